"""A snapshot holds every update that was decided before it, exactly once."""

import time
from typing import NamedTuple

import numpy as np
import pytest
import torch

from gossip.averaging.boundary import Boundary
from gossip.averaging.jobs import MixJob
from gossip.averaging.pair import PairAverage
from gossip.averaging.visit import Adoption, Update, Visit
from gossip.codecs import get_codec
from gossip.config import Config
from gossip.effects import Mix, Release, Transfer
from gossip.filters.clip import Clip
from node.model.backup import KeptWeights, copy_to_host
from node.model.pool import VectorPool
from node.model.snapshot import Copies, ModelState
from node.network.transfers import streams
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel
from tests.node.offline import ELEMENTS, OTHER, in_trio, runtime, wants_snapshot

PLAIN = Config(mix_every_steps=1, filter="none", outer_momentum=0.0)


def boundary(values=0.0, size=300):
    vector = np.full(size, values, np.float32)
    state = ModelState({"x": vector})
    pool = VectorPool(state)
    return Boundary(state, pool, KeptWeights(state)), pool, vector


def shift_of(pool, values):
    vector = pool.take()
    vector.array.fill(values)
    return Update(vector)


def ignore(vector):
    """Do nothing when weights are adopted."""


def test_a_snapshot_waits_for_an_update_that_is_owed():
    meeting, pool, vector = boundary()
    meeting.begin_update()
    meeting.request_snapshot(1)
    assert not meeting.visit(ignore).snapshots
    meeting.deliver_update(shift_of(pool, 2.0))
    assert meeting.has_requests
    done = meeting.visit(ignore)
    [(session, snapshot, _)] = done.snapshots
    assert session == 1
    assert (snapshot.array == 2.0).all()
    assert (vector == 2.0).all()
    assert meeting.pending_updates == 0


def test_nor_does_a_spare_copy_leave_out_what_is_owed():
    meeting, pool, _ = boundary()
    meeting.begin_update()
    assert meeting.visit(ignore, spare=True).spare_copy is None
    meeting.deliver_update(shift_of(pool, 2.0))
    spare = meeting.visit(ignore, spare=True).spare_copy
    assert spare is not None
    assert (spare.array == 2.0).all()


@pytest.mark.parametrize("earlier", [[], [1]])
def test_a_wish_that_comes_during_a_visit_is_for_the_next(earlier):
    """Once, such a request was served and yet stayed, or ended the visit if there was no earlier one."""
    meeting, pool, _ = boundary()
    meeting.begin_update()
    meeting.deliver_update(shift_of(pool, 2.0))
    for session in earlier:
        meeting.request_snapshot(session)
    plain, meeting.model.add_read = meeting.model.add, lambda values, weight: False
    # The network thread requests a snapshot during the addition.
    meeting.model.add = lambda values: (meeting.request_snapshot(9), plain(values))[1]
    assert [session for session, _, _ in meeting.visit(ignore).snapshots] == earlier
    assert list(meeting.requests) == [9]
    assert meeting.has_requests


def test_what_is_given_away_waits_for_nothing():
    """A pushed snapshot takes its mass along, and pending updates bring a mass of their own."""
    meeting, _, _ = boundary()
    meeting.begin_update()
    meeting.request_snapshot(1, pushes=1)
    meeting.request_snapshot(2)
    assert [session for session, _, _ in meeting.visit(ignore).snapshots] == [1]
    meeting.abort_update()
    assert [session for session, _, _ in meeting.visit(ignore).snapshots] == [2]


@pytest.mark.parametrize("end", ["excuse", "forget", "adoption"])
def test_an_update_that_never_comes_is_waited_for_no_longer(end):
    meeting, pool, vector = boundary()
    meeting.begin_update()
    meeting.request_snapshot(1)
    if end == "excuse":
        meeting.abort_update()
    else:
        meeting.deliver_update(shift_of(pool, 2.0))
        if end == "forget":
            meeting.forget_old_weights()
        else:
            meeting.request_adoption(Adoption(vector.copy(), (), ()))
    assert meeting.has_requests
    assert len(meeting.visit(ignore).snapshots) == 1
    assert (vector == 0.0).all()


