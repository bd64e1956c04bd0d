"""Targets: the bytes of vectors. Codecs' payloads, chunks out of order, TLS handshakes, records of sealed links."""

import contextlib
import ssl
from random import Random
from typing import Any

import numpy as np
import trio
import xxhash
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gossip.averaging.streams import DifferenceReceiver, Sender
from gossip.codecs import CODECS, Overflow, Spread
from gossip.errors import ProtocolError, RemoteError
from gossip.wire.frames import PREFIX_BYTES, decode
from gossip.wire.messages import Chunk
from node.identity.keys import Identity, verify
from node.transport.blocking_io import run_to_end
from node.transport.byte_stream import BrokenLinkError
from node.transport.sealed import ROOM_BYTES, Opener, Sealer
from node.transport.tls import TlsStream, _ca_certificate, leaf_peer_id, swarm_contexts
from tests.fuzz.engine import Input, Target
from tests.fuzz.mutations import EDGE_INTS, mutated_bytes
from tests.gossip.codecs.spreads import observe


def bound_codec(name: str, size: int) -> Any:
    codec = CODECS[name]
    if not codec.needs_spread:
        return codec
    spread = Spread(size)
    observe(spread, np.full(size, 0.1, np.float32))
    return codec.with_bounds(spread)


EDGE_NUMBERS = (  # Infinity, NaN, the largest and the least float32, then infinity in half precision and in bfloat16.
    b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f", b"\x01\x00\x00\x00", b"\x00\x7c", b"\x80\x7f",
)  # fmt: skip


