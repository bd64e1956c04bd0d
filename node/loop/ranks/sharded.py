"""A sharded model and its optimizers on every rank of a node. Rank 0 collects the whole for checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from node.loop.live import Trained
from node.loop.ranks.mirror import (
    Described,
    Place,
    check_counts,
    fill_optimizers,
    host_copy,
    parameters_of,
    with_places,
)
from node.loop.ranks.plain import checked, register, unreadable_error
from node.loop.ranks.ranks import Command, Ranks
from node.model.optimizers import SEVERAL, Optimizers
from node.model.sharded.memory import MemoryName
from node.model.sharded.operation import Operation
from node.model.sharded.shards import ShardPlace, is_sharded, is_sharded_model
from node.model.sharded.state import ShardedState
from node.model.sharded.work import ShardWork
from node.model.state import State

__all__ = ["ShardedOptimizers", "perform_command", "with_shards"]

register(MemoryName, Operation, ShardPlace)


def with_shards(trained: Trained, ranks: Ranks) -> Trained:
    """Return ``trained``, with a state and optimizers for a sharded model if the model is one.

    Raises:
        LayoutError: A tensor cannot be exchanged.
    """
    if not is_sharded_model(trained.model):
        return trained
    assert not isinstance(trained.model, State), "a State is not sharded"
    state = ShardedState(ShardWork(trained.model, trained.optimizers, trained.choices, ranks))
    return dataclasses.replace(
        trained, optimizers=ShardedOptimizers(trained.optimizers, state, ranks), given_state=state
    )


class ShardedOptimizers(Optimizers):
    """The optimizers of a sharded model. A saved state is that of the whole model.

    Rank 0 calls :meth:`state_dict`, :meth:`load` and :meth:`on_replaced`, only while all ranks stand at one boundary.
    """

    def __init__(self, optimizers: Optimizers, state: ShardedState, ranks: Ranks) -> None:
        super().__init__(optimizers.all)
        self.state, self.ranks = state, ranks

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the optimizers, with the parts of all ranks in whole tensors."""
        saved = super().state_dict()
        if saved is None:
            return None
        start = 0  # The index of the next tensor's first element in the vector of all sharded optimizer tensors.
        for optimizer, own_state in zip(self.holders, saved.get(SEVERAL, [saved]), strict=True):
            # This and the next mapping are copies, since the optimizer still uses its own.
            states = own_state["state"] = dict(own_state["state"])
            for number, _ in enumerate(parameters_of(optimizer)):
                state = states[number] = dict(states.get(number, {}))
                for key in sorted(state, key=str):
                    tensor = state[key]
                    if is_sharded(tensor):
                        state[key] = self.state.fetch(start, tensor, in_optimizers=True)
                        start += tensor.numel()
                if not state:
                    del states[number]
        return saved

    def load(self, states: list[dict[str, Any]]) -> None:
        """Load saved states of the whole model, one for each optimizer, into the optimizers of all ranks."""
        if not states:
            return
        described: Described = []
        sent: list[Tensor] = []  # Tensors that all ranks get.
        sharded: list[Tensor] = []  # Whole tensors, of which each rank gets a part.
        for optimizer, saved in zip(self.holders, states, strict=True):
            groups = [
                {key: with_places(value, None, sent) for key, value in group.items() if key != "params"}
                for group in saved["param_groups"]
            ]
            # For each parameter: True if its step count is on the device, as in fused and capturable optimizers.
            has_steps_on_device = [bool(group.get("fused") or group.get("capturable"))
                                   for group in optimizer.param_groups for _ in group["params"]]  # fmt: skip
            parameter_states = [
                describe_state(saved["state"].get(number, {}), parameter, has_steps_on_device[number], sent, sharded)
                for number, parameter in enumerate(parameters_of(optimizer))
            ]
            described.append((groups, parameter_states))
        self.ranks.send_command("optimizers", described)
        self.fill(described, iter(sent))
        start = 0
        for tensor in sharded:
            self.state.put(start, tensor, in_optimizers=True)
            start += tensor.numel()

    @torch.no_grad()
    def fill(self, described: Described, sent: Iterator[Tensor] | None = None) -> None:
        """Make the optimizers' state as rank 0 describes it: allocate sharded tensors, and receive the others.

        Args:
            described: The options and the state of each optimizer.
            sent: The tensors to send, on rank 0.
        """

        def receive(place: Place, parameter: Tensor | None, before: Any) -> Tensor:
            """Return the tensor for a place: this rank's part if it is sharded, else the one that rank 0 sends."""
            if place.sharded:
                if parameter is None or tuple(parameter.shape) != place.shape:
                    raise unreadable_error("a part of an optimizer's state for no parameter")
                fits = is_sharded(before) and before.dtype == place.dtype
                part: Tensor = before if fits else torch.zeros_like(parameter, dtype=place.dtype)
                return part
            if not place.fits(self.state.layout.size):
                raise unreadable_error(f"a tensor of {place.shape}")
            host = torch.empty(place.shape, dtype=place.dtype, device="cpu") if sent is None else host_copy(next(sent))
            self.ranks.broadcast(host)
            return host.to(parameter.device, copy=True) if place.on_device and parameter is not None else host.clone()

        check_counts(self, described)
        fill_optimizers(self, described, receive)
        super().on_replaced(keep=True)

    def on_replaced(self, keep: bool = False) -> None:
        if self.quasi_global:
            self.ranks.send_command("joined", keep)
        super().on_replaced(keep)

    def reset_here(self, keep: bool) -> None:
        """Do the part of :meth:`on_replaced` that the other ranks do."""
        super().on_replaced(keep)


def describe_state(
    saved: Mapping[Any, Any], parameter: Tensor, has_step_on_device: bool, sent: list[Tensor], sharded: list[Tensor]
) -> dict[Any, Any]:
    """Return a parameter's saved state, in the order of its keys, with a :class:`Place` for each tensor.

    Args:
        saved: The state of the whole parameter.
        parameter: The parameter.
        has_step_on_device: True if its step count is on its device.
        sent: Receives the tensors that all ranks get.
        sharded: Receives the tensors of which each rank gets a part: those of a sharded parameter's shape.
    """
    described: dict[Any, Any] = {}
    for key, value in sorted(saved.items(), key=lambda item: str(item[0])):
        if key != "step" and is_sharded(parameter) and getattr(value, "shape", None) == parameter.shape:
            described[key] = Place(tuple(value.shape), value.dtype, on_device=True, sharded=True)
            sharded.append(value)
        elif isinstance(value, Tensor):
            described[key] = Place(tuple(value.shape), value.dtype, on_device=key != "step" or has_step_on_device)
            sent.append(value)
        else:
            described[key] = with_places(value, parameter, sent)
    return described


def perform_command(command: Command, work: ShardWork, optimizers: Optimizers) -> bool:
    """Carry out rank 0's command on a sharded model; return False if it is none of these."""
    assert isinstance(optimizers, ShardedOptimizers), "the optimizers of a sharded model"
    match command.kind:
        case "operation":
            operation = checked(command.payload, Operation)
            if not work.accepts(operation):
                raise unreadable_error(f"an operation {operation.kind[:20]!r} outside its memory")
            work.perform(operation)
        case "map":
            work.map(checked(command.payload, MemoryName))
        case "unmap":
            work.unmap(checked(command.payload, list[int]))
        case "optimizers":
            optimizers.fill(checked(command.payload, Described))
        case "joined":
            optimizers.reset_here(checked(command.payload, bool))
        case _:
            return False
    return True
