"""Sealed streams: after TLS, links continue in large encrypted records, which I/O threads can carry.

TLS authenticates both sides and carries both Hellos, each with a random key share. If both sides gave a share, they
close TLS in order, and each direction continues with a key of its own, derived from both shares. This is because
OpenSSL keeps one state for both directions, and its records hold 16 KiB. Here a direction is a key and a counter, which
a task can take into a thread, and a record is decrypted straight into its buffer.
"""

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

SHARE_BYTES = 32  # Random bytes from each side, as many as a key has.
LENGTH_BYTES = 4  # The prefix of a record: the length of its ciphertext and tag.
TAG_BYTES = 16  # The authentication tag of AES-GCM.
RECORD_BYTES = 262_144  # The largest record: it stays in cache together with the plaintext.
AROUND_BYTES = LENGTH_BYTES + TAG_BYTES  # The overhead of a record.
AHEAD_BYTES = 16_384  # Read-ahead for short reads; below WHOLE_BYTES, so that a thread returns with the bytes it has.
# A *room* is a buffer for records. A large one holds a chunk of the default size, which then takes one system call.
ROOM_BYTES = 2 * (RECORD_BYTES + AROUND_BYTES) + AHEAD_BYTES
ROOMS_KEPT = 8  # Free rooms that are kept, one for each thread that carries large vectors.
# RFC 8446, 5.5: a key may seal 2^34.5 blocks of AES-GCM with a safety margin of about 2^-57. Here it seals 2^34.
RECORDS_A_KEY = 1 << 20
IN_PLACE = hasattr(AESGCM, "encrypt_into") and hasattr(AESGCM, "decrypt_into")  # Available since cryptography 47.

Piece = bytes | bytearray | memoryview
Read = Callable[[memoryview], Awaitable[int]]
Write = Callable[[Piece], Awaitable[None]]


def fresh_share() -> bytes:
    """Return this side's key share for one link; empty where it cannot seal, so that TLS stays."""
    return secrets.token_bytes(SHARE_BYTES) if IN_PLACE else b""


def direction_keys(dialler: bytes, acceptor: bytes) -> tuple[bytes, bytes]:
    """Derive the keys of the dialler and of the acceptor, from each side's share followed by its id.

    Neither side alone determines a key, so no key repeats if one side draws at random. The ids bind the keys to
    the two members. Otherwise a man in the middle could dial with the share that it was just given, and splice two
    connections. Each side would then take the other for the man in the middle.
    """
    both = HKDF(algorithm=hashes.SHA256(), length=64, salt=None, info=b"gossip sealed 1").derive(dialler + acceptor)
    return both[:32], both[32:]


class Direction:
    """The key and record counter of one direction.

    Nonces are counted and never sent, so that a record that is missing, doubled or reordered cannot be opened.
    """

    def __init__(self, key: bytes) -> None:
        self.key, self.cipher = key, AESGCM(key)
        self.records = 0

    def next_record(self) -> tuple[AESGCM, bytes]:
        """Return cipher and nonce for the next record. Each new key is derived from the old, and does not reveal it."""
        if self.records and self.records % RECORDS_A_KEY == 0:
            self.key = HKDFExpand(algorithm=hashes.SHA256(), length=32, info=b"gossip sealed next").derive(self.key)
            self.cipher = AESGCM(self.key)
        nonce = self.records.to_bytes(12, "big")
        self.records += 1
        return self.cipher, nonce


class Rooms:
    """A free list of rooms. A link takes one only while something large is in flight."""

    def __init__(self) -> None:
        self.free_rooms: list[memoryview] = []

    def take(self) -> memoryview:
        try:
            return self.free_rooms.pop()
        except IndexError:
            return memoryview(bytearray(ROOM_BYTES))

    def give(self, room: memoryview) -> None:
        if len(room) == ROOM_BYTES and len(self.free_rooms) < ROOMS_KEPT:
            self.free_rooms.append(room)


ROOMS = Rooms()  # The list of this process.


