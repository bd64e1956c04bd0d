"""Operations on the flat vector of a sharded model, as rank 0 announces them, and their portions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from node.model.state import Floats, Positions
from node.ranks.sharded.memory import Bytes
from node.ranks.sharded.shards import LocalShard, matching_slices

__all__ = ["PORTION_BYTES", "Operation", "Portion", "portions"]

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

    @property
    def is_at_positions(self) -> bool:
        """Return True if memory holds positions, 8 bytes each, and then a value for each of them."""
        return self.kind.endswith("_at")

    @property
    def reads(self) -> bool:
        """Return True if the ranks fill memory with values, and False if they change the model by its values."""
        return self.kind in ("read", "read_at")

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an element in memory."""
        if self.is_at_positions:
            return 12  # A position of 8 bytes, and a value of 4.
        return 8 if self.wide else 4

    @property
    def size(self) -> int:
        """Return the bytes that it uses in memory."""
        return self.element_bytes * self.elements

    def concerns(self, start: int, stop: int) -> bool:
        """Return True if the operation may concern a tensor with these elements of the vector."""
        return self.is_at_positions or (self.start < stop and start < self.start + self.elements)

    def fits(self, memory: int) -> bool:
        """Return True if a correct rank 0 can have sent the operation, for a memory of this many bytes."""
        if min(self.start, self.elements, self.offset) < 0 or self.offset % 4 or self.offset + self.size > memory:
            return False
        return not self.is_at_positions or self.size <= PORTION_BYTES


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

    @property
    def positions(self) -> Positions:
        return self.memory[: 8 * self.operation.elements].view(np.int64)

    @property
    def values(self) -> Floats:
        """Return the values at the positions."""
        return self.memory[8 * self.operation.elements :].view(np.float32)

    def views(self) -> Iterator[tuple[LocalShard, Tensor, Tensor]]:
        """Yield this rank's part of the stretch: the shard, a view of its tensor, and the same of :attr:`host`."""
        for shard, inside, values in matching_slices(self.shards, self.host, self.operation.start):
            yield shard, shard.tensor[inside], values


def portions(operation: Operation) -> Iterator[Operation]:
    """Yield the operation as consecutive ones of at most ``PORTION_BYTES``, the same on all ranks.

    Where a tensor is cut decides which of its elements are added in vector registers, whose last bit may differ. So
    ranks that map the memory keep to these portions too.
    """
    if operation.is_at_positions:
        yield operation
        return
    max_elements = PORTION_BYTES // operation.element_bytes
    for first in range(0, operation.elements, max_elements):
        yield replace(
            operation, start=operation.start + first, elements=min(max_elements, operation.elements - first),
            offset=operation.offset + operation.element_bytes * first,
        )  # fmt: skip
