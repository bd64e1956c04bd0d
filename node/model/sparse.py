"""Reads and additions at some positions of a model, for mixes that cover a part of its weights."""

import contextlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossip.errors import LayoutError
from node.model.device.copies import Copies, combined, crossing_type, memory_errors
from node.model.device.downloads import Downloads
from node.model.device.guard import StepGuard
from node.model.device.streams import CopyStreams
from node.model.device.uploads import Uploads
from node.model.state import Floats, Positions
from node.model.tensors import LiveTensors


class TensorPositions(NamedTuple):
    """Positions in one tensor, flattened, for the elements [start, stop) of a vector of values."""

    tensor: Tensor
    positions: Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DevicePositions:
    """The positions in consecutive tensors of one device.

    Attributes:
        device: The device.
        start: The index of the first position of these among all positions of the part.
        stop: The index after the last one.
        tensors: For each tensor with positions: its number, and where its positions start and stop in ``on_device``.
        on_device: The positions, each counted from its tensor's first element, on the device.
        ready: The event after the copy of ``on_device``; None if the copy is done.
    """

    device: torch.device
    start: int
    stop: int
    tensors: tuple[tuple[int, int, int], ...]
    on_device: Tensor
    ready: torch.cuda.Event | None

    def pieces(self, live: list[Tensor]) -> list[TensorPositions]:
        """Return the positions by tensor, for work of the current stream."""
        if self.ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self.ready)
            self.on_device.record_stream(current)
        return [
            TensorPositions(live[number], self.on_device[start:stop], start, stop)
            for number, start, stop in self.tensors
        ]


class SparseCopies:
    """Copies of the weights at some positions: a part of :class:`node.model.snapshot.ModelState`.

    *Positions* are ascending indices in the flat vector of all weights. An array of them must not change, because the
    model's devices keep the last few: those of exchanges in progress, of the next mix, and sampled. A worker may bring
    positions to the device before the training thread needs them.
    """

    MAX_SETS = 4  # A set takes 8 bytes a position.

    def __init__(self, tensors: LiveTensors, guard: StepGuard, downloads: Downloads, uploads: Uploads) -> None:
        self.tensors, self.guard, self.downloads, self.uploads = tensors, guard, downloads, uploads
        self.lock = threading.Lock()
        # By the id of the positions, in the order of their last use: the positions, all tensors' devices, and the runs.
        # An entry holds its array, so that no other array has its id.
        self.kept: OrderedDict[int, tuple[Positions, list[torch.device], list[DevicePositions]]] = OrderedDict()

    def has(self, positions: Positions) -> bool:
        """Return True if these positions are on their devices, or on their way there."""
        return id(positions) in self.kept

    def prepare(self, positions: Positions) -> None:
        """Copy the positions to the model's devices, ahead of the boundary that needs them there."""
        with contextlib.suppress(MemoryError, LayoutError):  # The boundary meets the same error again.
            self.runs(positions, self.tensors.unchecked())

    @torch.no_grad()
    def begin_read(self, out: Floats, positions: Positions) -> Copies:
        """Begin to read the weights at these positions into ``out``, which has as many elements."""
        assert out.size == positions.size
        live, host = self.tensors.current(), torch.from_numpy(out)
        copies: list[Copies] = []
        for run in self.runs(positions, live):
            pieces, values = run.pieces(live), host[run.start : run.stop]
            if run.device.type == "cuda":
                with memory_errors():
                    flat = [
                        torch.cat([selected(piece).to(dtype) for piece in alike])
                        for dtype, alike in groupby(pieces, key=lambda piece: crossing_type(piece.tensor))
                    ]
                copies.append(self.downloads.begin(run.device, flat, values, constant=True))
                continue
            for piece in pieces:
                values[piece.start : piece.stop].copy_(selected(piece))
        return combined(copies)

    @torch.no_grad()
    def add(self, shift: Floats, positions: Positions) -> Copies:
        """Add ``shift``, which has as many elements, to the weights at these positions."""
        assert shift.size == positions.size
        self.guard.order_after_copies()
        live, host = self.tensors.current(), torch.from_numpy(shift)
        return self.uploads.change_whole([
            (run.device, host[run.start : run.stop], partial(add_pieces, run.pieces(live)))
            for run in self.runs(positions, live)
        ])  # fmt: skip

    def runs(self, positions: Positions, live: list[Tensor]) -> list[DevicePositions]:
        """Return the positions in runs of tensors on one device.

        Raises:
            LayoutError: They lie outside the model.
            MemoryError: A device has no room for them.
        """
        devices = [tensor.device for tensor in live]
        if all(device.type == "cpu" for device in devices):  # Without a copy to a device nothing is worth keeping.
            return device_positions(positions, live, self.uploads.streams)
        with self.lock:
            entry = self.kept.get(id(positions))
            if entry is not None and entry[1] == devices:
                self.kept.move_to_end(id(positions))
                return entry[2]
            self.kept.pop(id(positions), None)
            while len(self.kept) >= self.MAX_SETS:  # Before the upload, to make room for it on the device.
                self.kept.popitem(last=False)
        with memory_errors():
            entry = positions, devices, device_positions(positions, live, self.uploads.streams)
        with self.lock:
            self.kept[id(positions)] = entry
        return entry[2]