@pytest.mark.parametrize("is_spare", [False, True])
@in_trio
def test_a_copy_from_before_an_update_was_decided_is_given_back_and_taken_anew(is_spare):
    node = runtime()
    session, pool, boundary = wants_snapshot(node), node.streams.pool, node.averager.boundary
    done = Visit(spare_copy=pool.take(), decided_updates=0) if is_spare else boundary.visit(ignore)
    boundary.begin_update()  # The copy is on its way to this thread at this point.
    node.averager.use_copies(done)
    assert node.averager.snapshot_of(session) is None
    assert session in boundary.requests
    assert sum(map(len, pool.free_arrays.values())) == 1
    boundary.deliver_update(shift_of(pool, 2.0))
    node.averager.use_copies(boundary.visit(ignore))
    assert (node.averager.snapshot_of(session).array == 2.0).all()


@pytest.mark.parametrize("decided", [False, True])
@in_trio
def test_a_copy_whose_exchange_made_way_is_the_snapshot_of_the_one_that_it_made_way_for(decided):
    """The next exchange uses the copy instead of another one, unless an update was decided in between."""
    node = runtime()
    averager, peer = node.averager, node.peer
    averager.boundary.request_snapshot(99)  # This session has ended when the copy arrives.
    done = averager.boundary.visit(ignore)
    assert [number for number, _, _ in done.snapshots] == [99]
    session = wants_snapshot(node)
    if decided:
        averager.boundary.begin_update()
    node.averager.use_copies(done)
    assert not peer.view.needs_snapshot(99)
    assert (averager.snapshot_of(session) is None) is decided
    assert (session in averager.boundary.requests) is decided
    if decided:
        assert sum(map(len, node.streams.pool.free_arrays.values())) == 1, "it is given back"
    else:
        assert averager.snapshot_of(session) is done.snapshots[0][1]


@in_trio
def test_who_asks_while_a_copy_is_made_is_given_that():
    """Copying a large model takes as long as an offer needs to arrive, and a second copy would be equal."""
    node = runtime(PLAIN)
    averager, boundary = node.averager, node.averager.boundary
    session = wants_snapshot(node)
    done = boundary.visit(ignore)
    boundary.request_snapshot(98, pushes=1)
    boundary.request_snapshot(99)
    node.peer.exchanges.table[99] = node.peer.exchanges.table[session]
    averager.use_copies(done)
    assert averager.snapshot_of(99) is averager.snapshot_of(session) is done.snapshots[0][1]
    assert averager.snapshot_of(99).users == 2
    assert list(boundary.requests) == [98], "what is given away is copied with its mass"


class Copy(Copies):
    """Copies that are done at the second look, as they may be on CUDA."""

    looks = 0

    def done(self):
        type(self).looks += 1
        return self.looks > 1


@in_trio
def test_a_spare_whose_copy_ends_between_two_looks_is_not_lost():
    node = runtime()
    session = wants_snapshot(node)
    tasks = []
    node.streams.spawn = lambda task, *arguments: tasks.append((task, arguments))
    Copy.looks = 0
    node.averager.on_visit(Visit(spare_copy=node.streams.pool.take(), copies=[Copy()]), 1, 1, None)

    async def later():
        for task, arguments in tasks:
            await task(*arguments)
        assert node.averager.snapshot_of(session) is not None

    return later()


@in_trio
def test_as_many_mixes_may_end_at_once_as_there_are_exchanges():
    """Once, with more than 64 neighbours, the 65th mix that ended at the same time ended the network thread."""
    node = runtime()
    for session in range(100):
        transfer, effect = node.averager.open(session), Transfer(session, OTHER, "fp32")
        transfer.snapshot = snapshot = node.streams.pool.take()
        pair = transfer.pair = PairAverage(effect, snapshot, get_codec("fp32"), None, node.streams.pool)
        pair.receive_whole(snapshot.array)
    for session in range(100):
        node.perform([Mix(session, 0.5), Release(session)])
    assert node.averager.boundary.pending_updates == 100


