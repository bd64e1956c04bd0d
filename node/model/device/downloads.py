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
from node.model.flat import count_elements, views_like

__all__ = ["Downloads"]


class Downloads:
    """Copies from one model's live tensors to the host.

    A small model is first copied on its device, which takes microseconds, and from there to the host. In a large model
    only unprotected tensors are copied so: buffers, tensors without an optimizer, and small ones. The others go to the
    host from their own memory, and the guard makes their optimizer wait.
    """

    STAGED_ELEMENTS = 1 << 26  # A model up to 256 MB of float32 is copied on its device as a whole.
    DIRECT_ELEMENTS = 1 << 16  # Smaller tensors are copied on the device: a copy of their own takes mostly its call.

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
        protected = self.guard.protected_tensors() if host.numel() > self.STAGED_ELEMENTS else set()

        def is_direct(tensor: Tensor) -> bool:
            return lasting or (id(tensor) in protected and tensor.numel() >= self.DIRECT_ELEMENTS)

        sources: list[Tensor] = []
        pieces: list[Tensor] = []  # The parts of `host` for them.
        direct: list[Tensor] = []
        training_waits, start = False, 0
        for from_own_memory, run in groupby(live, key=is_direct):
            tensors = list(run)
            stop = start + count_elements(tensors)
            piece, start = host[start:stop], stop
            staged = None if from_own_memory else self.copy_on_device(device, tensors)
            if staged is not None:
                sources.append(staged)
                pieces.append(piece)
                continue
            sources += tensors
            pieces += views_like(piece, tensors)
            if from_own_memory:
                direct += tensors
            else:
                training_waits = True  # The device has no room for another copy.
        side.wait_stream(current)
        try:
            with self.streams.copying(device, "down", host.numel()):  # A conversion takes memory for its tensor.
                torch._foreach_copy_(pieces, sources, non_blocking=True)
                flags = self.begin_finite_check(sources)
        except torch.OutOfMemoryError as error:
            side.synchronize()  # Nothing may write to the host vector any more, nor read what trains.
            raise MemoryError(str(error)) from error
        for source in sources:
            source.record_stream(side)  # Keep the allocator from reusing the memory during the copy.
        event = side.record_event()
        if training_waits:
            current.wait_event(event)
        watches = (self.guard.protect(device, event, direct),) if direct and not lasting else ()
        return Copies((event,), flags, watches)

    def copy_on_device(self, device: torch.device, tensors: list[Tensor]) -> Tensor | None:
        """Return a flat copy of the tensors on their device; None if there is no room."""
        try:
            flat = torch.empty(count_elements(tensors), dtype=torch.float32, device=device)
            torch._foreach_copy_(views_like(flat, tensors), tensors)
        except torch.OutOfMemoryError:
            return None
        return flat

    def begin_finite_check(self, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Begin to check on the device if all values are finite; return the flag that will tell.

        Return nothing if the device has no room for one number per tensor. Then the host checks, which is much slower.
        """
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        try:
            norms = torch._foreach_norm([source for source in sources if source.numel()], math.inf)  # NaN stays NaN.
            flag.copy_(torch.isfinite(torch.stack([norm.float() for norm in norms])).all(), non_blocking=True)
        except torch.OutOfMemoryError:
            return ()
        return (flag,)
