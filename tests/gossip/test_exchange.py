"""One exchange from offer to commit: agreed, streamed, committed by both or by neither, whatever breaks when."""

from __future__ import annotations

import random
from collections import deque
from fractions import Fraction

import pytest

from gossip.config import Config
from gossip.effects import Mix, Release, Send, Snapshot, Transfer
from gossip.exchange import DOUBT_RETRY_S, TRIES, VERDICTS, Exchanges, Local, State
from gossip.ids import PeerId
from gossip.messages import Abort, Accept, Busy, Commit, Offer, Outcome, Refuse, Settled
from tests.gossip.swarm_harness import Swarm

A, B, C, D, E, F = (PeerId(bytes([65 + i]) * 16) for i in range(6))
ELEMENTS = 100


class Side:
    """An :class:`Exchanges` with a scripted choice of partners."""

    def __init__(self, me=A, partners=(B,), config=None, first_session=1, **local):
        self.me, self.partners = me, list(partners)
        fields = {"genesis": b"g" * 16, "ready": True} | local
        self.local = Local("f", ELEMENTS, 10, **fields)
        self.config = config or Config()
        self.sessions = iter(range(first_session, 1000))
        self.benched = []
        self.exchanges = Exchanges(
            me,
            self.local,
            self.config,
            lambda: next(self.sessions),
            self.choose,
            lambda peer, now: self.benched.append(peer),
        )

    def choose(self, asked, now):
        return next((peer for peer in self.partners if peer not in asked), None)

    @property
    def table(self):
        return self.exchanges.table


def offer(session=7, weight=0.5, version=0.0, fingerprint="f", genesis=b"g" * 16, codec="fp32", keys=()):
    return Offer(session, fingerprint, genesis, version, weight, codec, keys)


def streaming(side=None, session=1, weight=0.5):
    """A side whose own exchange with B streams."""
    side = side or Side()
    side.exchanges.begin(0.0)
    side.exchanges.snapshotted(session, 0.0)
    assert [type(e) for e in side.exchanges.on_accept(B, Accept(session, 0.0, weight, (), "fp32"), 0.0)] == [Transfer]
    return side


def verified(side=None):
    side = streaming(side)
    assert side.exchanges.streamed(1, 1.0, 1.0, 1.0) == [Send(B, Commit(1))]
    return side


def answering(side=None, session=7):
    """A side that streams an exchange which B offered."""
    side = side or Side()
    assert side.exchanges.on_offer(B, offer(session), 0.0) == [Snapshot(session, False)]
    side.exchanges.snapshotted(session, 0.0)
    return side


# -- the happy path --------------------------------------------------------------------------------------------------
def test_the_initiator_snapshots_offers_streams_commits_and_mixes():
    side = Side(version=2.0)
    x = side.exchanges
    assert x.begin(0.0) == [Snapshot(1, False)]
    assert x.snapshotted(1, 0.1) == [Send(B, Offer(1, "f", b"g" * 16, 2.0, 0.5, "fp32", ()))]
    [transfer] = x.on_accept(B, Accept(1, 4.0, 0.25, (), "fp32"), 0.2)
    assert (transfer.session, transfer.partner, transfer.full) == (1, B, False)
    assert x.streamed(1, 1.0, 1.0, 0.3) == [Send(B, Commit(1))]
    assert x.on_commit(B, 1, 0.4) == [Mix(1, 0.25), Release(1)]
    assert (x.done, x.last_partner, x.table, x.outgoing, side.benched) == (1, B, {}, None, [])
    assert side.local.version == 2.5


def test_the_responder_snapshots_accepts_streams_commits_and_mixes():
    side = Side(version=4.0)
    x = side.exchanges
    assert x.on_offer(B, offer(7, version=1.0), 0.0) == [Snapshot(7, False)]
    weight = 0.25  # 1/2 (1 + 3)^-1/2
    accept, transfer = x.snapshotted(7, 0.1)
    assert accept == Send(B, Accept(7, 4.0, weight, (), "fp32"))
    assert isinstance(transfer, Transfer)
    assert x.on_commit(B, 7, 0.2) == []
    assert x.streamed(7, 1.0, 1.0, 0.3) == [Send(B, Commit(7)), Mix(7, weight), Release(7)]
    assert x.table == {}
    assert side.local.version == 4.0 + weight * (1.0 - 4.0)


