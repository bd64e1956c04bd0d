"""What goes over a link beside messages: vectors, chunk by chunk, and whether they move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from gossip.wire.messages import Chunk
from node.links.frame_reader import FrameReader
from node.transport.byte_stream import ByteStream, socket_of

__all__ = ["Bulk", "ChunkMotion", "Inflow", "Sending"]

FIRST_ELEMENTS = 16_384  # of a link's first chunk
LEAST_ELEMENTS = 4_096  # of a chunk: sums of squares are added up in blocks of so many
MOST_ELEMENTS = 1 << 20  # that a Config allows
LONG_S, SHORT_S = 0.25, 0.05  # of a chunk: what a probe may wait behind one, and what is far below that


class Bulk(Protocol):
    """Something to stream over a link, a chunk at a time."""

    def next_frame(self, apart: bool = False) -> tuple[bytes, memoryview] | None:
        """The next frame's prefix and header, and its body; None when all is sent. ``apart``: for a lane, which sends
        it beside others."""

    def let_go(self) -> None:
        """The link reads nothing of it any more; may be said twice, and before all is sent."""


class Inflow(Protocol):
    """One vector that comes over a link, and that a thread may take in. ``place`` and ``arrived`` are called from one
    thread at a time; what came of it is asked for once that is back."""

    over: bool  # nobody wants it any more
    heard_at: float  # when something of it last came

    def place(self, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """The buffer for the body of another chunk of it; None when it is over."""

    def arrived(self, chunk: Chunk) -> bool:
        """The body is filled; whether there is more to come."""


class ChunkMotion:
    """The chunks of one connection: whether bytes of them move, and how long the next one may be.

    Bytes are counted where the kernel gives or takes them, since on a slow connection one chunk takes longer than a
    stream may stand still. They are polled by :meth:`look`, so that reads and writes cost nothing more.

    Attributes:
        filling: The body of a chunk is being received.
        received_at: The time at which :meth:`look` last found new bytes of a chunk that is being received.
        sent_at: The same for a chunk that is being sent.
        elements: The largest number of elements for the next chunk. A message waits for the chunk before it, so chunks
            become shorter where they take long.
    """

    def __init__(self, stream: ByteStream, reader: FrameReader) -> None:
        self.stream, self.reader, self.socket = stream, reader, socket_of(stream)
        self.filling = False
        self.received_at = self.sent_at = -math.inf
        self.elements = FIRST_ELEMENTS
        self._began: float | None = None  # when the chunk that is being sent was taken
        self._received = self._sent = 0  # bytes at the last look

    def begin(self, now: float) -> None:
        """A chunk is about to be sent."""
        self._began = now

    def end(self, now: float) -> None:
        """The chunk is sent."""
        if self._began is None:
            return
        seconds, self._began = now - self._began, None
        if seconds > LONG_S:
            self.elements = max(self.elements // 2, LEAST_ELEMENTS)
        elif seconds < SHORT_S:
            self.elements = min(2 * self.elements, MOST_ELEMENTS)

    def look(self, now: float) -> bool:
        """Note and return whether bytes of a chunk have moved since the last look."""
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
    """What is sent together: control frames, and perhaps a chunk behind them."""

    pieces: list[bytes | memoryview]  # what the kernel has not taken yet
    control_bytes: int
    session: int = 0
    bulk: Bulk | None = None  # whose chunk it is
    chunk_bytes: int = 0  # with its header
