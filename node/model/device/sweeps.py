"""Repeated additions of a host vector (the correction of the node's own data) to live tensors.

Each is spread over several step boundaries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.model.device.streams import CopyStreams
from node.model.device.uploads import Uploads, portions
from node.model.flat import count_elements, views_like

__all__ = ["AdditionSweep", "ScaledAddition"]

Run = tuple[torch.device, list[Tensor], Tensor]
"""Consecutive tensors on one device, and their part of a host vector."""


class ScaledAddition:
    """Additions of ``factor * vector`` to a model, one at a time: on CUDA by sweeps, elsewhere at once."""

    def __init__(self, streams: CopyStreams) -> None:
        self.streams = streams
        self.sweeps: list[AdditionSweep] | None = None  # While an addition lasts, one for each run on CUDA.

    def add(self, runs: Sequence[Run], factor: float, version: int) -> bool:
        """Begin an addition, or do one more boundary's part of it. Return True once everything is added."""
        on_cuda = [run for run in runs if run[0].type == "cuda"]
        sweeps = self.sweeps
        if sweeps is None:
            sweeps = [AdditionSweep(self.streams, device) for device, _, _ in on_cuda]
            for device, live, host in runs:
                if device.type != "cuda":
                    add_at_once(device, live, host, factor)
        elif [sweep.device for sweep in sweeps] != [device for device, _, _ in on_cuda]:
            self.sweeps = None  # The program has moved the model meanwhile: the rest is not added.
            return True
        parts = zip(sweeps, on_cuda, strict=True)
        are_over = [sweep.advance(live, host, factor, version) for sweep, (_, live, host) in parts]
        self.sweeps = None if all(are_over) else sweeps
        return self.sweeps is None


@dataclass(frozen=True, slots=True)
class ArrivingPortion:
    """The values of the vector for one portion of the tensors, on their way to the device."""

    values: Tensor
    version: int  # The vector's version when the copy began.
    arrived: torch.cuda.Event


class AdditionSweep:
    """One addition of ``factor * vector`` to the tensors of a CUDA device, a few portions at each step boundary.

    Each boundary adds the portions that have arrived since the last one, and begins to upload as many again. So neither
    the host nor the device waits, and the memory is that of a few portions. Only the training thread uses it.

    The vector is page-locked. It may change between two boundaries, with a new version. A portion that was uploaded
    meanwhile may be torn, and is uploaded again.

    Args:
        streams: The streams of the copies.
        device: The device.
    """

    BUFFERS = 4  # With portions of 64 MB, 256 MB on the device, and 64 million parameters a step.

    def __init__(self, streams: CopyStreams, device: torch.device) -> None:
        self.streams, self.device = streams, device
        self.portion_elements = 0  # The size of a portion; 0 before the first boundary.
        self.buffers: list[Tensor] = []
        self.last_reads: list[torch.cuda.Event | None] = []  # For each buffer the event after its last addition.
        self.arriving: deque[ArrivingPortion] = deque()  # The oldest first.
        self.added_portions = 0

    def advance(self, live: Sequence[Tensor], host: Tensor, factor: float, version: int) -> bool:
        """Do one boundary's part. Return True once everything is added.

        Args:
            live: The tensors, the same at each boundary.
            host: The vector. No other thread changes it during the call.
            factor: The factor for the portions that this boundary adds.
            version: The version of the vector.
        """
        if not self.portion_elements and not self.allocate(live):
            add_on_host(live, host, factor)
            return True
        all_portions = list(portions(live, self.portion_elements))
        starts = [0]
        for tensors in all_portions:
            starts.append(starts[-1] + count_elements(tensors))
        self.add_arrived(all_portions, factor, version)
        self.begin_uploads(host, starts, version)
        return self.added_portions == len(all_portions)

    def allocate(self, live: Sequence[Tensor]) -> bool:
        """Allocate the buffers; return False if the device has no room for small ones either."""
        copy_stream = self.streams.of(self.device, "up")
        for portion_elements in (Uploads.PORTION_ELEMENTS, max(Uploads.PORTION_ELEMENTS >> 4, 1)):
            sizes = [count_elements(tensors) for tensors in portions(live, portion_elements)]
            count = min(len(sizes), self.BUFFERS)
            try:
                with torch.cuda.stream(copy_stream):
                    self.buffers = [
                        torch.empty(max(sizes), dtype=torch.float32, device=self.device) for _ in range(count)
                    ]
            except torch.OutOfMemoryError:
                continue
            self.portion_elements, self.last_reads = portion_elements, [None] * count
            return True
        return False

    def add_arrived(self, all_portions: list[list[Tensor]], factor: float, version: int) -> None:
        """Add the portions that have arrived; forget those of an older version of the vector."""
        current = torch.cuda.current_stream(self.device)
        if self.arriving and self.arriving[0].version != version:
            self.arriving.clear()  # Later copies into these buffers follow on the same stream.
        while self.arriving and self.arriving[0].arrived.query():  # type: ignore[no-untyped-call]
            portion = self.arriving.popleft()
            current.wait_event(portion.arrived)
            add_scaled(all_portions[self.added_portions], portion.values, factor)
            portion.values.record_stream(current)
            self.last_reads[self.added_portions % len(self.buffers)] = current.record_event()
            self.added_portions += 1

    def begin_uploads(self, host: Tensor, starts: list[int], version: int) -> None:
        """Begin to upload the next portions into the buffers that are free.

        ``starts`` are the portions' first positions in the vector, and the vector's end.
        """
        copy_stream = self.streams.of(self.device, "up")
        first = self.added_portions + len(self.arriving)
        for number in range(first, min(self.added_portions + len(self.buffers), len(starts) - 1)):
            buffer, start, stop = number % len(self.buffers), starts[number], starts[number + 1]
            last_read = self.last_reads[buffer]
            if last_read is not None:
                copy_stream.wait_event(last_read)
            values = self.buffers[buffer][: stop - start]
            with self.streams.copying(self.device, "up", 4 * (stop - start)):
                values.copy_(host[start:stop], non_blocking=True)
            self.arriving.append(ArrivingPortion(values, version, copy_stream.record_event()))


def add_at_once(device: torch.device, live: list[Tensor], host: Tensor, factor: float) -> None:
    """Add to tensors of one device, which takes the memory of a portion there."""
    if device.type == "cpu":
        add_scaled(live, host, factor)
        return
    start = 0
    for tensors in portions(live, Uploads.PORTION_ELEMENTS):
        stop = start + count_elements(tensors)
        add_scaled(tensors, host[start:stop].to(device), factor)
        start = stop


def add_scaled(live: Sequence[Tensor], flat: Tensor, factor: float) -> None:
    """Add ``factor * flat`` to the tensors. ``flat`` stays unchanged."""
    tensors = list(live)
    torch._foreach_add_(tensors, views_like(flat, tensors), alpha=factor)


def add_on_host(live: Sequence[Tensor], host: Tensor, factor: float) -> None:
    """Add as :func:`add_scaled`, one tensor after the other, with copies on the host. The host waits."""
    start = 0
    for tensor in live:
        stop = start + tensor.numel()
        copy = tensor.detach().cpu()
        add_scaled([copy], host[start:stop], factor)
        tensor.copy_(copy)
        start = stop
