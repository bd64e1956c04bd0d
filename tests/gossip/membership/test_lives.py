"""A member's own record: when it is signed, and its steps and samples over several lives of its process."""

from gossip.config import Config
from gossip.effects import Notice
from gossip.wire.messages import Gossip
from tests.gossip.membership.members import acquainted, member, peer_id, record_of, sent

RUN, OTHER = b"1" * 16, b"2" * 16


# -- when it is signed ------------------------------------------------------------------------------------------------
def test_progress_is_signed_once_a_period_and_the_last_value_in_the_end():
    me = acquainted(1)
    sequence, period_s = me.me.sequence, Config().internal.progress_period_s
    for step in range(100):
        me.update_me(1.0 + 0.99 * period_s * step / 100, steps=step + 1, samples=8 * (step + 1))
        assert me.my_samples == 8 * (step + 1)
    assert me.me.sequence == sequence + 1
    me.tick(1.0 + period_s)
    assert (me.me.sequence, me.me.steps, me.me.samples) == (sequence + 2, 100, 800)


def test_everything_else_is_signed_at_once():
    me = acquainted(2)
    me.update_me(1.0, samples=8)
    changes = me.changes
    me.update_me(1.01, samples=16, ready=False)
    assert (me.me.ready, me.me.samples) == (False, 16)
    assert me.changes == changes + 1
    assert me.owners() == sorted([peer_id(1), peer_id(2)])
    sequence = me.me.sequence
    me.update_me(1.02, ready=False)
    assert me.me.sequence == sequence


# -- several lives ----------------------------------------------------------------------------------------------------
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


def test_a_record_of_an_earlier_life_is_continued_above():
    me = member()
    me.update_me(0.0, samples=7, steps=1)
    me.on_linked(peer_id(1), record_of(1), 0.5)
    me.receive(peer_id(1), Gossip((record_of(0, incarnation=40, samples=100, steps=10, left=True),)), 1.0)
    assert (me.me.incarnation, me.me.samples, me.me.steps, me.me.left) == (41, 107, 11, False)
    me.update_me(5.0, steps=2)
    assert me.me.steps == 12


def test_steps_of_an_earlier_life_are_not_lost_with_the_incarnation_known():
    me = acquainted(2, steps=100)
    effects = me.on_linked(peer_id(1), record_of(1, incarnation=2, steps=3), 1.0)
    assert sent(effects, Gossip)[0].message.updates == (record_of(1, steps=100),)
    again = member(1, incarnation=2)
    again.update_me(0.5, steps=3)
    again.receive(peer_id(0), sent(effects, Gossip)[0].message, 1.0)
    assert (again.me.incarnation, again.me.steps) == (3, 103)


def test_two_processes_of_one_key_do_not_add_each_others_counts_for_ever():
    a, b = member(0), member(0)
    a.update_me(0.0, steps=100)
    b.update_me(0.0, steps=101)
    notices = []
    for step in range(100):
        notices += a.receive(peer_id(1), Gossip((b.me,)), float(step))
        notices += b.receive(peer_id(1), Gossip((a.me,)), float(step))
    assert len([effect for effect in notices if isinstance(effect, Notice)]) == 2
    assert a.me.steps < 101 * 2**16
