"""Newcomers' pieces of a large model are copied one at a time, alongside exchanges and in their own memory."""

import resource
import sys

import numpy as np
import pytest

from gossip.arithmetic.subsets import Subset
from gossip.averaging.boundary import Boundary
from gossip.averaging.vectors import Cut, Vector
from gossip.averaging.visit import Adoption, Update
from node.model.backup import KeptWeights
from node.model.pool import VectorPool
from node.model.snapshot import ModelState

WEIGHTS = 1_000
PART = Subset.parse("mask 0.5")


class Model(ModelState):
    """A model whose optimizer keeps two numbers for each weight; each number is its own position."""

    state = range(WEIGHTS, 3 * WEIGHTS)

    def __init__(self):
        super().__init__({"x": np.arange(WEIGHTS, dtype=np.float32)})

    def optimizer_range(self):
        return self.state

    def begin_read_optimizer(self, out, start):
        out[:] = np.arange(start, start + out.size)


class Pool(VectorPool):
    """A pool that records the vectors it gets back."""

    def __init__(self, state):
        super().__init__(state)
        self.back = []

    def give(self, vector):
        self.back.append(vector)
        super().give(vector)


@pytest.fixture
def meeting():
    """Return the boundary of a model; its ``vectors`` are a Pool."""
    model = Model()
    return Boundary(model, Pool(model), KeptWeights(model))


def room(meeting, start, stop):
    vector = meeting.vectors.take_transient(stop - start)
    vector.start = start
    return vector


def ignore(weights):
    """Adopt nothing."""


@pytest.mark.parametrize("start", [0, 1, 600, 999, WEIGHTS, 2 * WEIGHTS - 1, 3 * WEIGHTS - 10])
def test_pieces_of_weights_and_of_the_state_are_what_lies_there(start, meeting):
    stop = min(start + 250, WEIGHTS if start < WEIGHTS else 3 * WEIGHTS)
    meeting.request_snapshot(1, room(meeting, start, stop))
    [(session, vector, mass)] = meeting.visit(ignore).snapshots
    assert (session, mass, vector.start) == (1, 0.0, start)
    assert vector.array.tolist() == list(range(start, stop))
    assert vector.has_piece(start, stop)
    assert not vector.has_piece(start, stop + 1)
    assert not meeting.has_requests


def test_two_newcomers_and_an_exchange_are_served_at_one_boundary_and_newcomers_where_exchanges_wait(meeting):
    meeting.begin_update()
    for session, start in ((1, 0), (2, WEIGHTS)):
        meeting.request_snapshot(session, room(meeting, start, start + 100))
    meeting.request_snapshot(3)
    assert [session for session, _, _ in meeting.visit(ignore).snapshots] == [1, 2]
    meeting.abort_update()
    assert [session for session, _, _ in meeting.visit(ignore).snapshots] == [3]


def test_who_wants_it_no_more_gives_the_memory_back_at_once(meeting):
    vector = room(meeting, 0, 100)
    meeting.request_snapshot(1, vector)
    meeting.cancel_snapshot(1)
    assert meeting.vectors.back == [vector]
    assert meeting.vectors.free_elements == 0, "of a length that no exchange needs"
    assert not meeting.has_requests
    assert not meeting.visit(ignore).snapshots


@pytest.mark.parametrize("elements", [0, WEIGHTS, 2 * WEIGHTS - 1])
def test_of_a_state_that_has_become_shorter_nothing_is_given(elements, meeting):
    meeting.request_snapshot(1, room(meeting, 3 * WEIGHTS - 100, 3 * WEIGHTS))
    meeting.model.state = range(WEIGHTS, WEIGHTS + elements)
    [(_, vector, _)] = meeting.visit(ignore).snapshots
    assert not vector.has_piece(3 * WEIGHTS - 100, 3 * WEIGHTS)


def test_a_spare_copy_is_no_newcomers(meeting):
    """An exchange that begins meanwhile may have the spare; a newcomer's piece has its own memory."""
    meeting.request_snapshot(1, room(meeting, 0, 100))
    meeting.request_snapshot(2)
    assert meeting.take_matching_requests() == [2]
    assert list(meeting.requests) == [1]


