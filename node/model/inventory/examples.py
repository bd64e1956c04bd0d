"""Examples of the state that optimizers keep for a parameter, told by one step on a small one, and its scalars."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossip.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Example:
    """The state that an optimizer keeps for a parameter of one group, told by one step on a small parameter."""

    optimizer: torch.optim.Optimizer
    state: dict[str, Any]
    keys: frozenset[str]  # Tensors of the parameter's shape.
    scalars: frozenset[str]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Example:
        """Raise LayoutError if the optimizer keeps more than such tensors and scalars, or cannot take the step."""
        name = type(optimizer).__name__
        try:
            parameter, state = probe_state(optimizer, group)
        except Exception as error:  # A user's optimizer may raise anything.
            raise LayoutError(f"What {name} keeps cannot be told ({error}): take the weights alone.") from error
        keys = frozenset(key for key, value in state.items() if key != "step" and is_state_of(value, parameter))
        scalars = frozenset(key for key, value in state.items() if key not in keys and is_scalar(value))
        if others := set(state) - keys - scalars:
            raise LayoutError(f"{name} also keeps {listed(others)}, which no newcomer gets: take the weights alone.")
        return cls(optimizer, state, keys, scalars)


def can_be_told(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the state that an optimizer keeps can be told by a step on a small parameter."""
    try:
        Example.of(optimizer, optimizer.param_groups[0])
    except LayoutError:
        return False
    return True


def probe_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return a small parameter like the group's, and the state that the optimizer keeps for it after one step."""
    model_parameter = group["params"][0]
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=model_parameter.dtype, device=model_parameter.device))
    parameter.grad = torch.zeros_like(parameter)
    probe = probe_copy(optimizer, group, parameter)
    type(optimizer).step(probe)  # The class's method, because a scheduler wraps the instance's.
    return parameter, {key: value for key, value in probe.state[parameter].items() if value is not None}


def probe_copy(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> torch.optim.Optimizer:
    """Return a copy of an optimizer that trains this parameter alone, with copies of the optimizers that it wraps."""
    kind, step = type(optimizer), type(optimizer).step
    probe = copy.copy(optimizer)  # torch leaves the user's hooks and all attributes of subclasses out of a copy.
    if kind.step is not step:  # With torch's hooks around it, which an optimizer lacks that skips torch's constructor.
        kind.step = step  # type: ignore[method-assign]
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [parameter]}]
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            setattr(probe, name, probe_copy(value, value.param_groups[0], parameter))
        elif name not in vars(probe) and isinstance(value, int | float | str | None):
            setattr(probe, name, value)
    return probe


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def is_state_of(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape


def is_scalar(value: object) -> bool:
    """Return True for a number and for a tensor without dimensions."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)