class Sealer:
    """The sending direction. One task, or its thread, uses it at a time."""

    def __init__(self, key: bytes, peer_host: str) -> None:
        self.direction, self.peer_host = Direction(key), peer_host
        self.small = memoryview(bytearray(AHEAD_BYTES))  # The room for short messages.
        self.torn = False  # A send is in progress or was cut short. The peer could not read anything sent after it.
        self.ended = False

    async def send(self, write: Write, *pieces: Piece) -> None:
        """Send all pieces as records with ``write``."""
        if self.torn or self.ended:
            raise BrokenLinkError(f"The encrypted connection to {self.peer_host} broke.")
        self.torn = True
        for batch in self.batches(pieces):
            await write(batch)
        self.torn = False

    async def end(self, write: Write) -> None:
        """Send the empty record that marks the end, if the last record was sent whole."""
        if not self.torn and not self.ended:
            self.ended = True
            await write(self.small[: self.seal(memoryview(b""), self.small)])

    def batches(self, pieces: Sequence[Piece]) -> Iterator[memoryview]:
        """Yield the pieces as batches of records, each as many as fit into a room, which the next batch overwrites."""
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
        """Write a record with this data, at most 256 KiB, to the start of ``room``; return its length in bytes."""
        length = len(data) + TAG_BYTES
        prefix = room[:LENGTH_BYTES]
        prefix[:] = length.to_bytes(LENGTH_BYTES, "big")
        cipher, nonce = self.direction.next_record()
        cipher.encrypt_into(nonce, data, prefix, room[LENGTH_BYTES : LENGTH_BYTES + length])
        return LENGTH_BYTES + length


class Opener:
    """The receiving direction. One task, or its thread, uses it at a time. A cancelled read loses nothing."""

    def __init__(self, key: bytes, peer_host: str) -> None:
        self.direction, self.peer_host = Direction(key), peer_host
        self.room = self.small = memoryview(bytearray(AHEAD_BYTES))
        self.start = self.stop = 0  # The bounds of the bytes in the room that are not decrypted yet.
        self.plaintext = memoryview(b"")  # Decrypted bytes that are not received yet.
        self.ended = False

    def begin(self, read_ahead: bytes) -> None:
        """Start with the bytes that TLS has already read past its end."""
        self.make_room(len(read_ahead))  # A slice of TLS is smaller than a room.
        self.room[: len(read_ahead)] = read_ahead
        self.stop = len(read_ahead)

    @property
    def is_ready(self) -> bool:
        """Return True if :meth:`receive` would not wait."""
        unread_bytes = self.stop - self.start
        return (
            bool(self.plaintext)
            or self.ended
            or (unread_bytes >= LENGTH_BYTES and unread_bytes >= LENGTH_BYTES + self.length())
        )

    async def receive(self, read: Read, buffer: memoryview) -> int:
        """Receive as :meth:`ByteStream.receive_into` does, at most one record.

        Args:
            read: Reads ciphertext. It must be able to return less than asked for, unless more data than the buffer
                holds is to come.
            buffer: The buffer for the plaintext.
        """
        if not self.plaintext:
            if self.ended:
                return 0
            await self.read_until(read, LENGTH_BYTES)
            length = self.length()
            plain_bytes = length - TAG_BYTES
            # A buffer with space left is that of a chunk of several records, so another record follows.
            rest_bytes = len(buffer) - plain_bytes
            await self.read_until(read, LENGTH_BYTES + length, rest_bytes + AROUND_BYTES if rest_bytes > 0 else 0)
            self.plaintext = self.open(length, buffer)
            if not self.plaintext:  # `open` has decrypted all of it into the buffer.
                self.return_room()
                return plain_bytes
        count = min(len(buffer), len(self.plaintext))
        buffer[:count] = self.plaintext[:count]
        self.plaintext = self.plaintext[count:]
        self.return_room()
        return count

    def length(self) -> int:
        """Return the length of the record that begins at ``start``. It is checked, because nothing authenticates it."""
        length = int.from_bytes(self.room[self.start : self.start + LENGTH_BYTES], "big")
        if not TAG_BYTES <= length <= RECORD_BYTES + TAG_BYTES:
            raise ProtocolError(f"{self.peer_host} sent a record of {length} bytes, outside the allowed range.")
        return length

    def open(self, length: int, buffer: memoryview) -> memoryview:
        """Decrypt the record into ``buffer`` if it fits, and return nothing; else return the plaintext in the room."""
        begin = self.start + LENGTH_BYTES
        record = self.room[begin : begin + length]
        plain_bytes = length - TAG_BYTES
        fits = plain_bytes <= len(buffer)
        target = buffer[:plain_bytes] if fits else record[:plain_bytes]
        cipher, nonce = self.direction.next_record()
        try:
            cipher.decrypt_into(nonce, record, self.room[self.start : begin], target)
        except InvalidTag:
            raise ProtocolError(f"{self.peer_host} sent bytes that are not sealed for this link.") from None
        self.start = begin + length
        self.ended = not plain_bytes  # An empty record marks the end.
        return target[:0] if fits else target

    async def read_until(self, read: Read, count: int, following: int = 0) -> None:
        """Read until ``count`` bytes are here. Another ``following`` bytes are certain to come after them.

        All bytes that are certain to come are read in one call, and no others, for which a thread would block.
        """
        self.make_room(count)
        while self.stop - self.start < count:
            missing = count - (self.stop - self.start)
            read_bytes = missing + following if missing >= AHEAD_BYTES else AHEAD_BYTES
            count_read = await read(self.room[self.stop : self.stop + read_bytes])
            if not count_read:
                raise BrokenLinkError(f"The encrypted connection to {self.peer_host} broke.")
            self.stop += count_read

    def make_room(self, count: int) -> None:
        """Make place for ``count`` bytes from ``start`` on, in a larger room if needed."""
        unread_bytes = self.stop - self.start
        if unread_bytes and self.start + count <= len(self.room):
            return
        room = self.room if count <= len(self.room) else ROOMS.take()
        room[:unread_bytes] = self.room[self.start : self.stop]
        self.room, self.start, self.stop = room, 0, unread_bytes

    def return_room(self) -> None:
        """Give the large room back if it is empty."""
        if self.start == self.stop and not self.plaintext and self.room is not self.small:
            ROOMS.give(self.room)
            self.room, self.start, self.stop = self.small, 0, 0


