"""Copies of live tensors to the host that overlap with training."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from node.model.device.copies import Copies, HalfPart, crossing_type
from node.model.device.guard import StepGuard
from node.model.device.streams import CopyStreams
from node.model.flat import count_elements, finite_flag, views_like


@dataclass(slots=True)
class CopyPlan:
    """The copies to the host that are to begin.

    Attributes:
        sources: Tensors on a device.
        targets: For each its place in a host vector.
        halves: The parts of the host vector that arrive in half precision.
        guarded: Live tensors whose optimizer must wait for the copies.
        blocks: True if all later work on the device must wait for them.
    """

    sources: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    halves: list[HalfPart] = field(default_factory=list)
    guarded: list[Tensor] = field(default_factory=list)
    blocks: bool = False


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
        plan = self.plan_copies(device, live, host, constant)
        size_bytes = 4 * host.numel() - sum(half.narrow.nbytes for half in plan.halves)
        copy_stream.wait_stream(current)
        try:
            with self.streams.copying(device, "down", size_bytes):
                # The device may lack memory for it: torch converts a tensor to another type in a temporary one there.
                torch._foreach_copy_(plan.targets, plan.sources, non_blocking=True)
                flags = self.begin_finite_check(plan.sources)
        except torch.OutOfMemoryError as error:
            copy_stream.synchronize()  # Nothing may write to the host vector any more, nor read what trains.
            raise MemoryError(str(error)) from error
        for source in plan.sources:
            source.record_stream(copy_stream)  # Keep the allocator from reusing the memory during the copy.
        copied = copy_stream.record_event()
        if plan.blocks:
            current.wait_event(copied)
        # A watch notices changes that did not wait for the copy.
        watches = (self.guard.delay_steps(device, copied, plan.guarded),) if plan.guarded else ()
        return Copies((copied,), flags, watches, tuple(plan.halves))

    def plan_copies(self, device: torch.device, live: Sequence[Tensor], host: Tensor, constant: bool) -> CopyPlan:
        """Choose the way of each tensor, and begin the staged copies on the device; for arguments see :meth:`begin`."""
        guarded = self.guard.guarded_tensors() if host.numel() > self.MAX_STAGED_ELEMENTS else set()

        def is_direct(tensor: Tensor) -> bool:
            return constant or (id(tensor) in guarded and tensor.numel() >= self.MIN_DIRECT_ELEMENTS)

        plan, stop = CopyPlan(), 0
        direct: list[tuple[list[Tensor], Tensor]] = []  # Tensors, and their place.
        staged: dict[torch.dtype, list[tuple[list[Tensor], Tensor]]] = {}
        for (are_direct, dtype), run in groupby(live, key=lambda tensor: (is_direct(tensor), crossing_type(tensor))):
            tensors = list(run)
            start, stop = stop, stop + count_elements(tensors)
            place = host[start:stop]
            if dtype != torch.float32:
                plan.halves.append(HalfPart(place, dtype))
                place = plan.halves[-1].narrow
            (direct if are_direct else staged.setdefault(dtype, [])).append((tensors, place))
        if not constant:
            plan.guarded = [tensor for tensors, _ in direct for tensor in tensors]
        for dtype, rows in staged.items():
            flat = self.copy_on_device(device, dtype, [tensor for tensors, _ in rows for tensor in tensors])
            if flat is None:  # The device has no room for another copy.
                plan.blocks = True
                direct += rows
            else:
                plan.sources += torch.split(flat, [place.numel() for _, place in rows])
                plan.targets += [place for _, place in rows]
        for tensors, place in direct:
            pieces = self.converted_pieces(tensors)
            plan.sources += pieces
            plan.targets += views_like(place, pieces)
        return plan

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
        try:
            flag.copy_(finite_flag(sources), non_blocking=True)
        except torch.OutOfMemoryError:
            return ()
        return (flag,)
