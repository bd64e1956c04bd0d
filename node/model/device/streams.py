"""The streams of a device on which copies run, one in each direction, so that both overlap with training."""

from __future__ import annotations

import threading
from typing import Literal

import torch

__all__ = ["CopyStreams"]

Direction = Literal["up", "down"]


class CopyStreams:
    """Streams by device and direction, made when they are needed. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: dict[tuple[torch.device, Direction], torch.cuda.Stream] = {}

    def of(self, device: torch.device, direction: Direction) -> torch.cuda.Stream:
        with self.lock:
            stream = self.made.get((device, direction))
            if stream is None:
                stream = self.made[device, direction] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return stream
