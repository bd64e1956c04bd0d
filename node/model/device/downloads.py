"""Copies of live tensors to the host that overlap with training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from node.model.device.copies import Copies
from node.model.device.guard import StepGuard
from node.model.device.halves import HalfPart, crossing_type
from node.model.device.streams import CopyStreams
from node.model.flat import count_elements, views_like

__all__ = ["Downloads"]


class CopyList:
    """Copies to the host that are to begin: tensors on a device, and for each its place in a host vector.

    Attributes:
        sources: The tensors.
        targets: Their places.
        halves: The parts of the host vector that arrive in half precision.
        guarded: Live tensors whose optimizer must wait for the copies.
        blocks: True if all later work on the device must wait for them.
    """

    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.halves: list[HalfPart] = []
        self.guarded: list[Tensor] = []
        self.blocks = False

    def place(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the place in a part of the host vector at which its values arrive in this type."""
        if dtype == torch.float32:
            return part
        self.halves.append(HalfPart(part, dtype))
        return self.halves[-1].narrow

    def add(self, tensors: list[Tensor], place: Tensor) -> None:
        """Add tensors that together have one place."""
        self.sources += tensors
        self.targets += views_like(place, tensors)


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

    Half precision crosses as it is in all three, and the host widens it.
    """

    MAX_STAGED_ELEMENTS = 1 << 26  # A model of up to 256 MB of float32, or 128 MB of halves, is staged as a whole.
    MIN_DIRECT_ELEMENTS = 1 << 16  # Smaller tensors are staged: the call for a direct copy takes longer than the copy.
    PORTION_ELEMENTS = 1 << 24  # Elements that are converted on the device at once, in 64 MB there.

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
        current, copy_stream = torch.cuda.current_stream(device), self.streams.of(device, "down")
        self.guard.arm()
        copies = self.plan_copies(device, live, host, constant)
        size_bytes = 4 * host.numel() - sum(half.narrow.nbytes for half in copies.halves)
        copy_stream.wait_stream(current)
        try:
            with self.streams.copying(device, "down", size_bytes):
                # The device may lack memory for it: torch converts a tensor to another type in a temporary one there.
                torch._foreach_copy_(copies.targets, copies.sources, non_blocking=True)
                flags = self.begin_finite_check(copies.sources)
        except torch.OutOfMemoryError as error:
            copy_stream.synchronize()  # Nothing may write to the host vector any more, nor read what trains.
            raise MemoryError(str(error)) from error
        for source in copies.sources:
            source.record_stream(copy_stream)  # Keep the allocator from reusing the memory during the copy.
        copied = copy_stream.record_event()
        if copies.blocks:
            current.wait_event(copied)
        # A watch notices changes that did not wait for the copy.
        watches = (self.guard.delay_steps(device, copied, copies.guarded),) if copies.guarded else ()
        return Copies((copied,), flags, watches, tuple(copies.halves))

    def plan_copies(self, device: torch.device, live: Sequence[Tensor], host: Tensor, constant: bool) -> CopyList:
        """Choose the way of each tensor, and begin the staged copies on the device; for arguments see :meth:`begin`."""
        guarded = self.guard.guarded_tensors() if host.numel() > self.MAX_STAGED_ELEMENTS else set()

        def is_direct(tensor: Tensor) -> bool:
            return constant or (id(tensor) in guarded and tensor.numel() >= self.MIN_DIRECT_ELEMENTS)

        copies, start = CopyList(), 0
        staged: dict[torch.dtype, list[tuple[list[Tensor], Tensor]]] = {}  # By type: tensors, and their place.
        for (are_direct, dtype), run in groupby(live, key=lambda tensor: (is_direct(tensor), crossing_type(tensor))):
            tensors = list(run)
            stop = start + count_elements(tensors)
            target, start = copies.place(host[start:stop], dtype), stop
            if not are_direct:
                staged.setdefault(dtype, []).append((tensors, target))
                continue
            copies.add(self.converted_pieces(tensors), target)
            if not constant:
                copies.guarded += tensors
        for dtype, runs in staged.items():
            flat = self.copy_on_device(device, dtype, [tensor for tensors, _ in runs for tensor in tensors])
            if flat is None:  # The device has no room for another copy.
                copies.blocks = True
                for tensors, target in runs:
                    copies.add(self.converted_pieces(tensors), target)
            else:
                copies.sources += torch.split(flat, [target.numel() for _, target in runs])
                copies.targets += [target for _, target in runs]
        return copies

    def converted_pieces(self, tensors: list[Tensor]) -> list[Tensor]:
        """Split large tensors that cross in another type: torch converts each piece in a copy on the device."""
        pieces: list[Tensor] = []
        for tensor in tensors:
            is_split = tensor.dtype != crossing_type(tensor) and tensor.is_contiguous()
            pieces += torch.split(tensor.detach().view(-1), self.PORTION_ELEMENTS) if is_split else [tensor]
        return pieces

    def copy_on_device(self, device: torch.device, dtype: torch.dtype, tensors: list[Tensor]) -> Tensor | None:
        """Return a flat copy of the tensors, in this type, on their device; None if there is no room."""
        try:
            flat = torch.empty(count_elements(tensors), dtype=dtype, device=device)
            torch._foreach_copy_(views_like(flat, tensors), tensors)
        except torch.OutOfMemoryError:
            return None
        return flat

    def begin_finite_check(self, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Begin to check on the device if all values are finite; return the flag that will tell.

        Return nothing if the device has no room for one number per tensor. Then the host checks, which is much slower.
        """
        flag = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for source in sources:
            if source.numel():
                by_type.setdefault(source.dtype, []).append(source)
        try:
            # The largest absolute value of each tensor; one NaN makes it NaN. torch is fast for tensors of one type.
            norms = [torch.stack(torch._foreach_norm(group, math.inf)).float() for group in by_type.values()]
            flag.copy_(torch.isfinite(torch.cat(norms)).all(), non_blocking=True)
        except torch.OutOfMemoryError:
            return ()
        return (flag,)
