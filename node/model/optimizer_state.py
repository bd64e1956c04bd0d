"""The per-parameter state of optimizers: read, written, and created where it is missing."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossip.errors import LayoutError
from node.model.optimizers import Optimizers
from node.model.sharded.shards import local_part
from node.model.tensors import LiveTensors

__all__ = ["MAX_OPTIMIZER_KEYS", "OptimizerState"]

MAX_OPTIMIZER_KEYS = 4
"""The most tensors of a parameter's shape in an optimizer's state: amsgrad Adam and centred RMSprop keep 3."""


class OptimizerState:
    """The state of the ``optimizers`` for a model's ``tensors``; empty without optimizers.

    A *trained* parameter requires a gradient and is in an optimizer. If several optimizers hold it, the first counts.

    Raises:
        LayoutError: An optimizer holds none of the model's tensors.
    """

    def __init__(self, tensors: LiveTensors, optimizers: Optimizers) -> None:
        self._tensors, self._optimizers = tensors, optimizers.all
        self._copy: ScalarCopy | None = None  # The copy that is on its way from the device.
        self._arrived: dict[str, float] | None = None  # The scalars of the last copy that has arrived.
        ours = {id(tensor) for tensor in tensors.current()}
        is_single = len(self._optimizers) == 1
        for optimizer in self._optimizers:
            if not any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
                subject = "The optimizer" if is_single else f"One of the optimizers ({type(optimizer).__name__})"
                raise LayoutError(
                    f"{subject} holds none of this model's tensors: build it from the parameters of the model given."
                )

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the sorted names of the state tensors that EVERY trained parameter has in its own shape.

        Empty if parameters differ in their names: a joiner cannot use half of an optimizer's state.
        """
        keys: set[str] | None = None  # Those of the parameters so far; None before the first.
        owners = self.owners()
        for parameter in self.trained():
            state = owners[id(parameter)].state.get(parameter, {})
            # "step" is always a scalar, but its shape does not show that if the parameter is a scalar too.
            own_keys = {key for key, value in state.items() if key != "step" and _is_state_of(value, parameter)}
            if not own_keys or own_keys != (keys or own_keys):
                return ()
            keys = own_keys
        if len(keys or ()) > MAX_OPTIMIZER_KEYS:
            raise LayoutError(
                f"An optimizer keeps {len(keys or ())} tensors for each parameter and at most {MAX_OPTIMIZER_KEYS} are "
                "given to newcomers: they begin with the weights alone."
            )
        return tuple(sorted(keys or ()))

    def scalars(self) -> dict[str, float]:
        """Return the state's scalars, each as the largest value over the trained parameters. Waits for a device."""
        scalars, on_device = self.largest_scalars()
        if on_device is not None:
            scalars.update(zip(on_device.names, on_device.values.tolist(), strict=True))
        return scalars

    def recent_scalars(self) -> dict[str, float] | None:
        """Return the scalars without waiting for a device: as of an earlier call, or None if none have arrived yet.

        One copy brings all of them from the device. Without a device they are the present ones.
        """
        on_host, on_device = self.largest_scalars()
        if on_device is None:
            return on_host
        if self._copy is None or self._copy.done():
            arrived, self._copy = self._copy, ScalarCopy(on_device)
            if arrived is not None and arrived.names == on_device.names:
                self._arrived = arrived.scalars()
        return None if self._arrived is None else {**on_host, **self._arrived}

    def largest_scalars(self) -> tuple[dict[str, float], DeviceScalars | None]:
        """Return each scalar's largest value: those on the host as numbers, and those on a device."""
        keys = self.keys
        on_host: dict[str, float] = {}
        on_device: dict[str, list[Tensor]] = {}
        for state in self.states() if keys else ():
            for key, value in state.items():
                if key in keys or not _is_scalar(value):
                    continue
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    on_device.setdefault(key, []).append(value)
                else:
                    on_host[key] = max(float(value), on_host.get(key, -math.inf))
        return on_host, DeviceScalars.of(on_device) if on_device else None

    def owners(self) -> dict[int, torch.optim.Optimizer]:
        """Return the optimizer of each parameter, by the parameter's id. A program may add groups at any time."""
        groups = reversed(self.groups())  # The first optimizer with a parameter is entered last, and stays.
        return {id(parameter): optimizer for optimizer, group in groups for parameter in group["params"]}

    def groups(self) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Return the parameter groups of all optimizers, each with its optimizer."""
        return [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]

    def trained(self) -> list[Tensor]:
        """Return the trained parameters in the layout's order."""
        if not self._optimizers:
            return []
        owners = self.owners()
        return [tensor for tensor in self._tensors.current() if id(tensor) in owners and tensor.requires_grad]

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each trained parameter, created empty if it is missing."""
        owners = self.owners()
        return [owners[id(parameter)].state[parameter] for parameter in self.trained()]

    def tensors(self, keys: Sequence[str]) -> list[Tensor]:
        """Return the state tensors of all trained parameters, key by key, in the vector's order."""
        states = self.states() if keys else []
        return [state[key] for key in keys for state in states]

    def examples(self, keys: Sequence[str], scalars: Mapping[str, float]) -> dict[int, dict[str, Any]]:
        """Return an example of the optimizer's state for each trained parameter, by the parameter's id.

        A fresh optimizer has no state yet. So a copy of it takes one step on a small parameter, with the options of
        each group.

        Args:
            keys: The names of the tensors that the example should have.
            scalars: The scalars that it should have, by name.

        Raises:
            LayoutError: The example has other names, or a name or scalar is invalid.
        """
        if len(keys) > MAX_OPTIMIZER_KEYS or len(scalars) > MAX_OPTIMIZER_KEYS or len(set(keys)) < len(keys):
            raise LayoutError(f"Optimizer state is at most {MAX_OPTIMIZER_KEYS} different keys, and as many scalars.")
        if not all(isinstance(key, str) and key.isidentifier() for key in (*keys, *scalars)):
            raise LayoutError("A key of optimizer state is not a name.")
        if not all(isinstance(scalar, float) and 0.0 <= scalar < math.inf for scalar in scalars.values()):
            raise LayoutError("A scalar of optimizer state is negative or not finite.")
        if not (keys or scalars):
            return {}
        if not self._optimizers:
            raise LayoutError("There is no optimizer to write state into: give Node the optimizer, or weights alone.")
        owners = self.owners()
        trained = {id(parameter) for parameter in self.trained()}
        examples: dict[int, dict[str, Any]] = {}
        for optimizer, group in self.groups():
            ids = set(map(id, group["params"]))
            trained_here = {each for each in ids if each in trained and owners[each] is optimizer}
            if not trained_here:
                continue
            name = type(optimizer).__name__
            try:
                parameter, state = _probe(optimizer, group)
            except Exception as error:  # A user's optimizer may raise anything.
                raise LayoutError(f"What {name} keeps cannot be told ({error}): take the weights alone.") from error
            own_keys = {key for key, value in state.items() if key != "step" and _is_state_of(value, parameter)}
            own_scalars = {key for key, value in state.items() if key not in own_keys and _is_scalar(value)}
            has_others = len(state) > len(own_keys | own_scalars)
            if (own_keys, own_scalars) != (set(keys), set(scalars)) or has_others:
                raise LayoutError(
                    f"{name} keeps {_listed(state)} for each parameter and was given {_listed([*keys, *scalars])}: "
                    "use the swarm's optimizer, or take the weights alone."
                )
            examples.update(dict.fromkeys(trained_here, state))
        return examples

    def create(self, keys: Sequence[str], examples: Mapping[int, Mapping[str, Any]]) -> list[Tensor]:
        """Return the same as :meth:`tensors`, after creating missing tensors as zeros."""
        trained, states = (self.trained(), self.states()) if keys else ([], [])
        tensors = list[Tensor]()
        for key in keys:
            for parameter, state in zip(trained, states, strict=True):
                if not _is_state_of(state.get(key), parameter):
                    state[key] = torch.zeros_like(parameter, dtype=examples[id(parameter)][key].dtype)
                tensors.append(state[key])
        return tensors

    def set_scalars(self, scalars: Mapping[str, float], examples: Mapping[int, Mapping[str, Any]]) -> None:
        """Set these scalars for every trained parameter."""
        trained, states = (self.trained(), self.states()) if scalars else ([], [])
        for key, scalar in scalars.items():
            for parameter, state in zip(trained, states, strict=True):
                example = examples[id(parameter)][key]
                if isinstance(state.get(key), Tensor):
                    state[key].fill_(scalar)
                elif isinstance(example, Tensor):
                    # The scalars of a fused or captured optimizer are on the parameter's device, others on the host.
                    device = parameter.device if example.is_cuda else example.device
                    state[key] = torch.full_like(example, scalar, device=device)
                else:
                    state[key] = type(example)(scalar)

    @torch.no_grad()
    def clear_non_finite(self) -> None:
        """Clear the whole state of each parameter that has a non-finite tensor in it.

        An optimizer only recreates a state that is missing altogether.
        """
        for state in self.states():
            tensors = [value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
            if not all(bool(torch.isfinite(local_part(tensor)).all()) for tensor in tensors):
                state.clear()


@dataclass(frozen=True, slots=True)
class DeviceScalars:
    """The largest values of some scalars, on the first device that has any."""

    names: tuple[str, ...]
    values: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Sequence[Tensor]]) -> DeviceScalars:
        """Return the largest of the tensors of each name."""
        device = next(iter(tensors.values()))[0].device
        largest = [
            torch.stack([scalar.to(device, torch.float32) for scalar in scalars]).amax() for scalars in tensors.values()
        ]
        return cls(tuple(tensors), torch.stack(largest))


