"""Framing of a byte stream: short reads ahead for headers, bodies straight into the receiver's buffer."""

from __future__ import annotations

from collections.abc import Callable

from gossip.wire.frames import PREFIX_BYTES, decode, read_prefix
from gossip.wire.messages import Message
from node.transport.byte_stream import BrokenLinkError, ByteStream, PlainStream

__all__ = ["READ_AHEAD_BYTES", "FrameReader", "nothing"]

READ_AHEAD_BYTES = 16_384  # Room for a few control frames; a larger buffer would copy the start of every chunk twice.


def nothing() -> None:
    """Do nothing: the default for ``before_waiting``."""


class FrameReader:
    """A reader of frames: short reads ahead for headers, bodies straight into the receiver's buffer."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.buffer = memoryview(bytearray(READ_AHEAD_BYTES))
        self.start = self.end = 0
        self.bytes_received = 0
        self.before_waiting: Callable[[], None] = nothing
        # The other side's Hello named a newer version than ours, so it may send messages that we do not know.
        self.newer = False

    @property
    def ahead(self) -> bool:
        """Return True if bytes beyond the current frame have been read."""
        return self.start < self.end

    async def message(self) -> tuple[Message, int] | None:
        """Return the next message and the length of its body, which the caller reads next; None at a clean end."""
        if self.start == self.end:
            self.start = self.end = 0
            if not await self.fill():
                return None
        start, ready = self.start, self.end - self.start
        if ready >= PREFIX_BYTES:
            header_bytes, body_bytes = read_prefix(self.buffer[start : start + PREFIX_BYTES])
            stop = start + PREFIX_BYTES + header_bytes
            if stop <= self.end:  # The usual case, without a wait or a copy.
                self.start = stop
                return decode(self.buffer[start + PREFIX_BYTES : stop], body_bytes, self.newer), body_bytes
        prefix = bytearray(PREFIX_BYTES)
        await self.exactly(memoryview(prefix))
        header_bytes, body_bytes = read_prefix(prefix)
        header = bytearray(header_bytes)
        await self.exactly(memoryview(header))
        return decode(header, body_bytes, self.newer), body_bytes

    async def fill(self) -> int:
        count = await self.read(self.buffer[self.end :] if self.end else self.buffer)
        self.end += count
        return count

    async def read(self, out: memoryview) -> int:
        """Read as :meth:`ByteStream.receive_into` does, but first call ``before_waiting``, which sends replies."""
        stream = self.stream
        count = stream.receive_now(out) if isinstance(stream, PlainStream) else None
        if count is None:
            self.before_waiting()
            count = await stream.receive_into(out)
        self.bytes_received += count
        return count

    async def exactly(self, out: memoryview) -> None:
        """Fill ``out`` from the read-ahead buffer first, then straight from the stream where much is missing."""
        filled = 0
        while filled < len(out):
            ready = min(self.end - self.start, len(out) - filled)
            if ready:
                out[filled : filled + ready] = self.buffer[self.start : self.start + ready]
                self.start += ready
                filled += ready
                continue
            self.start = self.end = 0
            if len(out) - filled >= READ_AHEAD_BYTES:
                count = await self.read(out[filled:])
                filled += count
            else:
                count = await self.fill()
            if not count:
                raise BrokenLinkError(f"The connection to {self.stream.peer_host} ended inside a frame.")

    async def discard(self, count: int) -> None:
        scratch = memoryview(bytearray(min(count, 65_536)))
        while count:
            piece = scratch[: min(count, len(scratch))]
            await self.exactly(piece)
            count -= len(piece)