def test_the_version_moves_by_what_was_exchanged_whatever_steps_were_taken_meanwhile():
    a, b = Side(A, version=2.0), Side(B, version=4.0)
    a.exchanges.begin(0.0)
    [offered] = a.exchanges.snapshotted(1, 0.0)
    b.exchanges.on_offer(A, offered.message, 0.0)
    accepted, _ = b.exchanges.snapshotted(1, 0.0)
    a.exchanges.on_accept(B, accepted.message, 0.0)
    a.local.version += 10.0
    b.local.version += 1.0
    for side, other in ((a, B), (b, A)):
        side.exchanges.streamed(1, 1.0, 1.0, 0.0)
        assert side.exchanges.on_commit(other, 1, 0.0)
    assert a.local.version - 12.0 == -(b.local.version - 5.0) != 0.0


def test_one_own_exchange_at_a_time():
    side = streaming()
    assert side.exchanges.begin(1.0) == []


# -- asking another --------------------------------------------------------------------------------------------------
def test_a_busy_partner_is_followed_by_others_with_the_same_snapshot():
    side = Side(partners=(B, C, D, E, F))
    x = side.exchanges
    x.begin(0.0)
    asked = x.snapshotted(1, 0.0)
    for partner in (B, C, D, E):
        assert asked == [Send(partner, offer(1))]
        asked = x.on_busy(partner, 1, 0.1)
    assert TRIES == 4
    assert asked == [Release(1)]
    assert x.gave_up
    assert side.benched == []
    assert x.table == {}


def test_a_refusal_and_silence_bench_the_partner_and_ask_the_next():
    side = Side(partners=(B, C, D))
    x = side.exchanges
    x.begin(0.0)
    x.snapshotted(1, 0.0)
    assert x.on_refuse(B, 1, 0.1) == [Send(C, offer(1))]
    assert x.deadline == 0.1 + side.config.reply_timeout_s
    assert x.tick(x.deadline - 0.001) == []
    assert x.tick(x.deadline) == [Send(C, Abort(1, "late")), Send(D, offer(1))]
    assert side.benched == [B, C]


def test_an_answer_from_one_who_is_not_asked_any_more_changes_nothing():
    side = Side(partners=(B, C))
    x = side.exchanges
    x.begin(0.0)
    x.snapshotted(1, 0.0)
    x.on_busy(B, 1, 0.1)
    assert x.on_accept(B, Accept(1, 0.0, 0.5, (), "fp32"), 0.2) == [Send(B, Abort(1, "late"))]
    assert x.on_busy(B, 1, 0.2) == x.on_refuse(B, 1, 0.2) == x.on_abort(B, 1, "no", 0.2) == x.on_commit(B, 1, 0.2) == []
    assert x.table[1].partner == C
    assert x.table[1].state is State.OFFERED


@pytest.mark.parametrize(
    "accept", [Accept(1, 0.0, 0.6, (), "fp32"), Accept(1, 0.0, 0.0, (), "fp32"), Accept(1, 0.0, 0.5, ("m",), "fp32")]
)
def test_terms_that_were_not_offered_end_the_exchange(accept):
    side = Side()
    side.exchanges.begin(0.0)
    side.exchanges.snapshotted(1, 0.0)
    assert side.exchanges.on_accept(B, accept, 0.1) == [Send(B, Abort(1, "terms")), Release(1)]
    assert side.benched == [B]


# -- refusing --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "code"),
    [({"fingerprint": "x"}, "layout"), ({"genesis": b"x" * 16}, "genesis"), ({"codec": "zip"}, "codec")],
)
def test_an_offer_for_other_weights_is_refused(changes, code):
    side = Side()
    assert side.exchanges.on_offer(B, offer(**changes), 0.0) == [Send(B, Refuse(7, code))]
    assert side.table == {}


def test_a_peer_that_is_not_ready_refuses():
    assert Side(ready=False).exchanges.on_offer(B, offer(), 0.0) == [Send(B, Refuse(7, "genesis"))]


