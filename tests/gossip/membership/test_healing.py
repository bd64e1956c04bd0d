"""Healing: members that are held DEAD are dialled again, since only the network may have failed."""

import itertools

import pytest

from gossip.effects import Dial, MemberChanged, MemberState
from gossip.wire.messages import Ack, Gossip, Hint, Ping
from tests.gossip.membership.members import acquainted, peer_id, record_of, sent

SUSPECT, DEAD = MemberState.SUSPECT, MemberState.DEAD


@pytest.mark.parametrize("is_link_lost", [True, False])
@pytest.mark.parametrize("silent_at", [5.0, 15.0, 25.0])
def test_the_only_other_member_is_dialled_a_probe_period_after_it_is_dead(silent_at, is_link_lost):
    """A link that a cut left open carries nothing until TCP sends again, and the warnings keep it from being idle."""
    me, dead_at, dialled_at = acquainted(1), None, []
    while me.deadline < silent_at + 60:
        now = me.deadline
        effects = me.tick(now)
        if now < silent_at:
            for send in sent(effects, Ping):
                me.receive(send.to, Ack(send.message.seq, ()), now)
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
        for send in sent(effects, Ping):
            me.receive(send.to, Ack(send.message.seq, ()), now)
    assert me.state(peer_id(2)) is DEAD
    assert not dialled
