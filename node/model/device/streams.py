"""The streams of a device on which copies run, one in each direction, so that both overlap with training."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

Direction = Literal["up", "down"]
MAX_PENDING = 1_024  # Copies in progress whose times are recorded: a mix of 7 B parameters makes some hundred.
# An anchor serves for so long. The time between two events is a float32 in milliseconds, and clocks drift: both errors
# are small within a minute.
ANCHORED_S = 60.0
Anchor = tuple[torch.cuda.Event, float]
"""An event, and the unix time at which it happened. CUDA tells only the time between two events."""


class CopyStreams:
    """Streams by device and direction, made when they are needed. Thread-safe.

    Attributes:
        times: Records when copies run, for a timeline; None for no record.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.streams: dict[tuple[torch.device, Direction], torch.cuda.Stream] = {}
        self.times: CopyTimes | None = None

    def of(self, device: torch.device, direction: Direction) -> torch.cuda.Stream:
        """Return the stream of a device and direction: "up" is to the device, "down" from it."""
        with self.lock:
            stream = self.streams.get((device, direction))
            if stream is None:
                stream = self.streams[device, direction] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return stream

    @contextlib.contextmanager
    def copying(self, device: torch.device, direction: Direction, size_bytes: int) -> Iterator[None]:
        """Run the copies of this block, of so many bytes, on the stream of this direction."""
        record = contextlib.nullcontext() if self.times is None else self.times.timed(device, direction, size_bytes)
        with torch.cuda.stream(self.of(device, direction)), record:
            yield


@dataclass(frozen=True, slots=True)
class CopySpan:
    """A copy that has ended. Times are unix time."""

    device: torch.device
    direction: Direction
    size_bytes: int
    begin_s: float
    end_s: float


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
        if anchor is None or time.time() - anchor[1] > ANCHORED_S:
            if device not in self.streams:
                self.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            event = timed_event()
            event.record(self.streams[device])
            anchor = self.anchors[device] = event, time.time()
        return anchor

    def ended(self) -> list[CopySpan]:
        """Return the copies that have ended since the last call, the oldest first."""
        spans: list[CopySpan] = []
        while self.pending:
            (event, at_s), device, direction, size_bytes, begin, end = self.pending[0]
            if not (event.query() and end.query()):  # type: ignore[no-untyped-call]
                break
            self.pending.popleft()
            begin_s, end_s = (at_s + event.elapsed_time(each) / 1e3 for each in (begin, end))
            spans.append(CopySpan(device, direction, size_bytes, begin_s, end_s))
        return spans


def timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
