"""Copies of live tensors to the host that overlap with training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from node.model.device.copies import Copies
from node.model.device.guard import StepGuard
from node.model.device.streams import CopyStreams
from node.model.flat import cut, elements

__all__ = ["Downloads"]


class Downloads:
    """Copies from one model's live tensors.

    A small model is first copied on its device, which takes microseconds, and from there to the host. Of a large model
    only tensors without the guard's protection are copied so: buffers, tensors without an optimizer, and small ones.
    The others go to the host from their own memory, and the guard makes their optimizer wait.
    """

    STAGED_ELEMENTS = 1 << 26  # 256 MB of float32 on the device: below, a whole copy is cheaper than many small ones.
    DIRECT_ELEMENTS = 1 << 16  # A copy of less takes about as long as its call.

    def __init__(self, streams: CopyStreams, guard: StepGuard) -> None:
        self.streams, self.guard = streams, guard

    @torch.no_grad()
    def begin(self, device: torch.device, live: Sequence[Tensor], host: Tensor, lasting: bool = False) -> Copies:
        """Begin to copy these tensors, all on this device, into ``host``.

        Args:
            device: The device.
            live: The tensors.
            host: A vector for all their elements; page-locked, or the host waits.
            lasting: True if nothing will change the tensors, which then need no copy on the device.

        Raises:
            MemoryError: The device has no memory for it. Nothing writes to ``host``.
        """
        current, side = torch.cuda.current_stream(device), self.streams.of(device, "down")
        self.guard.arm()
        covered = self.guard.covered() if host.numel() > self.STAGED_ELEMENTS else set()
        rows = [
            (lasting or (id(tensor) in covered and tensor.numel() >= self.DIRECT_ELEMENTS), tensor) for tensor in live
        ]
        sources: list[Tensor] = []
        pieces: list[Tensor] = []
        direct: list[Tensor] = []
        held, start = False, 0
        for in_place, run in groupby(rows, key=lambda row: row[0]):
            tensors = [tensor for _, tensor in run]
            stop = start + elements(tensors)
            piece, start = host[start:stop], stop
            staged = None if in_place else self.staged(device, tensors)
            if staged is not None:
                sources.append(staged)
                pieces.append(piece)
                continue
            sources += tensors
            pieces += cut(piece, tensors)
            if in_place:
                direct += tensors
            else:
                held = True  # No room for another copy: training waits for this one instead.
        side.wait_stream(current)
        try:
            with self.streams.copying(device, "down", host.numel()):  # A conversion takes memory for its tensor.
                torch._foreach_copy_(pieces, sources, non_blocking=True)
                flags = self.flags(sources)
        except torch.OutOfMemoryError as error:
            side.synchronize()  # Nothing may write to the host vector any more, nor read what trains.
            raise MemoryError(str(error)) from error
        for source in sources:
            source.record_stream(side)  # Keep the allocator from reusing the memory during the copy.
        event = side.record_event()
        if held:
            current.wait_event(event)
        watches = (self.guard.hold(device, event, direct),) if direct and not lasting else ()
        return Copies((event,), flags, watches)

    def staged(self, device: torch.device, tensors: list[Tensor]) -> Tensor | None:
        """Copy the tensors on their device; return None if there is no room."""
        try:
            flat = torch.empty(elements(tensors), dtype=torch.float32, device=device)
            torch._foreach_copy_(cut(flat, tensors), tensors)
        except torch.OutOfMemoryError:
            return None
        return flat

    def flags(self, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Begin to copy a flag that says if all values are finite, which a device checks much faster than a host.

        Return nothing if there is no room for one number per tensor: then the host checks.
        """
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        try:
            norms = torch._foreach_norm([source for source in sources if source.numel()], math.inf)  # NaN stays NaN.
            flag.copy_(torch.isfinite(torch.stack([norm.float() for norm in norms])).all(), non_blocking=True)
        except torch.OutOfMemoryError:
            return ()
        return (flag,)
