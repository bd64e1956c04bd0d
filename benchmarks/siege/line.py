"""A connection of the attacker's, from TCP to a finished Hello, on which it may say whatever it likes."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Awaitable, Callable

import trio

from gossip.ids import Address, MemberRecord, PeerId
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk, Close, Hello, Message, Widen
from node.links.frame_reader import FrameReader
from node.links.handshake import Greeter
from node.transport.byte_stream import ByteStream
from node.transport.tcp import TcpNetwork
from node.transport.tls import Contexts, TlsStream

__all__ = ["Heard", "Line", "chunk_of", "hello_of", "open_lane", "open_line", "plain", "tls"]

CONNECT_S = 5.0
Heard = Callable[["Line", Message, bytes], Awaitable[None]]
"""(where, what, the body of a chunk)"""


class Line:
    """One link. ``peer`` is who answered; None before its Hello."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.reader = FrameReader(stream)
        self.peer: PeerId | None = None
        self.record: MemberRecord | None = None
        self.lock = trio.Lock()  # a stream has one sender at a time
        self.open = True
        self.name = b""  # that they gave this link, for more connections of it
        self.address: Address | None = None  # that was dialled

    async def send(self, message: Message, body: bytes | memoryview = b"") -> None:
        """What cannot be sent any more is not sent: an attacker goes on."""
        await self.write(encode(message, len(body)) + bytes(body))

    async def write(self, data: bytes) -> None:
        try:
            async with self.lock:
                await self.stream.send_all(data)
        except Exception:  # torn in any way: BrokenLinkError, TLS, a closed socket
            self.close()

    async def hello(self, hello: Hello) -> Hello | None:
        """Say ours, hear theirs; None when they closed instead."""
        await self.write(encode(hello))
        try:
            got = await self.reader.message()
        except Exception:  # as above
            got = None
        theirs = None if got is None else got[0]
        if not isinstance(theirs, Hello) or theirs.record is None:
            self.close()
            return None
        self.peer, self.record, self.name = theirs.record.id, theirs.record, theirs.lanes
        return theirs

    async def first(self) -> Message | None:
        """The next message, None where there is none."""
        try:
            got = await self.reader.message()
        except Exception:  # as above
            return None
        return None if got is None else got[0]

    async def hear(self, heard: Heard) -> None:
        """Read until it ends, a call for each frame."""
        try:
            while True:
                got = await self.reader.message()
                if got is None:
                    return
                message, size = got
                body = bytearray(size)
                if size:
                    await self.reader.exactly(memoryview(body))
                if isinstance(message, Close):
                    return
                await heard(self, message, bytes(body))
        except Exception:  # an attacker outlives whatever honest nodes do to its connections
            return
        finally:
            self.close()

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(Exception):
            self.stream.close_now()


async def plain(address: Address) -> ByteStream:
    """A TCP connection; raises what the network raises."""
    return await TcpNetwork(None, CONNECT_S).connect(address)


async def tls(address: Address, contexts: Contexts) -> ByteStream:
    stream = TlsStream(await plain(address), contexts, server_side=False)
    try:
        with trio.fail_after(CONNECT_S):
            await stream.handshake()
    except BaseException:
        stream.close_now()
        raise
    return stream


async def open_line(address: Address, contexts: Contexts, fingerprint: str, record: MemberRecord | None) -> Line | None:
    """A link to the node there, with this record (None: as an observer); None when it did not come to be."""
    try:
        line = Line(await tls(address, contexts))
    except Exception:  # refused, reset, timed out: as an attacker meets it
        return None
    line.address = address
    if record is None:
        await line.write(encode(Greeter("", None).hello(None)))
        return line
    with trio.move_on_after(CONNECT_S):
        if await line.hello(hello_of(fingerprint, record)) is not None:
            return line
    line.close()
    return None


async def open_lane(line: Line, contexts: Contexts, fingerprint: str, record: MemberRecord) -> Line | None:
    """Another connection of a link that was dialled, once the other side lets it in."""
    if line.address is None:
        return None
    try:
        lane = Line(await tls(line.address, contexts))
    except Exception:  # as above
        return None
    with trio.move_on_after(CONNECT_S):
        hello = dataclasses.replace(hello_of(fingerprint, record), joins=line.name)
        if await lane.hello(hello) is not None and isinstance((await lane.first()), Widen):
            return lane
    lane.close()
    return None


def hello_of(fingerprint: str, record: MemberRecord) -> Hello:
    greeter = Greeter("default", None)
    return dataclasses.replace(greeter.hello(record, lanes=secrets.token_bytes(16)), fingerprint=fingerprint)


def chunk_of(session: int, start: int, elements: int, body: bytes) -> Chunk:
    import xxhash

    return Chunk(session, start, elements, xxhash.xxh3_64_intdigest(body))
