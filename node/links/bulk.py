"""What goes over a link beside messages: vectors, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gossip.wire.messages import Chunk

__all__ = ["Bulk", "Inflow", "Sending"]


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


@dataclass(slots=True)
class Sending:
    """What is sent together: control frames, and perhaps a chunk behind them."""

    pieces: list[bytes | memoryview]  # what the kernel has not taken yet
    control_bytes: int
    session: int = 0
    bulk: Bulk | None = None  # whose chunk it is
    chunk_bytes: int = 0  # with its header
