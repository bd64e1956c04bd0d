"""One pass over memory that adds, copies the result and checks that it is finite."""

import numpy as np
import pytest
import torch
from torch import nn

from gossip import kernel
from gossip.arithmetic import live
from gossip.averaging.jobs import MixJob
from gossip.config import Config
from gossip.effects import Mix
from node.model import flat
from node.model.snapshot import ModelState
from tests.gossip.kernel.building import passes
from tests.node.offline import in_trio, runtime
from tests.node.vectors import vector_of


def uneven():
    """Return two models of large and small tensors, with an empty one and some that are not contiguous."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Linear(300, 700), nn.Linear(1, 1))
    model[0].to(memory_format=torch.channels_last)
    wide = nn.Parameter(torch.randn(400, 500).t())
    return ModelState({"wide": wide, "empty": torch.zeros(0), "flat": torch.randn(70_000)}), ModelState(model)


@pytest.fixture(params=["torch", "compiled", "threads"])
def way(request, monkeypatch):
    """Run a test with torch, or with the compiled kernel in one thread or several, as for large vectors."""
    monkeypatch.setattr(kernel, "passes", None if request.param == "torch" else passes())
    monkeypatch.setattr(flat, "MIN_KERNEL_ELEMENTS", 1)
    if request.param == "threads":
        monkeypatch.setattr(live, "THREAD_ELEMENTS", 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    return request.param


@pytest.mark.parametrize("weight", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("which", [0, 1])
def test_the_sum_and_its_copy_are_what_an_addition_and_a_read_give(which, weight, way):
    one, other = uneven()[which], uneven()[which]
    shift = np.random.default_rng(1).normal(size=one.layout.exchanged).astype(np.float32)
    both = shift.copy()
    assert one.add_read(both, weight)
    other.add(shift * np.float32(weight)).wait()
    np.testing.assert_array_equal(both, vector_of(other))
    np.testing.assert_array_equal(vector_of(one), vector_of(other))
    one.add_weighted(shift.copy(), weight).wait()
    other.add(shift * np.float32(weight)).wait()
    np.testing.assert_array_equal(vector_of(one), vector_of(other))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_not_finite_is_seen_on_the_way_wherever_it_lies(which, value, way):
    state = uneven()[which]
    for place in range(0, state.layout.exchanged, state.layout.exchanged // 7):
        seen = []
        for spoil in (0.0, value):
            shift = np.zeros(state.layout.exchanged, np.float32)
            shift[place] = spoil
            assert state.add_read(shift, 1.0)
            seen.append(state.finite)
            state.begin_read(shift).wait()
            seen.append(state.finite)
        assert seen == ([None] * 4 if way == "torch" else [True, True, False, False])
        state = uneven()[which]


def test_the_largest_numbers_are_finite(way):
    """The sum of their squares is not finite."""
    state = ModelState({"x": torch.full((70_000,), 3.4e38), "few": torch.full((3,), -3.4e38)})
    state.begin_read(np.zeros(70_003, np.float32)).wait()
    assert state.finite is (None if way == "torch" else True)


@pytest.mark.parametrize("offset", range(5))
def test_a_vector_may_begin_anywhere_in_memory(offset, way):
    room = np.zeros(70_010, np.float32)[offset : offset + 70_000]
    state = ModelState({"x": torch.randn(70_000)})
    state.begin_read(room).wait()
    np.testing.assert_array_equal(room, vector_of(state))


@pytest.mark.parametrize("sizes", [[10], [1, 2, 3, 4], [7, 0, 5], [100, 1]])
@pytest.mark.parametrize("share", [1, 3, 4, 200])
def test_threads_have_equal_shares_and_together_all(sizes, share):
    rows = [(np.arange(size, dtype=np.float32), np.full(size, number, np.float32)) for number, size in enumerate(sizes)]
    found = list(live.split_rows(rows, share))
    for which in (0, 1):
        both = [np.concatenate([row[which] for row in of]) for of in (rows, [row for one in found for row in one])]
        np.testing.assert_array_equal(*both)
    lengths = [sum(mine.size for mine, _ in one) for one in found]
    assert lengths[:-1] == [share] * (len(lengths) - 1)
    assert 0 < lengths[-1] <= share


@pytest.mark.parametrize("spare", [False, True])
@in_trio
def test_a_plain_mean_is_weighed_where_it_is_added(spare, way):
    """The additions of other nodes are not the node's own movement, whether they have a weight or not."""
    node = runtime(Config(outer_momentum=0.0))
    averager, pool, boundary = node.averager, node.streams.pool, node.averager.boundary
    vectors = [pool.take() for _ in range(2)]
    for vector in vectors:
        vector.array[:] = 0.0
    averager.movement.measure(vectors[0].array)
    brought = vectors[1].array
    brought[:] = np.arange(brought.size)
    expected = np.float32(1 / 3) * brought
    averager.start_mixing(MixJob(averager, *vectors, None, Mix(1, 1 / 3)))
    assert [update.weight for update in boundary.arrived_updates] == [1.0 if way == "torch" else 1 / 3]
    visit = boundary.visit(lambda vector: None, spare=spare)
    here = pool.take().array
    boundary.model.read(here)
    np.testing.assert_array_equal(here, expected)
    assert averager.movement.measure(here) == 0.0
    if spare:
        np.testing.assert_array_equal(visit.spare_copy.array, expected)
        assert visit.spare_copy.is_finite is (None if way == "torch" else True)


def test_half_precision_is_added_and_read_one_after_the_other():
    state = ModelState({"x": torch.zeros(100_000), "half": torch.zeros(8, dtype=torch.bfloat16)})
    shift = np.ones(state.layout.exchanged, np.float32)
    assert not state.add_read(shift, 1.0)
    assert (shift == 1.0).all()
    assert not vector_of(state).any()
