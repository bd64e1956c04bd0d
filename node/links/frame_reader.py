"""Frames as they come from a stream: small reads ahead for headers, bodies straight into the receiver's buffer."""

from __future__ import annotations

from collections.abc import Callable

from gossip.wire.frames import PREFIX_BYTES, decode, read_prefix
from gossip.wire.messages import Message
from node.transport.byte_stream import BrokenLinkError, ByteStream, PlainStream

__all__ = ["READ_AHEAD_BYTES", "FrameReader", "nothing"]

READ_AHEAD_BYTES = 16_384  # a few control frames; more would copy the start of every chunk twice


def nothing() -> None:
    """There is nothing to do."""


class FrameReader:
    """Frames from a stream: small reads ahead for headers, bodies straight into the receiver's buffer."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.buffer = memoryview(bytearray(READ_AHEAD_BYTES))
        self.start = self.end = 0
        self.bytes_received = 0
        self.before_waiting: Callable[[], None] = nothing
        self.newer = False  # the other side's Hello named a newer version than ours: it may send what we do not know

    @property
    def ahead(self) -> bool:
        """Whether more was read than was asked for."""
        return self.start < self.end

    async def message(self) -> tuple[Message, int] | None:
        """The next frame's message and the length of its body, which must be read next; None at a proper end."""
        if self.start == self.end:
            self.start = self.end = 0
            if not await self.fill():
                return None
        start, ready = self.start, self.end - self.start
        if ready >= PREFIX_BYTES:
            header_bytes, body_bytes = read_prefix(self.buffer[start : start + PREFIX_BYTES])
            stop = start + PREFIX_BYTES + header_bytes
            if stop <= self.end:  # the rule: there is nothing to wait for, nor to copy
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
        """As :meth:`ByteStream.receive_into`; before it waits what was heard so far is answered."""
        stream = self.stream
        count = stream.receive_now(out) if isinstance(stream, PlainStream) else None
        if count is None:
            self.before_waiting()
            count = await stream.receive_into(out)
        self.bytes_received += count
        return count

    async def exactly(self, out: memoryview) -> None:
        """Fill ``out``: what was read ahead first, then directly for what is large."""
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
