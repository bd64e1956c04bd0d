"""A rank's way to the elements of host vectors: memory that it maps, or messages between it and rank 0.

A *stretch* is a range of consecutive elements of a vector. A *part* is the box of one tensor that a rank holds.

A rank on rank 0's host maps the memory of the vectors. Another rank has none of it. At the start of each operation it
tells rank 0 where its parts lie in the vector. Then the two go through the operation in portions: of each one, rank 0
sends the rank's elements, or receives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gossip.errors import LocalError
from node.ranks.ranks import Ranks
from node.ranks.sharded.memory import Bytes, MappedVectors, SharedVectors
from node.ranks.sharded.operation import Operation, Portion, portions
from node.ranks.sharded.shards import LocalShard, ShardPlace, matching_positions, matching_slices

__all__ = ["LeaderPortions", "OtherPortions"]


class LeaderPortions:
    """Rank 0's portions. It holds the vectors, and serves the ranks that do not map them.

    The values of a change are there when a portion is yielded. Those of a read are taken when the next one is asked
    for. All ranks yield the same elements with the same values.
    """

    def __init__(self, memory: SharedVectors, ranks: Ranks) -> None:
        self.memory, self.ranks = memory, ranks

    def of(self, operation: Operation, shards: Sequence[LocalShard]) -> Iterator[Portion]:
        """Yield the portions of an operation. ``shards`` are this rank's parts of the tensors that it concerns."""
        absent = self.memory.absent_ranks(operation.memory)
        places = {rank: self.ranks.receive_value(list[ShardPlace], rank) for rank in absent}
        for portion in mapped_portions(operation, self.memory.bytes_of(operation.memory), shards):
            if operation.is_at_positions:
                yield from self.serve_positions(portion, places)
            else:
                yield from self.serve_stretch(portion, places)

    def serve_stretch(self, portion: Portion, places: dict[int, list[ShardPlace]]) -> Iterator[Portion]:
        """Send each rank the elements in its parts; for a read receive them, after this rank has done its own."""
        reads = portion.operation.reads
        for rank, parts in places.items() if not reads else ():
            send_slices(self.ranks, rank, portion, parts)
        yield portion
        for rank, parts in places.items() if reads else ():
            receive_slices(self.ranks, rank, portion, parts)

    def serve_positions(self, portion: Portion, places: dict[int, list[ShardPlace]]) -> Iterator[Portion]:
        """Send each rank the positions in its parts, with the values there. For a read, receive the values."""
        reads, values, indices_by_rank = portion.operation.reads, torch.from_numpy(portion.values), {}
        for rank, parts in places.items():
            by_part = [indices for _, indices, _ in matching_positions(parts, portion.positions)]
            indices_by_rank[rank] = indices = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *by_part]))
            self.ranks.send_value(len(indices), rank)
            self.ranks.send(torch.from_numpy(portion.positions)[indices], rank)
            if not reads:
                self.ranks.send(values[indices], rank)
        yield portion
        for rank, indices in indices_by_rank.items():
            if reads:
                received = torch.empty(len(indices), device="cpu")
                self.ranks.receive(received, rank)
                values[indices] = received


class OtherPortions:
    """The portions of any other rank."""

    def __init__(self, memory: MappedVectors, ranks: Ranks) -> None:
        self.memory, self.ranks = memory, ranks

    def of(self, operation: Operation, shards: Sequence[LocalShard]) -> Iterator[Portion]:
        if self.memory.maps(operation.memory):
            yield from mapped_portions(operation, self.memory.bytes_of(operation.memory), shards)
            return
        # In a read each part comes from its owner alone.
        parts = [shard for shard in shards if shard.box.elements and (shard.box.owns or not operation.reads)]
        self.ranks.send_value([ShardPlace(part.start, part.box) for part in parts], 0)
        memory = np.empty(0, np.uint8)  # It grows to the size of the largest portion, and is used again.
        for step in portions(operation):
            if operation.is_at_positions:
                yield from self.own_positions(step, shards)
                continue
            # Each element has the same place as in mapped memory, so that additions give the same bits.
            memory = memory if memory.size >= step.size else np.empty(step.size, np.uint8)
            portion = Portion(step, memory[: step.size], shards)
            if not operation.reads:
                receive_slices(self.ranks, 0, portion, parts)
            yield portion
            if operation.reads:
                send_slices(self.ranks, 0, portion, parts)

    def own_positions(self, operation: Operation, shards: Sequence[LocalShard]) -> Iterator[Portion]:
        """Yield a portion of the positions that lie in this rank's parts."""
        count = self.ranks.receive_value(int, 0)
        if not 0 <= count <= operation.elements:
            raise LocalError(
                f"Rank 0 of this node's group sends {count} of {operation.elements} positions: install the same "
                "version of this package on all ranks."
            )
        operation = replace(operation, elements=count)
        portion = Portion(operation, np.empty(operation.size, np.uint8), shards)
        self.ranks.receive(torch.from_numpy(portion.positions), 0)
        values = torch.from_numpy(portion.values)
        if not operation.reads:
            self.ranks.receive(values, 0)
        yield portion
        if operation.reads:
            self.ranks.send(values, 0)


def mapped_portions(operation: Operation, memory: Bytes, shards: Sequence[LocalShard]) -> Iterator[Portion]:
    """Yield the portions of an operation on memory that this rank maps."""
    for step in portions(operation):
        yield Portion(step, memory[step.offset : step.offset + step.size], shards)


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