@pytest.mark.parametrize("weight", [0.0, -0.5, 0.51, 1e9])
def test_an_offer_of_an_impossible_weight_is_not_taken(weight):
    assert Side().exchanges.on_offer(B, offer(weight=weight), 0.0) == [Send(B, Busy(7))]


def test_a_peer_whose_training_loop_stands_still_is_busy():
    side = Side(boundary_at=0.0)
    patience = side.config.boundary_patience_s
    assert side.exchanges.on_offer(B, offer(), patience + 0.1) == [Send(B, Busy(7))]
    assert side.exchanges.on_offer(B, offer(), patience) == [Snapshot(7, False)]
    assert side.exchanges.tick(2 * patience) == [Send(B, Busy(7)), Release(7)]  # it stopped after the offer
    assert side.table == {}


def test_two_incoming_exchanges_at_once_and_the_third_is_busy():
    side = Side()
    assert side.exchanges.on_offer(B, offer(7), 0.0) == [Snapshot(7, False)]
    assert side.exchanges.on_offer(C, offer(8), 0.0) == [Snapshot(8, False)]
    assert side.exchanges.on_offer(D, offer(9), 0.0) == [Send(D, Busy(9))]
    assert side.exchanges.on_offer(D, offer(8), 0.0) == [Send(D, Busy(8))]
    assert side.table[8].partner == C


def test_one_incoming_beside_an_own_offer_counts_as_one():
    side = Side(config=Config(incoming_exchanges=1))
    side.exchanges.begin(0.0)
    side.exchanges.snapshotted(1, 0.0)
    assert side.exchanges.on_offer(C, offer(8), 0.0) == [Snapshot(8, False)]
    assert side.exchanges.on_offer(D, offer(9), 0.0) == [Send(D, Busy(9))]


def test_with_outer_momentum_there_is_one_exchange_at_a_time():
    config = Config(outer_momentum=0.5, outer_rate=0.7)
    side = Side(config=config)
    side.exchanges.on_offer(B, offer(7), 0.0)
    assert side.exchanges.on_offer(C, offer(8), 0.0) == [Send(C, Busy(8))]
    assert side.exchanges.begin(0.0) == []
    other = streaming(Side(config=config))
    assert other.exchanges.on_offer(C, offer(8), 0.0) == [Send(C, Busy(8))]


# -- two who ask each other ------------------------------------------------------------------------------------------
def test_an_offer_that_comes_while_ours_is_prepared_takes_its_place():
    side = Side()
    side.exchanges.begin(0.0)
    assert side.exchanges.on_offer(C, offer(8), 0.0) == [Release(1), Snapshot(8, False)]
    assert side.exchanges.outgoing is None


def test_a_busy_answer_leaves_our_own_offer_alone():
    side = Side(boundary_at=-100.0)
    side.exchanges.begin(0.0)
    assert side.exchanges.on_offer(C, offer(8), 0.0) == [Send(C, Busy(8))]
    assert side.exchanges.outgoing is not None
    crossing = Side(B, partners=(A, C), boundary_at=-100.0)
    crossing.exchanges.begin(0.0)
    crossing.exchanges.snapshotted(1, 0.0)
    assert crossing.exchanges.on_offer(A, offer(8), 0.0) == [Send(A, Busy(8))]
    assert crossing.exchanges.outgoing is not None


def test_two_offers_that_cross_make_exactly_one_exchange():
    a, b = Side(A, partners=(B,)), Side(B, partners=(A,), first_session=2)
    for side, session in ((a, 1), (b, 2)):
        side.exchanges.begin(0.0)
        side.exchanges.snapshotted(session, 0.0)
    assert a.exchanges.on_offer(B, offer(2), 0.1) == [Send(B, Busy(2))]
    assert b.exchanges.on_offer(A, offer(1), 0.1) == [Release(2), Snapshot(1, False)]
    assert b.exchanges.on_busy(A, 2, 0.2) == []
    assert b.exchanges.snapshotted(2, 0.2) == []
    accept, _ = b.exchanges.snapshotted(1, 0.2)
    assert [type(e) for e in a.exchanges.on_accept(B, accept.message, 0.3)] == [Transfer]
    assert (list(a.table), list(b.table)) == ([1], [1])


