"""Samples count only as fast as they can be made, and only those of the run that is held."""

from __future__ import annotations

import pytest

from gossip.membership.samples.credit import MOST_SAMPLES
from gossip.membership.samples.tally import INCLUDED_S, STRANGERS_SAVE_S
from gossip.wire.messages import Gossip, Records
from tests.gossip.membership.members import acquainted, member, peer_id, record_of
from tests.harness.world import World

A, B = b"a" * 16, b"b" * 16


class Pacing:
    """Member 0 and some that it is linked with, each of a pace of its own (samples a second)."""

    def __init__(self, own: float, *others: float, **changes):
        self.me = member(genesis=A)
        self.own, self.others, self.changes = own, others, {"genesis": A} | changes
        self.now, self.sequence = 0.0, 0
        for number in range(1, len(others) + 1):
            self.me.linked(peer_id(number), record_of(number, **self.changes), 0.0)

    def train(self, seconds: float, stated: dict[int, int] | None = None) -> None:
        """``stated``: what these members say instead."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.sequence += 1
            self.me.update_me(self.now, samples=int(self.own * self.now))
            for number, pace in enumerate(self.others, 1):
                samples = (stated or {}).get(number, int(pace * self.now))
                record = record_of(number, sequence=self.sequence, samples=samples, **self.changes)
                self.me.receive(peer_id(number), Gossip((record,)), self.now)
            self.me.tick(self.now)

    @property
    def trained(self) -> int:
        return int(self.own * self.now) + sum(int(pace * self.now) for pace in self.others)


def test_honest_members_are_counted_in_full():
    swarm = Pacing(100.0, 100.0, 90.0, 110.0)
    swarm.train(20.0)
    assert swarm.me.swarm_samples == swarm.trained


@pytest.mark.parametrize("times", [2, 10])
def test_a_member_ten_times_as_fast_as_the_others_is_counted_in_full(times):
    swarm = Pacing(100.0, 100.0, 100.0, 100.0 * times)
    swarm.train(20.0)
    assert swarm.me.swarm_samples == swarm.trained


def test_one_liar_among_eight_speeds_the_count_by_no_more_than_its_allowance():
    """Sixteen honest members' worth: 23 instead of 7 of them, and not 2**53 at once."""
    honest = Pacing(*[100.0] * 7, 0.0)
    honest.train(60.0, {7: 2**53 - 1})
    assert honest.me.swarm_samples <= (7 + 16.5) * 100 * 60
    assert honest.me.swarm_samples >= 7 * 100 * 60


def test_a_liar_beside_one_honest_member_does_not_raise_what_it_may_claim():
    pair = Pacing(100.0, 0.0)
    pair.train(60.0, {1: 2**53 - 1})
    assert pair.me.swarm_samples <= 17.5 * 100 * 60


def test_of_a_member_that_is_seen_for_the_first_time_nothing_counts_yet():
    me = acquainted(3, genesis=A)
    me.update_me(0.0, genesis=A)
    before = me.swarm_samples
    me.receive(peer_id(1), Gossip((record_of(9, genesis=A, samples=2**53 - 1),)), 5.0)
    assert me.swarm_samples == before


def test_a_thousand_names_that_nobody_met_add_no_more_than_one_liar_does():
    """Each was credited a rate of its own: 1,400 of them made 19.7 million of 12 thousand samples."""
    swarm = Pacing(100.0, 100.0, 100.0)
    swarm.train(5.0)
    before = swarm.me.swarm_samples - swarm.trained
    for first in range(100, 1_100, 25):
        liars = tuple(record_of(n, genesis=A, ready=True, samples=2**53 - 1) for n in range(first, first + 25))
        swarm.me.receive(peer_id(1), Gossip(liars), swarm.now)
    swarm.train(60.0)
    added = swarm.me.swarm_samples - swarm.trained - before
    assert 16 * 100 * 55 < added <= 16 * 100 * (60 + STRANGERS_SAVE_S) * 1.05


def test_what_a_stranger_made_counts_when_it_is_met():
    swarm = Pacing(100.0, 100.0, 100.0)
    swarm.train(1.0)
    made = {}
    for n in range(100, 160):
        made[n] = record_of(n, genesis=A, ready=True)
        swarm.me.receive(peer_id(1), Gossip((made[n],)), swarm.now)
    swarm.train(60.0)
    for n in made:
        made[n] = record_of(n, genesis=A, ready=True, samples=6_000, sequence=1)
        swarm.me.receive(peer_id(1), Gossip((made[n],)), swarm.now)
    assert swarm.me.swarm_samples < swarm.trained + 60 * 6_000
    for n in made:
        swarm.me.linked(peer_id(n), made[n], swarm.now)
    swarm.train(2.0)
    assert swarm.me.swarm_samples == swarm.trained + 60 * 6_000


def test_sums_saturate():
    """2,049 identities with 2**53 - 1 samples each once made a sum that no message can carry."""
    me = acquainted(3, genesis=A, base_samples=2**53 - 1)
    records = tuple(record_of(n, genesis=A, samples=2**53 - 1) for n in range(10, 110))
    me.receive(peer_id(1), Records(records, b""), 1.0)
    for second in range(3, 100):
        me.tick(float(second) * 1e15)
    assert me.samples_of(A) == MOST_SAMPLES
    me.update_me(1e20, genesis=A)
    me.rebase(MOST_SAMPLES, 1e20, included=True, afresh=True)
    me.update_me(2e20, samples=10**6)
    assert me.swarm_samples == MOST_SAMPLES