class ScalarCopy:
    """A copy of scalars that is on its way from a device."""

    def __init__(self, scalars: DeviceScalars) -> None:
        self.names = scalars.names
        self.event: torch.cuda.Event | None = None
        if scalars.values.is_cuda:
            self.host = torch.empty(len(scalars.names), pin_memory=True)
            self.host.copy_(scalars.values, non_blocking=True)
            self.event = torch.cuda.current_stream(scalars.values.device).record_event()
        else:
            self.host = scalars.values.cpu()

    def done(self) -> bool:
        return self.event is None or self.event.query()  # type: ignore[no-untyped-call]

    def scalars(self) -> dict[str, float]:
        return dict(zip(self.names, self.host.tolist(), strict=True))


def _probe(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return a small parameter like the group's, and the state that the optimizer keeps for it after one step."""
    model_parameter = group["params"][0]
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=model_parameter.dtype, device=model_parameter.device))
    parameter.grad = torch.zeros_like(parameter)
    probe = copy.copy(optimizer)  # torch leaves the user's hooks out of a copy.
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [parameter]}]
    type(optimizer).step(probe)  # The class's method, because a scheduler wraps the instance's.
    return parameter, {key: value for key, value in probe.state[parameter].items() if value is not None}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _is_state_of(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape


def _is_scalar(value: object) -> bool:
    """Return True for a number and for a tensor without dimensions."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)
