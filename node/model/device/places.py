"""Positions of a part of the weights in the flat vector of all, kept on the device for as long as the part is used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from gossip.errors import LayoutError
from node.model.device.streams import CopyStreams
from node.model.flat import TensorPositions
from node.model.state import Positions

__all__ = ["DevicePositions", "PositionCache"]


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


class PositionCache:
    """The last few sets of positions on their devices: those of exchanges in progress, of the next mix, and sampled.

    Thread-safe: a worker may bring positions to the device before the training thread needs them.
    """

    MAX_SETS = 4  # A set takes 8 bytes a position.

    def __init__(self, streams: CopyStreams) -> None:
        self.streams, self.lock = streams, threading.Lock()
        # By the id of the positions, in the order of their last use: the positions, all tensors' devices, and the runs.
        self.kept: OrderedDict[int, tuple[Positions, list[torch.device], list[DevicePositions]]] = OrderedDict()

    def of(self, positions: Positions, live: list[Tensor]) -> list[DevicePositions]:
        """Return these ascending positions, which must not change, in runs of tensors on one device.

        Raises:
            LayoutError: They lie outside the model.
        """
        devices = [tensor.device for tensor in live]
        if all(device.type == "cpu" for device in devices):  # Without a copy to a device nothing is worth keeping.
            return device_positions(positions, live, self.streams)
        with self.lock:
            entry = self.kept.get(id(positions))  # An entry holds its array, so that no other array has its id.
            if entry is not None and entry[0] is positions and entry[1] == devices:
                self.kept.move_to_end(id(positions))
                return entry[2]
            self.kept.pop(id(positions), None)
            while len(self.kept) >= self.MAX_SETS:  # Before the upload, to make room for it on the device.
                self.kept.popitem(last=False)
        entry = positions, devices, device_positions(positions, live, self.streams)
        with self.lock:
            self.kept[id(positions)] = entry
        return entry[2]

    def has(self, positions: Positions) -> bool:
        """Return True if these positions are on their devices, or on their way there."""
        with self.lock:
            entry = self.kept.get(id(positions))
            return entry is not None and entry[0] is positions


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
        on_device, ready = upload(torch.from_numpy(relative), device, streams)
        runs.append(DevicePositions(device, run_start, run_stop, tensors, on_device, ready))
    return runs


def upload(host: Tensor, device: torch.device, streams: CopyStreams) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return a copy of positions on a device, and the event after it: CUDA copies page-locked memory without a wait."""
    if device.type != "cuda":
        return host.to(device), None
    locked = host.pin_memory()
    with streams.copying(device, "up", host.nbytes):
        on_device = locked.to(device, non_blocking=True)
    return on_device, streams.of(device, "up").record_event()
