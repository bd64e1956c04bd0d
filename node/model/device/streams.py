"""The streams of a device on which copies run, one in each direction, so that both overlap with training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from node.model.device.times import CopyTimes, Direction

__all__ = ["CopyStreams"]


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
        with torch.cuda.stream(self.of(device, direction)):
            if self.times is None:
                yield
            else:
                with self.times.timed(device, direction, size_bytes):
                    yield
