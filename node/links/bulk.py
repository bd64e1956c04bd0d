"""Bulk data on a link: vectors, sent chunk by chunk, and a check of whether bytes still move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from gossip.wire.messages import Chunk
from node.links.frame_reader import FrameReader
from node.transport.byte_stream import ByteStream, socket_of

__all__ = ["Bulk", "ChunkMotion", "Inflow", "Sending"]

FIRST_ELEMENTS = 16_384  # The size of a link's first chunk.
LEAST_ELEMENTS = 4_096  # The smallest chunk: sums of squares are added up in blocks of 4,096.
MOST_ELEMENTS = 1 << 20  # The largest chunk that a Config allows.
# A chunk slower than LONG_S delays a probe behind it too much; one faster than SHORT_S may grow.
LONG_S, SHORT_S = 0.25, 0.05


class Bulk(Protocol):
    """A vector to stream over a link, one chunk at a time."""

    def next_frame(self, apart: bool = False) -> tuple[bytes, memoryview] | None:
        """Return the next frame as (prefix and header, body), or None when all frames are sent.

        ``apart`` is True for a lane, which sends the frame while other frames of the same vector are in flight.
        """

    def let_go(self) -> None:
        """Release the vector: the link reads it no more. May be called twice, and before all of it is sent."""


class Inflow(Protocol):
    """A vector that arrives over a link and that a worker thread may receive.

    ``place`` and ``arrived`` are called from one thread at a time. The outcome is read after that thread returns.
    """

    over: bool  # Nothing needs this vector any more.
    heard_at: float  # The time at which its last chunk arrived.

    def place(self, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return the buffer for the body of the next chunk, or None if the vector is no longer needed."""

    def arrived(self, chunk: Chunk) -> bool:
        """Take note that the chunk's body is in its buffer; return True if more chunks are to come."""


class ChunkMotion:
    """The chunks of one connection: whether their bytes move, and how long the next chunk may be.

    Bytes are counted at the kernel's socket, because on a slow connection one chunk takes longer than the stall
    timeout. :meth:`look` polls the counters, so that reads and writes cost nothing more.

    Attributes:
        filling: True while the body of a chunk is being received.
        received_at: The time at which :meth:`look` last found new bytes of a chunk that is being received.
        sent_at: The same for a chunk that is being sent.
        elements: The largest number of elements for the next chunk. A message waits for the chunk before it, so chunks
            become shorter on slow links.
    """

    def __init__(self, stream: ByteStream, reader: FrameReader) -> None:
        self.stream, self.reader, self.socket = stream, reader, socket_of(stream)
        self.filling = False
        self.received_at = self.sent_at = -math.inf
        self.elements = FIRST_ELEMENTS
        self._began: float | None = None  # The time at which the chunk now being sent was taken.
        self._received = self._sent = 0  # Byte counts at the last look.

    def begin(self, now: float) -> None:
        """Start the clock for a chunk that is about to be sent."""
        self._began = now

    def end(self, now: float) -> None:
        """Adapt the chunk size to the time that the sent chunk took."""
        if self._began is None:
            return
        seconds, self._began = now - self._began, None
        if seconds > LONG_S:
            self.elements = max(self.elements // 2, LEAST_ELEMENTS)
        elif seconds < SHORT_S:
            self.elements = min(2 * self.elements, MOST_ELEMENTS)

    def look(self, now: float) -> bool:
        """Note the movement of bytes; return True if bytes of a chunk have moved since the last look."""
        received = self.reader.bytes_received if self.socket is None else self.socket.bytes_received
        sent = 0 if self.socket is None else self.socket.bytes_sent
        if self.filling and received > self._received:
            self.received_at = now
        if self._began is not None and sent > self._sent:
            self.sent_at = now
        self._received, self._sent = received, sent
        return now in (self.received_at, self.sent_at)


@dataclass(slots=True)
class Sending:
    """A batch for one send: control frames, and perhaps one chunk after them."""

    pieces: list[bytes | memoryview]  # The bytes that the kernel has not taken yet.
    control_bytes: int
    session: int = 0
    bulk: Bulk | None = None  # The source of the chunk.
    chunk_bytes: int = 0  # The chunk's size with its header.
