"""The timers of suspicions, of which accusations that are refuted leave stale ones behind."""

from __future__ import annotations

from gossip.effects import MemberState
from gossip.membership.states import MIN_STALE
from tests.harness.world import World


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
