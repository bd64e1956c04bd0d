"""The guard of live tensors that copies still read: it makes an optimizer's step wait for the copies, on the device."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class TornWatch:
    """A watch for changes of live tensors that a copy is reading. A change *tears* the copy into old and new values.

    The optimizer waits for the copy, so that only other code can change the tensors meanwhile. torch counts a tensor's
    changes in its ``_version``. ``copied`` is the event after the copy.
    """

    __slots__ = ("copied", "device", "is_torn", "tensors", "versions")

    def __init__(self, device: torch.device, copied: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        self.device, self.copied = device, copied
        self.tensors, self.versions = list(tensors), [tensor._version for tensor in tensors]
        self.is_torn = False

    def check(self) -> bool:
        """Return True if a tensor has changed before the watch was closed. Any thread may call it."""
        versions = zip(self.tensors, self.versions, strict=False)  # There are none once the watch is closed.
        if any(tensor._version != before for tensor, before in versions) and self.tensors:
            self.is_torn = True  # The training thread has not closed it meanwhile, as it does before its own changes.
        return self.is_torn

    def close(self) -> bool:
        """End the watch, because later work of the device waits for the copy. Return True if a tensor has changed."""
        self.check()
        self.tensors = []
        return self.is_torn


class StepGuard:
    """A wait for copies in progress, before each optimizer step and each change by this library.

    Only the training thread uses it. Tensors are *guarded* once their optimizer was seen to step through Python,
    because a step in a CUDA graph or a compiled one changes weights without a call to the guard. A loop that writes
    weights elsewhere must do so before ``node.step()``. A change that is noticed invalidates the copy, but one through
    ``.data`` is not noticed.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.is_armed = False
        self.stepped_optimizers: set[int] = set()  # Ids of the optimizers that were seen to step through Python.
        self.is_blind = False  # Weights have changed in ways that the guard does not see, so nothing is guarded.
        self.pending: list[TornWatch] = []  # The watches of copies that read live tensors.

    def arm(self) -> None:
        """Begin to watch the optimizers' steps."""
        if self.is_armed:
            return
        self.is_armed = True
        reference = weakref.ref(self)  # The optimizers outlive the node, and must not keep its model alive.

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            guard = reference()
            if guard is not None:
                guard.before_step(optimizer)

        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(hook)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the step wait for copies; a step that is being compiled or captured will not call this again."""
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            self.is_blind = True
        else:
            self.stepped_optimizers.add(id(optimizer))
            self.order_after_copies()

    def guarded_tensors(self) -> set[int]:
        """Return the ids of the guarded tensors, which change only after a wait."""
        self.is_blind |= any([watch.check() for watch in self.pending])
        if self.is_blind:
            return set()
        stepped = [optimizer for optimizer in self.optimizers if id(optimizer) in self.stepped_optimizers]
        groups = [group for optimizer in stepped for group in optimizer.param_groups]
        return {id(tensor) for group in groups if not group.get("capturable") for tensor in group["params"]}

    def delay_steps(self, device: torch.device, copied: torch.cuda.Event, tensors: Sequence[Tensor]) -> TornWatch:
        """Let later changes of these tensors wait for the event, which follows a copy that reads them."""
        for watch in self.pending:
            if watch.copied.query():  # type: ignore[no-untyped-call]
                self.is_blind |= watch.close()
        watch = TornWatch(device, copied, tensors)
        self.pending = [*(other for other in self.pending if other.tensors), watch]
        return watch

    def order_after_copies(self) -> None:
        """Let the current streams wait for all copies that read live tensors. The host does not wait."""
        for watch in self.pending:
            torch.cuda.current_stream(watch.device).wait_event(watch.copied)
            self.is_blind |= watch.close()
        self.pending = []