def device_positions(positions: Positions, live: list[Tensor], streams: CopyStreams) -> list[DevicePositions]:
    """Divide positions in the whole vector among devices and tensors, and copy them there."""
    ends = np.cumsum([tensor.numel() for tensor in live])
    if positions.size and not 0 <= positions[0] <= positions[-1] < ends[-1]:
        raise LayoutError("Positions lie outside the model, which has changed meanwhile: make a new Node.")
    starts, position_stops = np.concatenate(([0], ends[:-1])), np.searchsorted(positions, ends).tolist()
    # For each tensor: its number, and where its positions start and stop among all.
    rows = zip(range(len(live)), [0, *position_stops[:-1]], position_stops, strict=True)
    runs: list[DevicePositions] = []
    for device, group in groupby((row for row in rows if row[1] < row[2]), key=lambda row: live[row[0]].device):
        run = list(group)
        run_start, run_stop = run[0][1], run[-1][2]
        counts = [stop - start for _, start, stop in run]
        relative = positions[run_start:run_stop] - np.repeat(starts[[number for number, _, _ in run]], counts)
        tensors = tuple((number, start - run_start, stop - run_start) for number, start, stop in run)
        host, ready = torch.from_numpy(relative), None
        if device.type == "cuda":  # CUDA copies page-locked memory without a wait.
            locked = host.pin_memory()
            with streams.copying(device, "up", host.nbytes):
                on_device = locked.to(device, non_blocking=True)
            ready = streams.of(device, "up").record_event()
        else:
            on_device = host.to(device)
        runs.append(DevicePositions(device, run_start, run_stop, tensors, on_device, ready))
    return runs


def selected(piece: TensorPositions) -> Tensor:
    """Return a copy of the elements at these positions."""
    return piece.tensor.reshape(-1).index_select(0, piece.positions)


def add_pieces(pieces: list[TensorPositions], _: list[Tensor], values: Tensor) -> None:
    """Add its part of ``values`` to each tensor at its distinct positions, in the tensor's own dtype, rounded once."""
    for piece in pieces:
        live, added = piece.tensor, values[piece.start : piece.stop]
        flat = live.view(-1) if live.is_contiguous() else live.reshape(-1)
        flat.index_copy_(0, piece.positions, (flat.index_select(0, piece.positions) + added).to(live.dtype))
        is_copy = flat.data_ptr() != live.data_ptr()  # A tensor that is not contiguous was copied.
        if is_copy:
            live.copy_(flat.view(live.shape))
