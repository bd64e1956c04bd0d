"""The patience of an exchange: how long it waits for its partner, and which members need not wait meanwhile."""

import math
from dataclasses import replace

import pytest

from gossip.config import Config
from gossip.effects import Mix, Release, Send, Snapshot
from gossip.exchange.durations import MIN_WAIT_LIMIT_S, WAIT_PARTNERS, WAITS_PER_PARTNER, Waits
from gossip.exchange.session import State
from gossip.wire.messages import Abort, Busy, Refuse
from tests.gossip.exchange.sides import OUTER, A, B, C, D, E, F, Side, accept, offer, used_to
from tests.harness.configs import tuned
from tests.harness.world import World


def patience(*answers):
    it = Waits()
    for place, seconds in enumerate(answers):
        it.add((B, C, D, E)[place % 4], seconds)
    return it


def asking(*partners, stream_s=0.1, **config):
    """Return a side whose answers take 0.1 s, and which has asked the first of these partners."""
    side = used_to(Side(partners=partners, config=replace(OUTER, **config)), 0.1, stream_s)
    side.offer_mix()
    return side


def backgrounding(*partners):
    """Return a side whose offer to the first of these partners takes longer than usual, and takes no slot."""
    side = asking(*partners)
    assert side.exchanges.deadline == MIN_WAIT_LIMIT_S
    assert side.exchanges.used_slots == 1
    assert side.exchanges.tick(MIN_WAIT_LIMIT_S) == []
    assert side.exchanges.used_slots == 0
    return side


def answering_slow_streams():
    """Return a side that streams session 70, which F offered, when streams take 0.1 s."""
    side = used_to(Side(partners=(F, B), config=OUTER), 0.1)
    side.answer(F, 70)
    return side


def test_until_the_first_exchange_has_finished_one_waits_for_all_of_the_time():
    """If members lose every third exchange, a limit learned from four finished ones comes too late."""
    assert patience().limit_s == math.inf
    assert patience(0.1).limit_s == MIN_WAIT_LIMIT_S
    assert patience(2.0).limit_s == patience(2.0, 1.0).limit_s == 8.0
    assert patience(2.0, 1.0).median_s == math.inf
    assert patience(*[2.0] * 4).limit_s == 4.0
    assert patience(0.1, 0.7, 1.3, 1.9).limit_s >= 2.0, "a partner with steps of 2 s answers at its next boundary"


def test_with_steps_of_a_minute_an_answer_is_waited_for_as_long_as_ever():
    side = used_to(Side(partners=(F,)), 40.0)
    side.offer_mix()
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
    side = backgrounding(F, B, F)
    x = side.exchanges
    assert x.deadline == 5.0
    [sent] = side.offer_mix(0.6)
    assert sent.to == B
    assert x.tick(5.0) == [Send(F, Abort(1, "late")), Release(1)], "and its mix has another partner"
    assert side.benched == [F]
    assert not x.has_given_up


@pytest.mark.parametrize("answer", [Busy(1), Refuse(1, "late"), Abort(1, "late")], ids=str)
def test_what_is_backgrounded_asks_nobody_else(answer):
    x = backgrounding(F, B, C).exchanges
    x.begin_mix(0.6)
    assert x.receive(F, answer, 0.7) == [Release(1)]
    assert [one.partner for one in x.table.values()] == [A], "preparing for the next"


def test_only_so_many_are_backgrounded_as_there_are_places():
    """Each backgrounded exchange holds two vectors. The next silent partner keeps its slot until its time is up."""
    side = asking(B, C, D, E, stream_s=1.0, incoming_exchanges=1)
    x = side.exchanges
    for now in (0.0, 1.0, 2.0):
        x.tick(now + MIN_WAIT_LIMIT_S)
        if now < 2.0:
            side.offer_mix(now + 1.0)
    assert x.backgrounded_count == x.max_backgrounded == 2
    assert x.used_slots == 1
    assert x.begin_mix(3.0) == []
    x.tick(5.0)
    assert x.backgrounded_count == 1


def test_an_offer_from_one_that_has_not_answered_ours_is_taken():
    """Our offer may be lost. If it waited for its answer, two sides that were cut off would say BUSY to each other."""
    x = asking(F).exchanges
    assert A < F
    assert x.on_offer(F, offer(70), 0.1) == [Send(F, Busy(70))], "ours is the exchange"
    x.tick(MIN_WAIT_LIMIT_S)
    assert x.on_offer(F, offer(71), 0.6) == [Snapshot(71)]
    assert 1 in x.table


def test_one_that_has_not_answered_is_asked_again_where_there_is_nobody_else():
    side = backgrounding(F)
    side.offer_mix(0.6)
    assert [one.partner for one in side.table.values()] == [F, F]


def test_a_stream_that_takes_too_long_takes_no_slot():
    """Other members need not wait for a partner that streams nothing, too slowly, or never says COMMIT."""
    side = answering_slow_streams()
    x = side.exchanges
    assert x.table[70].state is State.STREAMING
    x.tick(0.4)
    assert x.used_slots == 1
    x.tick(MIN_WAIT_LIMIT_S)
    assert x.used_slots == 0
    assert x.on_offer(F, offer(71), 0.6) == [Send(F, Busy(71))], "not a second one beside it"
    [begun] = x.begin_mix(0.6)
    assert isinstance(begun, Snapshot)
    assert side.complete(F, 70, 0.9)[-2:] == [Mix(70, 0.5), Release(70)]


@pytest.mark.parametrize("changes", [{"partners": 0, "selection": "ring"}, {"max_version_gap": 0.0}], ids=str)
def test_a_mix_that_the_loop_waits_for_waits_for_streams_and_for_no_silent_partner(changes):
    side = used_to(Side(config=Config(**changes, mix_every_steps=8)), 0.1)
    x, side.count_own_mix = side.exchanges, lambda: 1
    side.offer_mix()
    x.on_accept(B, accept(), 0.1)
    x.tick(0.1 + MIN_WAIT_LIMIT_S)
    assert x.used_slots == 1
    x.on_streamed(1, 1.0, 1.0, 0.7)
    x.tick(x.deadline)
    assert x.table[1].state is State.IN_DOUBT
    side.offer_mix(1.0)
    assert Send(B, Abort(2, "late")) in x.tick(1.0 + MIN_WAIT_LIMIT_S)
    assert (x.used_slots, side.benched) == (0, [B, B])


def test_an_accept_without_a_stream_teaches_nothing():
    side = Side()
    for session in range(1, 9):
        side.offer_mix()
        side.exchanges.on_accept(B, accept(session), 4.0)
        side.exchanges.on_failed(session, "stalled", 7.0)
    assert side.exchanges.answer_waits.waits_s == side.exchanges.stream_waits.waits_s == {}


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
    side = used_to(Side(), 0.1)
    x, side.strangers = side.exchanges, [E, F]
    assert x.on_offer(E, offer(70), 0.0) == [Snapshot(70)]
    assert x.on_offer(F, offer(71), 0.1) == [Send(F, Busy(71))]
    assert x.on_offer(C, offer(72), 0.2) == [Snapshot(72)]
    x.on_abort(E, 70, "late", 0.3)
    side.wary_until = 5.0
    assert x.on_offer(F, offer(73), 0.4) == [Send(F, Busy(73))]
    side.local.boundary_at = 5.0
    assert x.on_offer(F, offer(74), 5.0) == [Snapshot(74)]
