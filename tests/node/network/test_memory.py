"""The number of vectors that a node holds, and the first touch of their memory.

A node holds its model, a snapshot and a difference; the outer step has two vectors more.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from gossip.averaging.boundary import Boundary
from gossip.averaging.model import Pending
from gossip.averaging.visit import Update
from gossip.config import Config
from gossip.effects import ReceivePiece
from gossip.exchange import exchanges
from gossip.exchange.exchanges import MAX_OVERLAP_ELEMENTS
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.network.transfers import streams
from sim.engine.swarm import Swarm
from sim.engine.vector_model import HostVectors
from sim.world.network import NetworkModel
from tests.node.model.test_boundary import PLAIN, boundary, ignore
from tests.node.offline import ELEMENTS, OTHER, in_trio, runtime, wants_snapshot

# The outer step is a node's default.
OUTER = Config(mix_every_steps=1, filter="none", outer_momentum=0.5, outer_rate=0.7)


def counting(pool):
    made = []
    fresh, pool.state.buffer = pool.state.buffer, lambda size: made.append(size) or fresh(size)
    return made


def test_whoever_wants_a_copy_of_one_boundary_has_the_same_one():
    meeting, pool, vector = boundary(3.0)
    made = counting(pool)
    meeting.request_snapshot(1)
    meeting.request_snapshot(2)
    visit = meeting.visit(ignore, spare=True, keep=True)
    copies = [*(copy for _, copy, _ in visit.snapshots), visit.spare_copy, visit.newcomers_copy]
    assert len(copies) == 4
    assert len(made) == 1
    for copy in copies:
        assert copy is copies[0]
        assert (copy.array == 3.0).all()
    for left in (3, 2, 1):
        pool.give(copies[0])
        assert copies[0].users == left
        assert not pool.free_arrays.get(vector.size), "others read it"
    pool.give(copies[0])
    assert len(pool.free_arrays[vector.size]) == 1


def test_the_next_copy_is_made_where_the_difference_lay_that_was_just_added():
    meeting, pool, vector = boundary(1.0)
    made = counting(pool)
    brought = pool.take()
    brought.array.fill(2.0)
    meeting.begin_update()
    meeting.deliver_update(Update(brought))
    visit = meeting.visit(ignore, spare=True)
    assert (vector == 3.0).all()
    assert visit.spare_copy is not None
    assert (visit.spare_copy.array == 3.0).all()
    assert visit.spare_copy.array is brought.array
    assert len(made) == 1


def test_a_difference_that_a_device_still_reads_is_given_back_when_it_has_been():
    class Reading(Pending):
        over = False

        def done(self):
            return self.over

    meeting, pool, _ = boundary()
    reading = Reading()
    meeting.model.add, meeting.model.add_read = lambda values: reading, lambda values, weight: False
    brought = pool.take()
    meeting.begin_update()
    meeting.deliver_update(Update(brought))
    visit = meeting.visit(ignore, spare=True)
    assert visit.busy_vectors == [brought]
    assert visit.spare_copy is not None
    assert visit.spare_copy.array is not brought.array


@pytest.mark.parametrize(("largest", "vectors_each"), [(0, 2), (MAX_OVERLAP_ELEMENTS, 8)])
def test_nodes_that_want_a_mix_at_every_step_hold_so_many_vectors_each(monkeypatch, largest, vectors_each):
    """A node with the outer step has one exchange at a time, even if it is asked while its own mix is due.

    Where mixes overlap, there are three, and two sums of others' additions. The vectors of exchanges that wait for
    longer than usual are extra.
    """
    monkeypatch.setattr(exchanges, "MAX_OVERLAP_ELEMENTS", largest)
    live, most = defaultdict(set), Counter()

    def take(self, elements):
        vector = plain(self, elements)
        live[id(self)].add(id(vector.array))
        most[id(self)] = max(most[id(self)], len(live[id(self)]))
        return vector

    def give(self, vector):
        vector.users -= 1
        if not vector.users:
            live[id(self)].remove(id(vector.array))
            if vector.added_since is not None:
                give(self, vector.added_since)

    plain = HostVectors.take
    monkeypatch.setattr(HostVectors, "take", take)
    monkeypatch.setattr(HostVectors, "give", give)
    swarm = Swarm(0, NetworkModel(rate_bytes_s=1e6), OUTER)
    vectors = [np.full(ELEMENTS, float(index), np.float32) for index in range(3)]
    for index, vector in enumerate(vectors):
        swarm.add_peer(vector, seeds=[0] if index else [])
    swarm.run_until(60.0)
    assert all(host.peer.exchanges.done_count > 50 for host in swarm.alive())
    assert max(most.values()) <= vectors_each
    assert largest or list(most.values()) == [2, 2, 2], "and no fewer"


@in_trio
async def test_a_newcomer_collects_where_its_exchanges_will_be(monkeypatch):
    made = []
    fresh = ModelState.buffer
    monkeypatch.setattr(ModelState, "buffer", lambda self, elements: made.append(elements) or fresh(self, elements))
    node = runtime(Config(filter="none", outer_momentum=0.0))
    first = node.streams.pool.take()
    node.streams.pool.give(first)
    before = len(made)
    collecting = node.averager.joining_array(ReceivePiece(1, OTHER, 0, 100, ELEMENTS))
    assert collecting is first.array
    assert len(made) == before
    assert node.averager.joining_array(ReceivePiece(2, OTHER, 100, 200, ELEMENTS)) is collecting


def test_no_copy_is_taken_along_for_a_mix_that_cannot_begin(monkeypatch):
    """Exchanges of others take the place of the node's own, which may be due at every boundary meanwhile."""
    taken = []

    def visit(self, replaced, spare=False, keep=False):
        [host] = [host for host in swarm.hosts if host.boundary is self]
        under_way = [one for one in host.peer.exchanges.table.values() if one.has_slot]
        taken.append((spare, bool(under_way)))
        return plain(self, replaced, spare, keep)

    plain = Boundary.visit
    monkeypatch.setattr(Boundary, "visit", visit)
    swarm = Swarm(0, NetworkModel(rate_bytes_s=1e4), OUTER)  # A stream takes longer than a step.
    for index in range(3):
        swarm.add_peer(np.full(ELEMENTS, float(index), np.float32), seeds=[0] if index else [])
    swarm.run_until(60.0)
    assert taken.count((True, False)) > 50
    assert taken.count((False, True)) > 50
    assert (True, True) not in taken


