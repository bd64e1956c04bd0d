"""Ranks that cannot map rank 0's memory get the same elements as ranks that can, in bounded portions."""

import queue
import threading
from dataclasses import fields, replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossip.errors import LocalError
from node.ranks.plain import pack_value, unpack_value
from node.ranks.sharded import operation as operations
from node.ranks.sharded.memory import MappedVectors, SharedVectors
from node.ranks.sharded.operation import Operation, portions_of
from node.ranks.sharded.shards import LocalShard, ShardBox, ShardPlace
from tests.node.ranks.test_shards import divided

SMALL_BYTES = 240  # A portion of 60 elements.


class Wires:
    """Messages between the ranks of a group; ``most_bytes`` is the size of the largest one with elements."""

    def __init__(self, size):
        self.queues = {(one, other): queue.Queue() for one in range(size) for other in range(size)}
        self.most_bytes = 0


class Rank:
    """A rank's end of the wires."""

    def __init__(self, wires, rank):
        self.wires, self.rank, self.leads = wires, rank, rank == 0

    def send(self, tensor, rank):
        assert tensor.is_contiguous()
        self.wires.most_bytes = max(self.wires.most_bytes, tensor.nbytes)
        self.wires.queues[self.rank, rank].put(tensor.clone())

    def receive(self, tensor, rank):
        sent = self.wires.queues[rank, self.rank].get(timeout=20)
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
        tensor.copy_(sent)

    def send_value(self, value, rank):
        self.wires.queues[self.rank, rank].put(pack_value(value))

    def receive_value(self, hint, rank):
        return unpack_value(self.wires.queues[rank, self.rank].get(timeout=20), hint)


def performed(memory, rank, operation, shards):
    """Process the portions of an operation as ``ShardWork`` does."""
    for portion in portions_of(operation, shards, memory, rank):
        for shard, slices, values in portion.pieces():
            part = shard.tensor[slices]
            if not operation.reads:
                part.add_(values, alpha=0.3)
            elif shard.box.owns:
                values.copy_(part)


def apart(ranks, vector, operation, absent):
    """Process an operation on all ranks, some of which are ``absent`` from rank 0's host.

    Returns:
        The vector afterwards, each rank's tensors, and the wires.
    """
    wires, memory = Wires(len(ranks)), SharedVectors()
    held = memory.make(vector.size)
    held[:] = vector
    number, offset = memory.locate(held)
    name, copies = memory.made[number].name, [copied(shards) for shards in ranks]
    ends = []
    for rank in range(1, len(ranks)):
        mapped = MappedVectors()
        place = replace(name, path="/nowhere") if rank in absent else name
        assert mapped.map(place) == (rank not in absent)
        ends.append((mapped, Rank(wires, rank)))
    memory.on_offered(number, tuple(absent))
    operation = replace(operation, memory=number, offset=offset)
    ends.insert(0, (memory, Rank(wires, 0)))
    threads = [
        threading.Thread(target=performed, args=(*end, operation, shards), daemon=True)
        for end, shards in zip(ends[1:], copies[1:], strict=True)
    ]
    for thread in threads:
        thread.start()
    performed(*ends[0], operation, copies[0])
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert all(one.empty() for one in wires.queues.values())
    return held.copy(), [[shard.tensor for shard in shards] for shards in copies], wires


def copied(shards):
    return [replace(shard, tensor=shard.tensor.clone()) for shard in shards]


def same(one, other):
    assert np.array_equal(one[0], other[0])
    assert all(map(torch.equal, chain.from_iterable(one[1]), chain.from_iterable(other[1])))


@pytest.fixture(autouse=True, scope="module")
def _small_portions():
    before, operations.PORTION_BYTES = operations.PORTION_BYTES, SMALL_BYTES
    yield
    operations.PORTION_BYTES = before


@given(divided(), st.sampled_from(["read", "add"]), st.data())
def test_a_stretch_is_the_same_for_ranks_that_map_it_and_for_those_that_do_not(case, kind, data):
    whole, ranks, low, high = case
    absent = sorted(data.draw(st.sets(st.integers(1, max(1, len(ranks) - 1))))) if len(ranks) > 1 else []
    vector = np.random.default_rng(low).standard_normal(high - low).astype(np.float32)
    operation = Operation(kind, start=low, elements=high - low)
    *found, wires = apart(ranks, vector, operation, absent)
    same(found, apart(ranks, vector, operation, ())[:2])
    if kind == "read":
        assert found[0].tolist() == whole[low:high].tolist()
    assert wires.most_bytes <= SMALL_BYTES


def test_double_precision_travels_as_it_is():
    rows = torch.arange(200, dtype=torch.float64).view(20, 10) / 3
    ranks = [
        [LocalShard(0, ShardBox((20, 10), (part.start, 0), (part.stop - part.start, 10)), rows[part].clone())]
        for part in (slice(0, 13), slice(13, 20))
    ]
    vector = np.zeros(400, np.float32)
    held, _, wires = apart(ranks, vector, Operation("read", elements=200, wide=True), [1])
    assert torch.equal(torch.from_numpy(held.view(np.float64)), rows.view(-1))
    assert wires.most_bytes <= SMALL_BYTES


@pytest.mark.parametrize(
    ("start", "box"),
    [
        (-1, ((4,), (0,), (2,))), (0, ((4,), (3,), (2,))), (0, ((4,), (-1,), (2,))), (0, ((4,), (0,), (-1,))),
        (0, ((4, 4), (0,), (2,))), (0, ((1 << 40, 1 << 40), (0, 0), (1, 1))),
    ],
)  # fmt: skip
def test_a_part_that_no_rank_has_is_refused(start, box):
    with pytest.raises(ValueError, match=r"part outside|shorter|longer"):
        ShardPlace(start, ShardBox(*box))
    stated = [packed(ShardPlace, start, packed(ShardBox, *box, True))]
    with pytest.raises(LocalError, match="is no message of this version"):
        unpack_value(pack_value(stated), list[ShardPlace])


def packed(kind, *values):
    """Return an object of a class whose constructor would refuse these values."""
    made = object.__new__(kind)
    for field, value in zip(fields(kind), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made
