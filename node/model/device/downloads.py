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

    Training goes on during a copy, which must not see later values. There are three ways to copy a tensor:

    - **Staged**: copy it on its device, which takes microseconds, and copy that copy to the host. This is the way of
      small models. In a large model it is the way of small tensors, and of tensors that are not guarded: buffers, and
      parameters without an optimizer.
    - **Direct**: copy it to the host from its own memory. The guard makes its optimizer's next step wait for that. This
      is the way of the large guarded tensors of a large model.
    - **Blocking**: copy it directly, and make all later work on the device wait. It remains for tensors to be staged if
      the device has no room for another copy.
    """

    MAX_STAGED_ELEMENTS = 1 << 26  # A model of up to 256 MB of float32 is staged as a whole.
    MIN_DIRECT_ELEMENTS = 1 << 16  # Smaller tensors are staged: the call for a direct copy takes longer than the copy.
    PORTION_ELEMENTS = 1 << 24  # A tensor of another type takes 64 MB to convert.

    def __init__(self, streams: CopyStreams, guard: StepGuard) -> None:
        self.streams, self.guard = streams, guard

    @torch.no_grad()
    def begin(self, device: torch.device, live: Sequence[Tensor], host: Tensor, constant: bool = False) -> Copies:
        """Begin to copy these tensors, all on this device, into ``host``.

        Args:
            device: The device.
            live: The tensors.
            host: A vector for all their elements; page-locked, or the host waits.
            constant: True if nothing will change the tensors. They are copied directly, without a guard.

        Raises:
            MemoryError: The device has no memory for it. Nothing writes to ``host``.
        """
        current, side = torch.cuda.current_stream(device), self.streams.of(device, "down")
        self.guard.arm()
        guarded = self.guard.guarded_tensors() if host.numel() > self.MAX_STAGED_ELEMENTS else set()

        def is_direct(tensor: Tensor) -> bool:
            return constant or (id(tensor) in guarded and tensor.numel() >= self.MIN_DIRECT_ELEMENTS)

        sources: list[Tensor] = []
        targets: list[Tensor] = []  # The parts of `host` for the sources.
        to_guard: list[Tensor] = []  # Sources whose optimizer must wait for the copy.
        training_waits, start = False, 0
        for are_direct, run in groupby(live, key=is_direct):
            tensors = list(run)
            stop = start + count_elements(tensors)
            target, start = host[start:stop], stop
            if are_direct:
                pieces = self.widened_pieces(tensors)
                sources += pieces
                targets += views_like(target, pieces)
                if not constant:
                    to_guard += tensors
            elif (staged := self.copy_on_device(device, tensors)) is not None:
                sources.append(staged)
                targets.append(target)
            else:  # The device has no room for another copy.
                pieces = self.widened_pieces(tensors)
                sources += pieces
                targets += views_like(target, pieces)
                training_waits = True
        side.wait_stream(current)
        try:
            with self.streams.copying(device, "down", host.numel()):
                # This may lack memory: torch converts a tensor of another dtype into a temporary one on the device.
                torch._foreach_copy_(targets, sources, non_blocking=True)
                flags = self.begin_finite_check(sources)
        except torch.OutOfMemoryError as error:
            side.synchronize()  # Nothing may write to the host vector any more, nor read what trains.
            raise MemoryError(str(error)) from error
        for source in sources:
            source.record_stream(side)  # Keep the allocator from reusing the memory during the copy.
        copied = side.record_event()
        if training_waits:
            current.wait_event(copied)
        # A watch notices changes that did not wait for the copy.
        watches = (self.guard.delay_steps(device, copied, to_guard),) if to_guard else ()
        return Copies((copied,), flags, watches)

    def widened_pieces(self, tensors: list[Tensor]) -> list[Tensor]:
        """Split large tensors of another type: torch makes a float32 copy of each piece on the device."""
        pieces: list[Tensor] = []
        for tensor in tensors:
            is_split = tensor.dtype != torch.float32 and tensor.is_contiguous()
            pieces += torch.split(tensor.detach().view(-1), self.PORTION_ELEMENTS) if is_split else [tensor]
        return pieces

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
            # The largest absolute value of each tensor; one NaN makes it NaN.
            norms = torch._foreach_norm([source for source in sources if source.numel()], math.inf)
            flag.copy_(torch.isfinite(torch.stack([norm.float() for norm in norms])).all(), non_blocking=True)
        except torch.OutOfMemoryError:
            return ()
        return (flag,)
