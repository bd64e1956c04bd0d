"""Which members are probed and what comes of it: answers, suspicions with their timers, and dials of dead members."""

import itertools

import pytest

from gossip.effects import Dial, MemberChanged, MemberState, Send
from gossip.membership.states import MIN_STALE
from gossip.wire.messages import Ack, Gossip, Hint, Nack, Ping, PingReq
from tests.gossip.membership.members import MemberWorld, acquainted, answer_pings, peer_id, record_of, sent, tick_until
from tests.harness.world import World

ALIVE, SUSPECT, DEAD = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD


# -- probes -----------------------------------------------------------------------------------------------------------
def test_a_probe_for_another_is_answered_by_ack_or_nack():
    me = acquainted(5)
    ping = sent(me.receive(peer_id(1), PingReq(77, peer_id(2), ()), 1.0), Ping)[0]
    assert ping.to == peer_id(2)
    effects = me.receive(peer_id(2), Ack(ping.message.seq, ()), 1.1)
    assert Send(peer_id(1), Ack(77, ())) in effects
    me.receive(peer_id(1), PingReq(78, peer_id(3), ()), 1.2)
    # It sends no PingReq, or one death would have all members ask all others.
    assert me.on_dial_failed(peer_id(3), 1.3) == [Send(peer_id(1), Nack(78))]
    assert me.state(peer_id(3)) is ALIVE, "another member asked, and draws its own conclusion"
    assert me.receive(peer_id(1), PingReq(79, peer_id(4000), ()), 1.4) == [Send(peer_id(1), Nack(79))]
    me.receive(peer_id(1), PingReq(80, peer_id(4), ()), 1.5)
    nacks = []
    while not nacks:
        nacks = sent(me.tick(me.deadline), Nack)
    assert nacks == [Send(peer_id(1), Nack(80))]


def test_three_nacks_make_a_suspect_and_a_stranger_is_not_counted():
    me = acquainted(8)
    asked = sent(me.on_dial_failed(peer_id(2), 1.0), PingReq)
    helpers = {send.to for send in asked}
    stranger = next(peer_id(n) for n in range(3, 9) if peer_id(n) not in helpers)
    for teller in (stranger, asked[0].to, asked[1].to, asked[0].to):
        me.receive(teller, Nack(asked[0].message.seq), 1.1)
    assert me.state(peer_id(2)) is ALIVE
    effects = me.receive(asked[2].to, Nack(asked[0].message.seq), 1.1)
    assert effects == [MemberChanged(peer_id(2), ALIVE, SUSPECT)]


def test_a_finished_exchange_answers_a_probe():
    me = acquainted(2)
    me.on_unlinked(peer_id(1), 1.0)  # it probes the member at once
    me.on_proof_of_life(peer_id(1), 1.1)
    tick_until(me, 3.0)
    assert me.state(peer_id(1)) is ALIVE


def test_who_cannot_be_dialled_is_probed_by_its_homes_alone():
    world = MemberWorld(2)
    world.swarm(6, run_s=1)
    hidden = world.start(9, seed=0, address=None, homes=(peer_id(0),))
    world.run(120)
    assert world.agreed()
    assert hidden.membership.me.incarnation == 1  # no member accused it
    hidden.power_off()
    world.until(lambda: world.states_of(hidden.id) == {DEAD}, 40)


def test_who_cannot_be_dialled_and_names_no_homes_is_probed_by_everybody():
    """Before, it refuted a suspicion through another member, vanished with that one, and stayed ALIVE to us."""
    me = acquainted(2, address=None)
    me.on_unlinked(peer_id(1), 1.0)
    me.receive(peer_id(2), Gossip((record_of(1, address=None, incarnation=3),)), 1.5)
    me.on_unlinked(peer_id(2), 2.0)
    while me.state(peer_id(1)) is not DEAD and me.deadline < 120.0:
        me.tick(me.deadline)
    assert me.state(peer_id(1)) is DEAD


# -- suspicions -------------------------------------------------------------------------------------------------------
def test_a_member_that_is_suspected_and_refutes_without_end_leaves_a_bounded_number_of_timers():
    world = World(1)
    watcher, other, first = world.start(), world.start(0), world.start(0)
    world.until(world.agreed, 30.0)
    states, now = watcher.peer.membership._states, world.now
    entry, earliest = states._table.entries[other.id], states._table.entries[first.id]
    states.change_state(earliest, earliest.record, SUSPECT, now)
    states._set_expiry(earliest, now + 1.0)  # In front of all stale ones, which it keeps there.
    longest = 0
    for number in range(1_000):
        states.change_state(entry, entry.record, SUSPECT, now)
        states._set_expiry(entry, now + 60.0 + number)
        states.change_state(entry, entry.record, ALIVE, now)
        longest = max(longest, len(states._suspicions))
    assert MIN_STALE <= longest <= 2 * len(states._table.entries) + MIN_STALE + 1
    states.change_state(entry, entry.record, SUSPECT, now)
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
    tick_until(me, began + answered_s)
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


# -- healing: a member that is held DEAD is dialled again, since only the network may have failed ---------------------
@pytest.mark.parametrize("is_link_lost", [True, False])
@pytest.mark.parametrize("silent_at", [5.0, 15.0, 25.0])
def test_the_only_other_member_is_dialled_a_probe_period_after_it_is_dead(silent_at, is_link_lost):
    """A link that a cut left open carries nothing until TCP sends again, and the warnings keep it from being idle."""
    me, dead_at, dialled_at = acquainted(1), None, []
    while me.deadline < silent_at + 60:
        now = me.deadline
        effects = me.tick(now)
        if now < silent_at:
            answer_pings(me, effects, now)
        if MemberChanged(peer_id(1), SUSPECT, DEAD) in effects:
            dead_at = now
            if is_link_lost:
                me.on_unlinked(peer_id(1), now)
        dialled_at += [now for effect in effects if isinstance(effect, Dial) and dead_at is not None]
    assert dialled_at[0] <= dead_at + 2.0
    assert max(after - before for before, after in itertools.pairwise(dialled_at)) <= 2.0 + 1e-9


def test_a_dead_member_that_answers_over_its_link_is_not_dialled():
    me = acquainted(1)
    me.receive(peer_id(1), Gossip((record_of(2), Hint(peer_id(2), 1, True, peer_id(1)))), 0.1)
    me.on_linked(peer_id(2), record_of(2), 0.2)
    dialled = []
    while me.deadline < 90:
        now = me.deadline
        me.receive(peer_id(2), Ping(1, ()), now)  # And yet it never refutes.
        effects = me.tick(now)
        dialled += [effect for effect in effects if isinstance(effect, Dial)]
        answer_pings(me, effects, now)
    assert me.state(peer_id(2)) is DEAD
    assert not dialled
