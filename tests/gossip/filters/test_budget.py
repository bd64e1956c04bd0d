"""The movement budget: one partner may move a node as three typical ones do, and two moves more."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.filters.budget import MAX_PARTNERS, MEDIAN_FACTOR, MEMORY_INTERVALS, SPARE_MOVES, Budget
from gossip.ids import PeerId
from tests.gossip.exchange.sides import A

PEERS = [PeerId(number.to_bytes(16, "big")) for number in range(200)]


def push(budget, partner, at, most=1.0, here=list):
    """Add as much of a move as the budget leaves, and return it."""
    moves = min(most, budget.moves_left(partner, most, at, here))
    budget.add(partner, moves, at)
    return moves


def test_one_partner_moves_us_as_three_median_others_and_two_moves_more():
    budget = Budget()
    for peer in PEERS[:6]:
        budget.add(peer, 5.0, 0.0)
    assert sum(push(budget, A, 0.0) for _ in range(40)) == MEDIAN_FACTOR * 5.0 + SPARE_MOVES
    assert budget.moves_left(PEERS[0], 1.0, 0.0, list) > 0, "the others go on"


def test_movement_is_forgotten_by_own_intervals():
    budget = Budget()
    budget.add(A, 4.0, 10.0)
    assert budget.movement_of(A, 10.0 + MEMORY_INTERVALS) == pytest.approx(4.0 / math.e)
    budget.add(A, 1.0, 10.0 + MEMORY_INTERVALS)
    assert budget.movement_of(A, 10.0 + MEMORY_INTERVALS) == pytest.approx(4.0 / math.e + 1.0)
    assert budget.movement_of(A, 0.0) == pytest.approx(4.0 / math.e + 1.0), "a count that begins anew lets no time pass"


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 1.0)), min_size=1, max_size=80), st.integers(0, 2**16))
def test_what_a_partner_moves_us_in_a_time_is_bounded_whatever_it_sends_and_when(pushes, seed):
    """The bound is B (1 + t / T), B the largest MEDIAN_FACTOR * median + SPARE_MOVES; the others come at random."""
    budget, dice, at, taken, most = Budget(), random.Random(seed), 0.0, 0.0, 0.0
    for peer in PEERS[:7]:
        budget.add(peer, dice.random(), at)
    for wait, moves in pushes:
        for _ in range(int(wait)):
            at += 1.0
            budget.add(PEERS[dice.randrange(7)], dice.random(), at)
        others = sorted(budget.movement_of(peer, at) for peer in PEERS[:7])
        most = max(most, MEDIAN_FACTOR * others[3] + SPARE_MOVES)
        taken += push(budget, A, at, moves)
    assert taken <= most * (1 + at / MEMORY_INTERVALS) + 1e-9


@pytest.mark.parametrize("rate", [1, 8, 30])
def test_a_partner_that_comes_at_every_step_gains_nothing_over_one_that_comes_at_every_interval(rate):
    """Before, the budget counted the last 64 exchanges, and this partner's own pushed the others out of them."""
    budget, dice, taken = Budget(), random.Random(1), 0.0
    for interval in range(402):
        push(budget, PEERS[dice.randrange(31)], interval, 0.8)
        taken += sum(push(budget, A, interval) for _ in range(rate if interval > 1 else 0))  # two others are known
    honest = 0.8 * 400 / 31
    assert taken < 5 * honest + SPARE_MOVES * (1 + 400 / MEMORY_INTERVALS)


def test_colluding_partners_do_not_raise_one_anothers_budget_while_fewer_than_half():
    budget, dice, taken = Budget(), random.Random(1), 0.0
    liars = PEERS[40:52]  # twelve, against 31 honest ones
    for interval in range(420):
        push(budget, PEERS[dice.randrange(31)], interval, 0.8)
        asked = liars if interval >= 20 else []  # more of the honest are known than liars
        taken += sum(push(budget, liar, interval) for liar in asked for _ in range(4))
    honest = 0.8 * 400 / 31
    assert taken / 12 < 8 * honest + SPARE_MOVES * (1 + 400 / MEMORY_INTERVALS)


def test_without_two_others_that_are_there_nobody_is_held_to_a_budget():
    budget = Budget()
    for peer in PEERS[:2]:
        budget.add(peer, 0.1, 0.0)
    budget.add(A, 50.0, 0.0)
    assert budget.moves_left(A, 1.0, 0.0, list) == 0.0
    alive = [peer for peer in (A, PEERS[1])]
    assert budget.moves_left(A, 1.0, 0.0, lambda peers: [peer for peer in peers if peer in alive]) == math.inf, (
        "one is dead: who is left would be held to it"
    )


def test_as_many_partners_are_remembered_as_are_met_in_the_time():
    budget = Budget()
    for number in range(3 * MAX_PARTNERS):
        budget.add(PEERS[number % 100], 0.1, float(number))
    assert len(budget._movements) == MAX_PARTNERS


@pytest.mark.parametrize("count", [3, 7, 31, 200])
def test_honest_partners_drawn_at_random_hardly_ever_meet_the_budget(count):
    """Differences of a third to all of the radius, one an interval: 3 in 1,000 exchanges at most, and then a part."""
    budget, dice, met = Budget(), random.Random(count), 0
    for interval in range(4000):
        moves = dice.uniform(0.33, 1.0)
        met += push(budget, PEERS[dice.randrange(count)], interval, moves) < moves
    assert met <= 12


@pytest.mark.parametrize(("count", "often"), [(7, 0.2), (31, 0.05)])
def test_a_partner_of_four_times_our_pace_is_rarely_held_back(count, often):
    """Half of its exchanges are of its own asking, so it is met 2.5 times as often as the others."""
    budget, dice, met, times = Budget(), random.Random(count), 0, 0
    for interval in range(4000):
        fast = dice.random() < 2.5 / (count + 1.5)
        moves = dice.uniform(0.33, 1.0)
        given = push(budget, A if fast else PEERS[dice.randrange(count)], interval, moves)
        met, times = met + (fast and given < moves), times + fast
    assert met <= often * times
