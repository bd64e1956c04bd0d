"""The reader of frames from a byte stream. A frame is a prefix of two lengths, a header (the message) and a body."""

from collections.abc import Callable

from gossip.wire.frames import PREFIX_BYTES, decode, read_prefix
from gossip.wire.messages import Message
from node.transport.byte_stream import BrokenLinkError, ByteStream, PlainStream

READ_AHEAD_BYTES = 16_384  # Room for a few control frames; a larger buffer would copy the start of every chunk twice.
DISCARD_BYTES = 65_536  # The size of the buffer through which a body is discarded.


class FrameReader:
    """A reader of frames. It reads headers ahead into a small buffer, and bodies straight into their buffers."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.buffer = memoryview(bytearray(READ_AHEAD_BYTES))
        self.start = self.end = 0  # The bounds of the bytes in the buffer that are not returned yet.
        self.bytes_received = 0
        self.before_waiting: Callable[[], None] = lambda: None  # Called before a wait: it sends replies.
        self.is_peer_newer = False  # The other side may send messages that this version does not know.

    @property
    def has_read_ahead(self) -> bool:
        """Return True if bytes beyond the current frame have been read."""
        return self.start < self.end

    async def read_message(self) -> tuple[Message, int] | None:
        """Return the next message and the length of its body, which the caller reads next; None at a clean end."""
        if self.start == self.end:
            self.start = self.end = 0
            if not await self.fill_buffer():
                return None
        start, ready = self.start, self.end - self.start
        if ready >= PREFIX_BYTES:
            header_bytes, body_bytes = read_prefix(self.buffer[start : start + PREFIX_BYTES])
            stop = start + PREFIX_BYTES + header_bytes
            if stop <= self.end:  # The usual case, without a wait or a copy.
                self.start = stop
                return decode(self.buffer[start + PREFIX_BYTES : stop], body_bytes, self.is_peer_newer), body_bytes
        prefix = bytearray(PREFIX_BYTES)
        await self.read_exactly(memoryview(prefix))
        header_bytes, body_bytes = read_prefix(prefix)
        header = bytearray(header_bytes)
        await self.read_exactly(memoryview(header))
        return decode(header, body_bytes, self.is_peer_newer), body_bytes

    async def fill_buffer(self) -> int:
        """Read the bytes that have come into the buffer; return their number, 0 at the end of the stream."""
        count = await self.read(self.buffer[self.end :] if self.end else self.buffer)
        self.end += count
        return count

    async def read(self, out: memoryview) -> int:
        """Read as :meth:`ByteStream.receive_into` does, but call ``before_waiting`` before a wait."""
        stream = self.stream
        count = stream.receive_now(out) if isinstance(stream, PlainStream) else None
        if count is None:
            self.before_waiting()
            count = await stream.receive_into(out)
        self.bytes_received += count
        return count

    async def read_exactly(self, out: memoryview) -> None:
        """Fill ``out`` from the buffer, and then straight from the stream if much is missing."""
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
                count = await self.fill_buffer()
            if not count:
                raise BrokenLinkError(f"The connection to {self.stream.peer_host} ended inside a frame.")

    async def discard(self, count: int) -> None:
        """Read ``count`` bytes and drop them."""
        scratch = memoryview(bytearray(min(count, DISCARD_BYTES)))
        while count:
            piece = scratch[: min(count, len(scratch))]
            await self.read_exactly(piece)
            count -= len(piece)
