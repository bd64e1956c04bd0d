"""A process that is stopped and goes on, like a laptop whose lid was closed."""

from gossip.effects import MemberChanged, MemberState
from gossip.wire.messages import Gossip, Hint, Ping
from tests.gossip.membership.members import acquainted, peer_id

SUSPECT, DEAD = MemberState.SUSPECT, MemberState.DEAD
SLEPT_S = 30.0
MESSAGES = 50  # messages that waited in its sockets


def test_a_sleep_counts_once_however_many_messages_waited():
    me = acquainted(8)
    me.receive(peer_id(1), Gossip(tuple(Hint(peer_id(2), 1, False, peer_id(by)) for by in (1, 3))), 0.1)
    wakes = me.deadline + SLEPT_S
    effects = []
    for number in range(MESSAGES):
        effects += me.receive(peer_id(1), Ping(number, ()), wakes + 0.001 * number)
    assert me.state(peer_id(2)) is SUSPECT
    while me.deadline < wakes + 40:
        effects += me.tick(me.deadline)
    assert MemberChanged(peer_id(2), SUSPECT, DEAD) in effects
