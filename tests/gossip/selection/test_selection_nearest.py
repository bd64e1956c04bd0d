"""Nearest with shortcuts: what it learns, how far its choices lead, and the spectral gap that it states."""

import math
import random

import numpy as np
import pytest

from gossip.ids import PeerId
from gossip.selection.nearest import MAX_MEASURED, Nearest
from tests.gossip.selection.test_selection import View, ids
from tests.theory.mixing_matrices import choice_matrix, complete, expected_pair_mean, spectral_gap


def regions(count=8, each=8, seed=1):
    """Return round trips, s, (n, n): 1 to 3 ms within a region, 20 to 200 ms between regions at random places."""
    rng = np.random.default_rng(seed)
    places, region = rng.random((count, 2)), np.repeat(np.arange(count), each)
    far = 0.02 + 0.18 / math.sqrt(2) * np.linalg.norm(places[:, None] - places[None], axis=2)
    within = rng.uniform(0.001, 0.003, (count * each,) * 2)
    return np.where(region[:, None] == region, (within + within.T) / 2, far[region][:, region])


def uniform_choice(n):
    return complete(n) / (n - 1)


def mean_cost(choice, cost):
    return float((choice * cost).sum() / len(cost))


def learnt(round_trips_s, mixes, me=0, **options):
    """Return a selector that has mixed so often, its view, and the partner of each mix."""
    n = len(round_trips_s)
    peers, rng = ids(n), random.Random(1)
    rank = {peer: i for i, peer in enumerate(peers)}
    rule, view = Nearest(**options), View(peers[me], rng.sample(peers, n))
    chosen = []
    for _ in range(mixes):
        partner = rule.choose(view, (), rng)
        rule.note_rate(partner, 1 / round_trips_s[me, rank[partner]])
        chosen.append(rank[partner])
    return rule, view, chosen


# -- the gap -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("count", "each"), [(2, 5), (8, 8), (3, 30)])
@pytest.mark.parametrize("shortcut", [0.05, 0.1, 0.2, 1.0])
def test_shortcuts_p_make_p_times_the_gap_of_uniform_choice_in_however_many_regions(count, each, shortcut):
    n = count * each
    gap = n * spectral_gap(expected_pair_mean(choice_matrix(regions(count, each), shortcut)))
    assert gap >= shortcut * n / (n - 1) - 1e-9
    if each == 5:  # the four near ones are the whole region, and nothing else leads out
        assert gap == pytest.approx(shortcut * n / (n - 1), abs=1e-9)


@pytest.mark.parametrize(("shortcut", "gap", "cost"), [(0.2, 0.203, 0.21), (0.1, 0.102, 0.12), (0.05, 0.051, 0.07)])
def test_the_stated_gaps_and_costs_of_64_members_in_8_regions_are_true(shortcut, gap, cost):
    round_trips_s = regions()
    choice = choice_matrix(round_trips_s, shortcut)
    assert choice.sum(1) == pytest.approx(1)
    assert 64 * spectral_gap(expected_pair_mean(choice)) == pytest.approx(gap, abs=0.001)
    uniform = mean_cost(uniform_choice(64), round_trips_s)
    assert mean_cost(choice, round_trips_s) / uniform == pytest.approx(cost, abs=0.01)


def test_without_shortcuts_regions_never_agree():
    assert spectral_gap(expected_pair_mean(choice_matrix(regions(), 0.0))) == 0


def test_the_variance_that_noise_leaves_at_a_tenth_of_shortcuts_is_about_twice_uniform_choices():
    left = []
    for choice in (uniform_choice(64), choice_matrix(regions(), 0.1)):
        rng, sums = np.random.default_rng(1), choice.cumsum(1)
        values, series = np.zeros((64, 200)), []
        for round in range(160):
            values += rng.standard_normal(values.shape)
            for first in rng.integers(64, size=64):
                pair = [first, int(np.searchsorted(sums[first], rng.random() * sums[first, -1]))]
                values[pair] = values[pair].mean(0)
            if round >= 60:  # six times the relaxation of the slowest, 10 rounds
                series.append(values.var(0).mean())
        left.append(np.mean(series))
    assert left[1] / left[0] == pytest.approx(1.90, rel=0.08)


# -- what is learnt ----------------------------------------------------------------------------------------------------
def test_choices_come_to_be_those_of_the_stated_matrix():
    round_trips_s, mixes = regions(), 6000
    _, _, chosen = learnt(round_trips_s, 800 + mixes, me=20, shortcut=0.1)
    seen = np.bincount(chosen[800:], minlength=64) / mixes
    expected = choice_matrix(round_trips_s, 0.1)[20]
    error = np.sqrt(expected * (1 - expected) / mixes)
    assert (np.abs(seen - expected) <= 4.5 * error + 1e-12).all()


def test_nearly_everybody_in_a_small_swarm_is_measured_soon_and_the_nearest_are_the_nearest_of_them():
    round_trips_s = regions()
    rule, view, chosen = learnt(round_trips_s, 300, me=9)
    assert len(set(chosen)) >= 58  # uniform draws alone would have left one, shortcuts alone most of them
    nearest = sorted(set(chosen), key=lambda i: round_trips_s[9, i])[:4]
    assert rule.nearest(view) == [ids(64)[i] for i in nearest]
    assert set(nearest) <= set(range(8, 16))


def test_in_a_large_swarm_trying_ends_and_choices_are_near():
    round_trips_s = regions(8, 250)
    _, _, chosen = learnt(round_trips_s, 3000)
    assert np.mean(round_trips_s[0, chosen[-1000:]] < 0.01) > 0.85
    assert len(set(chosen)) < 600


def test_one_slow_exchange_does_not_make_a_partner_far_and_four_do():
    a, b, me = ids(3)
    rule, view = Nearest(near=1), View(me, ids(3))
    rule.note_rate(a, 1 / 0.1)
    rule.note_rate(b, 1 / 0.2)
    rule.note_rate(a, 1 / 0.4)
    assert rule.nearest(view) == [a]
    for _ in range(3):
        rule.note_rate(a, 1 / 0.4)
    assert rule.nearest(view) == [b]


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -1.0, 0.0])
def test_rates_that_cannot_be_are_ignored(nonsense):
    (peer,) = ids(1)
    rule = Nearest()
    rule.note_rate(peer, nonsense)
    assert not rule.rates_mb_s
    rule.note_rate(peer, 2.0)
    rule.note_rate(peer, nonsense)
    assert rule.rates_mb_s == {peer: 2.0}


def test_measurements_are_bounded_and_the_fast_ones_kept():
    peers = ids(3 * MAX_MEASURED)
    rule = Nearest()
    for i, peer in enumerate(peers):
        rule.note_rate(peer, 1 / (1.0 + i))
        assert len(rule.rates_mb_s) <= MAX_MEASURED
    view = View(PeerId(b"\xff" * 16), peers)
    assert rule.nearest(view) == peers[:4]


def test_those_who_are_gone_are_forgotten_and_those_who_do_not_fit_passed_over():
    peers = ids(12)
    rule, view = Nearest(), View(peers[11], peers)
    for i, peer in enumerate(peers[:11]):
        rule.note_rate(peer, 1 / (0.1 + i))
    view.unfit = {peers[1]}
    assert rule.nearest(view) == [peers[0], *peers[2:5]]
    view.living, view.changes = peers[4:], 1
    assert rule.nearest(view) == peers[4:8]
    assert peers[0] not in rule.rates_mb_s
    rng = random.Random(1)
    assert {rule.choose(view, set(peers[4:8]), rng) for _ in range(100)} == set(peers[8:11])  # the near ones are busy