class SealedStream:
    """A :class:`ByteStream` that began as TLS. It receives TLS until the other side has left TLS too."""

    def __init__(self, tls: TlsStream, sealer: Sealer, opener: Opener) -> None:
        self.inner: ByteStream = tls.inner
        self.sealer, self.opener = sealer, opener
        self.tls: TlsStream | None = tls  # None once the other side has left TLS.
        self.peer_host = tls.peer_host

    @property
    def sealed(self) -> bool:
        """Return True if both directions are sealed."""
        return self.tls is None

    async def receive_into(self, buffer: memoryview) -> int:
        while self.tls is not None:
            count = await self.tls.receive_into(buffer)
            if count:
                return count
            self.opener.begin(self.tls.bytes_after_end())
            self.tls = None
        if self.opener.is_ready:
            await trio.lowlevel.checkpoint()  # Nothing below waits, and a fast sender must not starve other tasks.
        return await self.opener.receive(self.inner.receive_into, buffer)

    async def send_all(self, data: Piece) -> None:
        await self.sealer.send(self.inner.send_all, data)

    async def aclose(self) -> None:
        """Send the end mark if that takes at most a second, and close without waiting for the other side's."""
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
    """Switch to sealed records, with the shares from the Hellos. Data still sent by TLS is read first."""
    dialled, host = tls.dialled, tls.peer_host
    ours, theirs = ours + tls.own_id, theirs + tls.peer_id
    keys = direction_keys(ours, theirs) if dialled else direction_keys(theirs, ours)
    await tls.leave()
    return SealedStream(tls, Sealer(keys[0 if dialled else 1], host), Opener(keys[1 if dialled else 0], host))
