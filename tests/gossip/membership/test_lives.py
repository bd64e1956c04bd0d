"""The steps and samples of a member's record over several lives of its process."""

from __future__ import annotations

from gossip.wire.messages import Gossip
from tests.gossip.membership.members import member, peer_id, record_of

RUN, OTHER = b"1" * 16, b"2" * 16


def test_steps_and_samples_of_a_record_span_the_same_lives():
    me = member(steps=10, samples=80)
    me.update_me(1.0, steps=1, samples=8, run_id=RUN)
    me.update_me(100.0, steps=2, samples=16)
    me.tick(200.0)
    assert (me.me.steps, me.me.samples) == (12, 96)


def test_another_run_takes_nothing_from_what_a_member_trained():
    me = member(run_id=RUN)
    me.update_me(1.0, steps=5, samples=40)
    me.update_me(100.0, run_id=OTHER)
    me.tick(200.0)
    assert (me.me.run_id, me.me.steps, me.me.samples) == (OTHER, 5, 40)


def test_both_counts_go_on_from_a_record_of_an_earlier_life():
    me = member()
    me.update_me(0.0, steps=1, samples=8)
    me.on_linked(peer_id(1), record_of(1), 0.5)
    me.receive(peer_id(1), Gossip((record_of(0, incarnation=40, steps=10, samples=80),)), 1.0)
    assert (me.me.incarnation, me.me.steps, me.me.samples) == (41, 11, 88)