# -- late and twice --------------------------------------------------------------------------------------------------
def test_late_messages_change_nothing():
    side = verified()
    x = side.exchanges
    x.on_commit(B, 1, 2.0)
    before = (x.done, x.failures, side.local.version)
    assert x.on_accept(B, Accept(1, 0.0, 0.5, (), "fp32"), 3.0) == [Send(B, Abort(1, "late"))]
    late = (x.on_commit(B, 1, 3.0), x.on_abort(B, 1, "norm", 3.0), x.on_busy(B, 1, 3.0), x.on_refuse(B, 1, 3.0),
            x.on_settled(B, Settled(1, False), 3.0), x.streamed(1, 1.0, 1.0, 3.0), x.snapshotted(1, 3.0),
            x.failed(1, "broken", 3.0), x.unlinked(B, 3.0), x.tick(99.0))  # fmt: skip
    assert late == ([],) * 10
    assert (x.done, x.failures, side.local.version, x.table) == (*before, {})


@pytest.mark.parametrize("make", [streaming, verified])
def test_an_accept_said_twice_is_not_answered_with_an_abort(make):
    side = make()
    state = side.table[1].state
    assert side.exchanges.on_accept(B, Accept(1, 9.0, 0.1, (), "fp32"), 1.0) == []
    assert (side.table[1].state, side.table[1].weight) == (state, 0.5)


def test_nobody_but_the_partner_moves_an_exchange():
    side = verified()
    x = side.exchanges
    assert x.on_commit(C, 1, 1.0) == x.on_abort(C, 1, "norm", 1.0) == x.on_settled(C, Settled(1, True), 1.0) == []
    assert x.on_outcome(C, 1, 1.0) == [Send(C, Settled(1, False))]
    assert side.table[1].state is State.VERIFIED


# -- failing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("difference_sq", "own_sq", "code"),
    [(float("nan"), 1.0, "not-finite"), (float("inf"), 1.0, "not-finite"), (1.0, float("nan"), "not-finite"),
     (1e9, 1.0, "norm")],
)  # fmt: skip
def test_a_vector_that_is_refused_leaves_both_sides_as_they_were(difference_sq, own_sq, code):
    a, b = streaming(Side(A)), Side(B)
    assert b.exchanges.on_offer(A, offer(1), 0.0) == [Snapshot(1, False)]
    b.exchanges.snapshotted(1, 0.0)
    assert b.exchanges.streamed(1, 1.0, 1.0, 1.0) == [Send(A, Commit(1))]
    assert a.exchanges.on_commit(B, 1, 1.0) == []
    assert a.exchanges.streamed(1, difference_sq, own_sq, 1.0) == [Send(B, Abort(1, code)), Release(1)]
    assert b.exchanges.on_abort(A, 1, code, 1.1) == [Release(1)]
    assert (a.exchanges.done, b.exchanges.done, a.exchanges.refused, a.benched, b.benched) == (0, 0, 1, [B], [A])


def test_a_transfer_that_stalls_or_brings_wrong_bytes_is_told_to_the_partner():
    side = streaming()
    assert side.exchanges.failed(1, "checksum", 1.0) == [Send(B, Abort(1, "checksum")), Release(1)]
    side = streaming()
    assert side.exchanges.tick(side.exchanges.deadline) == [Send(B, Abort(1, "deadline")), Release(1)]
    assert side.benched == [B]


def test_a_link_that_breaks_ends_an_exchange_in_every_state_but_after_our_commit():
    preparing = Side()
    preparing.exchanges.begin(0.0)
    assert preparing.exchanges.unlinked(B, 0.1) == []  # it has no partner yet
    answering_one = Side()
    answering_one.exchanges.on_offer(B, offer(), 0.0)
    assert answering_one.exchanges.unlinked(B, 0.1) == [Release(7)]
    offered = Side(partners=(B, C))
    offered.exchanges.begin(0.0)
    offered.exchanges.snapshotted(1, 0.0)
    assert offered.exchanges.unlinked(B, 0.1) == [Send(C, offer(1))]
    assert offered.benched == [B]
    assert streaming().exchanges.unlinked(B, 0.1) == [Release(1)]
    assert answering().exchanges.failed(7, "broken", 0.1) == [Release(7)]
    doubting = verified()
    assert doubting.exchanges.unlinked(B, 1.0) == [Send(B, Outcome(1))]
    assert doubting.table[1].state is State.DOUBT
    assert doubting.exchanges.unlinked(B, 1.1) == []


