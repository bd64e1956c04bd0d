"""The optimizers of a sharded model. Rank 0 collects their state for checkpoints, and distributes it from there."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from node.model.optimizers import SEVERAL, Optimizers
from node.model.tensors import is_sharded
from node.ranks.optimizers import Described, Place, RankOptimizers, options_of, parameters_of, with_places
from node.ranks.ranks import Ranks
from node.ranks.sharded.state import ShardedState


class ShardedOptimizers(RankOptimizers):
    """The optimizers of a sharded model. A saved state is that of the whole model.

    Rank 0 calls :meth:`state_dict` and :meth:`load`, only while all ranks stand at one boundary.
    """

    def __init__(self, optimizers: Optimizers, ranks: Ranks, state: ShardedState) -> None:
        super().__init__(optimizers, ranks, state.layout.size)
        self.state = state

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
            groups = [options_of(group, sent) for group in saved["param_groups"]]
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
