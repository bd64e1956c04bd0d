"""Reads and additions at some positions of a model, for mixes that cover a part of its weights."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from gossip.errors import LayoutError
from node.model.device.copies import Copies, combined, memory_errors
from node.model.device.downloads import Downloads
from node.model.device.guard import StepGuard
from node.model.device.halves import crossing_type
from node.model.device.places import DevicePositions, PositionCache
from node.model.device.streams import CopyStreams
from node.model.device.uploads import Uploads, Work
from node.model.flat import add_pieces
from node.model.state import Floats, Positions
from node.model.tensors import LiveTensors

__all__ = ["SparseCopies"]


class SparseCopies:
    """Copies of the weights at some positions: a part of :class:`node.model.snapshot.ModelState`.

    *Positions* are ascending indices in the flat vector of all weights. An array of them must not change, because the
    model's devices keep a copy for later calls.
    """

    def __init__(
        self, tensors: LiveTensors, streams: CopyStreams, guard: StepGuard, downloads: Downloads, uploads: Uploads
    ) -> None:
        self.tensors, self.guard, self.downloads, self.uploads = tensors, guard, downloads, uploads
        self.cache = PositionCache(streams)

    def prepare(self, positions: Positions) -> None:
        """Copy the positions to the model's devices, ahead of the boundary that needs them there."""
        with contextlib.suppress(torch.OutOfMemoryError, LayoutError):  # The boundary meets the same error again.
            self.cache.of(positions, self.tensors.current())

    @torch.no_grad()
    def begin_read(self, out: Floats, positions: Positions) -> Copies:
        """Begin to read the weights at these positions into ``out``, which has as many elements."""
        assert out.size == positions.size
        live, host = self.tensors.current(), torch.from_numpy(out)
        copies: list[Copies] = []
        for run in self.device_runs(positions, live):
            pieces, values = run.pieces(live), host[run.start : run.stop]
            if run.device.type == "cuda":
                with memory_errors():
                    flat = [
                        torch.cat([piece.select().to(dtype) for piece in alike])
                        for dtype, alike in groupby(pieces, key=lambda piece: crossing_type(piece.tensor))
                    ]
                copies.append(self.downloads.begin(run.device, flat, values, constant=True))
                continue
            for piece in pieces:
                values[piece.start : piece.stop].copy_(piece.select())
        return combined(copies)

    @torch.no_grad()
    def add(self, shift: Floats, positions: Positions) -> Copies:
        """Add ``shift``, which has as many elements, to the weights at these positions."""
        assert shift.size == positions.size
        self.guard.order_after_copies()
        live, host = self.tensors.current(), torch.from_numpy(shift)
        work: list[Work] = []
        for run in self.device_runs(positions, live):
            change, values = partial(add_pieces, run.pieces(live)), host[run.start : run.stop]
            if run.device.type == "cuda":
                work.append(self.uploads.prepare_at(run.device, values, change))
            else:
                change([], values.to(run.device))
        return Copies(tuple(event for queue_change in work for event in queue_change()))

    def device_runs(self, positions: Positions, live: list[Tensor]) -> list[DevicePositions]:
        """Return the positions by device. Raises MemoryError if a device has no room for them."""
        with memory_errors():
            return self.cache.of(positions, live)