def octets(rng: Random, size: int) -> bytes:
    """Return ``size`` bytes of a payload: random ones, or the encodings of extreme numbers."""
    match rng.randrange(4):
        case 0:
            return rng.randbytes(size)
        case 1:
            return bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * size
        case 2:
            edge = rng.choice(EDGE_NUMBERS)
            return (edge * (size // len(edge) + 1))[:size]
    data = bytearray(rng.randbytes(size))
    for _ in range(4):
        if size:
            data[rng.randrange(size)] = rng.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(data)


class Payloads(Target):
    """A payload of the right length with any bytes, which its codec decodes or refuses as an Overflow."""

    name, share, declared = "payloads", 0.05, (Overflow,)

    def prepare(self, rng: Random) -> Input:
        name, size = rng.choice(list(CODECS)), rng.choice((1, 2, 255, 256, 257, 1_000))
        codec = bound_codec(name, size)
        data = octets(rng, codec.encoded_bytes(size))
        near = np.linspace(-1, 1, size, dtype=np.float32)
        out = np.empty(size, np.float32)
        seed = rng.choice(EDGE_INTS) % 2**63

        def act() -> None:
            codec.decode(data, out, near, seed)

        return (name, size, seed, data), act


class Chunks(Target):
    """Chunks of a stream with wrong bodies, positions, sizes or checksums, which the receiver takes or refuses."""

    name, share, life, declared = "chunks", 0.04, 64, (ProtocolError,)
    size = 5_000

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.begin()

    def begin(self) -> None:
        rng = self.rng
        codec = bound_codec(rng.choice(list(CODECS)), self.size)
        ours = np.linspace(-1, 1, self.size, dtype=np.float32)
        self.sender = Sender(7, ours, codec, rng.choice((1_024, 2_048, 131_072)))
        self.receiver = DifferenceReceiver(7, ours, np.empty(self.size, np.float32), codec, None)
        self.anywhere = rng.random() < 0.5  # Several connections may deliver chunks in any order.

    def prepare(self, rng: Random) -> Input:
        frame = self.sender.next_frame()
        if frame is None or self.receiver.is_complete or self.receiver.fault:
            self.begin()
            frame = self.sender.next_frame()
        assert frame is not None
        body = bytes(frame[1])
        chunk = decode(frame[0][PREFIX_BYTES:], len(body))
        assert isinstance(chunk, Chunk)
        start, elements, checksum = chunk.start, chunk.elements, chunk.checksum
        if rng.random() < 0.5:
            body = mutated_bytes(rng, body)
        if self.anywhere and rng.random() < 0.5:
            start = 256 * rng.randrange(self.size // 256)
        if rng.random() < 0.3:
            start = rng.choice((0, start + 1, abs(rng.choice(EDGE_INTS)) % 2**48))
        if rng.random() < 0.3:
            elements = rng.choice((0, elements - 1, elements + 256, abs(rng.choice(EDGE_INTS)) % 2**20))
        if rng.random() < 0.5:
            checksum = xxhash.xxh3_64_intdigest(body)  # An attacker sends the right checksum of a wrong body.

        def act() -> None:
            said = Chunk(7, start, elements, checksum)
            place = self.receiver.begin_chunk(said, len(body), self.anywhere)
            assert len(place) == len(body)
            place[:] = body
            self.receiver.finish_chunk(said)
            assert self.receiver.position <= self.size

        return (start, elements, checksum, body), act

    def ended(self, error: BaseException) -> None:
        self.begin()


class Certificates(Target):
    """Certificates and signatures from other nodes."""

    name, share, declared = "certificates", 0.02, (ProtocolError,)
    identity = Identity(Ed25519PrivateKey.from_private_bytes(b"k" * 32))
    leaf = _ca_certificate(Ed25519PrivateKey.from_private_bytes(b"c" * 32)).public_bytes(serialization.Encoding.DER)

    def prepare(self, rng: Random) -> Input:
        if rng.random() < 0.5:
            der = mutated_bytes(rng, self.leaf)
            return der, lambda: len(leaf_peer_id(der))
        text = rng.randbytes(40)
        key, signature = mutated_bytes(rng, self.identity.public_key), mutated_bytes(rng, self.identity.sign(text))
        return (key, text, signature), lambda: verify(key, text, signature)


CONTEXTS = swarm_contexts(Identity.fresh(), b"s" * 32)
OTHERS = swarm_contexts(Identity.fresh(), b"o" * 32)


class Handshakes(Target):
    """A handshake with a node of this or another swarm, whose bytes are changed on their way.

    TLS draws its own random numbers, so this target's inputs are the only ones that do not replay exactly.
    """

    name, share, life, declared = "handshakes", 0.002, 8, (RemoteError, BrokenLinkError)

    def prepare(self, rng: Random) -> Input:
        server = rng.random() < 0.5
        theirs = CONTEXTS if rng.random() < 0.8 else OTHERS
        seed = rng.getrandbits(32)
        return (server, theirs is OTHERS, seed), lambda: self.greet(server, theirs, Random(seed))

    def greet(self, server: bool, theirs: Any, rng: Random) -> None:
        """Shake hands through a TlsStream; the other end of its wire is Python's ``ssl``."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = theirs.client_context if server else theirs.server_context
        other = context.wrap_bio(incoming, outgoing, server_side=not server)
        stream = TlsStream(Wire(other, incoming, outgoing, rng, asks=server), CONTEXTS, server_side=server)
        trio.run(stream.handshake)


class Wire:
    """The other end of a connection, whose bytes are changed on their way."""

    peer_host = "wire"

    def __init__(
        self, other: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, rng: Random, asks: bool
    ) -> None:
        self.other, self.incoming, self.outgoing, self.rng = other, incoming, outgoing, rng
        self.reads = 0
        if asks:
            self.turn()

    def turn(self) -> None:
        with contextlib.suppress(ssl.SSLError):
            self.other.do_handshake()

    async def send_all(self, data: Any) -> None:
        self.incoming.write(bytes(data))
        self.turn()

    async def receive_into(self, buffer: memoryview) -> int:
        self.reads += 1
        data = self.outgoing.read() if self.reads < 40 else b""
        if data and self.rng.random() < 0.6:
            data = mutated_bytes(self.rng, data)
        data = data[: len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def close_now(self) -> None:
        self.reads = 40


class SealedRecords(Target):
    """The records of a sealed link, changed on their way.

    The receiver accepts only a prefix of whole records, then raises a declared error unless all of them have arrived.
    """

    name, share, declared = "sealed", 0.02, (ProtocolError, BrokenLinkError)

    def prepare(self, rng: Random) -> Input:
        said = [rng.randbytes(rng.choice((1, 16, 300, 20_000))) for _ in range(rng.randrange(4))]
        sent = bytearray()

        async def send(sealer: Sealer) -> None:
            for piece in said:
                await sealer.send(write, piece)
            await sealer.end(write)

        async def write(*pieces: Any) -> None:
            for piece in pieces:
                sent.extend(piece)

        run_to_end(send, Sealer(b"k" * 32, "fuzzed"))
        data = mutated_bytes(rng, bytes(sent)) if rng.random() < 0.8 else bytes(sent)
        buffer = rng.choice((8, 500, 30_000))
        return (said, data, buffer), lambda: self.open(b"".join(said), data, memoryview(bytearray(buffer)))

    def open(self, said: bytes, data: bytes, buffer: memoryview) -> None:
        left, found = memoryview(data), bytearray()

        async def read(into: memoryview) -> int:
            nonlocal left
            count = min(len(into), len(left))
            into[:count], left = left[:count], left[count:]
            return count

        async def take(opener: Opener) -> None:
            while count := await opener.receive(read, buffer):
                found.extend(buffer[:count])

        opener = Opener(b"k" * 32, "fuzzed")
        try:
            run_to_end(take, opener)
            assert found == said
        finally:
            assert said.startswith(found)
            assert len(opener.room) <= ROOM_BYTES
