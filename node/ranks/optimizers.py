"""The optimizers of a node's ranks, whose state rank 0 sends to the others: at the start, and after a replacement.

An optimizer's state is sent as its structure, in which a :class:`Place` stands for each tensor, and then the tensors.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossip.errors import ConfigError
from node.model.optimizers import Optimizers
from node.model.tensors import is_sharded
from node.ranks.plain import register, unreadable_error
from node.ranks.ranks import Ranks

Described = list[tuple[list[dict[str, Any]], list[dict[Any, Any]]]]
"""For each optimizer: its groups' options and its state by parameter, with a :class:`Place` for each tensor."""

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


class RankOptimizers(Optimizers):
    """The optimizers of one rank. Tensors are sent in their own types, so that all ranks hold the same bits.

    Args:
        optimizers: The optimizers, the same on all ranks.
        ranks: The ranks.
        elements: The number of elements of the model, which limits the tensors that rank 0 may send.

    Raises:
        ConfigError: An optimizer keeps another part of its state on each rank.
    """

    def __init__(self, optimizers: Optimizers, ranks: Ranks, elements: int) -> None:
        super().__init__(optimizers.all)
        for optimizer in self.holders:
            # It is a ZeroRedundancyOptimizer, whose module is rarely imported.
            if hasattr(optimizer, "consolidate_state_dict"):
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps another part of its state on each rank, and the ranks of a node "
                    "hold the same: give Node a plain optimizer."
                )
        self.ranks, self.elements = ranks, elements

    def send(self) -> None:
        """Send the state from rank 0, which the other ranks :meth:`fill` in."""
        sent: list[Tensor] = []
        described: Described = [
            (
                [options_of(group, sent) for group in optimizer.param_groups],
                [with_places(optimizer.state.get(parameter, {}), parameter, sent)
                 for parameter in parameters_of(optimizer)],
            )
            for optimizer in self.holders
        ]  # fmt: skip
        self.ranks.send_command("optimizers", described)
        for tensor in sent:
            self.ranks.broadcast(host_copy(tensor))

    @torch.no_grad()
    def fill(self, described: Described, sent: Iterator[Tensor] | None = None) -> None:
        """Make the state as rank 0 describes it: receive whole tensors, and allocate those that are sharded.

        Args:
            described: The options and the state of each optimizer.
            sent: The tensors to send, if this is rank 0.

        Raises:
            LocalError: No rank 0 with these optimizers describes this.
        """
        counts = [(len(holder.param_groups), len(list(parameters_of(holder)))) for holder in self.holders]
        if counts != [(len(groups), len(states)) for groups, states in described]:
            raise unreadable_error("optimizers of other parameters")
        for optimizer, (groups, states) in zip(self.holders, described, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                if "params" in options:
                    raise unreadable_error("an optimizer's parameters")
                group.update(self._with_tensors(options, None, sent, group))
            for parameter, state in zip(parameters_of(optimizer), states, strict=True):
                before = optimizer.state.pop(parameter, {})
                if state:
                    optimizer.state[parameter] = self._with_tensors(state, parameter, sent, before)

    def _with_tensors(self, value: Any, parameter: Tensor | None, sent: Iterator[Tensor] | None, before: Any) -> Any:
        """Return ``value`` with a tensor for each place, in the order of :func:`with_places`.

        ``before`` is the value that is replaced.
        """
        if isinstance(value, Place):
            return self._tensor_for(value, parameter, sent, before)
        if isinstance(value, dict):
            present = before if isinstance(before, Mapping) else {}
            return {key: self._with_tensors(item, parameter, sent, present.get(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            has_same_length = isinstance(before, list | tuple) and len(before) == len(value)
            pairs = zip(value, before if has_same_length else [None] * len(value), strict=True)
            return type(value)(self._with_tensors(item, parameter, sent, old) for item, old in pairs)
        return value

    def _tensor_for(
        self, place: Place, parameter: Tensor | None, sent: Iterator[Tensor] | None, before: Any
    ) -> Tensor:  # fmt: skip
        """Return the tensor for a place: this rank's part if it is sharded, else the one that rank 0 sends.

        That is the present one if it is alike, because a step in a CUDA graph has its address.
        """
        if place.sharded:
            if parameter is None or tuple(parameter.shape) != place.shape:
                raise unreadable_error("a part of an optimizer's state for no parameter")
            fits = is_sharded(before) and before.dtype == place.dtype
            part: Tensor = before if fits else torch.zeros_like(parameter, dtype=place.dtype)
            return part
        if not place.fits(self.elements):
            raise unreadable_error(f"a tensor of {tuple(place.shape)}")
        host = torch.empty(place.shape, dtype=place.dtype, device="cpu") if sent is None else host_copy(next(sent))
        self.ranks.broadcast(host)
        device = parameter.device if place.on_device and parameter is not None else host.device
        if isinstance(before, Tensor) and like(before, host) and before.device == device:
            return before.copy_(host)
        return host.to(device, copy=True)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def like(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def options_of(group: Mapping[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """Return a parameter group's options as :func:`with_places` does, without its parameters."""
    return {key: with_places(value, None, tensors) for key, value in group.items() if key != "params"}


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
