"""Links after TLS: what goes over them is sealed in large records, which threads can carry.

TLS proves who is there and carries both Hellos, with a random share of each side in them. Where both gave one, TLS is
left in order, and each direction goes on with a key of its own that is made of both. What OpenSSL keeps of a connection
is one thing for both directions, and its records hold 16 KiB; here a direction is a key and a count, which its task
takes along into a thread, and a record is opened where its bytes belong.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence

import trio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from gossip.errors import ProtocolError
from node.transport.byte_stream import BrokenLinkError, ByteStream
from node.transport.tls import LAST_WORDS_S, TlsStream

__all__ = ["SHARE_BYTES", "Opener", "SealedStream", "Sealer", "direction_keys", "fresh_share", "leave_tls"]

SHARE_BYTES = 32  # of randomness from each side, as many as a key has
LENGTH_BYTES = 4  # before each record: of what is sealed and its tag
TAG_BYTES = 16
RECORD_BYTES = 262_144  # sealed at a time: it stays in cache together with what it is opened into
AROUND_BYTES = LENGTH_BYTES + TAG_BYTES
AHEAD_BYTES = 16_384  # read where less is needed; less than what a thread's call waits for until all of it is there
ROOM_BYTES = 2 * (RECORD_BYTES + AROUND_BYTES) + AHEAD_BYTES  # a chunk of the default size, in one call of the kernel
ROOMS_KEPT = 8  # for as many threads as carry large vectors
# RFC 8446, 5.5: a key may seal 2^34.5 blocks of AES-GCM with a safety margin of about 2^-57. These are 2^34.
RECORDS_A_KEY = 1 << 20
IN_PLACE = hasattr(AESGCM, "encrypt_into") and hasattr(AESGCM, "decrypt_into")  # since cryptography 47

Piece = bytes | bytearray | memoryview
Read = Callable[[memoryview], Awaitable[int]]
Write = Callable[[Piece], Awaitable[None]]


def fresh_share() -> bytes:
    """What this side gives for the keys of one link; nothing where it cannot seal, and TLS is kept."""
    return secrets.token_bytes(SHARE_BYTES) if IN_PLACE else b""


def direction_keys(dialler: bytes, acceptor: bytes) -> tuple[bytes, bytes]:
    """What the dialler seals with, and what the acceptor, from the share of each with its id behind it. Neither alone
    decides on a key, so that none comes twice while one of them draws. And no two links of other members have the same:
    else one who dials with the share that somebody has just given it, and answers that one with the share it is given,
    could join the two connections and leave, with both still taking the other for it."""
    both = HKDF(algorithm=hashes.SHA256(), length=64, salt=None, info=b"gossip sealed 1").derive(dialler + acceptor)
    return both[:32], both[32:]


class Direction:
    """The key of one direction, and how many records it has had: nonces are counted and never sent, so that a record
    that is missing, doubled or out of turn opens no other."""

    def __init__(self, key: bytes) -> None:
        self.key, self.cipher = key, AESGCM(key)
        self.records = 0

    def turn(self) -> tuple[AESGCM, bytes]:
        """Cipher and nonce of the next record. Keys follow each other by what cannot be reckoned backwards."""
        if self.records and self.records % RECORDS_A_KEY == 0:
            self.key = HKDFExpand(algorithm=hashes.SHA256(), length=32, info=b"gossip sealed next").derive(self.key)
            self.cipher = AESGCM(self.key)
        nonce = self.records.to_bytes(12, "big")
        self.records += 1
        return self.cipher, nonce


class Rooms:
    """Memory for what is sealed, lent for as long as something large is under way: an idle link has none of it."""

    def __init__(self) -> None:
        self.free: list[memoryview] = []

    def take(self) -> memoryview:
        try:
            return self.free.pop()
        except IndexError:
            return memoryview(bytearray(ROOM_BYTES))

    def give(self, room: memoryview) -> None:
        if len(room) == ROOM_BYTES and len(self.free) < ROOMS_KEPT:
            self.free.append(room)


ROOMS = Rooms()  # of the process; one of them is nobody else's while it is taken


class Sealer:
    """What this side sends. One task, or its thread, uses it at a time."""

    def __init__(self, key: bytes, peer_host: str) -> None:
        self.direction, self.peer_host = Direction(key), peer_host
        self.small = memoryview(bytearray(AHEAD_BYTES))
        self.torn = False  # a send is under way, or was cut short: nothing sent after it could be read
        self.ended = False

    async def send(self, write: Write, *pieces: Piece) -> None:
        """All of them, as records, by ``write``."""
        if self.torn or self.ended:
            raise BrokenLinkError(f"The encrypted connection to {self.peer_host} broke.")
        self.torn = True
        for batch in self.batches(pieces):
            await write(batch)
        self.torn = False

    async def end(self, write: Write) -> None:
        """Say that nothing follows, as far as there was a whole record before it."""
        if not self.torn and not self.ended:
            self.ended = True
            await write(self.small[: self.seal(memoryview(b""), self.small)])

    def batches(self, pieces: Sequence[Piece]) -> Iterator[memoryview]:
        """As records, as many together as fit into a room: each batch is to be out before the next is asked for."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        small = sum(len(view) + AROUND_BYTES for view in views) <= AHEAD_BYTES
        room, filled = self.small if small else ROOMS.take(), 0
        for view in views:
            for start in range(0, len(view), RECORD_BYTES):
                data = view[start : start + RECORD_BYTES]
                if filled + len(data) + AROUND_BYTES > len(room):
                    yield room[:filled]
                    filled = 0
                filled += self.seal(data, room[filled:])
        if filled:
            yield room[:filled]
        ROOMS.give(room)

    def seal(self, data: memoryview, room: memoryview) -> int:
        """A record of at most 256 KiB at the start of ``room``; its bytes."""
        length = len(data) + TAG_BYTES
        prefix = room[:LENGTH_BYTES]
        prefix[:] = length.to_bytes(LENGTH_BYTES, "big")
        cipher, nonce = self.direction.turn()
        cipher.encrypt_into(nonce, data, prefix, room[LENGTH_BYTES : LENGTH_BYTES + length])
        return LENGTH_BYTES + length


