"""Every rank's part in operations on the flat vector of a sharded model.

Rank 0 announces an operation. All ranks do their part of it at the same boundary, and then all know that it is done.
Each rank copies its own part of the vector's memory in and out, portion by portion.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossip.errors import LayoutError
from node.model.device.uploads import Uploads
from node.model.flat import finite_flag
from node.model.inventory.items import Choices
from node.model.optimizer.moments import LiveMoments, mix_values
from node.model.optimizer.optimizer_state import OptimizerState
from node.model.optimizers import Optimizers
from node.model.tensors import LiveTensors, buffers_of, is_sharded, local_part, plain_name
from node.ranks.ranks import Ranks
from node.ranks.sharded.memory import NO_BYTES, MappedVectors, MemoryName, SharedVectors
from node.ranks.sharded.operation import Operation, Portion, portions_of
from node.ranks.sharded.shards import LocalShard, box_of, fsdp_modules, reshard

NOT_FLOATING = "is sharded and no floating-point tensor of the model's own: keep it whole in each process."


class ShardWork:
    """A rank's tensors of a sharded model and of its optimizers, and its part in operations on their flat vector.

    Several ranks may hold the same part of a tensor. One of them *owns* it: that rank copies the part out.

    Args:
        model: A module or a mapping, as for :class:`node.model.snapshot.ModelState`.
        optimizers: Its optimizers.
        choices: The treatments that the user chose.
        ranks: The processes.

    Raises:
        LayoutError: A tensor cannot be exchanged.
    """

    def __init__(
        self, model: nn.Module | Mapping[str, Any], optimizers: Optimizers, choices: Choices, ranks: Ranks
    ) -> None:  # fmt: skip
        self.model, self.optimizers, self.ranks = model, optimizers, ranks
        self._fsdp = fsdp_modules(model)
        reshard(self._fsdp)
        self.tensors = LiveTensors(model, choices, sharded=True)
        self.state = OptimizerState(self.tensors, optimizers)
        self.layout = self.tensors.layout
        live, is_first = self.tensors.current(), ranks.leads
        # The vector of floats, without the bits of other tensors, which are whole on each rank.
        self.segments = self.layout.segments[: len(live)]
        named = zip(self.segments, live, strict=True)
        self._boxes = [box_of(segment.name, tensor, is_first) for segment, tensor in named]
        known = set(map(id, live))
        for name, tensor in self.named():
            if is_sharded(tensor) and id(tensor) not in known:
                raise LayoutError(f"Tensor {name!r} {NOT_FLOATING}")
        self.memory: SharedVectors | MappedVectors = SharedVectors() if is_first else MappedVectors()

    def begin(self) -> None:
        """Choose the rank that owns each part, and check that the ranks hold the whole model. All of them call this.

        Raises:
            LayoutError: They do not hold the whole model.
        """
        # Each rank knows its own mesh alone, and a model may use several, as FSDP over tensor parallelism does. So the
        # ranks exchange a digest of each part. The first rank with a part owns it.
        count, rank = len(self._boxes), self.ranks.rank
        own_digests = [0] * (self.ranks.size * count)  # Zeros in the places of other ranks: the sum collects all.
        own_digests[rank * count : (rank + 1) * count] = [box.digest() for box in self._boxes]
        digests = self.ranks.sum_values(own_digests)
        owners = [digests[number::count].index(box.digest()) for number, box in enumerate(self._boxes)]
        self._boxes = [replace(box, owns=owner == rank) for box, owner in zip(self._boxes, owners, strict=True)]
        owned_counts = self.ranks.sum_values([box.elements if box.owns else 0 for box in self._boxes])
        for segment, owned in zip(self.segments, owned_counts, strict=True):
            if owned != segment.size:
                raise LayoutError(
                    f"The ranks of this node's group hold {owned} elements of tensor {segment.name!r}, which has "
                    f"{segment.size}: give as group= exactly the processes over which the model is sharded."
                )

    def perform(self, operation: Operation) -> int:
        """Do this rank's part; return the number of ranks that report success, once all have done theirs."""
        reshard(self._fsdp)
        if not (self.ranks.leads or operation.reads):
            self.state.told_keys = frozenset(operation.follows)
        with torch.no_grad():
            if operation.memory:
                portions = portions_of(operation, list(self._shards(operation)), self.memory, self.ranks)
            else:
                portions = iter([Portion(operation, NO_BYTES, [])])
            succeeds = [WORK[operation.kind](self, portion) is not False for portion in portions]
        return self.ranks.sum_values([int(all(succeeds))])[0]

    def accepts(self, operation: Operation) -> bool:
        """Return True if a correct rank 0 can have sent the operation."""
        return operation.kind in WORK and operation.fits(self.memory.size_of(operation.memory))

    def map(self, name: MemoryName) -> tuple[int, ...]:
        """Map rank 0's memory, where this rank can. All ranks call this.

        Returns:
            The ranks that cannot, being on another host, or in a container that does not see rank 0's processes.
        """
        own_result = [0] * self.ranks.size
        own_result[self.ranks.rank] = int(self.memory.map(name))
        return tuple(rank for rank, maps in enumerate(self.ranks.sum_values(own_result)) if not maps)

    def unmap(self, numbers: list[int]) -> None:
        if isinstance(self.memory, MappedVectors):
            self.memory.unmap(numbers)

    @property
    def device(self) -> torch.device | None:
        """Return the CUDA device of this rank's tensors; None if they are on the host."""
        return next((tensor.device for tensor in self.tensors.current() if tensor.is_cuda), None)

    def _shards(self, operation: Operation) -> Iterator[LocalShard]:
        """Yield this rank's parts of the tensors that an operation concerns."""
        live, start = self.tensors.current(), 0
        boxes = dict(zip(map(id, live), self._boxes, strict=True))
        # Parameters, each with a tensor of its optimizer's state.
        state = self.optimizer_tensors() if operation.in_optimizers else []
        if not operation.in_optimizers:
            followers: dict[int, tuple[Tensor, ...]] = {}
            for parameter, tensor in self.state.followers() if operation.follows else ():
                followers[id(parameter)] = (*followers.get(id(parameter), ()), local_part(tensor))
            for segment, tensor, box in zip(self.segments, live, self._boxes, strict=True):
                if operation.concerns(start, start + segment.size):
                    yield LocalShard.of(segment.name, tensor, start, box, followers.get(id(tensor), ()))
                start += segment.size
            start = self.layout.size
            trained = self.state.trained() * len(operation.keys)
            state = list(zip(trained, self.state.tensors(operation.keys), strict=True))
        for parameter, tensor in state:
            if operation.concerns(start, start + tensor.numel()):
                box = box_of("of an optimizer", tensor, self.ranks.leads)
                # The box of the parameter knows the owner, also if two meshes of ranks hold the same part.
                parameter_box = boxes.get(id(parameter))
                if parameter_box is not None and replace(parameter_box, owns=box.owns) == box:
                    box = parameter_box
                yield LocalShard.of("of an optimizer", tensor, start, box)
            start += tensor.numel()

    def optimizer_tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Return all sharded tensors in the optimizers' state with their parameters, by parameter and key."""
        return [
            (parameter, state[key])
            for holder in self.optimizers.holders for group in holder.param_groups for parameter in group["params"]
            for state in [holder.state.get(parameter, {})]
            for key in sorted(state, key=str) if is_sharded(state[key])
        ]  # fmt: skip

    def _read(self, portion: Portion) -> bool:
        """Read this rank's part. Return True if all of it is finite."""
        parts: list[Tensor] = []
        for shard, inside, values in portion.pieces():
            if shard.box.owns:
                part = shard.tensor[inside]
                values.copy_(part.cpu())  # Half precision is widened on the host, and takes no memory of the device.
                parts.append(part)
        return are_finite(parts)

    def _change(self, portion: Portion, change: Callable[[Tensor, Tensor], object]) -> None:
        for shard, inside, values in portion.pieces():
            followers = [follower[inside] for follower in shard.followers]
            change_tensor(shard.tensor[inside], values, change, followers)

    def _write(self, portion: Portion) -> None:
        self._change(portion, lambda live, written: live.copy_(written))

    def _add(self, portion: Portion) -> None:
        self._change(portion, lambda live, added: live.add_(added, alpha=portion.operation.weight))

    def _merge(self, portion: Portion) -> None:
        ratio = portion.operation.weight
        self._change(portion, lambda live, other: live.add_(other - live.to(other.dtype), alpha=ratio))

    def _mix(self, portion: Portion) -> None:
        for shard, inside, values in portion.pieces():
            part = shard.tensor[inside]
            if part.dim() == 0 or any(shard.tensor.stride()):  # Otherwise the optimizer has no such state yet.
                change_tensor(part, values, mix_values)

    def _create(self, portion: Portion) -> None:
        keys, scalars = portion.operation.keys, dict(portion.operation.scalars)
        examples = self.state.examples(keys, scalars)
        self.state.create(keys, examples)
        self.state.set_scalars(scalars, examples)

    @torch.no_grad()
    def sound(self) -> bool:
        """Return True if all weights that this rank holds are finite."""
        return are_finite([local_part(tensor) for tensor in self.tensors.current()])

    def _plain(self, portion: Portion) -> None:
        """Broadcast from rank 0 the tensors that no vector holds, integers for example."""
        known = set(map(id, self.tensors.current()))
        for _, tensor in self.named():
            if id(tensor) not in known:
                host = tensor.detach().to("cpu", copy=True).contiguous()
                self.ranks.broadcast(host)
                tensor.copy_(host)

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the tensors of a checkpoint by name: the live ones, since hooks of ``state_dict`` may make others."""
        model = self.model
        if not isinstance(model, nn.Module):
            return [(name, torch.as_tensor(value)) for name, value in {**model, **self.tensors.shared}.items()]
        reshard(self._fsdp)
        parameters = [(plain_name(name), tensor) for name, tensor in model.named_parameters(remove_duplicate=False)]
        return [*parameters, *((name, owner[key]) for name, owner, key, role in buffers_of(model) if role == "buffer")]

    def starts(self) -> dict[int, int]:
        """Return the index of each tensor's first element in the vector, by the tensor's id."""
        reshard(self._fsdp)
        sizes = [segment.size for segment in self.segments]
        return dict(zip(map(id, self.tensors.current()), np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return True if all values are finite. The host waits once for each device."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return all([bool(finite_flag(list(group))) for _, group in groupby(floats, key=attrgetter("device"))])


def change_tensor(
    tensor: Tensor, values: Tensor, change: Callable[[Tensor, Tensor], object], followers: Sequence[Tensor] = ()
) -> None:
    """Call ``change`` with the tensor and its values: on a device with some rows of both at a time.

    If the device has too little memory, call it with a host copy of them. The followers move by as much as the tensor.
    """
    if not tensor.is_cuda:
        move(tensor, values.to(tensor.device), change, followers)
        return
    rows = max(1, Uploads.PORTION_ELEMENTS * max(len(tensor), 1) // max(tensor.numel(), 1)) if tensor.dim() else 0
    split = (torch.split(whole, rows) if rows else [whole] for whole in (values, tensor, *followers))
    for host, live, *following in zip(*split, strict=True):
        try:
            # torch keeps page-locked memory, so that only the first portions lock it.
            staged = torch.empty(host.shape, dtype=host.dtype, pin_memory=True, device="cpu").copy_(host)
            move(live, staged.to(tensor.device, non_blocking=True), change, following)
        except torch.OutOfMemoryError:
            copies = [part.cpu() for part in (live, *following)]
            move(copies[0], host, change, copies[1:])
            for part, copy in zip((live, *following), copies, strict=True):
                part.copy_(copy)


def move(live: Tensor, values: Tensor, change: Callable[[Tensor, Tensor], object], followers: Sequence[Tensor]) -> None:
    """Change a tensor, and its followers by as much; nothing, if the device has no memory for that."""
    if not followers:
        change(live, values)
        return
    change(moved := live.clone(), values)
    types = [torch.promote_types(live.dtype, follower.dtype) for follower in followers]
    shifts = [moved.to(wide) - live.to(wide) for wide in types]
    live.copy_(moved)
    for follower, shift in zip(followers, shifts, strict=True):
        follower.add_(shift)


WORK: dict[str, Callable[[ShardWork, Portion], bool | None]] = {
    "read": ShardWork._read, "write": ShardWork._write, "add": ShardWork._add, "merge": ShardWork._merge,
    "mix": ShardWork._mix, "create": ShardWork._create, "bound": lambda work, _: LiveMoments(work.state).bound(),
    "clear": lambda work, _: work.state.clear_non_finite(), "sound": lambda work, _: work.sound(),
    "plain": ShardWork._plain,
}  # fmt: skip
