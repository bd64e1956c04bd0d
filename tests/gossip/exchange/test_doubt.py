"""An exchange in doubt: it hinders no other, and it is resolved, given up or mixed late."""

from dataclasses import replace

import pytest

from gossip.config import Config
from gossip.effects import MemberState, Mix, Release, Send, Snapshot
from gossip.exchange.session import State
from gossip.exchange.session_table import DOUBT_RETRY_S
from gossip.ids import PeerId
from gossip.wire.messages import Commit, Outcome, Settled
from tests.gossip.exchange.sides import OUTER, B, C, D, Side, offer, verified
from tests.harness.world import World

OTHERS = [PeerId(bytes([100 + number]) * 16) for number in range(9)]


def doubting(config=None, partners=(B, C)):
    """Return a side whose exchange with B lost its link between the two COMMITs."""
    side = verified(Side(config=config, partners=partners))
    side.exchanges.on_unlinked(B, 1.0)
    assert side.table[1].state is State.IN_DOUBT
    return side


def verify(side, partner, session, now):
    """Let the side send its COMMIT in an exchange that ``partner`` offered."""
    side.local.boundary_at = now
    side.answer(partner, session, now)
    assert side.exchanges.on_streamed(session, 1.0, 1.0, now) == [Send(partner, Commit(session))]


@pytest.mark.parametrize("config", [Config(), OUTER, Config(incoming_exchanges=1)])
def test_a_doubt_takes_no_slot(config):
    own = doubting(config)
    own.partners = [C]
    assert own.exchanges.begin_mix(2.0) == [Snapshot(2)], "our own mix does not wait for the answer"
    asked = doubting(config)
    assert asked.exchanges.on_offer(C, offer(8), 2.0) == [Snapshot(8)], "nor anybody's offer"
    assert asked.table[8].weight == 0.5, "what moves nothing shares the vector with nobody"


@pytest.mark.parametrize("answer", [Settled(1, True), Commit(1), Outcome(1)], ids=str)
@pytest.mark.parametrize("config", [Config(), OUTER])
def test_a_late_yes_is_mixed(config, answer):
    assert doubting(config).exchanges.receive(B, answer, 9.0)[:2] == [Mix(1, 0.5), Release(1)]


@pytest.mark.parametrize("state", list(MemberState))
def test_a_doubt_about_one_who_is_gone_ends_and_one_who_may_answer_is_asked_on(state):
    side = doubting()
    ended = side.exchanges.leave_lost_members({B: state}.get, 2.0)
    if state in (MemberState.DEAD, MemberState.LEFT):
        assert ended == [Release(1)]
        assert (side.exchanges.failures, side.benched) == (1, [B])
    else:
        assert ended == []
        assert side.table


def test_a_tick_ends_the_doubt_about_one_that_is_held_dead():
    swarm = World(config=replace(OUTER, mix_every_steps=4))
    a, b, c = swarm.swarm(3)
    swarm.until(lambda: swarm.agreed() and all(node.mixes for node in swarm.hosts), 30.0)
    swarm.until(swarm.quiet, 30.0)
    for node in (b, c):
        node.peer.schedule.retry_at = float("inf")
    a.peer.schedule.retry_at, a.peer.schedule.due_steps = swarm.now, 0
    swarm.until(lambda: any(one.state is State.STREAMING for one in a.peer.exchanges.table.values()), 5.0)
    exchange = next(one for one in a.peer.exchanges.table.values() if one.state is State.STREAMING)
    a.perform(a.peer.on_streamed(exchange.session, 1.0, 1.0, swarm.now))
    partner = swarm.by_id[exchange.partner]
    partner.crash()
    swarm.until(lambda: exchange.state is State.IN_DOUBT, 5.0)
    swarm.until(lambda: not a.peer.exchanges.table, 0.9 * swarm.config.internal.doubt_s)
    assert a.peer.membership.state(partner.id) is MemberState.DEAD


@pytest.mark.parametrize(("answer", "count"), [(None, 1), (Settled(1, False), 1), (Commit(1), 0)], ids=str)
def test_who_says_no_commit_in_time_is_blamed_for_it_at_once_and_only_once(answer, count):
    """Back-off lasts longer for each failure: a second count at the end of the doubt would make one failure two.

    A count at the end alone would come minutes late. A COMMIT that comes after all takes the misbehaviour back.
    """
    side = verified()
    x = side.exchanges
    until = side.table[1].final_deadline
    x.tick(until)
    assert side.table[1].state is State.IN_DOUBT
    assert side.benched == [B]
    assert x.misbehaviour.levels[B, "wasted"][0] == 1.0
    if answer is None:
        while x.deadline < until + x.config.internal.doubt_s:
            assert x.tick(x.deadline) == [Send(B, Outcome(1))]
        assert x.tick(x.deadline) == [Release(1)]
    else:
        assert Release(1) in x.receive(B, answer, until + 1.0)
    assert side.benched == [B]
    assert [level for level, *_ in x.misbehaviour.levels.values()] == [1.0] * count


@pytest.mark.parametrize(("config", "most"), [(Config(), 3), (OUTER, 3), (Config(incoming_exchanges=4), 5)])
def test_doubts_are_as_many_as_can_be_under_way_and_the_oldest_is_dropped_for_another(config, most):
    side = Side(partners=(B, C, D), config=config)
    for number, partner in enumerate(OTHERS):
        verify(side, partner, 50 + number, float(number))
        oldest = [Release(50 + number - most)] if number >= most else []
        assert side.exchanges.on_unlinked(partner, float(number)) == [*oldest, Send(partner, Outcome(50 + number))]
        assert len(side.table) == min(number + 1, most)
    assert side.benched == OTHERS[:-most]
    assert len(side.exchanges.tick(float(len(OTHERS)) + DOUBT_RETRY_S)) == most


def test_one_that_makes_way_for_a_doubt_of_the_same_tick_is_asked_nothing():
    side = Side(config=replace(OUTER, incoming_exchanges=1))
    x = side.exchanges
    for number in range(3):
        verify(side, OTHERS[number], 50 + number, 0.1 * number)
        if number < 2:
            x.on_unlinked(OTHERS[number], 0.1 * number)
    for session in (50, 51, 52):
        x.table[session].timer_at = x.table[session].final_deadline = 1.0
    effects = x.tick(1.0)
    assert Release(50) in effects
    assert effects.index(Release(50)) > 0
    assert x.table.keys() == {51, 52}


def test_doubts_are_bounded_by_what_may_ever_be_under_way():
    """The limit covers all neighbours at once, including members in back-off at this moment."""
    side = Side(config=Config(partners=0, selection="ring"))
    side.max_incoming = lambda: 0
    assert side.exchanges.max_doubts == 64
