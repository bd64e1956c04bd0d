"""The patience of an exchange: how long it waits for its partner, and which members need not wait meanwhile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gossip.config import Config
from gossip.effects import Mix, Release, Send, Snapshot
from gossip.exchange.durations import MIN_WAIT_LIMIT_S, WAIT_PARTNERS, WAITS_PER_PARTNER, Waits
from gossip.exchange.session import State
from gossip.wire.messages import Abort, Accept, Busy
from tests.gossip.exchange.sides import A, B, C, D, E, F, Side, offer
from tests.harness.configs import tuned
from tests.harness.world import World

OUTER = Config(outer_momentum=0.5, outer_rate=0.7)


def patience(*answers, partners=(B, C, D, E)):
    it = Waits()
    for place, seconds in enumerate(answers):
        it.add(partners[place % len(partners)], seconds)
    return it


def used_to(side, seconds, stream_s=None):
    for partner in (B, C, D, E):
        side.exchanges.answer_waits.add(partner, seconds)
        side.exchanges.stream_waits.add(partner, seconds if stream_s is None else stream_s)
    return side


def test_until_the_first_exchange_has_finished_one_waits_for_all_of_the_time():
    """If members lose every third exchange, a limit learned from four finished ones comes too late."""
    assert patience().limit_s == math.inf
    assert patience(0.1).limit_s == MIN_WAIT_LIMIT_S
    assert patience(2.0).limit_s == patience(2.0, 1.0).limit_s == 8.0
    assert patience(2.0, 1.0).median_s == math.inf
    assert patience(*[2.0] * 4).limit_s == 4.0


def test_whoever_waits_for_a_step_boundary_is_waited_for():
    """Answers take between nothing and a step of 2 s."""
    assert patience(0.1, 0.7, 1.3, 1.9).limit_s >= 2.0


def test_with_steps_of_a_minute_an_answer_is_waited_for_as_long_as_ever():
    side = used_to(Side(partners=(F,)), 40.0)
    side.exchanges.begin_mix(0.0)
    side.exchanges.on_snapshotted(1, 0.0)
    assert side.exchanges.deadline == side.exchanges.config.reply_timeout_s


def test_who_answers_often_and_late_has_nobody_wait_for_longer():
    it = patience(*[0.1] * 12)
    for _ in range(100):
        it.add(F, 4.0)
    assert it.limit_s == MIN_WAIT_LIMIT_S
    assert len(it.waits_s[F]) == WAITS_PER_PARTNER


def test_what_is_remembered_is_bounded():
    it = Waits()
    for number in range(10 * WAIT_PARTNERS):
        it.add(number, 0.1)
    assert len(it.waits_s) == WAIT_PARTNERS


def test_a_silent_one_takes_no_slot_and_is_waited_for_all_the_same():
    side = used_to(Side(partners=(F, B, F), config=OUTER), 0.1)
    x = side.exchanges
    x.begin_mix(0.0)
    x.on_snapshotted(1, 0.0)
    assert x.deadline == MIN_WAIT_LIMIT_S
    assert x.used_slots == 1
    assert x.tick(MIN_WAIT_LIMIT_S) == []
    assert x.used_slots == 0
    assert x.deadline == 5.0
    x.begin_mix(0.6)
    x.on_snapshotted(2, 0.6)
    assert x.table[2].partner == B
    assert x.tick(5.0) == [Send(F, Abort(1, "late")), Release(1)], "and its mix has another partner"
    assert side.benched == [F]
    assert not x.has_given_up


def test_a_late_answer_is_an_exchange_and_counts():
    side = used_to(Side(partners=(F, B), config=OUTER), 0.1)
    x = side.exchanges
    x.begin_mix(0.0)
    x.on_snapshotted(1, 0.0)
    x.tick(MIN_WAIT_LIMIT_S)
    x.begin_mix(0.6)
    x.on_snapshotted(2, 0.6)
    [transfer] = x.on_accept(F, Accept(1, 0.0, 0.5, "fp32"), 2.0)
    assert transfer.session == 1
    assert x.used_slots == 1, "the other one's"
    x.on_streamed(1, 1.0, 1.0, 2.1)
    assert x.on_commit(F, 1, 2.2) == [Mix(1, 0.5), Release(1)]
    assert side.benched == []
    assert side.exchanges.mixed_partners == [F], "it is alive, and a mix is a mix"


@pytest.mark.parametrize("answer", ["busy", "refuse", "abort"])
def test_what_is_backgrounded_asks_nobody_else(answer):
    side = used_to(Side(partners=(F, B, C), config=OUTER), 0.1)
    x = side.exchanges
    x.begin_mix(0.0)
    x.on_snapshotted(1, 0.0)
    x.tick(MIN_WAIT_LIMIT_S)
    x.begin_mix(0.6)
    tell = {"busy": x.on_busy, "refuse": x.on_refuse, "abort": lambda *at: x.on_abort(F, 1, "late", at[-1])}[answer]
    assert tell(F, 1, 0.7) == [Release(1)]
    assert [one.partner for one in x.table.values()] == [A], "preparing for the next"


def test_only_so_many_are_backgrounded_as_there_are_places():
    """Each backgrounded exchange holds two vectors. The next silent partner keeps its slot until its time is up."""
    side = used_to(Side(partners=(B, C, D, E), config=replace(OUTER, incoming_exchanges=1)), 0.1, stream_s=1.0)
    x = side.exchanges
    for place in range(3):
        x.begin_mix(1.0 * place)
        x.on_snapshotted(place + 1, 1.0 * place)
        x.tick(1.0 * place + MIN_WAIT_LIMIT_S)
    assert x.backgrounded_count == x.max_backgrounded == 2
    assert x.used_slots == 1
    assert x.begin_mix(3.0) == []
    x.tick(5.0)
    assert x.backgrounded_count == 1


def test_an_offer_from_one_that_has_not_answered_ours_is_taken():
    """Our offer may be lost. If it waited for its answer, two sides that were cut off would say BUSY to each other."""
    side = used_to(Side(partners=(F,), config=OUTER), 0.1)
    x = side.exchanges
    x.begin_mix(0.0)
    x.on_snapshotted(1, 0.0)
    assert A < F
    assert x.on_offer(F, offer(70), 0.1) == [Send(F, Busy(70))], "ours is the exchange"
    x.tick(MIN_WAIT_LIMIT_S)
    assert x.on_offer(F, offer(71), 0.6) == [Snapshot(71)]
    assert 1 in x.table


def test_one_that_has_not_answered_is_asked_again_where_there_is_nobody_else():
    side = used_to(Side(partners=(F,), config=OUTER), 0.1)
    x = side.exchanges
    x.begin_mix(0.0)
    x.on_snapshotted(1, 0.0)
    x.tick(MIN_WAIT_LIMIT_S)
    x.begin_mix(0.6)
    x.on_snapshotted(2, 0.6)
    assert [one.partner for one in x.table.values()] == [F, F]


def test_a_stream_that_takes_too_long_takes_no_slot():
    """Other members need not wait for a partner that streams nothing, too slowly, or never says COMMIT."""
    side = used_to(Side(partners=(F, B), config=OUTER), 0.1)
    x = side.exchanges
    x.on_offer(F, offer(70), 0.0)
    x.on_snapshotted(70, 0.0)
    assert x.table[70].state is State.STREAMING
    x.tick(0.4)
    assert x.used_slots == 1
    x.tick(MIN_WAIT_LIMIT_S)
    assert x.used_slots == 0
    assert x.on_offer(F, offer(71), 0.6) == [Send(F, Busy(71))], "not a second one beside it"
    [begun] = x.begin_mix(0.6)
    assert isinstance(begun, Snapshot)
    x.on_streamed(70, 1.0, 1.0, 0.8)
    assert x.on_commit(F, 70, 0.9) == [Mix(70, 0.5), Release(70)]


@pytest.mark.parametrize("streamed", [True, False])
def test_what_is_backgrounded_fails_when_its_time_is_up(streamed):
    side = used_to(Side(partners=(F, B), config=OUTER), 0.1)
    x = side.exchanges
    x.on_offer(F, offer(70), 0.0)
    x.on_snapshotted(70, 0.0)
    until = x.table[70].final_deadline
    x.tick(MIN_WAIT_LIMIT_S)
    assert x.deadline == until
    if streamed:
        x.on_streamed(70, 1.0, 1.0, 0.8)
    x.tick(until - 0.01)
    assert 70 in x.table
    x.tick(x.deadline)
    assert x.table[70].state is State.IN_DOUBT if streamed else 70 not in x.table
    assert side.benched == [F]


@pytest.mark.parametrize("changes", [{"partners": 0, "selection": "ring"}, {"max_version_gap": 0.0}])
def test_a_mix_that_the_loop_waits_for_waits_for_streams_and_for_no_silent_partner(changes):
    side = used_to(Side(partners=(B,), config=Config(**changes, mix_every_steps=8)), 0.1)
    x, side.count_own_mix = side.exchanges, lambda: 1
    x.begin_mix(0.0)
    x.on_snapshotted(1, 0.0)
    x.on_accept(B, Accept(1, 0.0, 0.5, "fp32"), 0.1)
    x.tick(0.1 + MIN_WAIT_LIMIT_S)
    assert x.used_slots == 1
    x.on_streamed(1, 1.0, 1.0, 0.7)
    x.tick(x.deadline)
    assert x.table[1].state is State.IN_DOUBT
    x.begin_mix(1.0)
    x.on_snapshotted(2, 1.0)
    assert Send(B, Abort(2, "late")) in x.tick(1.0 + MIN_WAIT_LIMIT_S)
    assert (x.used_slots, side.benched) == (0, [B, B])


def test_an_accept_without_a_stream_teaches_nothing():
    side = Side(partners=(B,))
    for place in range(8):
        session = place + 1
        side.exchanges.begin_mix(0.0)
        side.exchanges.on_snapshotted(session, 0.0)
        side.exchanges.on_accept(B, Accept(session, 0.0, 0.5, "fp32"), 4.0)
        side.exchanges.on_failed(session, "stalled", 7.0)
    assert side.exchanges.answer_waits.waits_s == side.exchanges.stream_waits.waits_s == {}


@pytest.mark.parametrize(("seconds", "taken"), [(0.15, False), (0.25, True)])
def test_an_offer_takes_the_place_of_ours_once_ours_waits_for_longer_than_answers_take(seconds, taken):
    """Long streams leave one slot, and we wait for half a second, long after the usual 0.1 s of an answer."""
    side = used_to(Side(partners=(F, B), config=OUTER), 0.1, stream_s=1.0)
    x = side.exchanges
    x.begin_mix(0.0)
    x.on_snapshotted(1, 0.0)
    assert x.deadline == MIN_WAIT_LIMIT_S
    answer = x.on_offer(C, offer(70), seconds)
    if not taken:
        assert answer == [Send(C, Busy(70))]
        assert x.table[1].state is State.OFFERED
        return
    assert answer == [Snapshot(70)]
    assert side.benched == []
    [transfer] = x.on_accept(F, Accept(1, 0.0, 0.5, "fp32"), 0.7)
    assert transfer.session == 1


def test_an_offer_that_is_not_taken_leaves_ours_where_it_is():
    side = used_to(Side(partners=(F, B), config=OUTER), 0.1)
    x = side.exchanges
    x.begin_mix(0.0)
    x.on_snapshotted(1, 0.0)
    side.declined.append(C)
    assert x.on_offer(C, offer(70), 0.4) == [Send(C, Busy(70))]
    assert x.table[1].state is State.OFFERED
    assert side.benched == []


@pytest.mark.parametrize("config", [OUTER, Config()], ids=["outer momentum", "plain"])
def test_a_far_one_among_near_ones_mixes(config):
    """The far member's answers take 2 s and more, the others' 0.1 s."""

    swarm = World(5, config=tuned(config, bench_s=5.0))
    *_, far = nodes = swarm.swarm(5)
    swarm.network.latency = lambda a, b: 1.0 if far in (a, b) else 0.01
    swarm.run(150.0)
    assert any(far.id in node.peer.exchanges.answer_waits.waits_s for node in nodes[:4]), (
        "asked by near ones it is heard"
    )
    assert [kind for node in nodes for kind in node.kinds if kind == "suspicious"] == [], "being far is no misconduct"
    assert len(far.mixes) > 30, (
        "in 300 s 86 with the outer step while everybody waited 5 s; then the near ones had 71, now 319"
    )
    assert sum(len(node.mixes) for node in nodes[:4]) > 500


def test_strangers_with_whom_exchanges_fail_have_one_at_a_time():
    side = used_to(Side(partners=(B,)), 0.1)
    x, side.strangers = side.exchanges, [E, F]
    assert x.on_offer(E, offer(70), 0.0) == [Snapshot(70)]
    assert x.on_offer(F, offer(71), 0.1) == [Send(F, Busy(71))]
    assert x.on_offer(C, offer(72), 0.2) == [Snapshot(72)]
    x.on_abort(E, 70, "late", 0.3)
    side.wary_until = 5.0
    assert x.on_offer(F, offer(73), 0.4) == [Send(F, Busy(73))]
    side.local.boundary_at = 5.0
    assert x.on_offer(F, offer(74), 5.0) == [Snapshot(74)]