def test_having_said_that_we_did_not_commit_we_never_do():
    side = streaming()
    assert side.exchanges.on_outcome(B, 1, 1.0) == [Release(1), Send(B, Settled(1, False))]
    assert side.exchanges.streamed(1, 1.0, 1.0, 2.0) == []
    assert side.exchanges.on_outcome(B, 1, 3.0) == [Send(B, Settled(1, False))]


def test_having_committed_the_question_itself_is_the_partners_commit():
    side = verified()
    assert side.exchanges.on_outcome(B, 1, 2.0) == [Mix(1, 0.5), Release(1), Send(B, Settled(1, True))]


def test_doubt_is_asked_after_each_second_and_ends_after_doubt_s():
    side = verified()
    side.exchanges.unlinked(B, 1.0)
    asked = []
    while side.table:
        now = side.exchanges.deadline
        asked.append((now, side.exchanges.tick(now)))
    assert asked[0] == (1.0 + DOUBT_RETRY_S, [Send(B, Outcome(1))])
    assert asked[-1] == (1.0 + side.config.doubt_s, [Release(1)])
    assert len(asked) == side.config.doubt_s / DOUBT_RETRY_S


def test_a_partner_in_doubt_does_not_keep_us_from_mixing_with_others():
    side = verified(Side(partners=(B, C)))
    side.exchanges.unlinked(B, 1.0)
    side.partners = [C]
    assert side.exchanges.begin(2.0) == [Snapshot(2, False)]
    assert side.exchanges.on_settled(B, Settled(1, True), 3.0) == [Mix(1, 0.5), Release(1)]
    assert side.exchanges.outgoing is not None


def test_what_was_asked_long_ago_is_forgotten_and_the_memory_is_bounded():
    side = Side()
    for session in range(VERDICTS + 10):
        answering(side, session)
        side.exchanges.on_commit(B, session, 0.0)
        side.exchanges.streamed(session, 1.0, 1.0, 0.0)
    assert len(side.exchanges.verdicts) == VERDICTS
    assert side.exchanges.on_outcome(B, VERDICTS + 9, 0.0) == [Send(B, Settled(VERDICTS + 9, True))]
    assert side.exchanges.on_outcome(B, 0, 0.0) == [Send(B, Settled(0, False))]


def test_weights_about_to_be_replaced_take_part_in_nothing():
    side = streaming()
    side.exchanges.on_offer(C, offer(8), 0.0)
    effects = side.exchanges.abandon()
    assert effects == [Send(B, Abort(1, "replaced")), Release(1), Send(C, Busy(8)), Release(8)]
    assert side.table == {}


# -- weights and times -----------------------------------------------------------------------------------------------
def test_concurrent_exchanges_take_a_half_a_third_and_a_quarter():
    side = Side()
    side.exchanges.begin(0.0)
    side.exchanges.snapshotted(1, 0.0)
    side.exchanges.on_offer(C, offer(8), 0.0)
    side.exchanges.on_offer(D, offer(9), 0.0)
    assert [exchange.weight for exchange in side.table.values()] == [1 / 2, 1 / 3, 1 / 4]


def test_the_weight_is_the_smaller_cap_of_both_and_falls_with_staleness():
    for version, theirs, cap, expected in (
        (0, 0, 0.5, 0.5),
        (0, 0.9, 0.5, 0.5),
        (8, 0, 0.5, 0.5 / 3),
        (0, 3, 0.25, 0.125),
    ):
        side = Side(version=float(version))
        side.exchanges.on_offer(B, offer(version=theirs, weight=cap), 0.0)
        assert side.table[7].weight == pytest.approx(expected)
        assert side.table[7].weight <= 0.5


