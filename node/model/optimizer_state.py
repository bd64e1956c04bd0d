"""What an optimizer keeps for each parameter that it trains: read, written, and created where there is none yet."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossip.errors import LayoutError
from node.model.tensors import LiveTensors

__all__ = ["MAX_OPTIMIZER_KEYS", "OptimizerState"]

MAX_OPTIMIZER_KEYS = 4
"""Tensors of a parameter's shape that an optimizer keeps for it: Adam with amsgrad and centred RMSprop keep 3."""


class OptimizerState:
    """Of the optimizer of a model's ``tensors``; without an optimizer there is none. A trained parameter requires a
    gradient and is held by the optimizer. Raises :class:`LayoutError` for an optimizer of another model."""

    def __init__(self, tensors: LiveTensors, optimizer: torch.optim.Optimizer | None) -> None:
        self._tensors, self._optimizer = tensors, optimizer
        if optimizer is not None and not self.held():
            raise LayoutError(
                "The optimizer holds none of this model's tensors: build it from the parameters of the model given."
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of what it keeps for EVERY trained parameter in its shape, sorted."""
        if self._optimizer is None:
            return ()
        keys: set[str] | None = None
        for parameter in self.trained():
            state = self._optimizer.state.get(parameter, {})
            # "step" is a scalar by meaning: for a model of scalars alone its shape would not tell.
            mine = {k for k, v in state.items() if k != "step" and _is_state_of(v, parameter)}
            keys = mine if keys is None else keys & mine
            if not keys:
                return ()
        found = tuple(sorted(keys or ()))
        if len(found) > MAX_OPTIMIZER_KEYS:
            raise LayoutError(
                f"The optimizer keeps {len(found)} tensors for each parameter and at most {MAX_OPTIMIZER_KEYS} are "
                "given to newcomers: they begin with the weights alone."
            )
        return found

    def scalars(self) -> dict[str, float]:
        """Of those that are no tensors of a parameter's shape, the largest over the trained parameters."""
        keys = self.keys
        if not keys:
            return {}
        scalars: dict[str, float] = {}
        for parameter in self.trained():
            for key, value in self.of(parameter).items():
                if key not in keys and _is_scalar(value):
                    scalars[key] = max(float(value), scalars.get(key, -math.inf))
        return scalars

    def held(self) -> list[Tensor]:
        """The layout's tensors that the optimizer holds, in the layout's order."""
        if self._optimizer is None:
            return []
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return [tensor for tensor in self._tensors.current() if id(tensor) in held]

    def trained(self) -> list[Tensor]:
        return [tensor for tensor in self.held() if tensor.requires_grad]

    def tensors(self, keys: Sequence[str]) -> list[Tensor]:
        """The state for each key of all trained parameters, in the order in which a vector holds it."""
        trained = self.trained() if keys else []
        return [self.of(parameter)[key] for key in keys for parameter in trained]

    def examples(self, keys: Sequence[str], numbers: Mapping[str, float]) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps, by the id of each trained parameter; raises unless these names are exactly that.

        A fresh optimizer keeps nothing yet and no table knows every optimizer, so a copy of it takes one step on a
        parameter of its own, with the options of each group.
        """
        if len(keys) > MAX_OPTIMIZER_KEYS or len(numbers) > MAX_OPTIMIZER_KEYS or len(set(keys)) < len(keys):
            raise LayoutError(f"Optimizer state is at most {MAX_OPTIMIZER_KEYS} different keys, and as many scalars.")
        if not all(isinstance(key, str) and key.isidentifier() for key in (*keys, *numbers)):
            raise LayoutError("A key of optimizer state is not a name.")
        if not all(isinstance(number, float) and 0.0 <= number < math.inf for number in numbers.values()):
            raise LayoutError("A scalar of optimizer state is negative or not finite.")
        if not (keys or numbers):
            return {}
        if self._optimizer is None:
            raise LayoutError("There is no optimizer to write state into: give Node the optimizer, or weights alone.")
        name = type(self._optimizer).__name__
        trained = {id(parameter) for parameter in self.trained()}
        kept: dict[int, dict[str, Any]] = {}
        for group in self._optimizer.param_groups:
            members = trained & {id(parameter) for parameter in group["params"]}
            if not members:
                continue
            try:
                parameter, state = _tried(self._optimizer, group)
            except Exception as error:  # a user's own optimizer may raise anything
                raise LayoutError(f"What {name} keeps cannot be told ({error}): take the weights alone.") from error
            tensors = {key for key, value in state.items() if key != "step" and _is_state_of(value, parameter)}
            scalars = {key for key, value in state.items() if key not in tensors and _is_scalar(value)}
            if (tensors, scalars) != (set(keys), set(numbers)) or len(state) > len(tensors | scalars):
                raise LayoutError(
                    f"{name} keeps {_listed(state)} for each parameter and was given {_listed([*keys, *numbers])}: "
                    "use the swarm's optimizer, or take the weights alone."
                )
            kept.update(dict.fromkeys(members, state))
        return kept

    def create(self, keys: Sequence[str], examples: Mapping[int, Mapping[str, Any]]) -> list[Tensor]:
        """As :meth:`tensors`, with those that there were none of yet."""
        trained, made = self.trained() if keys else [], list[Tensor]()
        for key in keys:
            for parameter in trained:
                state = self.of(parameter)
                if not _is_state_of(state.get(key), parameter):
                    state[key] = torch.zeros_like(parameter, dtype=examples[id(parameter)][key].dtype)
                made.append(state[key])
        return made

    def set_scalars(self, numbers: Mapping[str, float], examples: Mapping[int, Mapping[str, Any]]) -> None:
        """Of every trained parameter."""
        trained = self.trained() if numbers else []
        for key, number in numbers.items():
            for parameter in trained:
                state, example = self.of(parameter), examples[id(parameter)][key]
                if isinstance(state.get(key), Tensor):
                    state[key].fill_(number)
                elif isinstance(example, Tensor):  # on the host, but beside the parameter when fused or captured
                    beside = parameter.device if example.is_cuda else example.device
                    state[key] = torch.full_like(example, number, device=beside)
                else:
                    state[key] = type(example)(number)

    def forget_spoiled(self) -> None:
        """Of each parameter all of it or nothing: an optimizer makes what it lacks altogether."""
        for parameter in self.trained():
            state = self.of(parameter)
            kept = [value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
            if not all(bool(torch.isfinite(value).all()) for value in kept):
                state.clear()

    def of(self, parameter: Tensor) -> dict[str, Any]:
        assert self._optimizer is not None
        state: dict[str, Any] = self._optimizer.state[parameter]  # a defaultdict: created where there is none yet
        return state


def _tried(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """A parameter like those of the group, and what the optimizer keeps for it after one step."""
    like = group["params"][0]
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=like.dtype, device=like.device))
    parameter.grad = torch.zeros_like(parameter)
    probe = copy.copy(optimizer)  # without the user's hooks: torch leaves them out of a copy
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [parameter]}]
    type(optimizer).step(probe)  # the class's, since a scheduler puts its own in front of the instance's
    return parameter, {key: value for key, value in probe.state[parameter].items() if value is not None}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _is_state_of(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape


def _is_scalar(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)
