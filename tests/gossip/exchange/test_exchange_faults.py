"""An exchange with faults: both sides commit or neither does, whatever breaks when."""

from collections import deque

import pytest

from gossip.config import Config
from gossip.effects import Mix, Release, Rename, Send, Snapshot, Transfer
from gossip.exchange.session import State
from gossip.exchange.session_table import DOUBT_RETRY_S, MAX_OUTCOMES
from gossip.wire.messages import Abort, Busy, Outcome, Settled
from tests.gossip.exchange.sides import A, B, C, Side, offer, paths, replay, streaming, verified


def test_what_came_to_nothing_is_counted_by_its_reason_offers_without_an_answer_too():
    side = Side(partners=(B, C))
    x = side.exchanges
    side.offer_mix()
    x.tick(x.deadline)
    x.on_unlinked(C, 6.0)
    assert x.failures_by_reason == {"unanswered": 1, "unreached": 1}
    assert side.benched == [B, C]
    side.local.boundary_at = 6.0
    for session, code in ((50, "norm"), (51, "norm"), (52, "no such reason"), (53, "another")):
        side.answer(B, session, 6.0)
        x.on_abort(B, session, code, 6.1)
    assert x.failures_by_reason == {"unanswered": 1, "unreached": 1, "norm": 2, "other": 2}
    assert x.failures == 6


def test_a_transfer_that_stalls_or_brings_wrong_bytes_is_told_to_the_partner():
    side = streaming()
    assert side.exchanges.on_failed(1, "checksum", 1.0) == [Send(B, Abort(1, "checksum")), Release(1)]
    side = streaming()
    assert side.exchanges.tick(side.exchanges.deadline) == [Send(B, Abort(1, "deadline")), Release(1)]
    assert side.benched == [B]


def test_a_link_that_breaks_ends_an_exchange_in_every_state_but_after_our_commit():
    preparing = Side()
    preparing.exchanges.begin_mix(0.0)
    assert preparing.exchanges.on_unlinked(B, 0.1) == []  # it has no partner yet
    asked = Side()
    asked.exchanges.on_offer(B, offer(), 0.0)
    assert asked.exchanges.on_unlinked(B, 0.1) == [Release(7)]
    offered = Side(partners=(B, C))
    offered.offer_mix()
    assert offered.exchanges.on_unlinked(B, 0.1) == [Rename(1, 2), Send(C, offer(2))]
    assert offered.benched == [B]
    assert streaming().exchanges.on_unlinked(B, 0.1) == [Release(1)]
    answering = Side()
    answering.answer()
    assert answering.exchanges.on_failed(7, "broken", 0.1) == [Release(7)]
    doubting = verified()
    assert doubting.exchanges.on_unlinked(B, 1.0) == [Send(B, Outcome(1))]
    assert doubting.table[1].state is State.IN_DOUBT
    assert doubting.exchanges.on_unlinked(B, 1.1) == []


def test_having_said_that_we_did_not_commit_we_never_do():
    side = streaming()
    assert side.exchanges.on_outcome(B, 1, 1.0) == [Release(1), Send(B, Settled(1, False))]
    assert side.exchanges.on_streamed(1, 1.0, 1.0, 2.0) == []
    assert side.exchanges.on_outcome(B, 1, 3.0) == [Send(B, Settled(1, False))]


def test_having_committed_the_question_itself_is_the_partners_commit():
    side = verified()
    assert side.exchanges.on_outcome(B, 1, 2.0) == [Mix(1, 0.5), Release(1), Send(B, Settled(1, True))]


def test_doubt_is_asked_after_each_second_and_ends_after_doubt_s():
    side = verified()
    side.exchanges.on_unlinked(B, 1.0)
    asked = []
    while side.table:
        now = side.exchanges.deadline
        asked.append((now, side.exchanges.tick(now)))
    assert asked[0] == (1.0 + DOUBT_RETRY_S, [Send(B, Outcome(1))])
    assert asked[-1] == (1.0 + side.config.internal.doubt_s, [Release(1)])
    assert len(asked) == side.config.internal.doubt_s / DOUBT_RETRY_S


