"""Arrears: samples trained before the first link with a member count after it, for at most two periods."""

import dataclasses

import pytest

from gossip.effects import MemberState
from gossip.ids import MemberRecord, PeerId
from gossip.membership.arrears import PERIOD_S, Arrears
from gossip.membership.entry import Entry

RUN = b"r" * 16


def entry(**changes):
    record = MemberRecord(PeerId(b"m" * 16), b"k" * 32, 1, ready=True, run_id=RUN)
    return Entry(dataclasses.replace(record, **changes), MemberState.ALIVE, 0.0, 0.0)


def met(arrears, member):
    member.was_contacted = True
    arrears.update(member, RUN)
    return arrears.take()


def test_samples_since_a_member_was_heard_of_count_once_it_is_met():
    arrears, member = Arrears(0.0), entry()
    arrears.note_samples(100, 1.0)
    arrears.update(member, RUN)
    arrears.note_samples(350, 2.0)
    arrears.update(member, RUN)  # Updates about it before there is a link change nothing.
    assert arrears.take() == 0
    assert met(arrears, member) == 250
    arrears.note_samples(900, 3.0)
    arrears.update(member, RUN)
    assert arrears.take() == 0


def test_samples_of_the_last_two_periods_count_at_most():
    arrears, member = Arrears(0.0), entry()
    arrears.update(member, RUN)
    for period in range(1, 6):  # 1,000 samples in each, 5,000 in all.
        arrears.note_samples(1_000 * period, period * PERIOD_S)
    arrears.note_samples(5_400, 5.4 * PERIOD_S)
    assert met(arrears, member) == 1_400


def test_a_period_ends_after_its_time_and_not_before():
    arrears, member = Arrears(0.0), entry()
    arrears.update(member, RUN)
    for number in range(1, 60):
        arrears.note_samples(10 * number, number * PERIOD_S / 60)
    assert met(arrears, member) == 590


@pytest.mark.parametrize("changes", [{"ready": False}, {"run_id": b"o" * 16}])
def test_samples_count_for_no_member_that_is_not_in_the_run(changes):
    arrears, member = Arrears(0.0), entry(**changes)
    arrears.update(member, RUN)
    arrears.note_samples(100, 1.0)
    assert met(arrears, member) == 0


def test_a_switch_of_the_run_forgets_what_was_owed():
    arrears, member, other = Arrears(0.0), entry(), entry()
    arrears.update(member, RUN)
    arrears.update(other, RUN)
    arrears.note_samples(100, 1.0)
    other.was_contacted = True
    arrears.update(other, RUN)
    arrears.restart([member], RUN)
    assert arrears.take() == 0
    arrears.note_samples(170, 2.0)
    assert met(arrears, member) == 70
