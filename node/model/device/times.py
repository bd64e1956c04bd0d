"""Times at which copies ran on a device, by CUDA events that are read once they have passed."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["CopySpan", "CopyTimes", "Direction"]

Direction = Literal["up", "down"]
MAX_PENDING = 1_024  # Copies in progress whose times are recorded: a mix of 7 B parameters makes some hundred.
# An anchor serves for so long. The time between two events is a float32 in milliseconds, and clocks drift: both errors
# are small within a minute.
ANCHORED_S = 60.0


@dataclass(frozen=True, slots=True)
class CopySpan:
    """A copy that has ended. Times are unix time."""

    device: torch.device
    direction: Direction
    size_bytes: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event whose unix time is known. CUDA tells only the time between two events."""

    event: torch.cuda.Event
    at_s: float

    def time_of(self, event: torch.cuda.Event) -> float:
        """Return the unix time of another event; both have happened."""
        elapsed_ms: float = self.event.elapsed_time(event)
        return self.at_s + elapsed_ms / 1e3


class CopyTimes:
    """A record of when copies ran. Copies may begin in any thread; one thread calls :meth:`ended`."""

    def __init__(self) -> None:
        # For each copy that has begun: anchor, device, direction, bytes, and the events of its begin and end.
        self.pending: deque[tuple[Anchor, torch.device, Direction, int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.anchors: dict[torch.device, Anchor] = {}
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def timed(self, device: torch.device, direction: Direction, size_bytes: int) -> Iterator[None]:
        """Record when the current stream begins and ends the work of this block. Nothing waits."""
        if len(self.pending) >= MAX_PENDING:
            yield
            return
        anchor = self.anchor(device)
        begin, end = timed_event(), timed_event()
        begin.record()
        yield
        end.record()
        self.pending.append((anchor, device, direction, size_bytes, begin, end))

    def anchor(self, device: torch.device) -> Anchor:
        """Return an anchor of the last minute. Its event happens at once, on a stream that has no other work."""
        anchor = self.anchors.get(device)
        if anchor is None or time.time() - anchor.at_s > ANCHORED_S:
            if device not in self.streams:
                self.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            event = timed_event()
            event.record(self.streams[device])
            anchor = self.anchors[device] = Anchor(event, time.time())
        return anchor

    def ended(self) -> list[CopySpan]:
        """Return the copies that have ended since the last call, the oldest first."""
        spans: list[CopySpan] = []
        while self.pending:
            anchor, device, direction, size_bytes, begin, end = self.pending[0]
            if not (anchor.event.query() and end.query()):  # type: ignore[no-untyped-call]
                break
            self.pending.popleft()
            spans.append(CopySpan(device, direction, size_bytes, anchor.time_of(begin), anchor.time_of(end)))
        return spans


def timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
