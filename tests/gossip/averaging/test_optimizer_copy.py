"""The optimizer's state is copied for newcomers a part at a boundary, and in time."""

from __future__ import annotations

import numpy as np
import pytest

from gossip.averaging import optimizer_copy
from gossip.averaging.boundary import Boundary
from gossip.averaging.optimizer_copy import WITHIN_S, OptimizerCopy
from gossip.averaging.vectors import Vector
from node.model.kept import KeptWeights
from node.model.pool import VectorPool
from node.model.snapshot import ModelState

WEIGHTS = 1_000
QUARTER = WEIGHTS // 4


class Copying:
    """A copy that somebody says the end of."""

    over = False

    def done(self):
        return self.over


class Model:
    """Whose optimizer keeps two numbers for each weight: where it lies, and at which boundary it was read."""

    def __init__(self, elements=2 * WEIGHTS, pending=None):
        self.state, self.parts, self.pending = range(WEIGHTS, WEIGHTS + elements), [], pending

    def size(self):
        return WEIGHTS

    def optimizer_range(self):
        return self.state

    def begin_read_optimizer(self, out, start):
        self.parts.append(out.size)
        out[:] = np.arange(start, start + out.size)
        return self.pending


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch):
    monkeypatch.setattr(optimizer_copy, "SMALL_ELEMENTS", 1)


def room(elements=2 * WEIGHTS, start=WEIGHTS):
    return Vector(np.full(elements, -1.0, np.float32), start=start)


def copied(model, apart_s, copy=None, busy=lambda turn: False):
    """(parts, seconds until all is there) where boundaries are so far apart."""
    copy = copy or OptimizerCopy(room(), 0.0)
    for turn in range(1, 10_000):
        if copy.advance(model, 0, busy(turn), turn * apart_s):
            return model.parts, turn * apart_s
    raise AssertionError("it never ends")


def test_a_loop_of_short_steps_copies_a_quarter_of_its_weights_at_a_boundary():
    copy = OptimizerCopy(room(), 0.0)
    parts, _ = copied(Model(), 0.01, copy)
    assert parts == [QUARTER] * 8
    assert copy.vector.array.tolist() == list(range(WEIGHTS, 3 * WEIGHTS))
    assert copy.vector.holds(WEIGHTS, 3 * WEIGHTS)


@pytest.mark.parametrize("apart_s", [0.001, 0.1, 0.2, 0.35, 0.5, 0.8, 1.3, 1.6, 2.4])
@pytest.mark.parametrize("busy", [0, 1, 2, 3], ids=["idle", "busy", "every other", "two of three"])
def test_it_is_whole_in_time_whatever_a_step_takes(apart_s, busy):
    """Of what is left after that the last step is a part, which nobody can cut."""
    parts, took_s = copied(Model(), apart_s, busy=lambda turn: bool(busy) and (busy == 1 or turn % busy > 0))
    assert sum(parts) == 2 * WEIGHTS
    assert took_s < WITHIN_S + apart_s


def test_a_boundary_that_does_other_work_leaves_it_to_the_next():
    model = Model()
    copy = OptimizerCopy(room(), 0.0)
    assert not copy.advance(model, 0, True, 0.01)
    assert model.parts == []
    assert not copy.advance(model, 0, False, 0.02)
    assert model.parts == [QUARTER]


def test_with_other_weights_it_begins_anew():
    model, copy = Model(), OptimizerCopy(room(), 0.0)
    assert not copy.advance(model, 0, False, 0.01)
    copy.vector.array[:QUARTER] = 7.0  # of the run that went
    while not copy.advance(model, 1, False, 0.02):
        pass
    assert model.parts[1] + sum(model.parts[2:]) == 2 * WEIGHTS
    assert copy.vector.array.tolist() == list(range(WEIGHTS, 3 * WEIGHTS))


@pytest.mark.parametrize("elements", [0, WEIGHTS, 2 * WEIGHTS - 1])
def test_of_a_state_that_has_become_shorter_nothing_is_given(elements):
    model, copy = Model(), OptimizerCopy(room(), 0.0)
    assert not copy.advance(model, 0, False, 0.01)
    model.state = range(WEIGHTS, WEIGHTS + elements)
    assert copy.advance(model, 0, False, 0.02)
    assert not copy.vector.holds(WEIGHTS, WEIGHTS + 1)
    assert model.parts == [QUARTER]


# -- at a boundary -----------------------------------------------------------------------------------------------
class Whole(Model):
    """With weights as well."""

    def begin_read(self, out):
        out.fill(1.0)


class Pool(VectorPool):
    """What came back."""

    def __init__(self):
        super().__init__(ModelState({"x": np.zeros(WEIGHTS, np.float32)}))
        self.back = []

    def give(self, vector):
        self.back.append(vector)
        super().give(vector)


def boundary(model):
    pool = Pool()
    return Boundary(model, pool, KeptWeights(pool.state)), pool


def test_two_newcomers_and_an_exchange_are_served_one_after_another():
    meeting, _ = boundary(Whole())
    for session, start in ((1, WEIGHTS), (2, 2 * WEIGHTS)):
        meeting.want_snapshot(session, OptimizerCopy(room(WEIGHTS, start), 0.0))
    meeting.want_snapshot(3)
    seen = []
    for turn in range(1, 20):
        visit = meeting.visit(lambda weights: None, now=0.01 * turn)
        seen += [session for session, _, _ in visit.snapshots]
        for session, vector, _ in visit.snapshots:
            assert session == 3 or vector.array.tolist() == list(range(vector.start, vector.start + WEIGHTS))
        assert len(meeting.model.parts) <= turn - 1, "one part a boundary, and none beside the weights"
        assert meeting.wanted == bool(meeting.requests)
    assert seen == [3, 1, 2]


def test_who_wants_it_no_more_gives_the_memory_back_at_once():
    meeting, pool = boundary(Whole())
    vector = pool.pass_by(2 * WEIGHTS)
    vector.start = WEIGHTS
    meeting.want_snapshot(1, OptimizerCopy(vector, 0.0))
    meeting.visit(lambda weights: None, now=0.01)
    meeting.cancel(1)
    assert pool.back == [vector]
    assert not meeting.wanted
    assert pool.held == 0, "of a length that no exchange needs"
    assert not meeting.visit(lambda weights: None, now=0.02).snapshots


def test_memory_that_a_device_writes_to_is_not_given_back():
    meeting, pool = boundary(Whole(pending=Copying()))
    meeting.want_snapshot(1, OptimizerCopy(room(), 0.0))
    visit = meeting.visit(lambda weights: None, now=0.01)
    assert visit.copies
    meeting.cancel(1)
    assert pool.back == []


def test_while_an_update_is_owed_it_waits_as_all_snapshots_do():
    meeting, _ = boundary(Whole())
    meeting.want_snapshot(1, OptimizerCopy(room(), 0.0))
    meeting.owe()
    meeting.visit(lambda weights: None, now=0.01)
    assert meeting.model.parts == []
    meeting.excuse()
    meeting.visit(lambda weights: None, now=0.02)
    assert meeting.model.parts == [QUARTER]
