"""The optimizers of a training loop, as Node was given them: none, one, or several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from gossip.errors import CheckpointError, ConfigError
from gossip.ids import quantity
from node.model.quasi_global import QuasiGlobal

__all__ = ["Optimizers"]

MOST_WRAPPERS = 4  # around one optimizer: frameworks put one, and one framework in another two
SEVERAL = "optimizers"  # the key of a checkpoint's state of more than one


class Optimizers:
    """``given``: a ``torch.optim.Optimizer``, a list or tuple of them, or None. Those that frameworks wrap (accelerate,
    Lightning) are looked into. Raises :class:`~gossip.errors.ConfigError` for anything else."""

    def __init__(self, given: object = None) -> None:
        each = given if isinstance(given, list | tuple) else () if given is None else (given,)
        self.all = tuple(dict.fromkeys(unwrapped(one) for one in each))
        self.quasi_global = tuple(one for one in self.all if isinstance(one, QuasiGlobal))

    @property
    def rate(self) -> float:
        """The sum of all learning rates; NaN where there is none, or where one lies on a device."""
        rates = [group.get("lr") for one in self.all for group in one.param_groups]
        if not rates or not all(isinstance(rate, int | float) or plain_tensor(rate) for rate in rates):
            return math.nan
        return math.fsum(float(rate) for rate in rates)  # type: ignore[arg-type]

    def mixed(self) -> None:
        """What exchanges brought was added to the parameters."""
        for one in self.quasi_global:
            one.mixed()

    def joined(self, keep: bool = False) -> None:
        """The parameters were replaced; ``keep``: the momentum came along."""
        for one in self.quasi_global:
            one.joined(keep)

    def state_dict(self) -> dict[str, Any] | None:
        """One's own, as any tool reads it; of several theirs in order; None where there is none."""
        states = [one.state_dict() for one in self.all]
        return {SEVERAL: states} if len(states) > 1 else states[0] if states else None

    def states(self, saved: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Of what :meth:`state_dict` gave each one's part, for :meth:`load`; nothing where either side has nothing.
        Raises :class:`~gossip.errors.CheckpointError` where it is not of as many."""
        if saved is None or not self.all:
            return []
        states = list(saved[SEVERAL]) if SEVERAL in saved else [dict(saved)]
        if len(states) != len(self.all):
            raise CheckpointError(
                f"it holds the state of {quantity(len(states), 'optimizer')} and the node has "
                f"{len(self.all)}: give Node the same ones, in the same order."
            )
        return states

    def load(self, states: list[dict[str, Any]]) -> None:
        """What :meth:`states` gave."""
        for one, state in zip(self.all, states, strict=False):
            one.load_state_dict(state)


def plain_tensor(rate: object) -> bool:
    """Whether reading this learning rate waits for no device."""
    return isinstance(rate, torch.Tensor) and rate.device.type == "cpu"


def unwrapped(optimizer: object) -> torch.optim.Optimizer:
    """The optimizer in a framework's wrapper, which is one that has no state of its own. Others (Lookahead, SAM) are
    optimizers themselves."""
    for _ in range(MOST_WRAPPERS):
        inner = getattr(optimizer, "optimizer", getattr(optimizer, "_optimizer", None))
        if not isinstance(inner, torch.optim.Optimizer) or getattr(optimizer, "state", None) is not inner.state:
            break
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer, a list of them, or leave it out."
        )
    return optimizer
