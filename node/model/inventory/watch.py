"""What the training thread watches at its model, so that a program that defeats mixing is told so in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossip.errors import LayoutError
from node.model.snapshot import ModelState
from node.model.state import State

__all__ = ["ModelWatch"]

SAMPLED_ELEMENTS = 16  # Of each frozen tensor, by which a teacher is found that the program changes as a whole.


class ModelWatch:
    """The watch over one model. It does nothing for a model that is no torch module or mapping.

    Args:
        state: The model.
        notify: Tells the user, with a kind of notice and a sentence.
        on_changed: Called when a frozen tensor has changed, so that its hash is renewed.
    """

    def __init__(self, state: State, notify: Callable[[str, str], None], on_changed: Callable[[], None]) -> None:
        self.state = state if isinstance(state, ModelState) else None
        self.notify, self.on_changed = notify, on_changed
        self.told: set[str] = set()  # Sentences that the user has seen.
        self.frozen_sample: list[Tensor] | None = None  # The sampled elements of each frozen tensor, at the last look.
        self.range_sample: list[Tensor] | None = None  # The same of ranges, as the run began here.

    def begin(self) -> None:
        """Say what travels how, before the first step."""
        if self.state is not None:
            self.notify("inventory", self.state.inventory().counts())
            self.look_at_ranges(self.state.range_tensors())

    def on_step(self) -> None:
        """Look whether this step has undone a mix. Every training step calls it."""
        state = self.state
        if state is not None and state.probe.is_waiting and state.probe.on_step():
            names = " or ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in state.optimizers.all))
            self.notify_once(
                f"What a mix changes is gone one step later, so that the nodes train apart: {names or 'the program'} "
                "keeps a copy of the weights where this node does not see it. Keep it in optimizer.state, or write the "
                "weights into it before each step.",
                "undone",
            )

    def on_adopted(self) -> None:
        """Say why a newcomer's weights came without the optimizer's state, if they did."""
        if self.state is not None and self.state.state_refusal:
            self.notify_once(f"The optimizer's state begins afresh here: {self.state.state_refusal}", "optimizer")
        self.frozen_sample = self.range_sample = None
        if self.state is not None:
            self.look_at_ranges(self.state.range_tensors())

    def look(self) -> None:
        """Look at the optimizers and the frozen tensors, some seconds apart.

        Raises:
            LayoutError: An optimizer got parameters that the model lacks.
        """
        if self.state is None:
            return
        optimizer_state = self.state.optimizer_state
        optimizer_state.check_foreign()
        try:
            _ = optimizer_state.keys
        except LayoutError as error:
            self.notify_once(str(error), "optimizer")
        if left_out := optimizer_state.left_out:
            self.notify_once(
                f"Of the optimizer's state newcomers cannot take {', '.join(left_out)}, which have other shapes than "
                "the weights: they take the weights alone, and their state begins afresh.",
                "optimizer",
            )
        self.look_at_frozen(self.state.frozen_tensors())
        self.look_at_ranges(self.state.range_tensors())

    def look_at_frozen(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Notice frozen tensors that the program changes, as the teacher of BYOL or a momentum encoder."""
        last, self.frozen_sample = self.frozen_sample, [sampled(tensor) for _, tensor in named]
        if changed := changed_names(named, last, self.frozen_sample):
            self.on_changed()
            self.notify_once(
                f"Tensor {and_more(changed)} requires no gradient and changes while this node trains (a teacher?): it "
                "is not mixed, and newcomers take it as it is at their donor. To mix it, give Node "
                f"average=[{changed[0]!r}].",
                "teacher",
            )

    def look_at_ranges(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Notice ranges that each node observes for itself, as in quantisation-aware training."""
        now = [sampled(tensor) for _, tensor in named]
        if self.range_sample is None:
            self.range_sample = now
        if changed := changed_names(named, self.range_sample, now):
            self.notify_once(
                f"Tensor {and_more(changed)} has no mean (it began as infinite, or is the range of a quantiser) and "
                "changes while this node trains: each node keeps its own, so that nodes evaluate differently even once "
                "they have settled. Let all see the same batches then, or take the checkpoint of one node.",
                "ranges",
            )

    def notify_once(self, sentence: str, kind: str) -> None:
        """Tell the user once of each kind."""
        if kind not in self.told:
            self.told.add(kind)
            self.notify(kind, sentence)


def changed_names(named: Sequence[tuple[str, Tensor]], last: list[Tensor] | None, now: list[Tensor]) -> list[str]:
    """Return the names of the tensors whose samples differ; none at the first look."""
    pairs = zip(named, last or now, now, strict=True)
    return [name for (name, _), a, b in pairs if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)]


def and_more(names: Sequence[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@torch.no_grad()
def sampled(tensor: Tensor) -> Tensor:
    """Return a copy of some elements, evenly spaced."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)].clone()
