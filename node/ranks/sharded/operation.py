"""Operations on the flat vector of a sharded model, as rank 0 announces them, and their portions.

A *stretch* is a range of consecutive elements of a vector. A *part* is the box of one tensor that a rank holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from node.ranks.ranks import Ranks
from node.ranks.sharded.memory import Bytes, MappedVectors, SharedVectors
from node.ranks.sharded.shards import LocalShard, ShardPlace, Slices, matching_slices

# The largest part of an operation that is done at once. Over a network 64 MB take a hundred times as long as a message
# without contents.
PORTION_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Operation:
    """The part of every rank in one operation, as rank 0 announces it.

    Attributes:
        kind: A key of :data:`node.ranks.sharded.work.WORK`, which has the function of each.
        start: The index of the first element in the vector that newcomers take.
        elements: The number of elements in memory.
        memory: The number of the memory, 0 for none.
        offset: The first element's place there, in bytes.
        wide: True for float64 in place of float32.
        in_optimizers: True if ``start`` counts the elements of the sharded tensors in the optimizers' state instead.
        weight: The factor of an addition or a merge.
        keys: The keys of the optimizers' state in the vector.
        scalars: Scalars for the optimizers' state.
        follows: The keys of state that moves along with the weights, as rank 0 decides for all ranks.
    """

    kind: str
    start: int = 0
    elements: int = 0
    memory: int = 0
    offset: int = 0
    wide: bool = False
    in_optimizers: bool = False
    weight: float = 1.0
    keys: tuple[str, ...] = ()
    scalars: tuple[tuple[str, float], ...] = ()
    follows: tuple[tuple[str, str], ...] = ()

    @property
    def reads(self) -> bool:
        """Return True if the ranks fill memory with values, and False if they change the model by its values."""
        return self.kind == "read"

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an element in memory."""
        return 8 if self.wide else 4

    @property
    def size(self) -> int:
        """Return the bytes that it uses in memory."""
        return self.element_bytes * self.elements

    def concerns(self, start: int, stop: int) -> bool:
        """Return True if the operation may concern a tensor with these elements of the vector."""
        return self.start < stop and start < self.start + self.elements

    def fits(self, memory: int) -> bool:
        """Return True if a correct rank 0 can have sent the operation, for a memory of this many bytes."""
        return min(self.start, self.elements, self.offset) >= 0 == self.offset % 4 and self.offset + self.size <= memory


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of an operation.

    Attributes:
        operation: The operation with these elements alone.
        memory: Their place on the host.
        shards: This rank's parts of the tensors that the whole operation concerns.
    """

    operation: Operation
    memory: Bytes
    shards: Sequence[LocalShard]

    @property
    def host(self) -> Tensor:
        """Return the elements of a stretch of the vector."""
        return torch.from_numpy(self.memory.view(np.float64 if self.operation.wide else np.float32))

    def pieces(self) -> Iterator[tuple[LocalShard, Slices, Tensor]]:
        """Yield this rank's part of the stretch: the shard, the place in its tensor, and a view of :attr:`host`."""
        return matching_slices(self.shards, self.host, self.operation.start)


def portions_of(
    operation: Operation, shards: Sequence[LocalShard], memory: SharedVectors | MappedVectors, ranks: Ranks
) -> Iterator[Portion]:
    """Yield the portions of an operation. All ranks yield the same elements with the same values.

    The values of a change are there when a portion is yielded. Those of a read are taken when the next one is asked
    for.

    A rank on rank 0's host maps the memory. Another rank has none of it. At the start it tells rank 0 where its parts
    lie in the vector. Then rank 0 sends it the elements in its parts of each portion, or receives them.

    Args:
        operation: The operation.
        shards: This rank's parts of the tensors that it concerns.
        memory: The memory of vectors, as this rank has it.
        ranks: The ranks.
    """
    others: dict[int, list[ShardPlace]] = {}  # By rank, the parts whose elements it and this rank send each other.
    scratch: Bytes | None = None  # The place of a portion's elements if this rank does not map the memory.
    if isinstance(memory, SharedVectors):
        others = {rank: ranks.receive_value(list[ShardPlace], rank) for rank in memory.absent_ranks(operation.memory)}
    elif not memory.maps(operation.memory):
        # In a read each part comes from its owner alone.
        own = [shard for shard in shards if shard.box.elements and (shard.box.owns or not operation.reads)]
        others = {0: [ShardPlace(shard.start, shard.box) for shard in own]}
        ranks.send_value(others[0], 0)
        scratch = np.empty(min(operation.size, PORTION_BYTES), np.uint8)
    brings, takes = (send_slices, receive_slices) if ranks.leads else (receive_slices, send_slices)
    for step in portions(operation):
        # In scratch memory too each element has its place in the vector, so that additions give the same bits.
        offset, held = (step.offset, memory.bytes_of(step.memory)) if scratch is None else (0, scratch)
        portion = Portion(step, held[offset : offset + step.size], shards)
        for rank, parts in others.items() if not operation.reads else ():
            brings(ranks, rank, portion, parts)
        yield portion
        for rank, parts in others.items() if operation.reads else ():
            takes(ranks, rank, portion, parts)


def portions(operation: Operation) -> Iterator[Operation]:
    """Yield the operation as consecutive ones of at most ``PORTION_BYTES``, the same on all ranks.

    Where a tensor is cut decides which of its elements are added in vector registers, whose last bit may differ. So
    ranks that map the memory keep to these portions too.
    """
    max_elements = PORTION_BYTES // operation.element_bytes
    for first in range(0, operation.elements, max_elements):
        yield replace(
            operation, start=operation.start + first, elements=min(max_elements, operation.elements - first),
            offset=operation.offset + operation.element_bytes * first,
        )  # fmt: skip


def slices_of(portion: Portion, parts: Sequence[ShardPlace]) -> list[Tensor]:
    """Return views of a portion's host elements that lie in these parts, in the order of the vector."""
    return [values for _, _, values in matching_slices(parts, portion.host, portion.operation.start)]


def send_slices(ranks: Ranks, rank: int, portion: Portion, parts: Sequence[ShardPlace]) -> None:
    """Send the elements of a portion that lie in these parts, as one message."""
    views = slices_of(portion, parts)
    if len(views) == 1 and views[0].is_contiguous():
        ranks.send(views[0], rank)
    elif views:
        ranks.send(torch.cat([view.reshape(-1) for view in views]), rank)


def receive_slices(ranks: Ranks, rank: int, portion: Portion, parts: Sequence[ShardPlace]) -> None:
    """Receive what :func:`send_slices` sends for the same portion and parts."""
    views = slices_of(portion, parts)
    if len(views) == 1 and views[0].is_contiguous():
        ranks.receive(views[0], rank)
    elif views:
        sizes = [view.numel() for view in views]
        flat = torch.empty(sum(sizes), dtype=portion.host.dtype, device="cpu")
        ranks.receive(flat, rank)
        for view, values in zip(views, torch.split(flat, sizes), strict=True):
            view.copy_(values.view(view.shape))
