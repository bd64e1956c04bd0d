"""An exchange in doubt: it hinders no other, and it is resolved, given up or mixed late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossip.config import Config
from gossip.effects import MemberState, Mix, Release, Send, Snapshot
from gossip.exchange.session import State
from gossip.exchange.session_table import DOUBT_RETRY_S
from gossip.ids import PeerId
from gossip.wire.messages import Commit, Outcome, Settled
from tests.gossip.exchange.sides import A, B, C, D, Side, offer, verified
from tests.harness.world import World

OUTER = Config(outer_momentum=0.5, outer_rate=0.7)
OTHERS = [PeerId(bytes([100 + number]) * 16) for number in range(9)]


def doubting(side=None, now=1.0):
    """Return a side whose exchange with B lost its link between the two COMMITs."""
    side = verified(side)
    side.exchanges.on_unlinked(B, now)
    assert side.table[1].state is State.IN_DOUBT
    return side


def doubt(side, partner, session, now):
    """Leave in doubt, in the same way, an exchange that ``partner`` offered."""
    x = side.exchanges
    side.local.boundary_at = now
    assert x.on_offer(partner, offer(session), now) == [Snapshot(session)]
    x.on_snapshotted(session, now)
    assert x.on_streamed(session, 1.0, 1.0, now) == [Send(partner, Commit(session))]
    return x.on_unlinked(partner, now)


@pytest.mark.parametrize("config", [Config(), OUTER, Config(incoming_exchanges=1)])
def test_a_doubt_takes_no_slot(config):
    own = doubting(Side(partners=(B, C), config=config))
    own.partners = [C]
    assert own.exchanges.begin_mix(2.0) == [Snapshot(2)], "our own mix does not wait for the answer"
    asked = doubting(Side(partners=(B, C), config=config))
    assert asked.exchanges.on_offer(C, offer(8), 2.0) == [Snapshot(8)], "nor anybody's offer"
    assert asked.table[8].weight == 0.5, "what moves nothing shares the vector with nobody"


@pytest.mark.parametrize("answer", ["settled", "commit", "outcome"])
@pytest.mark.parametrize("config", [Config(), OUTER])
def test_a_late_yes_is_mixed(config, answer):
    x = doubting(Side(config=config)).exchanges
    if answer == "settled":
        ended = x.on_settled(B, Settled(1, True), 9.0)
    else:
        ended = x.on_commit(B, 1, 9.0) if answer == "commit" else x.on_outcome(B, 1, 9.0)
    assert ended[:2] == [Mix(1, 0.5), Release(1)]


def test_a_yes_in_time_is_mixed_as_ever():
    assert verified(Side(config=OUTER)).exchanges.on_commit(B, 1, 2.0) == [Mix(1, 0.5), Release(1)]


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
    swarm = World(config=Config(mix_every_steps=4, outer_momentum=0.5, outer_rate=0.7))
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


@pytest.mark.parametrize("answer", ["silence", "no"])
def test_who_says_no_commit_is_blamed_for_it_once(answer):
    """Back-off lasts longer for each failure: a second count at the end of the doubt would make one failure two."""
    side = verified()
    side.exchanges.tick(side.table[1].final_deadline)
    assert side.table[1].state is State.IN_DOUBT
    assert side.benched == [B]
    if answer == "no":
        ended = side.exchanges.on_settled(B, Settled(1, False), 40.0)
    else:
        ended = side.exchanges.tick(side.table[1].phase_began_at + side.exchanges.config.internal.doubt_s)
    assert ended == [Release(1)]
    assert side.benched == [B]


def test_one_that_was_restarted_knows_of_nothing_and_says_so_at_once():
    """The old outcome died with the weights. No member holds that mix, so the answer ends the doubt."""
    side, restarted = doubting(), Side(B)
    [asked] = side.exchanges.tick(1.0 + DOUBT_RETRY_S)
    [answered] = restarted.exchanges.on_outcome(A, asked.message.session, 2.1)
    assert answered == Send(A, Settled(1, False))
    assert side.exchanges.on_settled(B, answered.message, 2.2) == [Release(1)]
    assert side.benched == [B]


@pytest.mark.parametrize(("config", "most"), [(Config(), 3), (OUTER, 3), (Config(incoming_exchanges=4), 5)])
def test_doubts_are_as_many_as_can_be_under_way_and_the_oldest_is_dropped_for_another(config, most):
    side = Side(partners=(B, C, D), config=config)
    for number, partner in enumerate(OTHERS):
        ended = doubt(side, partner, 50 + number, float(number))
        oldest = [Release(50 + number - most)] if number >= most else []
        assert ended == [*oldest, Send(partner, Outcome(50 + number))]
        assert len(side.table) == min(number + 1, most)
    assert side.benched == OTHERS[:-most]
    assert len(side.exchanges.tick(float(len(OTHERS)) + DOUBT_RETRY_S)) == most


def test_one_that_makes_way_for_a_doubt_of_the_same_tick_is_asked_nothing():
    side = Side(config=replace(OUTER, incoming_exchanges=1))
    doubt(side, OTHERS[0], 50, 0.0)
    doubt(side, OTHERS[1], 51, 0.5)
    x = side.exchanges
    x.on_offer(OTHERS[2], offer(52), 0.6)
    x.on_snapshotted(52, 0.6)
    x.on_streamed(52, 1.0, 1.0, 0.6)
    x.table[52].timer_at = x.table[52].final_deadline = 1.0
    for session in (50, 51):
        x.table[session].timer_at = 1.0
    effects = x.tick(1.0)
    assert Release(50) in effects
    assert effects.index(Release(50)) > 0
    assert x.table.keys() == {51, 52}


def test_doubts_are_bounded_by_what_may_ever_be_under_way():
    """The limit covers all neighbours at once, including members in back-off at this moment."""
    side = Side(config=Config(partners=0, selection="ring"))
    side.max_incoming = lambda: 0
    assert side.exchanges.max_doubts == 64


def test_one_that_does_not_say_commit_is_counted_at_once_and_only_once():
    """A count at the end of the doubt would come minutes late, and a COMMIT that comes after all wastes nothing."""
    for says in (False, True):
        side = verified(Side(partners=(B,)))
        x = side.exchanges
        until = x.table[1].final_deadline
        x.tick(until)
        assert x.table[1].state is State.IN_DOUBT
        assert x.misbehaviour.levels[B, "wasted"][0] == 1.0
        if says:
            x.on_commit(B, 1, until + 1.0)
            assert (B, "wasted") not in x.misbehaviour.levels
            continue
        now = until
        while 1 in x.table:
            now = x.deadline
            x.tick(now)
        assert now >= until + x.config.internal.doubt_s
        assert x.misbehaviour.levels[B, "wasted"][0] == 1.0
