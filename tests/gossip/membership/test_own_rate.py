"""A node signs the rate at which it makes samples: exact for a steady trainer, and told no oftener than it must be."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import pairwise

import pytest

from gossip.config import Config
from gossip.effects import Send
from gossip.ids import MemberRecord
from gossip.membership.protocol import Membership
from gossip.membership.samples.meter import Meter
from gossip.membership.self_record import OFF_BATCHES, REFRESH_MOST_S
from gossip.wire.messages import Ack, Gossip, Ping, Records
from gossip.wire.records import within
from tests.gossip.membership.members import acquainted, member, peer_id, record_of, sent

A = b"a" * 16


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
