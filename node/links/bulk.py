"""Bulk data on a link: the interfaces of vectors that move in chunks, and the motion of their bytes."""

import math
from dataclasses import dataclass
from typing import Protocol

from gossip.wire.messages import Chunk
from node.links.frame_reader import FrameReader
from node.transport.byte_stream import ByteStream, socket_of

FIRST_ELEMENTS = 16_384  # The size of a link's first chunk.
LEAST_ELEMENTS = 4_096  # The smallest chunk: sums of squares are added up in blocks of 4,096.
MOST_ELEMENTS = 1 << 20  # The largest chunk that a Config allows.
SLOW_CHUNK_S = 0.25  # Chunks become shorter after one that took longer: SWIM's probes wait behind a chunk.
FAST_CHUNK_S = 0.05  # Chunks become longer after one that took less.


class Bulk(Protocol):
    """A vector to send over a link, one chunk at a time."""

    def next_frame(self, apart: bool = False) -> tuple[bytes, memoryview] | None:
        """Return the next frame as (prefix and header, body), or None when all frames are sent.

        ``apart`` is True for a lane. Lanes send several frames of a vector at the same time, so each frame needs memory
        of its own.
        """

    def let_go(self) -> None:
        """Release the vector, which the link reads no more. May be called twice, and before all of it is sent."""


@dataclass(frozen=True, slots=True)
class QueuedBulk:
    """A vector that waits for its turns on a connection."""

    bulk: Bulk
    # The value of ``Link.taken_frames`` from which on its chunks may be sent. So they follow the frames that were
    # queued before them.
    sendable_from: int
    is_large: bool = False  # An I/O thread sends it, if one is free.


class Inflow(Protocol):
    """A vector that comes over a link and that an I/O thread may receive. One thread at a time calls its methods."""

    is_over: bool  # True once nothing needs this vector any more.
    heard_at: float  # The time at which its last chunk arrived.

    def buffer_for(self, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return the buffer for the body of the next chunk, or None if the vector is no longer needed."""

    def on_body(self, chunk: Chunk) -> bool:
        """Handle a chunk whose body is in its buffer; return True if more chunks are to come."""


class ChunkMotion:
    """The motion of chunks over one connection: whether their bytes move, and how long the next chunk may be.

    Bytes are counted at the kernel's socket, because on a slow connection one chunk takes longer than the stall
    timeout. :meth:`poll` reads the counters, so that reads and writes cost nothing more.

    Attributes:
        is_receiving: True while the body of a chunk is being received.
        received_at: The time at which :meth:`poll` last found new bytes of a chunk that is being received.
        sent_at: The same for a chunk that is being sent.
        elements: The largest number of elements for the next chunk. Chunks are shorter on slow links, because messages
            wait behind them.
    """

    def __init__(self, stream: ByteStream, reader: FrameReader) -> None:
        self.stream, self.reader, self.socket = stream, reader, socket_of(stream)
        self.is_receiving = False
        self.received_at = self.sent_at = -math.inf
        self.elements = FIRST_ELEMENTS
        self._chunk_at: float | None = None  # The time at which the chunk in flight was begun; None if there is none.
        self._received = self._sent = 0  # Byte counts at the last poll.

    def on_chunk_begun(self, now: float) -> None:
        """Note that a chunk is about to be sent."""
        self._chunk_at = now

    def on_chunk_sent(self, now: float) -> None:
        """Adapt the chunk size to the time that the sent chunk took."""
        if self._chunk_at is None:
            return
        seconds, self._chunk_at = now - self._chunk_at, None
        if seconds > SLOW_CHUNK_S:
            self.elements = max(self.elements // 2, LEAST_ELEMENTS)
        elif seconds < FAST_CHUNK_S:
            self.elements = min(2 * self.elements, MOST_ELEMENTS)

    def poll(self, now: float) -> bool:
        """Read the byte counters; return True if bytes of a chunk have moved since the last poll."""
        # Without a socket, as in tests, only whole reads count.
        received = self.reader.bytes_received if self.socket is None else self.socket.bytes_received
        sent = 0 if self.socket is None else self.socket.bytes_sent
        has_received = self.is_receiving and received > self._received
        has_sent = self._chunk_at is not None and sent > self._sent
        if has_received:
            self.received_at = now
        if has_sent:
            self.sent_at = now
        self._received, self._sent = received, sent
        return has_received or has_sent


@dataclass(slots=True)
class SendBatch:
    """The bytes of one send: control frames, and perhaps one chunk after them."""

    pieces: list[bytes | memoryview]  # The bytes that the kernel has not taken yet.
    control_bytes: int
    session: int = 0  # That of the chunk.
    bulk: Bulk | None = None  # The vector of the chunk; None without a chunk.
    chunk_bytes: int = 0  # The chunk's size with its header.
