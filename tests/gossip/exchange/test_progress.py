"""One node's number of samples: how steps and exchanges move it, and what a partner's claim can do to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.exchange.progress import EXCHANGES, INTERVALS, RunProgress
from gossip.ids import MOST_SAMPLES, Claim

EVERY, SAMPLES, MEMBERS = 4, 8, 3
INTERVAL = EVERY * SAMPLES * MEMBERS  # what a node of these tests adds between two mixes


def trained(steps: int = EVERY) -> RunProgress:
    progress = RunProgress(EVERY)
    progress.trained(steps * SAMPLES, steps, MEMBERS, dialable=True)
    return progress


def test_a_step_counts_its_samples_for_every_member_in_contact():
    assert trained().samples == INTERVAL


@given(st.integers(0, MOST_SAMPLES), st.integers(0, MOST_SAMPLES))
def test_an_exchange_keeps_the_sum_of_both_numbers(one_has, other_has):
    one, other = trained(), trained()
    one.samples, other.samples = one_has, other_has
    ours, theirs = one.claim, other.claim
    one.mix(ours, theirs)
    other.mix(theirs, ours)
    assert one.samples + other.samples == one_has + other_has
    assert abs(one.samples - other.samples) <= abs(one_has - other_has)


claims = st.builds(Claim, *[st.integers(0, MOST_SAMPLES)] * 3)


@given(st.lists(claims, min_size=1, max_size=30))
def test_no_claim_moves_the_number_by_more_than_two_intervals(stated):
    progress = trained()
    for claim in stated:
        before = progress.samples
        progress.mix(progress.claim, claim)
        assert abs(progress.samples - before) <= INTERVALS * INTERVAL
        assert 0 <= progress.samples <= MOST_SAMPLES
        progress.trained(SAMPLES * EVERY, EVERY, MEMBERS, dialable=True)


def test_among_partners_that_are_close_one_that_is_far_moves_the_number_little():
    progress = trained()
    for number in range(EXCHANGES):
        near = Claim(progress.samples + number, MOST_SAMPLES, MEMBERS)
        progress.mix(progress.claim, near)
    before = progress.samples
    progress.mix(progress.claim, Claim(MOST_SAMPLES, MOST_SAMPLES, MEMBERS))
    assert progress.samples - before <= INTERVAL // 4


def test_a_slow_node_follows_partners_that_are_all_far_ahead():
    progress = trained()
    for _ in range(2 * EXCHANGES):
        before = progress.samples
        progress.mix(progress.claim, Claim(before + 10 * INTERVAL, MOST_SAMPLES, MEMBERS))
    assert progress.samples - before == INTERVALS * INTERVAL


def test_an_exchange_that_lowers_the_number_lowers_nothing_that_people_see():
    progress = trained(10 * EVERY)
    shown = progress.shown
    progress.mix(progress.claim, Claim(0, MOST_SAMPLES, MEMBERS))
    assert progress.samples < shown == progress.shown


@pytest.mark.parametrize("dialable", [True, False])
def test_only_a_node_without_an_address_counts_members_by_what_partners_say(dialable):
    progress = trained()
    for _ in range(3):
        progress.mix(progress.claim, Claim(INTERVAL, INTERVAL, 40))
    progress.trained(SAMPLES, 1, MEMBERS, dialable=dialable)
    assert progress.members == (MEMBERS if dialable else 40)


def test_partners_that_state_huge_swarms_gain_a_bounded_factor():
    progress = trained()
    for _ in range(5):
        progress.mix(progress.claim, Claim(INTERVAL, INTERVAL, MOST_SAMPLES))
    progress.trained(SAMPLES, 1, MEMBERS, dialable=False)
    assert progress.members == 16 * MEMBERS


def test_another_run_or_a_checkpoint_brings_its_number():
    progress = trained()
    progress.begin(5, resumed=True)
    assert (progress.samples, progress.shown, progress.resumed) == (5, 5, True)
    progress.begin(2**80)
    assert progress.samples == MOST_SAMPLES