def test_what_was_trained_for_another_run_is_not_behind_ours():
    me = acquainted(3, genesis=B, samples=10)
    me.update_me(0.0, genesis=A)
    me.update_me(1.0, samples=1)
    for second in range(1, 5):
        me.tick(float(second))
    assert (me.samples_of(B), me.swarm_samples) == (30, 1)
    me.receive(peer_id(1), Gossip((record_of(2, genesis=A, samples=0, sequence=1),)), 5.0)  # it took our weights
    me.receive(peer_id(1), Gossip((record_of(2, genesis=A, samples=4, sequence=2),)), 6.0)
    assert (me.samples_of(B), me.swarm_samples) == (30, 5)


def test_our_own_samples_begin_anew_with_another_run():
    me = member(genesis=A)
    me.update_me(0.0, samples=100)
    me.update_me(1.0, genesis=B)
    assert me.me.samples == 0
    me.update_me(2.0, samples=130)
    assert (me.me.samples, me.swarm_samples) == (30, 30)


def test_a_count_that_is_taken_over_includes_what_members_stated_until_then_and_shortly_after():
    me = acquainted(3, genesis=A, samples=1_000)
    me.update_me(1.0, genesis=A)
    me.rebase(3_500, 1.0, included=True, afresh=True)
    assert me.swarm_samples == 3_500
    me.receive(peer_id(1), Gossip((record_of(7, genesis=A, samples=500),)), 5.0)  # heard of a little late
    me.receive(peer_id(1), Gossip((record_of(2, genesis=A, samples=1_010, sequence=1),)), 5.0)
    me.receive(peer_id(1), Gossip((record_of(8, genesis=A, samples=20),)), 2 * INCLUDED_S)
    for second in range(1, 10):
        me.tick(2 * INCLUDED_S + second)
    assert me.swarm_samples == 3_500 + 10 + 20


def test_a_pause_of_everybody_slows_nobody_down():
    swarm = Pacing(100.0, 100.0, 1_000.0)
    swarm.train(20.0)
    allowed = swarm.me._table.tally.credit.per_s
    began = swarm.now
    for second in range(3_600):  # an hour of evaluation
        swarm.me.tick(began + second)
    assert swarm.me._table.tally.credit.per_s == allowed
    swarm.train(20.0)
    assert swarm.me.swarm_samples == swarm.trained


# -- whole peers -----------------------------------------------------------------------------------------------------
def test_all_members_of_a_swarm_count_the_same_and_what_was_trained():
    swarm = World(1)
    nodes = swarm.swarm(4)
    swarm.run(60.0)
    trained = sum(node.steps for node in nodes)
    for node in nodes:
        assert node.peer.membership.swarm_samples == pytest.approx(
            trained, abs=60
        )  # the last two seconds of three others


def test_a_newcomer_takes_over_the_count_with_the_weights():
    swarm = World(2)
    nodes = swarm.swarm(3)
    swarm.run(60.0)
    nodes[1].crash()
    swarm.run(20.0)
    newcomer = swarm.start(0)
    swarm.until(lambda: newcomer.peer.ready, 10.0)
    swarm.run(100.0)
    trained = sum(node.steps for node in swarm.hosts)  # of the dead as well
    for node in (nodes[0], nodes[2], newcomer):
        assert node.peer.membership.swarm_samples == pytest.approx(trained, abs=40)


def test_a_node_resumed_alone_counts_what_its_checkpoint_says_and_what_it_trains():
    """Its address book knows what members trained in its earlier life: that is in the checkpoint."""
    swarm = World(3)
    node = swarm.start(samples=6_000, steps=750)  # as a state directory once had it
    node.peer.membership.restore([record_of(50, genesis=A, samples=5_000)], 0.0)
    swarm.run(5.0)
    node.perform(node.peer.resume(A, 6_000, 10.0, swarm.now))
    began = node.steps
    swarm.run(30.0)
    assert node.peer.membership.swarm_samples == pytest.approx(6_000 + node.steps - began, abs=3)


def test_nodes_that_resume_one_after_the_other_count_alike():
    swarm = World(4)
    nodes = swarm.swarm(3)
    swarm.run(10.0)
    began = 0
    for node in nodes:
        began += node.steps
        node.perform(node.peer.resume(A, 90_000, 10.0, swarm.now))
        swarm.run(1.0)
    swarm.run(30.0)
    trained = 90_000 + sum(node.steps for node in nodes) - began
    for node in nodes:
        assert node.peer.membership.swarm_samples == pytest.approx(trained, abs=40)


def test_a_run_that_begins_afresh_counts_from_nothing_and_says_so():
    swarm = World(5)
    node = swarm.start(samples=6_000, steps=750)
    assert "new" not in node.notices[0][2]
    swarm.run(10.0)
    assert node.peer.membership.swarm_samples == pytest.approx(node.steps, abs=3)
