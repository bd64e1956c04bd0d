"""When a suspicion begins, and the timers of suspicions, of which refuted accusations leave stale ones behind."""

from __future__ import annotations

import pytest

from gossip.effects import MemberState
from gossip.membership.states import MIN_STALE
from gossip.wire.messages import Ack, Ping
from tests.gossip.membership.members import acquainted, peer_id, sent
from tests.harness.world import World

ALIVE, SUSPECT = MemberState.ALIVE, MemberState.SUSPECT


def test_a_member_that_is_suspected_and_refutes_without_end_leaves_a_bounded_number_of_timers():
    world = World(1)
    watcher, other, first = world.start(), world.start(0), world.start(0)
    world.until(world.agreed, 30.0)
    states, now = watcher.peer.membership._states, world.now
    entry, earliest = states._table.entries[other.id], states._table.entries[first.id]
    states.change_state(earliest, earliest.record, MemberState.SUSPECT, now)
    states._set_expiry(earliest, now + 1.0)  # In front of all stale ones, which it keeps there.
    longest = 0
    for number in range(1_000):
        states.change_state(entry, entry.record, MemberState.SUSPECT, now)
        states._set_expiry(entry, now + 60.0 + number)
        states.change_state(entry, entry.record, MemberState.ALIVE, now)
        longest = max(longest, len(states._suspicions))
    assert MIN_STALE <= longest <= 2 * len(states._table.entries) + MIN_STALE + 1
    states.change_state(entry, entry.record, MemberState.SUSPECT, now)
    states._set_expiry(entry, now + 60.0)
    assert (now + 60.0, other.id) in states._suspicions
    assert states.deadline == now + 1.0


def late_answer(count, answered_s):
    """Return member 0 of ``count`` others, the late probe of member 1 and when it began.

    The answer does not come until ``answered_s`` after that.
    """
    me = acquainted(count)
    while not (pings := [send for send in sent(me.tick(me.deadline), Ping) if send.to == peer_id(1)]):
        pass
    began = me._detector.targets[peer_id(1)][0].started_at
    while me.deadline < began + answered_s:
        me.tick(me.deadline)
    return me, pings[0], began


@pytest.mark.parametrize("count", [1, 4])
def test_an_answer_within_the_period_is_in_time_whether_or_not_there_are_helpers(count):
    me, ping, began = late_answer(count, 1.9)
    assert me.state(peer_id(1)) is ALIVE
    me.receive(peer_id(1), Ack(ping.message.seq, ()), began + 1.9)
    assert peer_id(1) not in me._detector.targets
    me, *_ = late_answer(count, 2.1)
    assert me.state(peer_id(1)) is SUSPECT


def test_a_dial_that_fails_ends_a_probe_without_helpers():
    me, _, began = late_answer(1, 1.5)
    me.on_unlinked(peer_id(1), began + 1.5)
    assert me.state(peer_id(1)) is ALIVE
    me.on_dial_failed(peer_id(1), began + 1.6)
    assert me.state(peer_id(1)) is SUSPECT
