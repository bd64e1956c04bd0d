"""Members that ask all the time are answered as often as others, once they are in the way of these."""

import random

import pytest

from gossip.selection.requests import MAX_ASKERS, MIN_MEMBERS, Paces, Requests

OWN_SHARE = 0.5  # share of all mixes of a usual node


def play(members, liars, intervals, fast=0):
    """Return the mixes of a node by partner, and its requests that were declined.

    Honest members ask half a time in an interval, divided over all; the first ``fast`` members four times as often.
    Each liar asks this node once in an interval. The node asks half a time.
    """
    rng, requests, ticks = random.Random(0), Requests(1.0), 20
    mixes, declined = dict.fromkeys(range(members), 0), dict.fromkeys(range(members), 0)
    for tick in range(intervals * ticks):
        now = tick / ticks
        if rng.random() < OWN_SHARE / ticks:
            partner = rng.randrange(members)
            mixes[partner] += 1
            requests.note_mix(None, now, members)
        for member in range(members):
            rate = 1.0 if member < liars else OWN_SHARE / members * (4.0 if member < fast else 1.0)
            if rng.random() < rate / ticks:
                if requests.is_too_much(member, now, members, list):
                    declined[member] += 1
                else:
                    mixes[member] += 1
                    requests.note_mix(member, now, members)
    return mixes, declined


@pytest.mark.parametrize(("members", "liars"), [(99, 30), (11, 4), (40, 12)])
def test_members_that_ask_all_the_time_become_few_of_the_partners(members, liars):
    mixes, _ = play(members, liars, 20 * members)
    share = sum(mixes[member] for member in range(liars)) / sum(mixes.values())
    assert share < 1.5 * liars / members
    unlimited = (OWN_SHARE * liars / members + liars) / (1.0 + liars)
    assert unlimited > 2 * liars / members


@pytest.mark.parametrize(
    ("members", "liars", "fast", "share"),
    [(8, 0, 0, 0.02), (30, 0, 0, 0.02), (99, 0, 0, 0.02), (99, 0, 5, 0.06), (99, 30, 0, 0.25)],
    ids=["8 alike", "30 alike", "99 alike", "a few fast ones", "among liars"],
)
def test_honest_members_are_seldom_declined(members, liars, fast, share):
    mixes, declined = play(members, liars, 20 * members, fast)
    honest = range(liars, members)
    assert sum(declined[member] for member in honest) < share * sum(mixes[member] for member in honest)


def test_in_a_small_swarm_nobody_is_declined():
    _, declined = play(MIN_MEMBERS - 1, 2, 200)
    assert not any(declined.values())


def test_members_that_are_gone_set_no_limit():
    """Otherwise members that asked often before they died would let the others ask as often."""
    requests = Requests(1.0)
    for turn in range(200):
        requests.note_mix(turn % 10, 0.0, 10)
    assert not requests.is_too_much(0, 0.0, 10, list)
    assert requests.is_too_much(0, 0.0, 10, lambda counts: [member for member in counts if member > 7])


@pytest.mark.parametrize(("pace", "is_declined"), [(1, True), (4, False)])
def test_a_node_that_is_slower_than_most_declines_nobody_who_asks_as_often_as_they_do(pace, is_declined):
    """Each of 20 members takes ``pace`` steps for each of ours, and the first two as many as they like to state."""
    requests, own_steps = Requests(1.0), 0
    for interval in range(64):
        own_steps += 8
        stated = {member: 8 * pace * interval * (1_000 if member < 2 else 1) for member in range(20)}
        requests.paces.note_steps(own_steps, float(interval), stated.copy)
        for turn in range(4):
            requests.note_mix((4 * interval + turn) % 3, float(interval), 20)
    assert requests.paces.median == pytest.approx(pace, rel=0.1)
    assert requests.is_too_much(0, 63.0, 20, list) is is_declined


def test_paces_are_compared_over_a_quarter_of_the_training_at_least():
    paces, looks = Paces(), []
    for interval in range(101):
        paces.note_steps(interval, float(interval), lambda at=interval: looks.append(at) or {1: 2 * at})
    assert looks[:3] == [0, 4, 8]
    assert looks[-2:] == [72, 96]
    assert paces.median == pytest.approx(2.0)


def test_members_without_steps_of_late_or_earlier_ones_change_no_pace():
    paces = Paces()
    for own_steps, steps in ((0, {}), (8, {}), (16, {1: 100}), (24, {2: 900}), (24, {2: 950})):
        paces.note_steps(own_steps, float(own_steps), lambda steps=steps: dict(steps))
    assert paces.median == 1.0


def test_the_table_is_bounded():
    requests = Requests(1.0)
    for turn in range(3 * MAX_ASKERS):
        requests.note_mix(turn, 0.0, 10)
    assert len(requests.counts) == MAX_ASKERS
