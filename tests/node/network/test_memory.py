"""The number of vectors that a node holds, the first touch of their memory, and pieces of it for newcomers.

A node holds its model, a snapshot and a difference; the outer step has two vectors more.
"""

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from gossip.averaging.boundary import Boundary
from gossip.averaging.visit import Update
from gossip.config import Config
from gossip.effects import CopyPiece, ReceivePiece
from gossip.exchange import exchanges
from gossip.exchange.exchanges import MAX_OVERLAP_ELEMENTS
from gossip.state_transfer.donating import ServedPiece
from gossip.wire.messages import Fetch
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.network.transfers import streams
from sim.engine.swarm import Swarm
from sim.engine.vector_model import HostVectors
from sim.world.network import NetworkModel
from tests.node.model.test_boundary import PLAIN, boundary, ignore
from tests.node.offline import ELEMENTS, OTHER, in_trio, runtime, wants_snapshot


def three_peers(rate_bytes_s):
    """Return a simulated swarm whose peers take the outer step, as nodes do by default."""
    config = Config(mix_every_steps=1, filter="none", outer_momentum=0.5, outer_rate=0.7)
    swarm = Swarm(0, NetworkModel(rate_bytes_s=rate_bytes_s), config)
    for index in range(3):
        swarm.add_peer(np.full(ELEMENTS, float(index), np.float32), seeds=[0] if index else [])
    return swarm


def test_a_difference_that_a_device_still_reads_is_not_used_again():
    meeting, pool, _ = boundary()
    reading = SimpleNamespace(done=lambda: False, is_narrow=False)
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
    swarm = three_peers(rate_bytes_s=1e6)
    swarm.run_until(60.0)
    assert all(host.peer.exchanges.done_count > 50 for host in swarm.alive())
    assert max(most.values()) <= vectors_each
    assert largest or list(most.values()) == [2, 2, 2], "and no fewer"


@in_trio
async def test_a_newcomer_collects_where_its_exchanges_will_be():
    node = runtime(Config(filter="none", outer_momentum=0.0))
    first = node.streams.pool.take()
    node.streams.pool.give(first)
    for session, start, stop in ((1, 0, 100), (2, 100, 200)):
        assert node.averager.joining_array(ReceivePiece(session, OTHER, start, stop, ELEMENTS)) is first.array


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
    swarm = three_peers(rate_bytes_s=1e4)  # A stream takes longer than a step.
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

    def buffer(self, elements):
        made.append(np.full(elements, 7.0, np.float32))  # Mark the memory as not fresh.
        return made[-1]

    monkeypatch.setattr(ModelState, "buffer", buffer)
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


def test_parts_of_many_sizes_leave_the_pool_no_larger_than_eight_vectors():
    pool = VectorPool(ModelState({"x": np.zeros(2_000, np.float32)}))
    pool.give(pool.take())
    for size in range(1, 2_000):
        pool.give(pool.take(size))
        free = sum(size * len(arrays) for size, arrays in pool.free_arrays.items())
        assert free == pool.free_elements <= pool.MAX_FREE * 2_000


# -- pieces for newcomers ----------------------------------------------------------------------------------------------
def donor(*sessions):
    """Return a node that is asked for pieces in these sessions, and whose optimizer has five elements, each a 7."""
    node = runtime(Config())
    fetches = {session: ServedPiece(OTHER, Fetch(session, (), 0, 1), 1e9) for session in sessions}
    node.peer.donating.table.update(fetches)
    model = node.averager.boundary.model
    model.optimizer_range = lambda: range(ELEMENTS, ELEMENTS + 5)
    model.begin_read_optimizer = lambda out, start: out.fill(7.0)
    return node, node.averager


@in_trio
def test_a_piece_for_a_newcomer_is_no_snapshot_of_the_weights():
    node, averager = donor(1, 2, 3)
    averager.boundary.request_snapshot(1)
    moved = []
    averager.movement.measure = averager.movement.measure_sample = lambda values: moved.append(values.size) or 0.0
    averager.perform(CopyPiece(2, ELEMENTS, ELEMENTS + 5))
    averager.perform(CopyPiece(3, 0, 5))
    averager.use_copies(averager.boundary.visit(ignore))
    weights, state, piece = (averager.snapshot_of(session) for session in (1, 2, 3))
    assert piece.has_piece(0, 5)
    assert not piece.has_piece(0, 6)
    assert (state.start, state.array.tolist()) == (ELEMENTS, [7.0] * 5)
    assert state.has_piece(ELEMENTS + 1, ELEMENTS + 5)
    assert not state.has_piece(0, 5)
    assert not weights.has_piece(0, ELEMENTS + 1)
    assert node.streams.pool.newest is weights
    assert moved == [ELEMENTS], "how far local steps went is of the weights"


@in_trio
def test_no_boundary_pays_for_fresh_memory_for_a_newcomer():
    """Once, while exchanges had all the vectors, the copy went into untouched pages."""
    node, averager = donor(1, 2)
    taken = [node.streams.pool.take() for _ in range(3)]
    averager.perform(CopyPiece(1, 3, 9))
    averager.perform(CopyPiece(2, ELEMENTS, ELEMENTS + 5))
    node.streams.pool.allocate = None  # Any further allocation fails.
    averager.use_copies(averager.boundary.visit(ignore))
    assert all(averager.snapshot_of(session) is not None for session in (1, 2))
    assert all(averager.snapshot_of(1).array is not one.array for one in taken)
