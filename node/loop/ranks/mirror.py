"""The mirror copies model and optimizers from rank 0 to a node's other ranks: at the start, and after a replacement.

An optimizer's state is sent as its structure, in which a :class:`Place` stands for each tensor, and then the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossip.errors import ConfigError
from node.loop.ranks.plain import checked, register, unreadable_error
from node.loop.ranks.ranks import Ranks
from node.model.optimizers import Optimizers
from node.model.snapshot import ModelState
from node.model.state import State

__all__ = [
    "Described",
    "Mirror",
    "Place",
    "check_counts",
    "fill_optimizers",
    "host_copy",
    "parameters_of",
    "with_places",
    "with_tensors",
]

Described = list[tuple[list[dict[str, Any]], list[dict[Any, Any]]]]
"""For each optimizer: its groups' options and its state by parameter, with a :class:`Place` for each tensor."""

Receive = Callable[["Place", Tensor | None, Any], Tensor]
"""Returns the tensor for a place. Arguments: the place, the parameter whose state it is, the present value there."""

# Limit of one tensor of an optimizer's state. A model of more than 8 million elements may have larger ones, of
# ``ELEMENT_BYTES`` for each of its elements.
MAX_TENSOR_BYTES = 1 << 30
ELEMENT_BYTES = 128


@dataclass(frozen=True, slots=True)
class Place:
    """The placeholder of a tensor in an optimizer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_device: bool  # True if it lies on its parameter's device, which differs by rank; otherwise it lies on the host.
    sharded: bool = False  # True if each rank has a part of it, as of its parameter. It is not sent then.

    def fits(self, elements: int) -> bool:
        """Return True if an optimizer of a model of this many elements can keep such a tensor."""
        size = math.prod(self.shape, start=self.dtype.itemsize)
        return min(self.shape, default=0) >= 0 and size <= max(MAX_TENSOR_BYTES, ELEMENT_BYTES * elements)


register(Place)


class Mirror:
    """One rank's end of the mirror. Tensors are sent in their own types, so that all ranks hold the same bits."""

    def __init__(self, state: State, optimizers: Optimizers, ranks: Ranks) -> None:
        for optimizer in optimizers.holders:
            # It is a ZeroRedundancyOptimizer, whose module is rarely imported.
            if hasattr(optimizer, "consolidate_state_dict"):
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps another part of its state on each rank, and the ranks of a node "
                    "hold the same: give Node a plain optimizer."
                )
        self.state, self.optimizers, self.ranks = state, optimizers, ranks

    @torch.no_grad()
    def send(self) -> None:
        """Send the state; called on rank 0."""
        tensors = self.state.tensors()
        for tensor in tensors.values():
            self.ranks.broadcast(host_copy(tensor))
        if not isinstance(self.state, ModelState):
            self.state.load(tensors)  # Loading may fill more than `tensors` returns.
        sent: list[Tensor] = []
        described = []
        for optimizer in self.optimizers.holders:
            groups = [{key: with_places(value, None, sent) for key, value in group.items() if key != "params"}
                      for group in optimizer.param_groups]  # fmt: skip
            states = [
                with_places(optimizer.state.get(parameter, {}), parameter, sent)
                for parameter in parameters_of(optimizer)
            ]
            described.append((groups, states))
        self.ranks.send_command("optimizers", described)
        for tensor in sent:
            self.ranks.broadcast(host_copy(tensor))

    @torch.no_grad()
    def receive(self) -> None:
        """Receive the state; called on the other ranks."""
        tensors = {}
        for name, tensor in self.state.tensors().items():
            tensors[name] = host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self.ranks.broadcast(host)
        described = checked(self.ranks.receive_command().payload, Described)
        check_counts(self.optimizers, described)
        self.state.load(tensors)
        self.optimizers.on_replaced(keep=True)  # It drops what belongs to the old weights; the momentum comes next.
        fill_optimizers(self.optimizers, described, self.receive_tensor)

    def receive_tensor(self, place: Place, parameter: Tensor | None, before: Any) -> Tensor:
        """Receive a tensor: into the present one if the shapes agree, since a step in a CUDA graph has its address."""
        if not place.fits(self.state.layout.size):
            raise unreadable_error(f"a tensor of {tuple(place.shape)}")
        host = torch.empty(place.shape, dtype=place.dtype, device="cpu")
        self.ranks.broadcast(host)
        if isinstance(before, Tensor) and (before.shape, before.dtype) == (host.shape, host.dtype):
            return before.copy_(host)
        return host.to(parameter.device) if place.on_device and parameter is not None else host


def check_counts(optimizers: Optimizers, described: Described) -> None:
    """Raise LocalError unless the optimizers have as many groups and parameters as rank 0 describes."""
    counts = [(len(optimizer.param_groups), len(list(parameters_of(optimizer)))) for optimizer in optimizers.holders]
    if counts != [(len(groups), len(states)) for groups, states in described]:
        raise unreadable_error("optimizers of other parameters")


def fill_optimizers(optimizers: Optimizers, described: Described, receive: Receive) -> None:
    """Replace the optimizers' options and state by those described, with a received tensor for each placeholder."""
    for optimizer, (groups, states) in zip(optimizers.holders, described, strict=True):
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            if "params" in options:
                raise unreadable_error("an optimizer's parameters")
            group.update(with_tensors(options, None, receive, group))
        for parameter, state in zip(parameters_of(optimizer), states, strict=True):
            before = optimizer.state.pop(parameter, {})
            if state:
                optimizer.state[parameter] = with_tensors(state, parameter, receive, before)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def with_places(value: Any, parameter: Tensor | None, tensors: list[Tensor]) -> Any:
    """Return ``value`` with a :class:`Place` for each tensor, and append the tensors to ``tensors``.

    Args:
        value: A value in an optimizer's options or state.
        parameter: The parameter whose state it is; None for options.
        tensors: Receives the tensors, in the order in which they are sent.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Place(value.shape, value.dtype, parameter is not None and value.device == parameter.device)
    if isinstance(value, Mapping):
        return {key: with_places(item, parameter, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_places(item, parameter, tensors) for item in value)
    return value


def with_tensors(value: Any, parameter: Tensor | None, receive: Receive, before: Any = None) -> Any:
    """Return ``value`` with a received tensor for each place, in the order of :func:`with_places`.

    ``before`` is the value that is replaced.
    """
    if isinstance(value, Place):
        return receive(value, parameter, before)
    if isinstance(value, dict):
        present = before if isinstance(before, Mapping) else {}
        return {key: with_tensors(item, parameter, receive, present.get(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        old_items = before if isinstance(before, list | tuple) and len(before) == len(value) else [None] * len(value)
        pairs = zip(value, old_items, strict=True)
        return type(value)(with_tensors(item, parameter, receive, old) for item, old in pairs)
    return value
