"""Between two records a member is taken to go on as it said: nobody need tell everybody every step count."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.config import Config
from gossip.effects import MemberState, Send
from gossip.ids import MemberRecord
from gossip.membership.protocol import Membership
from gossip.membership.samples.credit import MOST_SAMPLES
from gossip.membership.samples.meter import Meter
from gossip.membership.samples.run_count import RunCount, made
from gossip.membership.self_record import OFF_BATCHES, REFRESH_MOST_S
from gossip.wire.messages import Ack, Gossip, Hint, Ping, Records
from gossip.wire.records import within
from tests.gossip.membership.members import acquainted, member, peer_id, record_of, sent

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


# -- the rate of our own ----------------------------------------------------------------------------------------------
def metered(ends: list[float], at: float | None = None) -> float:
    meter = Meter(0.0)
    for number, end in enumerate(ends, 1):
        meter.report(8 * number, end)
    return meter.rate(ends[-1] if at is None else at)


def test_a_steady_trainers_rate_is_exact_however_late_it_began():
    assert metered([50.0 + 0.1 * n for n in range(400)]) == pytest.approx(80.0)
    assert metered([50.0 + 30.0 * n for n in range(5)]) == pytest.approx(8 / 30)
    assert metered([4.0]) == 2.0, "one step in four seconds is all that is known"


def test_a_rate_is_that_of_the_last_half_minute():
    slow = [0.1 * n for n in range(1, 600)]
    fast = [slow[-1] + 0.05 * n for n in range(1, 700)]
    assert metered(slow + fast) == pytest.approx(160.0)


def test_who_makes_nothing_for_twice_as_long_as_usual_has_no_rate():
    ends = [0.25 * n for n in range(1, 100)]
    assert metered(ends, ends[-1] + 0.4) == pytest.approx(32.0)
    assert metered(ends, ends[-1] + 0.6) == 0.0
    assert metered([*ends, ends[-1] + 600.0, ends[-1] + 600.25]) == pytest.approx(32.0), "a pause slows nobody down"


class Owner:
    """Member 0 of a swarm of ``size``, at its own pace; ``signed``: when, and which record."""

    def __init__(self, size: int):
        self.me = acquainted(size - 1, genesis=A)
        self.now, self.samples, self.steps = 0.0, 0.0, 0
        self.signed: list[tuple[float, MemberRecord]] = []

    def train(self, seconds: float, per_s: float, step_s: float = 0.25) -> None:
        for _ in range(round(seconds / step_s)):
            self.pass_(step_s)
            self.samples += per_s * step_s
            self.steps += 1
            self.me.update_me(self.now, samples=int(self.samples), steps=self.steps, loss=1 / self.steps, version=1.0)
            self.note()

    def pass_(self, seconds: float) -> None:
        """Nothing is reported; only what is due is done."""
        end = self.now + seconds
        while self.me._myself.due_s <= end:
            self.now = max(self.now, self.me._myself.due_s)
            self.me._myself.tick(self.now)
            self.note()
        self.now = end

    def note(self) -> None:
        record = self.me.me
        if not self.signed or self.signed[-1][1] is not record:
            self.signed.append((self.now, record))

    def error(self) -> float:
        """Of those who have our record."""
        record = self.me.me
        return record.samples + record.rate * (self.now - record.clock_s) - self.samples


def test_a_steady_trainer_signs_its_first_rate_and_then_when_the_figures_are_old():
    owner = Owner(100)
    owner.train(900.0, 100.0)
    period_s = 0.02 * 100**2 * (0.75 + peer_id(0)[0] / 512)
    late = [when for when, _ in owner.signed if when > 60.0]
    assert len(owner.signed) - len(late) <= 4
    assert [b - a for a, b in pairwise(late)] == pytest.approx([period_s] * (len(late) - 1), abs=0.5)
    assert 900 / period_s - 1 <= len(late) <= 900 / period_s + 1
    assert abs(owner.error()) < 0.001 * owner.samples


def test_figures_are_never_older_than_half_an_hour_or_so():
    owner = Owner(1_000)
    owner.train(6_000.0, 8.0, 1.0)
    assert len(owner.signed) <= 3 + 6_000 / (0.75 * REFRESH_MOST_S)
    assert owner.now - owner.signed[-1][0] <= 1.25 * REFRESH_MOST_S


@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_small_swarm_hears_about_as_often_as_ever(size):
    owner = Owner(size)
    owner.train(60.0, 100.0)
    assert 60 / 1.25 <= len(owner.signed) <= 60 / 0.25


@pytest.mark.parametrize("per_s", [0.0, 50.0, 200.0])
def test_another_pace_is_signed_when_others_are_two_in_a_hundred_off(per_s):
    owner = Owner(50)
    owner.train(500.0, 100.0)
    before, pause_s = len(owner.signed), 0.1 * 50
    for _ in range(600):
        if per_s:
            owner.train(0.25, per_s)
        else:
            owner.pass_(0.25)
        assert abs(owner.error()) <= 0.02 * owner.samples + abs(per_s - 100) * (pause_s + 0.5)
    assert 1 <= len(owner.signed) - before <= 16
    assert abs(owner.error()) < 0.005 * owner.samples
    assert owner.signed[-1][1].rate == pytest.approx(per_s, rel=0.01)


def test_what_is_held_shows_and_so_does_its_end():
    owner = Owner(20)
    owner.train(100.0, 100.0)
    owner.pass_(60.0)
    assert owner.me.me.rate == 0.0
    assert abs(owner.error()) < 1
    owner.train(60.0, 100.0)
    assert owner.me.me.rate > 40.0
    assert abs(owner.error()) < 0.03 * owner.samples


def test_long_steps_are_no_pauses():
    owner = Owner(5)
    owner.train(3_000.0, 10.0, 30.0)
    assert all(record.rate > 0 for when, record in owner.signed if when > 90.0)


def test_the_first_batches_are_no_storm():
    owner = Owner(2)
    owner.train(OFF_BATCHES * 0.1, 100.0, 0.1)
    assert len(owner.signed) <= 2


def test_progress_is_signed_no_more_often_than_ever_whatever_the_pace():
    owner, dice = Owner(50), random.Random(1)
    for _ in range(400):
        owner.train(0.5, dice.choice([1.0, 10.0, 1_000.0]))
    gaps = [b - a for (a, _), (b, _) in pairwise(owner.signed)]
    assert min(gaps) >= 0.1 * 50 - 1e-9


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300, 10**400, "x"])
def test_whatever_a_rate_came_to_others_take_it(value):
    for name in ("rate", "clock_s"):
        assert 0 <= within(name, value) < 2**53


# -- what goes over the wire -----------------------------------------------------------------------------------------
def quiet(size: int) -> Membership:
    """Member 0, with nothing left to tell."""
    me = acquainted(size - 1, genesis=A, ready=True)
    me._rumours.silence_all()
    me._arm()
    return me


def ticked(me: Membership, until: float) -> list[Send]:
    """What it sends until then; everybody answers its pings."""
    out: list[Send] = []
    while me.deadline <= until:
        now = me.deadline
        for effect in me.tick(now):
            if isinstance(effect, Send):
                out.append(effect)
                if isinstance(effect.message, Ping):
                    me.receive(effect.to, Ack(effect.message.seq, ()), now)
    return out


def test_no_frame_goes_out_for_progress_alone_and_pings_carry_it():
    me = quiet(20)
    for step in range(1, 5):
        me.update_me(float(step), steps=step, samples=100 * step)
    told = record_of(2, genesis=A, sequence=1, samples=400, steps=4, rate=100.0, clock_s=4.0)
    me.receive(peer_id(1), Gossip((told,)), 4.0)
    out = ticked(me, 10.0)
    assert not sent(out, Gossip)
    carried = [update for send in sent(out, Ping) for update in send.message.updates]
    assert told in carried
    assert me.me in carried


def test_an_ack_carries_progress():
    me = quiet(20)
    told = record_of(2, genesis=A, sequence=1, samples=400, steps=4, rate=100.0)
    me.receive(peer_id(1), Gossip((told,)), 4.0)
    (answer,) = sent(me.receive(peer_id(3), Ping(1, ()), 4.5), Ack)
    assert told in answer.message.updates


def test_news_still_has_frames_of_its_own_and_takes_progress_along():
    me = quiet(20)
    told = record_of(2, genesis=A, sequence=1, samples=400, steps=4, rate=100.0)
    me.receive(peer_id(1), Gossip((told, record_of(3, genesis=A, sequence=1, ready=False))), 4.0)
    frames = sent(ticked(me, 5.0), Gossip)
    assert frames
    assert told in frames[0].message.updates


def test_a_new_life_goes_on_from_steps_that_are_older_by_the_time_between_two_records():
    """Nobody knows more of its steps than its last record said; its samples begin anew with each life."""
    me = member(genesis=A)
    earlier = record_of(0, genesis=A, incarnation=4, steps=700, samples=5_000, rate=100.0, clock_s=60.0)
    me.linked(peer_id(1), record_of(1, genesis=A), 0.0)
    me.receive(peer_id(1), Records((earlier,), b""), 1.0)
    me.update_me(2.0, steps=1, samples=8)
    me.update_me(5.0, steps=2, samples=16)
    assert (me.me.steps, me.me.incarnation) == (702, 5)
    assert me.swarm_samples == 16


def test_a_record_that_no_longer_changes_its_rate_is_mere_progress():
    me = quiet(100)
    before = record_of(2, genesis=A, sequence=1, rate=100.0)
    me.receive(peer_id(1), Gossip((before,)), 1.0)
    me._rumours.silence_all()
    me.receive(peer_id(1), Gossip((dataclasses.replace(before, sequence=2, rate=101.0, samples=9),)), 2.0)
    assert len(me._rumours) == 1
    assert not me._rumours.pressing


def test_a_configured_period_is_kept_however_small_the_swarm():
    me = member(config=Config(progress_period_s=60.0), genesis=A)
    for step in range(1, 200):
        me.update_me(0.25 * step, steps=step, samples=8 * step)
    assert me.me.sequence <= 1