def test_a_transfer_may_take_what_it_took_before_and_the_bytes_at_the_slowest_rate():
    config = Config(slowest_rate_mb_s=1e-4)
    side = streaming(Side(config=config))
    bytes_s = 4 * ELEMENTS / 100
    assert side.exchanges.deadline == pytest.approx(1.0 + bytes_s)
    for took in (2.0, 3.0, 10.0):
        answering(side, 50)
        side.table[50].since = -took
        side.exchanges.on_commit(B, 50, 0.0)
        side.exchanges.streamed(50, 1.0, 1.0, 0.0)
    answering(side, 51)
    assert side.table[51].deadline == pytest.approx(1.0 + bytes_s + 3.0 + 6 * 1.0)  # median 3, median deviation 1


# -- the window between the COMMITs, systematically ------------------------------------------------------------------
class Pair:
    """A offers, B answers. Everything that can happen next is a choice: a message in order of its direction, a
    snapshot, or the end of a side's stream."""

    def __init__(self):
        self.sides = {A: Side(A, partners=(B,), version=3.0), B: Side(B, partners=(), version=5.0)}
        self.wires = {A: deque(), B: deque()}  # by receiver
        self.todo = {A: deque(), B: deque()}  # of each driver
        self.mixes = {A: [], B: []}
        self.up, self.now = True, 0.0
        self.perform(A, self.sides[A].exchanges.begin(0.0))

    def perform(self, me, effects):
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.wires[to].append(message)
                case Snapshot(session, _):
                    self.todo[me].append(("snapshotted", session))
                case Transfer(session, _, _, _, _):
                    self.todo[me].append(("streamed", session))
                case Mix(_, weight):
                    self.mixes[me].append(weight)

    def choices(self):
        found = [("message", side) for side in (A, B) if self.wires[side]]
        for side in (A, B):
            if self.todo[side]:
                what, session = self.todo[side][0]
                other = self.sides[B if side == A else A].table.get(session)
                begun = other is None or other.state not in (State.PREPARING, State.OFFERED)
                if what == "snapshotted" or (self.up and begun):
                    found.append(("driver", side))
        return found

    def take(self, choice):
        kind, side = choice
        if kind == "message":
            self.deliver(side, self.wires[side].popleft())
        else:
            what, session = self.todo[side].popleft()
            arguments = (1.0, 1.0) if what == "streamed" else ()
            self.perform(side, getattr(self.sides[side].exchanges, what)(session, *arguments, self.now))

    def deliver(self, to, message):
        x, other = self.sides[to].exchanges, B if to == A else A
        match message:
            case Offer():
                effects = x.on_offer(other, message, self.now)
            case Accept():
                effects = x.on_accept(other, message, self.now)
            case Commit(session):
                effects = x.on_commit(other, session, self.now)
            case Abort(session, code):
                effects = x.on_abort(other, session, code, self.now)
            case Outcome(session):
                effects = x.on_outcome(other, session, self.now)
            case Settled():
                effects = x.on_settled(other, message, self.now)
            case Busy(session):
                effects = x.on_busy(other, session, self.now)
        self.perform(to, effects)

    def cut(self, order):
        """What is on its way is lost, both drivers notice, and a new link carries what is said afterwards."""
        self.up = False
        for side in (A, B):
            self.wires[side].clear()
            self.todo[side] = deque(todo for todo in self.todo[side] if todo[0] == "snapshotted")
        for side in order:
            other = B if side == A else A
            self.perform(side, self.sides[side].exchanges.unlinked(other, self.now))

    def finish(self, losses):
        """Run to the end, losing the first ``losses`` messages."""
        for _ in range(200):
            while self.choices():
                kind, side = self.choices()[0]
                if kind == "message" and losses:
                    self.wires[side].popleft()
                    losses -= 1
                    continue
                self.take((kind, side))
            tables = [side.exchanges for side in self.sides.values()]
            if not any(x.table for x in tables):
                return
            self.now = max(self.now, min(x.deadline for x in tables))
            for me, side in self.sides.items():
                self.perform(me, side.exchanges.tick(self.now))
        raise AssertionError("an exchange never ends")

    def check(self):
        assert self.mixes[A] == self.mixes[B], "both commit or neither"
        assert len(self.mixes[A]) <= 1
        versions = [side.local.version for side in self.sides.values()]
        assert sum(versions) == pytest.approx(8.0)


