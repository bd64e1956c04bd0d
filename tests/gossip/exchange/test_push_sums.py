"""The sums of push-sum, of masses and of masses times values, are exact under any interleaving and any loss."""

import random
from collections import defaultdict, deque
from fractions import Fraction
from functools import partial

import pytest

from gossip.arithmetic.mixing import push_mass
from gossip.config import Config
from gossip.effects import Merge, Release, Rename, Send, Snapshot, Transfer
from gossip.exchange.session import State
from tests.gossip.exchange.sides import A, B, C, D, Side, paths, replay
from tests.harness.configs import tuned

SUM = tuned(mixing="push-sum", doubt_s=1e6, incoming_exchanges=4)
ROWS = Config(mixing="row-stochastic", incoming_exchanges=4)


class Pushes:
    """Sides with their drivers; each vector is one exact fraction.

    Each possible next event is a choice: a message or a stream in the order of its direction, or a side's step
    boundary.
    """

    def __init__(self, names=(A, B), config=SUM):
        self.sides = {
            me: Side(me, [other for other in names if other != me], config, first_session=10_000 * place + 1)
            for place, me in enumerate(names)
        }
        self.conserves = config.mixing == "push-sum"
        self.value = {me: Fraction(10 * place**2 + 1) for place, me in enumerate(names)}
        self.mass = {me: Fraction(1) for me in names}
        self.merges = {me: [] for me in names}
        self.wishes = {me: {} for me in names}
        self.snapshots = {me: {} for me in names}
        self.received = {me: {} for me in names}
        self.wires = defaultdict(deque)  # messages and streams in flight, by (from, to)
        self.merged = self.returned = 0
        self.now = 0.0
        self.start = self.sums()

    def perform(self, me, effects):
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.wires[me, to].append(message)
                case Snapshot(session, pushes):
                    self.wishes[me][session] = pushes
                case Transfer():
                    assert effect.sends != effect.receives
                    if effect.sends:
                        stream = effect.session, self.snapshots[me][effect.session]
                        self.wires[me, effect.partner].append(stream)
                case Merge(session, mass):
                    back = session not in self.received[me]
                    self.returned, self.merged = self.returned + back, self.merged + (not back)
                    value = self.snapshots[me][session] if back else self.received[me][session]
                    self.merges[me].append((mass, value))
                case Rename(session, number):
                    self.snapshots[me][number] = self.snapshots[me].pop(session)
                case Release(session):
                    for table in (self.wishes, self.snapshots, self.received):
                        table[me].pop(session, None)

    def boundary(self, me):
        merges, self.merges[me] = self.merges[me], []
        for mass, value in merges:
            self.value[me] += mass / (self.mass[me] + mass) * (value - self.value[me])
            self.mass[me] += mass
        wishes, self.wishes[me] = self.wishes[me], {}
        for session, pushes in wishes.items():
            mass = Fraction(0)
            if pushes:
                mass, self.mass[me] = push_mass(self.mass[me], pushes, self.conserves)
            self.snapshots[me][session] = self.value[me]
            self.perform(me, self.sides[me].exchanges.on_snapshotted(session, self.now, mass))

    def begin(self, me):
        self.perform(me, self.sides[me].exchanges.begin_mix(self.now))

    def deliver(self, sender, to):
        message = self.wires[sender, to].popleft()
        side = self.sides[to]
        side.local.boundary_at = self.now  # its loop goes on
        x = side.exchanges
        if not isinstance(message, tuple):
            self.perform(to, x.receive(sender, message, self.now))
            return
        session, value = message
        if session in x.table and x.table[session].state is State.STREAMING:
            self.received[to][session] = value
            self.perform(to, x.on_streamed(session, 1.0, 1.0, self.now))

    def fail(self, me, code):
        for session in list(self.sides[me].table):
            self.perform(me, self.sides[me].exchanges.on_failed(session, code, self.now))

    def cut(self, one, other):
        """Lose what is in flight between the two, notify both, and carry later messages over a new link."""
        self.wires[one, other].clear()
        self.wires[other, one].clear()
        for side, gone in ((one, other), (other, one)):
            self.perform(side, self.sides[side].exchanges.on_unlinked(gone, self.now))

    def tick(self):
        self.now = max(self.now, min(side.exchanges.deadline for side in self.sides.values()))
        for me, side in self.sides.items():
            self.perform(me, side.exchanges.tick(self.now))

    # -- what is asked -----------------------------------------------------------------------------------------------
    def choices(self):
        return [("deliver", way) for way in sorted(self.wires) if self.wires[way]] + [
            ("boundary", (me,)) for me in self.sides if self.wishes[me] or self.merges[me]
        ]

    def take(self, choice):
        what, arguments = choice
        getattr(self, what)(*arguments)

    def sums(self):
        held = [(self.mass[me], self.value[me]) for me in self.sides]
        for me, side in self.sides.items():
            held += self.merges[me]
            for session, exchange in side.table.items():
                if exchange.is_initiator and exchange.mass:
                    partner = self.sides.get(exchange.partner)
                    if partner is None or (me, session) not in partner.exchanges.outcomes:
                        held.append((exchange.mass, self.snapshots[me][session]))
        return sum(mass for mass, _ in held), sum(mass * value for mass, value in held)

    def check(self):
        assert self.sums() == self.start

    def finish(self, losses=0):
        """Run to the end, losing the first ``losses`` messages."""
        for _ in range(300):
            while found := self.choices():
                if found[0][0] == "deliver" and losses:
                    self.wires[found[0][1]].popleft()
                    losses -= 1
                else:
                    self.take(found[0])
                self.check()
            if not any(side.table for side in self.sides.values()):
                return
            self.tick()
            self.check()
        raise AssertionError("a push never ends")


