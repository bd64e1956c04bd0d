"""Between two records a member is taken to go on as it said: nobody need tell everybody every step count."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.effects import MemberState
from gossip.membership.samples.credit import MOST_SAMPLES
from gossip.membership.samples.run_count import RunCount, made
from gossip.wire.messages import Gossip, Hint
from tests.gossip.membership.members import member, peer_id, record_of

A, B = b"a" * 16, b"b" * 16
ALIVE, SUSPECT, DEAD = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD


class Watch:
    """Member 0, which trains 100 samples a second, and members 1 to ``count`` that it is linked with."""

    def __init__(self, count: int = 1, **changes):
        self.me, self.now, self.sequence = member(genesis=A, **changes), 0.0, 0
        for number in range(1, count + 1):
            self.me.linked(peer_id(number), record_of(number, genesis=A), 0.0)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now + 0.25 <= end:
            self.now += 0.25
            self.me.update_me(self.now, samples=int(100 * self.now))
            self.me.tick(self.now)
            if int(4 * self.now) % 4 == 0:
                for peer in self.me._table.links:
                    self.me.acknowledged(peer, self.now)

    def hear(self, number: int, samples: int, rate: float, late_s: float = 0.0, **changes) -> None:
        """Its record, which took so long to come; its clock is ours."""
        self.sequence += 1
        fields = {"genesis": A, "sequence": self.sequence, "clock_s": self.now - late_s} | changes
        record = record_of(number, samples=samples, rate=rate, **fields)
        self.me.receive(peer_id(1), Gossip((record,)), self.now)

    def meet(self, number: int) -> None:
        record = self.me.record(peer_id(number))
        assert record is not None
        self.me.linked(peer_id(number), record, self.now)

    @property
    def others(self) -> int:
        return self.me.swarm_samples - self.me.my_samples


def test_a_member_goes_on_as_it_said():
    swarm = Watch()
    swarm.run(10.0)
    swarm.hear(1, 1_000, 100.0)
    for _ in range(4):
        swarm.run(25.0)
        assert swarm.others == pytest.approx(100 * swarm.now, abs=1)
    assert swarm.me.samples_of(A) == swarm.me.swarm_samples


def test_a_record_counts_from_when_it_was_made_and_not_from_when_it_came():
    """It goes out on frames that go anyway, which takes it ten seconds in a swarm of a hundred."""
    swarm = Watch()
    swarm.run(10.0)
    swarm.hear(1, 1_000, 100.0)
    swarm.run(90.0)
    swarm.hear(1, 9_000, 100.0, late_s=10.0)
    assert swarm.others == pytest.approx(10_000, abs=1)
    swarm.hear(1, 9_500, 100.0, late_s=7.5)
    assert swarm.others == pytest.approx(10_250, abs=1)


def test_the_clock_of_another_life_is_another():
    swarm = Watch()
    swarm.run(100.0)
    swarm.hear(1, 1_000, 100.0)
    swarm.run(10.0)
    swarm.hear(1, 0, 100.0, clock_s=3.0, incarnation=2)
    before = swarm.others
    swarm.run(10.0)
    assert swarm.others - before == pytest.approx(1_000, abs=1)


@pytest.mark.parametrize(("rate", "made_s"), [(150.0, 1_500), (50.0, 500), (0.0, 0)])
def test_the_next_record_corrects_what_was_reckoned(rate, made_s):
    swarm = Watch()
    swarm.run(10.0)
    swarm.hear(1, 1_000, 100.0)
    swarm.run(10.0)
    assert swarm.others == pytest.approx(2_000, abs=1)
    swarm.hear(1, 1_000 + made_s, rate)
    assert swarm.others == 1_000 + made_s, "upwards and downwards, and to the last sample"
    swarm.run(10.0)
    assert swarm.others == pytest.approx(1_000 + 2 * made_s, abs=1)


def test_a_member_that_is_no_longer_alive_makes_no_more_and_keeps_what_it_made():
    swarm = Watch(3)
    swarm.run(10.0)
    swarm.hear(3, 1_000, 100.0)
    swarm.run(10.0)
    swarm.me.receive(peer_id(1), Gossip((Hint(peer_id(3), 1, False, peer_id(2)),)), swarm.now)
    assert swarm.me.state(peer_id(3)) is SUSPECT
    frozen = swarm.others
    assert frozen == pytest.approx(2_000, abs=1)
    swarm.run(1.0)
    assert swarm.others == frozen
    swarm.hear(3, 1_950, 100.0, incarnation=2)  # it refutes, and says how far it was
    assert (swarm.me.state(peer_id(3)), swarm.others) == (ALIVE, 1_950)
    swarm.run(10.0)
    assert swarm.others == pytest.approx(2_950, abs=1)


def test_what_a_member_made_until_it_left_stays():
    swarm = Watch(2)
    swarm.run(10.0)
    swarm.hear(2, 1_000, 100.0)
    swarm.run(10.0)
    swarm.hear(2, 1_990, 100.0, left=True)
    swarm.run(100.0)
    assert swarm.others == 1_990
    swarm.me._table.forget(math.inf)
    assert peer_id(2) not in swarm.me._table.entries
    assert swarm.others == 1_990


def test_who_begins_anew_leaves_what_it_was_reckoned_to_have_made():
    swarm = Watch()
    swarm.run(10.0)
    swarm.hear(1, 1_000, 100.0)
    swarm.run(10.0)
    swarm.hear(1, 30, 100.0, incarnation=2, clock_s=1.0)
    assert swarm.others == pytest.approx(2_030, abs=1)
    swarm.hear(1, 0, 100.0, incarnation=2, genesis=B)
    before = swarm.others
    swarm.run(10.0)
    assert swarm.others == before, "what it makes now is another run's"
    assert swarm.me.samples_of(B) == pytest.approx(1_000, abs=1)


def test_hearsay_is_never_reckoned_until_it_is_met():
    swarm = Watch()
    swarm.run(10.0)
    for number in range(100, 400):
        swarm.hear(number, 0, 100.0)
    swarm.run(20.0)
    assert swarm.others == 0
    swarm.meet(200)
    assert swarm.others == pytest.approx(2_000, abs=1), "one that we met went on since its record"
    swarm.run(10.0)
    assert swarm.others == pytest.approx(3_000, abs=1)


@pytest.mark.parametrize("clock_s", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("rate", [1_700.0, 1e6, 2.0**53 - 1])
def test_a_liars_rate_adds_no_more_than_its_allowance(rate, clock_s):
    """As much as a liar that states 2**53 - 1 samples: sixteen times the median pace."""
    swarm = Watch(3)
    for _ in range(60):
        swarm.run(1.0)
        for number in (2, 3):
            swarm.hear(number, int(100 * swarm.now), 100.0)
        swarm.hear(1, 0, rate, clock_s=clock_s)  # says again and again that its record is old
    assert swarm.others - 200 * swarm.now <= 16.5 * 100 * swarm.now
    swarm.hear(1, 2**53 - 1, rate, clock_s=clock_s)
    swarm.run(60.0)
    assert swarm.others - 200 * swarm.now <= 16.5 * 100 * swarm.now


def test_a_liar_is_believed_less_as_soon_as_everybody_is_slower():
    swarm = Watch(2)
    swarm.run(10.0)
    swarm.hear(1, 0, 1_500.0)  # in full: it might be
    swarm.hear(2, 1_000, 100.0)
    swarm.run(10.0)
    assert swarm.me._table.entries[peer_id(1)].rate == 1_500.0
    per_s = swarm.me._table.tally.credit.per_s
    swarm.hear(2, 2_000, 1.0)
    for second in range(60):  # and we make one sample a second ourselves
        swarm.now += 1.0
        swarm.me.update_me(swarm.now, samples=2_000 + second)
        swarm.me.tick(swarm.now)
        for peer in swarm.me._table.links:
            swarm.me.acknowledged(peer, swarm.now)
    assert swarm.me._table.tally.credit.per_s < per_s / 10
    assert swarm.me._table.entries[peer_id(1)].rate <= swarm.me._table.tally.credit.per_s


def test_what_was_reckoned_too_low_for_an_hour_makes_nobody_faster_than_it_is():
    """All end at once and say so: what each made more than was reckoned had come in one moment, and in the median."""
    swarm = Watch(3)
    swarm.run(10.0)
    for number in (1, 2, 3):
        swarm.hear(number, 1_000, 98.0)
    swarm.run(600.0)
    per_s = swarm.me._table.tally.credit.per_s
    for number in (1, 2, 3):
        swarm.hear(number, 61_000, 0.0)
    swarm.run(10.0)
    assert swarm.others == 3 * 61_000
    assert swarm.me._table.tally.credit.per_s == pytest.approx(per_s, rel=0.1)


def test_a_liar_takes_off_no_more_than_was_reckoned_of_itself():
    swarm = Watch(2)
    swarm.run(10.0)
    swarm.hear(2, 1_000, 100.0)
    swarm.hear(1, 1_000, 1_000.0)
    for samples in (1_000, 1_001, 0, 5, 0):
        swarm.run(10.0)
        swarm.hear(1, samples, 1_000.0)
        assert swarm.others >= 100 * swarm.now


def test_sums_saturate():
    swarm = Watch(1, base_samples=2**53 - 1)
    swarm.run(10.0)
    swarm.hear(1, 2**53 - 1, 2.0**53 - 1)
    for power in range(2, 25):
        now = 10.0**power
        swarm.me.acknowledged(peer_id(1), now)
        swarm.me.tick(now)
        assert 0 <= swarm.me.swarm_samples <= MOST_SAMPLES
        assert 0 <= swarm.me.samples_of(A) <= MOST_SAMPLES
    assert swarm.me.samples_of(A) == MOST_SAMPLES


def test_a_count_that_is_taken_over_holds_what_was_made_before_and_no_record_says_how_much():
    """The gap between a record of unknown age and the next is behind the weights that came with the count."""
    swarm = Watch(1)
    swarm.run(10.0)
    swarm.hear(1, 1_000, 100.0, clock_s=10.0)
    swarm.me.rebase(50_000, swarm.now, included=True, afresh=True)
    swarm.hear(5, 2_000, 100.0, clock_s=20.0)
    swarm.meet(5)
    began = swarm.others
    swarm.run(10.0)
    assert swarm.others - began == pytest.approx(2_000, abs=2)
    swarm.hear(1, 9_000, 100.0, clock_s=90.0)  # ours was 70 s old when we came
    swarm.hear(5, 3_000, 100.0, clock_s=30.0)  # this one was new
    assert swarm.others - began == pytest.approx(2_000, abs=2)
    swarm.run(10.0)
    assert swarm.others - began == pytest.approx(4_000, abs=2)
    swarm.hear(1, 10_500, 100.0, clock_s=100.0)  # from now on its records count
    assert swarm.others - began == pytest.approx(4_500, abs=2)


def test_of_a_stranger_in_the_first_minute_counts_what_it_made_since():
    swarm = Watch(1)
    swarm.run(10.0)
    swarm.me.rebase(50_000, swarm.now, included=True, afresh=True)
    swarm.run(30.0)
    before = swarm.others
    swarm.hear(7, 10_000, 100.0, clock_s=100.0)
    swarm.meet(7)
    swarm.run(30.0)
    assert swarm.others - before == pytest.approx(6_000, abs=3), "30 s of its 100 before we heard of it, and 30 after"


# -- sums -------------------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5)), max_size=20), st.floats(1e5, 1e8), st.randoms())
def test_nothing_is_left_of_those_who_are_taken_off_again(flows, now, dice):
    run = RunCount(0.0)
    for rate, since_s in flows:
        run.begin(rate, since_s)
    one_by_one = sum(made(rate, since_s, now) for rate, since_s in flows)
    assert one_by_one <= run.at(now) <= one_by_one + len(flows)
    dice.shuffle(flows)
    for rate, since_s in flows:
        run.end(rate, since_s)
    assert run.at(now) == run.at(1e15) == 0