class Opener:
    """What the other side sends. One task, or its thread, uses it at a time. A read that is cancelled loses nothing."""

    def __init__(self, key: bytes, peer_host: str) -> None:
        self.direction, self.peer_host = Direction(key), peer_host
        self.room = self.small = memoryview(bytearray(AHEAD_BYTES))
        self.start = self.stop = 0  # of what came and was not opened yet
        self.opened = memoryview(b"")  # and of what was, and not taken yet
        self.ended = False

    def begin(self, came: bytes) -> None:
        """With what was read of these records before it was known that they are."""
        self.move(len(came))  # a slice of TLS is smaller than a room
        self.room[: len(came)] = came
        self.stop = len(came)

    @property
    def ready(self) -> bool:
        """Whether something can be taken without waiting."""
        held = self.stop - self.start
        return bool(self.opened) or self.ended or (held >= LENGTH_BYTES and held >= LENGTH_BYTES + self.length())

    async def take(self, read: Read, buffer: memoryview) -> int:
        """As :meth:`ByteStream.receive_into`, of one record at most; ``read`` reads what is sealed. Whoever gives room
        for more than a record has waits for more, or ``read`` may return with less than it is asked for."""
        if not self.opened:
            if self.ended:
                return 0
            await self.hold(read, LENGTH_BYTES)
            length = self.length()
            inside = length - TAG_BYTES
            wanted = len(buffer) - inside
            await self.hold(read, LENGTH_BYTES + length, wanted + AROUND_BYTES if wanted > 0 else 0)
            self.opened = self.open(length, buffer)
            if not self.opened:
                self.leave_room()
                return inside
        count = min(len(buffer), len(self.opened))
        buffer[:count] = self.opened[:count]
        self.opened = self.opened[count:]
        self.leave_room()
        return count

    def length(self) -> int:
        """Of the record that begins here; its bound holds before anything is known of who wrote it."""
        length = int.from_bytes(self.room[self.start : self.start + LENGTH_BYTES], "big")
        if not TAG_BYTES <= length <= RECORD_BYTES + TAG_BYTES:
            raise ProtocolError(f"{self.peer_host} sent a record of {length} bytes, which nobody seals.")
        return length

    def open(self, length: int, buffer: memoryview) -> memoryview:
        """The record that is here, into ``buffer`` where it fits, or else in its place, which is returned."""
        begin = self.start + LENGTH_BYTES
        record = self.room[begin : begin + length]
        inside = length - TAG_BYTES
        fits = inside <= len(buffer)
        into = buffer[:inside] if fits else record[:inside]
        cipher, nonce = self.direction.turn()
        try:
            cipher.decrypt_into(nonce, record, self.room[self.start : begin], into)
        except InvalidTag:
            raise ProtocolError(f"{self.peer_host} sent bytes that are not sealed for this link.") from None
        self.start = begin + length
        self.ended = not inside
        return into[:0] if fits else into

    async def hold(self, read: Read, count: int, more: int = 0) -> None:
        """Until so many bytes are here, behind which ``more`` will come in any case: what is certain is read in one
        call, and never asked for is what may not come, for which a thread would wait."""
        self.move(count)
        while self.stop - self.start < count:
            missing = count - (self.stop - self.start)
            asked = missing + more if missing >= AHEAD_BYTES else AHEAD_BYTES
            got = await read(self.room[self.stop : self.stop + asked])
            if not got:
                raise BrokenLinkError(f"The encrypted connection to {self.peer_host} broke.")
            self.stop += got

    def move(self, count: int) -> None:
        """To where so many bytes fit."""
        held = self.stop - self.start
        if held and self.start + count <= len(self.room):
            return
        room = self.room if count <= len(self.room) else ROOMS.take()
        room[:held] = self.room[self.start : self.stop]
        self.room, self.start, self.stop = room, 0, held

    def leave_room(self) -> None:
        """For others, where nothing is in it."""
        if self.start == self.stop and not self.opened and self.room is not self.small:
            ROOMS.give(self.room)
            self.room, self.start, self.stop = self.small, 0, 0


