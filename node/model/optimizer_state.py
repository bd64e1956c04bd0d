"""What optimizers keep for each parameter that they train: read, written, and created where there is none yet."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossip.errors import LayoutError
from node.model.optimizers import Optimizers
from node.model.tensors import LiveTensors

__all__ = ["MAX_OPTIMIZER_KEYS", "OptimizerState"]

MAX_OPTIMIZER_KEYS = 4
"""Tensors of a parameter's shape that an optimizer keeps for it: Adam with amsgrad and centred RMSprop keep 3."""


class OptimizerState:
    """Of the ``optimizers`` of a model's ``tensors``; without any there is none. A trained parameter requires a
    gradient and is held by an optimizer: of several that hold it the first counts. Raises :class:`LayoutError` for an
    optimizer of another model."""

    def __init__(self, tensors: LiveTensors, optimizers: Optimizers) -> None:
        self._tensors, self._optimizers = tensors, optimizers.all
        ours = {id(tensor) for tensor in tensors.current()}
        for one in self._optimizers:
            if not any(id(parameter) in ours for group in one.param_groups for parameter in group["params"]):
                which = (
                    "The optimizer" if len(self._optimizers) == 1 else f"One of the optimizers ({type(one).__name__})"
                )
                raise LayoutError(
                    f"{which} holds none of this model's tensors: build it from the parameters of the model given."
                )

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of what is kept for EVERY trained parameter in its shape, sorted; none where it is not the same for all
        of them: a part of what an optimizer keeps is of no use to another."""
        keys: set[str] | None = None
        owners = self.owners()
        for parameter in self.trained():
            state = owners[id(parameter)].state.get(parameter, {})
            # "step" is a scalar by meaning: for a model of scalars alone its shape would not tell.
            mine = {k for k, v in state.items() if k != "step" and _is_state_of(v, parameter)}
            if not mine or mine != (keys or mine):
                return ()
            keys = mine
        found = tuple(sorted(keys or ()))
        if len(found) > MAX_OPTIMIZER_KEYS:
            raise LayoutError(
                f"An optimizer keeps {len(found)} tensors for each parameter and at most {MAX_OPTIMIZER_KEYS} are "
                "given to newcomers: they begin with the weights alone."
            )
        return found

    def scalars(self) -> dict[str, float]:
        """Of those that are no tensors of a parameter's shape, the largest over the trained parameters."""
        keys = self.keys
        if not keys:
            return {}
        scalars: dict[str, float] = {}
        for state in self.each():
            for key, value in state.items():
                if key not in keys and _is_scalar(value):
                    scalars[key] = max(float(value), scalars.get(key, -math.inf))
        return scalars

    def owners(self) -> dict[int, torch.optim.Optimizer]:
        """Of each tensor that is held the optimizer, by the tensor's id: looked up anew, since groups may be added."""
        return {id(parameter): one for one, group in reversed(self.groups()) for parameter in group["params"]}

    def groups(self) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        return [(one, group) for one in self._optimizers for group in one.param_groups]

    def trained(self) -> list[Tensor]:
        """In the layout's order."""
        if not self._optimizers:
            return []
        owners = self.owners()
        return [tensor for tensor in self._tensors.current() if id(tensor) in owners and tensor.requires_grad]

    def each(self) -> list[dict[str, Any]]:
        """What is kept for each trained parameter, created where there is nothing yet."""
        owners = self.owners()
        return [owners[id(parameter)].state[parameter] for parameter in self.trained()]

    def tensors(self, keys: Sequence[str]) -> list[Tensor]:
        """The state for each key of all trained parameters, in the order in which a vector holds it."""
        states = self.each() if keys else []
        return [state[key] for key in keys for state in states]

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
        if not self._optimizers:
            raise LayoutError("There is no optimizer to write state into: give Node the optimizer, or weights alone.")
        owners = self.owners()
        trained = {id(parameter) for parameter in self.trained()}
        kept: dict[int, dict[str, Any]] = {}
        for one, group in self.groups():
            members = {id(p) for p in group["params"] if id(p) in trained and owners[id(p)] is one}
            if not members:
                continue
            name = type(one).__name__
            try:
                parameter, state = _tried(one, group)
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
        trained, states = (self.trained(), self.each()) if keys else ([], [])
        made = list[Tensor]()
        for key in keys:
            for parameter, state in zip(trained, states, strict=True):
                if not _is_state_of(state.get(key), parameter):
                    state[key] = torch.zeros_like(parameter, dtype=examples[id(parameter)][key].dtype)
                made.append(state[key])
        return made

    def set_scalars(self, numbers: Mapping[str, float], examples: Mapping[int, Mapping[str, Any]]) -> None:
        """Of every trained parameter."""
        trained, states = (self.trained(), self.each()) if numbers else ([], [])
        for key, number in numbers.items():
            for parameter, state in zip(trained, states, strict=True):
                example = examples[id(parameter)][key]
                if isinstance(state.get(key), Tensor):
                    state[key].fill_(number)
                elif isinstance(example, Tensor):  # on the host, but beside the parameter when fused or captured
                    beside = parameter.device if example.is_cuda else example.device
                    state[key] = torch.full_like(example, number, device=beside)
                else:
                    state[key] = type(example)(number)

    def forget_spoiled(self) -> None:
        """Of each parameter all of it or nothing: an optimizer makes what it lacks altogether."""
        for state in self.each():
            kept = [value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
            if not all(bool(torch.isfinite(value).all()) for value in kept):
                state.clear()


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
