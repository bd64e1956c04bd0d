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

    def begin(self) -> None:
        """Say what travels how, before the first step."""
        if self.state is not None:
            self.notify("inventory", self.state.inventory().counts())

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
        self.frozen_sample = None

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

    def look_at_frozen(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Notice frozen tensors that the program changes, as the teacher of BYOL or a momentum encoder."""
        with torch.no_grad():
            sample = [sampled(tensor) for _, tensor in named]
        last, self.frozen_sample = self.frozen_sample, sample
        if last is None:
            return
        changed = [name for (name, _), now, then in zip(named, sample, last, strict=True) if not torch.equal(now, then)]
        if changed:
            self.on_changed()
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self.notify_once(
                f"Tensor {changed[0]!r}{more} requires no gradient and changes while this node trains (a teacher?): it "
                "is not mixed, and newcomers take it as it is at their donor. To mix it, give Node "
                f"average=[{changed[0]!r}].",
                "teacher",
            )

    def notify_once(self, sentence: str, kind: str) -> None:
        """Tell the user once of each kind."""
        if kind not in self.told:
            self.told.add(kind)
            self.notify(kind, sentence)


def sampled(tensor: Tensor) -> Tensor:
    """Return a copy of some elements, evenly spaced."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)].clone()