def test_what_was_asked_long_ago_is_forgotten_and_the_memory_is_bounded():
    side = Side()
    for session in range(MAX_OUTCOMES + 10):
        side.answer(B, session)
        side.complete(B, session)
    assert len(side.exchanges.outcomes) == MAX_OUTCOMES
    assert side.exchanges.on_outcome(B, MAX_OUTCOMES + 9, 0.0) == [Send(B, Settled(MAX_OUTCOMES + 9, True))]
    assert side.exchanges.on_outcome(B, 0, 0.0) == [Send(B, Settled(0, False))]


def test_weights_about_to_be_replaced_take_part_in_nothing():
    side = streaming()
    side.exchanges.on_offer(C, offer(8), 0.0)
    effects = side.exchanges.abandon()
    assert effects == [Send(B, Abort(1, "replaced")), Release(1), Send(C, Busy(8)), Release(8)]
    assert side.table == {}


# -- the window between the COMMITs, systematically ------------------------------------------------------------------
class Pair:
    """A side A that offers and a side B that answers, with their wires and drivers.

    Each possible next event is a choice: a message in the order of its direction, a snapshot, or the end of a stream.
    """

    def __init__(self):
        aged = Config(staleness_exponent=0.5)
        self.sides = {A: Side(A, (B,), aged, version=3.0), B: Side(B, (), aged, version=5.0)}
        self.wires = {A: deque(), B: deque()}  # messages in flight, by receiver
        self.todo = {A: deque(), B: deque()}  # what each driver has yet to report
        self.mixes = {A: [], B: []}
        self.up, self.now, self.steps = True, 0.0, 0.0
        self.perform(A, self.sides[A].exchanges.begin_mix(0.0))

    def perform(self, me, effects):
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.wires[to].append(message)
                case Snapshot(session):
                    self.todo[me].append(("snapshotted", session))
                case Transfer(session):
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
        kind, me = choice
        side = self.sides[me]
        if kind == "message":
            sender, message = B if me == A else A, self.wires[me].popleft()
            self.perform(me, side.exchanges.receive(sender, message, self.now))
            return
        what, session = self.todo[me].popleft()
        if what == "snapshotted":
            self.perform(me, side.exchanges.on_snapshotted(session, self.now))
        else:
            side.local.version += 1.0  # by local steps since the snapshot
            self.steps += 1.0
            self.perform(me, side.exchanges.on_streamed(session, 1.0, 1.0, self.now))

    def cut(self, order):
        """Lose what is in flight, notify both sides in ``order``, and carry later messages over a new link."""
        self.up = False
        for side in (A, B):
            self.wires[side].clear()
            self.todo[side] = deque(todo for todo in self.todo[side] if todo[0] == "snapshotted")
        for side in order:
            other = B if side == A else A
            self.perform(side, self.sides[side].exchanges.on_unlinked(other, self.now))

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
        assert sum(versions) == pytest.approx(8.0 + self.steps), "what one side gained the other lost"


PREFIXES = list(paths(Pair))


def test_every_interleaving_without_a_fault_commits_on_both_sides():
    whole = [replay(Pair, path) for path in PREFIXES]
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
        pair = replay(Pair, path)
        pair.cut(order)
        pair.finish(losses)
        pair.check()
        outcomes.add(len(pair.mixes[A]))
    assert outcomes == {0, 1}


@pytest.mark.parametrize("losses", [1, 2, 5])
def test_messages_lost_without_a_broken_link_end_the_same_on_both_sides(losses):
    for path in PREFIXES:
        pair = replay(Pair, path)
        pair.finish(losses)
        pair.check()


def test_only_a_partner_that_stays_unreachable_leaves_one_side_alone():
    ends_s = []
    for path in PREFIXES:
        pair = replay(Pair, path)
        pair.cut((A, B))
        pair.finish(losses=10_000)
        if pair.mixes[A] != pair.mixes[B]:
            ends_s.append(pair.now)
    assert min(ends_s) >= Config().internal.doubt_s