class SealedStream:
    """A :class:`ByteStream` that began as TLS: what it receives is TLS's until the other side has left it too."""

    def __init__(self, tls: TlsStream, sealer: Sealer, opener: Opener) -> None:
        self.inner: ByteStream = tls.inner
        self.sealer, self.opener = sealer, opener
        self.tls: TlsStream | None = tls
        self.peer_host = tls.peer_host

    @property
    def sealed(self) -> bool:
        """Whether both directions are."""
        return self.tls is None

    async def receive_into(self, buffer: memoryview) -> int:
        while self.tls is not None:
            count = await self.tls.receive_into(buffer)
            if count:
                return count
            self.opener.begin(self.tls.behind())
            self.tls = None
        if self.opener.ready:
            await trio.lowlevel.checkpoint()  # nothing below waits, and a fast sender must not starve other tasks
        return await self.opener.take(self.inner.receive_into, buffer)

    async def send_all(self, data: Piece) -> None:
        await self.sealer.send(self.inner.send_all, data)

    async def aclose(self) -> None:
        """Say that it is the end if that leaves within a second, and close; the other side's is not waited for."""
        try:
            with trio.move_on_after(LAST_WORDS_S):
                await self.sealer.end(self.inner.send_all)
        except BrokenLinkError:
            pass
        except BaseException:
            self.close_now()
            raise
        await self.inner.aclose()

    def close_now(self) -> None:
        self.sealer.ended = True
        self.inner.close_now()


async def leave_tls(tls: TlsStream, ours: bytes, theirs: bytes) -> SealedStream:
    """Go on sealed, with the shares that the Hellos had. Whatever either side still said in TLS is read first."""
    dialled, host = tls.dialled, tls.peer_host
    ours, theirs = ours + tls.own_id, theirs + tls.peer_id
    keys = direction_keys(ours, theirs) if dialled else direction_keys(theirs, ours)
    await tls.leave()
    return SealedStream(tls, Sealer(keys[0 if dialled else 1], host), Opener(keys[1 if dialled else 0], host))