# -- one push, systematically ------------------------------------------------------------------------------------------
def begun(both):
    """Return two sides of which one pushes, or both."""
    pushes = Pushes()
    pushes.begin(A)
    if both:
        pushes.begin(B)
    return pushes


ONE = list(paths(partial(begun, False)))
BOTH = list(paths(partial(begun, True), depth=8))


def test_every_interleaving_without_a_fault_gives_away_half():
    pushes = replay(partial(begun, False), ONE[-1])
    assert not pushes.choices()
    assert pushes.mass == {A: Fraction(1, 2), B: Fraction(3, 2)}
    assert pushes.value == {A: 1, B: Fraction(11) + Fraction(1, 3) * (1 - 11)}
    for path in BOTH:
        pushes = replay(partial(begun, True), path)
        pushes.finish()
        assert (pushes.merged, pushes.returned) == (2, 0)


@pytest.mark.parametrize("both", [False, True], ids=["one pushes", "both push"])
@pytest.mark.parametrize("losses", [0, 1, 2, 5])
def test_a_link_that_breaks_anywhere_loses_no_mass_and_makes_none(both, losses):
    merged = set()
    for path in BOTH[:: 7 if both else 1] if both else ONE:
        pushes = replay(partial(begun, both), path)
        pushes.check()
        pushes.cut(*((A, B), (B, A))[len(path) % 2])
        pushes.check()
        pushes.finish(losses)
        assert sum(pushes.mass.values()) == 2
        assert pushes.merged + pushes.returned >= (2 if both else 1) or not path
        merged.add(pushes.merged)
    assert merged >= {0, 1}


@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("fails", [None, A, B], ids=["message", "sender", "receiver"])
def test_each_message_lost_alone_and_each_stream_that_stalls_loses_no_mass(place, fails):
    """Lose the message of each place without breaking the link, or let the sender's or the receiver's stream stall."""
    for path in ONE:
        pushes = replay(partial(begun, False), path)
        if fails is None:
            pushes.finish(losses=place)
        else:
            pushes.fail(fails, ("stall", "checksum", "broken")[place % 3])
            pushes.check()
            pushes.finish(losses=place // 3)
        assert sum(pushes.mass.values()) == 2


def test_only_a_partner_that_stays_unreachable_for_doubt_s_has_a_mass_counted_twice():
    counted = set()
    for path in ONE:
        pushes = replay(partial(begun, False), path)
        side = pushes.sides[A]
        side.exchanges.config = tuned(mixing="push-sum", doubt_s=30.0)
        pushes.cut(A, B)
        while any(one.table for one in pushes.sides.values()):
            pushes.wires.clear()
            for me in (A, B):
                pushes.boundary(me)
            if any(one.table for one in pushes.sides.values()):
                pushes.tick()
        mass, _ = pushes.sums()
        counted.add(mass)
        assert mass == 2 or pushes.now >= 30.0
    assert counted == {Fraction(2), Fraction(5, 2)}


def test_links_that_break_leave_the_mean_where_it_was_and_everybody_comes_to_it():
    rng = random.Random(5)
    pushes = Pushes((A, B, C, D))
    _, weighted = pushes.start
    for _ in range(60):
        for me, side in pushes.sides.items():
            rng.shuffle(side.partners)
            pushes.begin(me)
        for _ in range(rng.randrange(40)):
            if found := pushes.choices():
                pushes.take(rng.choice(found))
        pushes.cut(*rng.sample(list(pushes.sides), 2))
        pushes.finish()
    assert all(abs(value - weighted / 4) < Fraction(1, 1000) for value in pushes.value.values())
    assert pushes.returned > 0


def test_of_several_vectors_that_are_pushed_to_one_it_takes_the_mean_with_its_own():
    pushes = Pushes((A, B, C, D), ROWS)
    values = dict(pushes.value)
    for me in (B, C, D):
        pushes.sides[me].partners = [A]
        pushes.begin(me)
        while pushes.choices():
            pushes.take(pushes.choices()[0])
    assert pushes.value[A] == sum(values.values()) / 4
    assert {pushes.value[me] - values[me] for me in (B, C, D)} == {0}
    pushes.begin(A)
    pushes.boundary(A)
    assert pushes.mass[A] == 1, "its next round begins with one vector, its own"