@pytest.mark.parametrize("mixing", ["push-sum", "row-stochastic"])
@in_trio
async def test_a_push_that_was_over_before_its_snapshot_came_leaves_the_model_as_heavy_as_it_was(mixing):
    """The mass stays the same, whether or not the mixing conserves it.

    Once, a row-stochastic model weighed 2 from there on, and took a third of the next vector instead of half.
    """
    node = runtime(Config(mixing=mixing, filter="none"))
    node.averager.boundary.request_snapshot(77, pushes=1)
    node.averager.use_copies(node.averager.boundary.visit(ignore))  # No exchange has this number any more.
    node.averager.use_copies(node.averager.boundary.visit(ignore))
    assert node.averager.boundary.mass == 1.0


@in_trio
def test_durations_read_in_the_other_thread_stay_as_they_were():
    node = runtime()
    for session in range(2):
        node.averager.open(session).requested_at = 0.0
    node.streams.record_duration(0)
    reading = iter(node.streams.durations)
    node.streams.record_duration(1)
    assert len(list(reading)) == 1
    assert len(node.streams.durations) == 2


@in_trio
def test_a_stream_whose_bound_is_not_known_fails_and_nothing_else():
    node = runtime(Config(codec="moniqua4", filter="none"))
    session = wants_snapshot(node)
    node.averager.use_copies(node.averager.boundary.visit(ignore))
    failures = []
    node.streams.spawn = lambda task, *arguments: failures.append(arguments)
    transfer = node.averager.open(session)
    transfer.link = link = object()
    node.streams.transfer(Transfer(session, OTHER, "moniqua4"))
    assert [arguments[1:] for arguments in failures] == [(session, "overflow")]
    assert not transfer.has_started
    assert transfer.link is link


def test_two_fixed_vectors_end_at_their_mean_while_shifts_are_slow(train, until, monkeypatch):
    """No snapshot is taken while the result of an exchange is on its way into the model.

    Otherwise the partner would give the same again, so that both would overshoot the mean and come back.
    """
    plain = MixJob.run

    def slow(self):
        time.sleep(0.02)
        plain(self)

    monkeypatch.setattr(streams, "INLINE_ELEMENTS", 0)  # Run the job in a worker, as for large vectors.
    monkeypatch.setattr(MixJob, "run", slow)
    vectors = [np.full(ELEMENTS, value, np.float32) for value in (0.0, 1.0)]
    trainees = [train({"x": vectors[0]}, config=PLAIN)]
    trainees.append(train({"x": vectors[1]}, config=PLAIN, seeds=[trainees[0].node.address]))
    trainees[1].do(lambda node: (node._training.settling.finish_exchanges(5.0), vectors[1].fill(1.0)))
    worst = [0.0]

    def look(node):
        """Record how far from the mean each vector is that has mixed. Without training it holds the mean."""
        for index, vector in enumerate(vectors):
            if abs(float(vector[0]) - index) > 0.25:
                worst[0] = max(worst[0], abs(float(vector[0]) - 0.5))
        return node.metrics().exchanges_done

    begun = trainees[0].do(look)
    until(lambda: trainees[0].do(look) > begun + 20)
    assert worst[0] < 1e-6


PUSHED = Config(mixing="row-stochastic", mix_every_steps=1)


def test_others_vectors_are_no_movement_of_ones_own_in_the_simulator(monkeypatch):
    """Two nodes that do not train are pushed each other's vectors; the filter learns that they do not move."""
    moved = []
    monkeypatch.setattr(Clip, "on_moved", lambda self, distance: moved.append(distance))

    def move(index, vector, steps):
        if index == 1 and steps == 50:
            vector.fill(1.0)

    swarm = Swarm(0, NetworkModel(), PUSHED, move)
    for index in range(2):
        swarm.add_peer(np.zeros(ELEMENTS, np.float32), seeds=[0] if index else [])
    swarm.run_until(30.0)
    own = [distance for distance in moved if distance > 1e-3]
    assert len(moved) > 100
    assert len(own) == 1  # The node's only step of its own, or what a merge left of it.
    assert own[0] < 1.001 * ELEMENTS**0.5


