"""The guard of live tensors that copies still read: an optimizer's step waits for them on the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from node.model.device.copies import Watch

__all__ = ["StepGuard"]


class StepGuard:
    """A wait before each optimizer step, and before each change by this library, for copies in progress.

    Only the training thread uses it. Tensors are covered once their optimizer was seen to step through Python: a
    captured or compiled step changes weights without a call to the guard. A loop that writes weights elsewhere
    (through ``.data`` even unseen) must do so before ``node.step()``; a change that is noticed invalidates the copy.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.armed = False
        self.stepped: set[int] = set()  # Ids of optimizers that stepped through Python.
        self.blind = False  # Weights change in ways that the guard does not see.
        self.pending: list[tuple[torch.device, torch.cuda.Event, Watch]] = []

    def arm(self) -> None:
        """Begin to watch the optimizers' steps."""
        if self.armed:
            return
        self.armed = True
        mine = weakref.ref(self)

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            guard = mine()
            if guard is not None:
                guard.before_step(optimizer)

        for one in self.optimizers:
            one.register_step_pre_hook(before)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            self.blind = True
        else:
            self.stepped.add(id(optimizer))
            self.join()

    def covered(self) -> set[int]:
        """Return the ids of the tensors that change only behind a wait."""
        self.blind |= any([watch.look() for _, _, watch in self.pending])
        if self.blind:
            return set()
        groups = [group for one in self.optimizers if id(one) in self.stepped for group in one.param_groups]
        return {id(tensor) for group in groups if not group.get("capturable") for tensor in group["params"]}

    def hold(self, device: torch.device, event: torch.cuda.Event, tensors: Sequence[Tensor]) -> Watch:
        """Let later changes of these tensors wait for the event."""
        watch = Watch(tensors)
        self.pending = [row for row in self.pending if not self.over(*row)]
        self.pending.append((device, event, watch))
        return watch

    def over(self, device: torch.device, event: torch.cuda.Event, watch: Watch) -> bool:
        if event.query():  # type: ignore[no-untyped-call]
            self.blind |= watch.close()
            return True
        return False

    def join(self) -> None:
        """Let the current streams wait for all copies that read live tensors. The host waits for none."""
        for device, event, watch in self.pending:
            torch.cuda.current_stream(device).wait_event(event)
            self.blind |= watch.close()
        self.pending = []
