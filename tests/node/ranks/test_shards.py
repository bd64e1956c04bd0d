"""The parts of a sharded tensor are where torch says, for any stretch of the vector."""

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.ranks.sharded.memory import MappedVectors, SharedVectors
from node.ranks.sharded.shards import LocalShard, ShardBox, blocks, matching_slices

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def divided(draw):
    """A few logical tensors, each cut along up to two dimensions; for each rank its shards, and the whole vector."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=3))
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = [[] for _ in range(rows * columns)]
    whole = torch.arange(sum(map(math.prod, shapes)), dtype=torch.float32)
    start = 0
    for shape in shapes:
        logical = whole[start : start + math.prod(shape)].view(shape)
        dims = [draw(st.integers(0, len(shape) - 1)) for _ in range(2)] if shape else []
        for rank, shards in enumerate(ranks):
            box = [slice(0, size) for size in shape]
            owns = True
            for dim, size, at in zip(dims, (rows, columns), divmod(rank, columns), strict=False):
                begin, end = box[dim].start, box[dim].stop
                each = -(-(end - begin) // size)  # As torch.chunk does.
                box[dim] = slice(min(begin + at * each, end), min(begin + (at + 1) * each, end))
            if not shape:
                owns = rank == 0
            part = logical[tuple(box)].clone()
            offsets, sizes = tuple(piece.start for piece in box), tuple(piece.stop - piece.start for piece in box)
            shards.append(LocalShard(start, ShardBox(shape, offsets, sizes, owns), part))
        start += math.prod(shape)
    low = draw(st.integers(0, whole.numel()))
    high = draw(st.integers(low, whole.numel()))
    return whole, ranks, low, high


@given(divided())
def test_ranks_together_read_any_stretch_of_the_vector(case):
    whole, ranks, low, high = case
    host = torch.full((high - low,), -1.0)
    for shards in ranks:
        for shard, inside, there in matching_slices(shards, host, low):
            if shard.box.owns:
                assert (there == -1.0).all(), "each element has one owner"
                there.copy_(shard.tensor[inside])
    assert torch.equal(host, whole[low:high])


@given(divided())
def test_what_is_written_to_a_stretch_changes_nothing_else(case):
    whole, ranks, low, high = case
    for shards in ranks:
        for shard, inside, there in matching_slices(shards, -whole[low:high], low):
            shard.tensor[inside].copy_(there)
        for shard in shards:
            expected = whole.clone()
            expected[low:high] *= -1
            logical = expected[shard.start : shard.stop].view(shard.box.shape)
            assert torch.equal(shard.tensor, logical[shard.box.slices])


@given(SHAPES, st.data())
def test_a_stretch_of_a_tensor_is_a_few_boxes(shape, data):
    size = math.prod(shape)
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    numbers = np.arange(size).reshape(shape)
    found = [(at, numbers[box].reshape(-1).tolist()) for at, box in blocks(shape, low, high)]
    assert all(row == list(range(at, at + len(row))) for at, row in found)
    assert sorted(number for _, row in found for number in row) == list(range(low, high))
    assert len(found) <= max(1, 2 * len(shape))


def test_another_process_maps_the_memory_and_it_ends_with_its_vectors():
    made, mapped = SharedVectors(), MappedVectors()
    vector = made.make(1000)
    number, offset = made.locate(vector[10:20])
    assert (offset, made.locate(np.zeros(10, np.float32))) == (40, None)
    name = made.made[number].name
    assert mapped.map(name)
    made.on_offered(number, ())
    vector[10:20] = 7.0
    assert mapped.bytes_of(number)[40:80].view(np.float32).tolist() == [7.0] * 10
    assert not os.path.exists(name.path), "the file is closed once it is mapped"
    assert made.drop_unused() == []
    del vector
    assert made.drop_unused() == [number]
    assert made.bytes_of(number).size == 0
    mapped.unmap([number])
    assert mapped.bytes_of(number).size == 0


@pytest.mark.parametrize("path", ["/proc/self/fd/0", "/proc/1/fd/99999", "/nowhere"])
def test_what_is_not_rank_0s_memory_is_not_mapped(path):
    made = SharedVectors()
    vector = made.make(4)
    number, _ = made.locate(vector)
    name = made.made[number].name
    assert not MappedVectors().map(type(name)(number, path, name.size, name.token))
    made.on_offered(number, ())


def test_memory_that_was_never_mapped_leaves_no_open_file():
    made = SharedVectors()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        made.make(8)
    assert made.drop_unused() == []
    assert len(os.listdir("/proc/self/fd")) == before