def prefixes(path=()):
    """Every state that an undisturbed exchange can pass through, as the choices that lead to it."""
    pair = replay(path)
    yield path
    for number in range(len(pair.choices())):
        yield from prefixes((*path, number))


def replay(path):
    pair = Pair()
    for number in path:
        pair.take(pair.choices()[number])
    return pair


PREFIXES = list(prefixes())


def test_every_interleaving_without_a_fault_commits_on_both_sides():
    whole = [replay(path) for path in PREFIXES]
    ends = [pair for pair in whole if not pair.choices()]
    assert len(ends) >= 6
    for pair in ends:
        assert pair.mixes[A] == pair.mixes[B] == [0.5 * 3**-0.5]
        pair.check()


@pytest.mark.parametrize("order", [(A, B), (B, A)], ids=["A notices first", "B notices first"])
@pytest.mark.parametrize("losses", [0, 1, 2, 3, 7])
def test_a_link_that_breaks_anywhere_ends_the_same_on_both_sides(order, losses):
    outcomes = set()
    for path in PREFIXES:
        pair = replay(path)
        pair.cut(order)
        pair.finish(losses)
        pair.check()
        outcomes.add(len(pair.mixes[A]))
    assert outcomes == {0, 1}


def test_messages_lost_without_a_broken_link_end_the_same_on_both_sides():
    for path in PREFIXES:
        for losses in (1, 2, 5):
            pair = replay(path)
            pair.finish(losses)
            pair.check()


def test_only_a_partner_that_stays_unreachable_leaves_one_side_alone():
    one_sided = 0
    for path in PREFIXES:
        pair = replay(path)
        pair.cut((A, B))
        pair.finish(losses=10_000)
        one_sided += pair.mixes[A] != pair.mixes[B]
        if pair.mixes[A] != pair.mixes[B]:
            assert pair.now >= pair.sides[A].config.doubt_s
    assert one_sided > 0


# -- the mean --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", range(10))
def test_the_mean_is_exactly_kept_whatever_breaks(block):
    """20 random schedules each of 5 nodes: links break, messages are lost, loops stand still; nobody dies."""
    mixes = failures = 0
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        config = Config(mix_every_steps=3, doubt_s=60.0, bench_s=2.0, incoming_exchanges=rng.choice([1, 2, 3]))
        swarm = Swarm(seed, config=config, latency_s=rng.choice([0.001, 0.02, 0.1]))
        nodes = swarm.swarm(5)
        swarm.until(swarm.agreed, 30.0)
        swarm.until(swarm.quiet, 30.0)
        for node in nodes:
            node.value, node.shifts = Fraction(rng.randrange(-1000, 1000)), []
        swarm.resume()
        before = swarm.total()
        done = sum(len(node.mixes) for node in nodes)
        swarm.loss = rng.choice([0.0, 0.02])
        for _ in range(30):
            swarm.run(rng.random() * 0.3)
            a, b = rng.sample(nodes, 2)
            if rng.random() < 0.8:
                swarm.unlink(a, b)
            a.stepping = rng.random() < 0.8
        swarm.loss = 0.0
        for node in nodes:
            node.stepping = True
        swarm.run(0.5)
        swarm.until(swarm.quiet, 90.0)
        assert swarm.total() == before, f"seed {seed}"
        mixes += sum(len(node.mixes) for node in nodes) - done
        failures += sum(node.peer.exchanges.failures for node in nodes)
    assert mixes > 200
    assert failures > 20


# -- the codec ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ours", "offered", "agreed"), [("fp32", "bf16", "bf16"), ("bf16", "fp32", "bf16")])
def test_of_two_codecs_the_leaner_is_agreed_on(ours, offered, agreed):
    side = Side(config=Config(codec=ours))
    side.exchanges.on_offer(B, offer(codec=offered), 0.0)
    [accept, transfer] = side.exchanges.snapshotted(7, 0.0)
    assert (accept.message.codec, transfer.codec) == (agreed, agreed)
    asker = Side(config=Config(codec=offered))
    asker.exchanges.begin(0.0)
    asker.exchanges.snapshotted(1, 0.0)
    [transfer] = asker.exchanges.on_accept(B, Accept(1, 0.0, 0.5, (), agreed), 0.0)
    assert transfer.codec == agreed
