"""A saved optimizer state before it is loaded: torch refuses one that does not fit late, or only at its next step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossip.errors import CheckpointError


class GroupedParameter(NamedTuple):
    """A parameter, and the number of its group."""

    parameter: Tensor
    group: int


def fitting_state(optimizer: torch.optim.Optimizer, state: Any) -> dict[str, Any]:
    """Return a saved state, which this optimizer can load and step with.

    Settings of a group that the file lacks, as of another version of torch, are this optimizer's own. An optimizer with
    a ``load_state_dict`` of its own may have another form of state, which is returned as it is.

    Raises:
        CheckpointError: It is the state of another optimizer, or damaged.
    """
    has_own_form = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    if has_own_form and isinstance(state, Mapping) and "param_groups" not in state:
        return dict(state)
    try:
        groups, per_parameter = state["param_groups"], state["state"]
        numbers = [number for group in groups for number in group["params"]]
        counts = [len(group["params"]) for group in groups]
        is_numbered = all(type(number) is int for number in numbers) and len(set(numbers)) == len(numbers)
        fits = is_numbered and counts == [len(group["params"]) for group in optimizer.param_groups]
        fits = fits and isinstance(per_parameter, Mapping) and set(per_parameter) <= set(numbers)
    except (LookupError, TypeError):
        fits = False
    if not fits:
        raise CheckpointError(
            f"its {type(optimizer).__name__} has other groups of parameters than this node's: build it in the same way."
        )
    places = [
        GroupedParameter(parameter, number)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]
    by_number = dict(zip(numbers, places, strict=True))
    entries = [(by_number[number], entry) for number, entry in per_parameter.items()]
    complete = [
        {name: value for name, value in own.items() if name != "params"} | dict(group)
        for own, group in zip(optimizer.param_groups, groups, strict=True)
    ]
    fits = all(map(fits_group, optimizer.param_groups, complete)) and all(
        isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry) for _, entry in entries
    )
    own = [(place, optimizer.state.get(place.parameter)) for place in places]
    entries += [(place, entry) for place, entry in own if entry]
    # Optimizers of other makers may keep other entries for some parameters, as 8-bit ones for small tensors.
    is_of_torch = type(optimizer).__module__.startswith("torch.optim")
    if not fits or (is_of_torch and not are_alike(entries)):
        name = type(optimizer).__name__
        raise CheckpointError(f"the state of its {name} is damaged, or of another kind of optimizer: use another file.")
    return {**state, "param_groups": complete}


def fits_group(own: Mapping[str, Any], loaded: Mapping[str, Any]) -> bool:
    """Return True if the settings of a loaded group are of the kinds of this optimizer's."""
    return all(
        isinstance(name, str) and (name not in own or name == "params" or is_of_kind(value, own[name]))
        for name, value in loaded.items()
    )


def is_of_kind(value: Any, own: Any) -> bool:
    """Return True if a setting may stand in the place of another one: a finite number in that of a number."""
    if isinstance(own, tuple | list):
        is_as_long = isinstance(value, tuple | list) and len(value) == len(own)
        return is_as_long and all(map(is_of_kind, value, own))
    if own is None or isinstance(own, bool):
        return value is None or isinstance(value, bool | str) or is_number(value)
    return is_number(value) if is_number(own) else type(value) is type(own)


def is_number(value: Any) -> bool:
    """Return True for a finite number, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and bool(value.isfinite().all())
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def are_alike(entries: Sequence[tuple[GroupedParameter, Mapping[str, Any]]]) -> bool:
    """Return True if the entries have the same names in a group, and those of one name are of one kind everywhere.

    Names may depend on the number of dimensions: some optimizers keep factors for matrices alone.
    """
    names: dict[tuple[int, int], set[str]] = {}
    kinds: dict[str, str] = {}
    for place, entry in entries:
        if entry and names.setdefault((place.group, place.parameter.ndim), set(entry)) != set(entry):
            return False
        for name, value in entry.items():
            kind = kind_of(value, place.parameter)
            if kind is not None and kinds.setdefault(name, kind) != kind:
                return False
    return True


def kind_of(value: Any, parameter: Tensor) -> str | None:
    """Return what a value of a parameter's state is; None if that says nothing about other parameters."""
    if value is None or (isinstance(value, Tensor) and parameter.numel() == value.numel() == 1):
        return None
    if isinstance(value, Tensor):
        if value.is_complex() and not parameter.is_complex():
            return "complex"
        return "like the parameter" if value.shape == parameter.shape else "one" if value.numel() == 1 else "other"
    return "one" if isinstance(value, int | float) else type(value).__name__