@pytest.mark.parametrize(("config", "expected"), [({}, 2), ({"part": "mask 0.5"}, 0), ({"mixing": "group"}, 0)])
@in_trio
def test_large_vectors_of_an_exchange_are_touched_before_the_first_step(config, expected, monkeypatch):
    """Once, fresh pages of 400 MB cost a boundary up to half a second.

    Parts and groups need vectors of other sizes.
    """
    monkeypatch.setattr(streams, "LARGE_BYTES", 1)
    made = []
    plain = ModelState.buffer

    def touched(self, elements):
        array = plain(self, elements)
        array.fill(7.0)  # Mark the memory as not fresh.
        made.append(array)
        return array

    monkeypatch.setattr(ModelState, "buffer", touched)
    node = runtime(Config(filter="none", outer_momentum=0.0, **config))
    assert len(made) == expected
    assert not any(array.any() for array in made), "written to, and not only taken"
    if expected:
        visit = node.averager.boundary.visit(ignore, spare=True)
        node.streams.pool.take()
        assert visit.spare_copy is not None
        assert len(made) == 2, "an exchange takes no memory"


@pytest.mark.parametrize("short", [True, False])
@in_trio
async def test_no_boundary_waits_for_memory_that_nobody_has_touched(short, monkeypatch):
    """Once, a snapshot of 400 MB cost a training loop 1.7 s while another exchange used the vectors."""
    node = runtime(PLAIN)
    monkeypatch.setattr(VectorPool, "SMALL_ELEMENTS", 1)
    boundary, pool = node.averager.boundary, node.streams.pool
    assert boundary.visit(ignore, spare=True, keep=True).spare_copy is None
    assert not pool.free_arrays, "what nobody asked for is left out"
    jobs = []
    monkeypatch.setattr(node.streams, "run_job", jobs.append)
    if not short:
        pool.give(pool.take())
    session = wants_snapshot(node)
    assert list(boundary.requests) == ([] if short else [session])
    for job in jobs:
        job.run()
        job.finish()
    assert len(jobs) == short
    [vector] = pool.free_arrays[ELEMENTS]
    [(_, snapshot, _)] = boundary.visit(ignore).snapshots
    assert snapshot.array is vector