def held_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_piece_goes_back_to_the_system():
    """An allocator would keep it: pieces of 25 MB once held two hundred MB for good."""
    pool = VectorPool(ModelState({"x": np.zeros(WEIGHTS, np.float32)}))
    before = held_mb()
    vectors = [pool.take_transient(6_000_000) for _ in range(3)]
    for vector in vectors:
        vector.array.fill(1.0)
    assert held_mb() > before + 60
    for vector in vectors:
        pool.give(vector)
    del vectors, vector
    assert held_mb() < before + 20


# -- an addition and a copy in one pass ----------------------------------------------------------------------------
def added(meeting, values, **visit):
    update = Update(Vector(np.full(WEIGHTS, values, np.float32)))
    meeting.begin_update()
    meeting.deliver_update(update)
    return update.vector, meeting.visit(ignore, **visit)


def test_what_was_added_becomes_the_copy_of_the_sum(meeting):
    meeting.request_snapshot(1)
    vector, visit = added(meeting, 0.5)
    assert visit.snapshots == [(1, vector, 0.0)]
    assert vector.users == 1
    assert meeting.vectors.back == []
    assert vector.array.tolist() == [0.5 + place for place in range(WEIGHTS)]
    meeting.vectors.give(vector)
    assert meeting.vectors.take().array is vector.array


def test_it_is_one_copy_for_all_that_want_it(meeting):
    for session in (1, 2):
        meeting.request_snapshot(session)
    vector, visit = added(meeting, 0.5, spare=True, keep=True)
    assert [one for _, one, _ in visit.snapshots] == [vector, vector]
    assert visit.spare_copy is visit.newcomers_copy is vector
    assert vector.users == 4


def test_of_several_updates_the_last_one_makes_the_copy(meeting):
    meeting.request_snapshot(1)
    meeting.begin_update()
    meeting.deliver_update(Update(Vector(np.full(WEIGHTS, 1.0, np.float32))))
    vector, visit = added(meeting, 0.5)
    assert [one for _, one, _ in visit.snapshots] == [vector]
    assert vector.array.tolist() == [1.5 + place for place in range(WEIGHTS)]
    assert len(meeting.vectors.back) == 1


@pytest.mark.parametrize("wish", ["nothing", "a piece", "a part that is expected", "one that waits"])
def test_where_nobody_wants_all_of_the_weights_nothing_is_copied(wish, meeting):
    calls = []
    meeting.model.add_read = lambda values, weight: calls.append(values) or True
    if wish == "a piece":
        meeting.request_snapshot(1, room(meeting, 0, 100))
    if wish == "a part that is expected":
        positions = PART.positions(WEIGHTS, 1)
        assert positions is not None
        meeting.next_cut = Cut(PART, positions)
    if wish == "one that waits":
        meeting.request_snapshot(1)
        meeting.begin_update()
    added(meeting, 0.5, spare=wish == "a part that is expected")
    assert calls == []
    assert len(meeting.vectors.back) == 1


def test_a_vector_with_a_mass_is_merged_and_copied_as_ever(meeting):
    meeting.request_snapshot(1)
    meeting.begin_update()
    update = Update(Vector(np.zeros(WEIGHTS, np.float32)), mass=1.0)
    meeting.deliver_update(update)
    visit = meeting.visit(ignore)
    [(_, vector, _)] = visit.snapshots
    assert visit.merged_shares == [0.5]
    assert vector.array.tolist() == [place / 2 for place in range(WEIGHTS)]


def test_weights_that_are_taken_over_at_the_same_boundary_are_what_is_copied(meeting):
    meeting.request_snapshot(1)
    meeting.request_adoption(Adoption(np.full(WEIGHTS, 7.0, np.float32)))
    _, visit = added(meeting, 0.5)
    [(_, vector, _)] = visit.snapshots
    assert (vector.array == 7.0).all()