@pytest.mark.parametrize("is_trial", [True, False])
def test_what_waits_for_the_boundary_is_in_the_weights_that_a_trial_keeps_and_goes_with_those_that_go(is_trial):
    meeting, pool, vector = boundary(1.0)
    meeting.begin_update()
    meeting.deliver_update(shift_of(pool, 2.0))
    meeting.request_adoption(Adoption(np.full(300, 9.0, np.float32), (), (), is_trial))
    assert meeting.visit(ignore).adopted
    assert (vector == 9.0).all()
    assert not meeting.pending_updates
    if is_trial:
        meeting.request_restore()
        assert meeting.visit(ignore).restored
        assert (vector == 3.0).all()


# -- the newest snapshot, for newcomers --------------------------------------------------------------------------------
def test_the_newest_snapshot_stays_as_it_is_through_exchanges_without_a_vector_more():
    _, pool, _ = boundary()
    allocated = []
    fresh, pool.state.buffer = pool.state.buffer, lambda size: allocated.append(size) or fresh(size)
    for number in range(10):
        snapshot = pool.take()
        assert pool.newest is not snapshot
        if number:
            recalled = pool.take_last_snapshot()
            assert (recalled.array == number - 1).all(), "while the next is taken the one before is there"
            pool.give(recalled)
        snapshot.array.fill(number)
        pool.keep_snapshot(snapshot)
        difference = pool.take()
        difference.array.fill(-1.0)
        assert (pool.take_last_snapshot().array == number).all()
        pool.give(snapshot)
        for vector in (difference, snapshot):
            pool.give(vector)
    assert len(allocated) == 2, "two for an exchange, as without"


def test_what_a_newcomer_is_sent_is_nobody_elses_until_it_is_sent():
    _, pool, _ = boundary()
    snapshot = pool.take()
    snapshot.array.fill(7.0)
    pool.keep_snapshot(snapshot)
    pool.give(snapshot)
    sent = pool.take_last_snapshot()
    for _ in range(2 * pool.MAX_FREE):
        pool.take().array.fill(-1.0)
    assert (sent.array == 7.0).all()
    pool.give(sent)
    assert pool.take().array is sent.array
    assert pool.take_last_snapshot() is None, "it is taken for something else"


def test_the_newest_snapshot_is_forgotten_with_the_vector_that_holds_it():
    _, pool, _ = boundary()
    kept = pool.take()
    others = [pool.take() for _ in range(pool.MAX_FREE)]
    pool.keep_snapshot(kept)
    for vector in (*others, kept):
        pool.give(vector)
    assert pool.take_last_snapshot() is None
    small = pool.take(10)
    pool.keep_snapshot(small)
    pool.give(small)
    for size in range(300, 340):
        pool.give(pool.take(size))
    assert pool.take_last_snapshot() is None
    last = pool.take()
    pool.keep_snapshot(last)
    pool.forget_snapshot()
    assert pool.take_last_snapshot() is None, "of weights that are others now"


def test_a_backup_of_optimizer_state_keeps_its_kinds_and_shares_no_memory():
    class Pair(NamedTuple):
        first: torch.Tensor
        second: list[int]

    state = {0: Pair(torch.ones(2), [1]), "all": (torch.zeros(1), [2.5])}
    copied = copy_to_host(state)
    state[0].first.add_(1.0)
    assert isinstance(copied[0], Pair)
    assert (copied[0].first.tolist(), copied[0].second) == ([1.0, 1.0], [1])
    assert copied["all"] == (torch.zeros(1), [2.5])
