"""The optimizers of a training loop as given to Node: none, one, or several."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from gossip.errors import CheckpointError, ConfigError
from gossip.ids import quantity
from node.model.optimizer.loaded import fitting_state

MAX_WRAPPERS = 4  # Wrappers around one optimizer; nested frameworks add up to two.
SEVERAL = "optimizers"  # The key of a checkpoint for the states of several optimizers.


class Optimizers:
    """The optimizers of one training loop, without the wrappers of frameworks (accelerate, Lightning).

    Args:
        optimizers: A ``torch.optim.Optimizer``, a list or tuple of them, or None.

    Raises:
        ConfigError: ``optimizers`` is something else.
    """

    def __init__(self, optimizers: object = None) -> None:
        as_list = optimizers if isinstance(optimizers, list | tuple) else [] if optimizers is None else [optimizers]
        self.all = tuple(dict.fromkeys(unwrapped(optimizer) for optimizer in as_list))  # Each once.
        # The optimizers that hold state: an optimizer that wraps another, like Lookahead and SAM, holds a part of it.
        self.holders = tuple(dict.fromkeys(holder for optimizer in self.all for holder in with_inner(optimizer)))

    @property
    def learning_rate(self) -> float:
        """Return the sum of all learning rates; NaN if there is none, or if one is on a device.

        Callers use only the ratio of two such sums. It is the ratio of the rates if a schedule scales all parameter
        groups alike; otherwise groups with larger rates weigh more, as they do in the model's movement.
        """
        rates = [group.get("lr") for optimizer in self.all for group in optimizer.param_groups]
        if not rates or not all(isinstance(rate, int | float) or is_on_host(rate) for rate in rates):
            return math.nan
        return math.fsum(float(rate) for rate in rates)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any] | None:
        """Return a single optimizer's plain ``state_dict()``, or those of several in order; None without optimizers."""
        states = [optimizer.state_dict() for optimizer in self.holders]
        return {SEVERAL: states} if len(states) > 1 else states[0] if states else None

    def split_state(self, saved: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Return a saved :meth:`state_dict` as one state for each optimizer; empty if either side has none.

        Raises:
            CheckpointError: The file has another number of optimizers, or a state does not fit its optimizer.
        """
        if saved is None or not self.all:
            return []
        several = saved.get(SEVERAL)
        states = list(several) if isinstance(several, list | tuple) else [dict(saved)]
        if len(states) != len(self.holders):
            raise CheckpointError(
                f"it holds the state of {quantity(len(states), 'optimizer')} and the node has "
                f"{len(self.holders)}: give Node the same ones, in the same order."
            )
        return [fitting_state(optimizer, state) for optimizer, state in zip(self.holders, states, strict=True)]

    @torch.inference_mode(False)  # An optimizer cannot step with state that is made under it.
    def load(self, states: list[dict[str, Any]]) -> None:
        """Load the states that :meth:`split_state` returned."""
        for optimizer, state in zip(self.holders, states, strict=False):
            optimizer.load_state_dict(state)


def is_on_host(rate: object) -> bool:
    """Return True if a learning rate is a tensor that can be read without waiting for a device."""
    return isinstance(rate, torch.Tensor) and rate.device.type == "cpu"


def with_inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and the optimizers inside it, which have their own state."""
    holders = [optimizer]
    for _ in range(MAX_WRAPPERS):
        inner = inner_of(holders[-1])
        if not isinstance(inner, torch.optim.Optimizer) or any(inner.state is holder.state for holder in holders):
            break
        holders.append(inner)
    return holders


def inner_of(optimizer: object) -> object:
    """Return the optimizer inside a wrapper, under one of the names that wrappers use; None if there is none."""
    names = ("optimizer", "_optimizer", "base_optimizer", "base")
    return next((inner for name in names if (inner := getattr(optimizer, name, None)) is not None), None)


def unwrapped(optimizer: object) -> torch.optim.Optimizer:
    """Return the optimizer behind a framework's wrappers, which share its state.

    Others that wrap an optimizer (Lookahead, SAM) have their own state and are optimizers themselves.
    """
    for _ in range(MAX_WRAPPERS):
        inner = inner_of(optimizer)
        if not isinstance(inner, torch.optim.Optimizer) or getattr(optimizer, "state", None) is not inner.state:
            break
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer, a list of them, or leave it out."
        )
    return optimizer
