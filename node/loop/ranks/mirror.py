"""The mirror: all state that rank 0 trains, copied to the other ranks when a loop begins or weights were replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossip.errors import ConfigError
from node.loop.ranks.plain import fitting, spoken, unreadable
from node.loop.ranks.ranks import Ranks
from node.model.optimizers import Optimizers
from node.model.snapshot import ModelState
from node.model.state import State

__all__ = ["Described", "Mirror", "Place", "check_counts", "fill_optimizers", "filled", "held", "on_host", "stripped"]

Described = list[tuple[list[dict[str, Any]], list[dict[Any, Any]]]]
"""For each optimizer: its groups' options, and its state for each parameter."""

Receive = Callable[["Place", Tensor | None, Any], Tensor]

# Limit of a tensor of an optimizer's state; models of more than 8 million elements may have larger ones.
MOST_TENSOR_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Place:
    """The placeholder of a tensor in an optimizer's state. The tensor itself follows separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    beside: bool  # True if it lies on its parameter's device, which differs by rank; otherwise it lies on the host.
    sharded: bool = False  # True if each rank has a part of it, as of its parameter, and nothing follows.

    def fits(self, elements: int) -> bool:
        """Return True if an optimizer of a model of this many elements can keep such a tensor."""
        size = math.prod(self.shape, start=self.dtype.itemsize)
        return min(self.shape, default=0) >= 0 and size <= max(MOST_TENSOR_BYTES, 128 * elements)


spoken(Place)


class Mirror:
    """The copying of model and optimizers between rank 0 and another rank.

    Values keep their types: float32 would round a float64 model on one side only.
    """

    def __init__(self, state: State, optimizers: Optimizers, ranks: Ranks) -> None:
        for optimizer in optimizers.all:
            # ZeroRedundancyOptimizer, whose module is rarely imported.
            if hasattr(optimizer, "consolidate_state_dict"):
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps another part of its state on each rank, and the ranks of a node "
                    "hold the same: give Node a plain optimizer."
                )
        self.state, self.optimizers, self.ranks = state, optimizers, ranks

    @torch.no_grad()
    def give(self) -> None:
        """Send the state; called on rank 0."""
        tensors = self.state.tensors()
        for tensor in tensors.values():
            self.ranks.send_tensor(on_host(tensor))
        if not isinstance(self.state, ModelState):
            self.state.load(tensors)  # Loading may fill more than `tensors` returns.
        found: list[Tensor] = []
        described = []
        for optimizer in self.optimizers.all:
            groups = [{key: stripped(value, None, found) for key, value in group.items() if key != "params"}
                      for group in optimizer.param_groups]  # fmt: skip
            kept = [stripped(optimizer.state.get(parameter, {}), parameter, found) for parameter in held(optimizer)]
            described.append((groups, kept))
        self.ranks.tell("optimizers", described)
        for tensor in found:
            self.ranks.send_tensor(on_host(tensor))

    @torch.no_grad()
    def take(self) -> None:
        """Receive the state; called on the other ranks."""
        tensors = {}
        for name, tensor in self.state.tensors().items():
            tensors[name] = host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.ranks.send_tensor(host)
        described = fitting(self.ranks.hear().what, Described)
        check_counts(self.optimizers, described)
        self.state.load(tensors)
        self.optimizers.joined(keep=True)  # It drops state that belongs to the old weights; the momentum follows.
        fill_optimizers(self.optimizers, described, self.receive)

    def receive(self, place: Place, parameter: Tensor | None, before: Any) -> Tensor:
        """Receive a tensor, into the present one if it has the same shape: a captured step refers to its address."""
        if not place.fits(self.state.layout.size):
            raise unreadable(f"a tensor of {tuple(place.shape)}")
        host = torch.empty(place.shape, dtype=place.dtype)
        self.ranks.send_tensor(host)
        if isinstance(before, Tensor) and (before.shape, before.dtype) == (host.shape, host.dtype):
            return before.copy_(host)
        return host.to(parameter.device) if place.beside and parameter is not None else host


def check_counts(optimizers: Optimizers, described: Described) -> None:
    """Raise LocalError unless the optimizers have as many groups and parameters as rank 0 describes."""
    counts = [(len(optimizer.param_groups), len(list(held(optimizer)))) for optimizer in optimizers.all]
    if counts != [(len(groups), len(kept)) for groups, kept in described]:
        raise unreadable("optimizers of other parameters")


def fill_optimizers(optimizers: Optimizers, described: Described, receive: Receive) -> None:
    """Replace the optimizers' options and state by those described, with a received tensor for each placeholder."""
    for optimizer, (groups, kept) in zip(optimizers.all, described, strict=True):
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            if "params" in options:
                raise unreadable("an optimizer's parameters")
            group.update(filled(options, None, receive, group))
        for parameter, state in zip(held(optimizer), kept, strict=True):
            before = optimizer.state.pop(parameter, {})
            if state:
                optimizer.state[parameter] = filled(state, parameter, receive, before)


def held(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def stripped(value: Any, parameter: Tensor | None, found: list[Tensor]) -> Any:
    """Return ``value`` with a placeholder for each tensor; append the tensors to ``found``."""
    if isinstance(value, Tensor):
        found.append(value)
        return Place(value.shape, value.dtype, parameter is not None and value.device == parameter.device)
    if isinstance(value, Mapping):
        return {key: stripped(one, parameter, found) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(stripped(one, parameter, found) for one in value)
    return value


def filled(value: Any, parameter: Tensor | None, receive: Receive, before: Any = None) -> Any:
    """Replace the placeholders by tensors, in the same order. ``before`` is the present value in its place."""
    if isinstance(value, Place):
        return receive(value, parameter, before)
    if isinstance(value, dict):
        held = before if isinstance(before, Mapping) else {}
        return {key: filled(one, parameter, receive, held.get(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        rows = before if isinstance(before, list | tuple) and len(before) == len(value) else [None] * len(value)
        return type(value)(filled(one, parameter, receive, was) for one, was in zip(value, rows, strict=True))
    return value
