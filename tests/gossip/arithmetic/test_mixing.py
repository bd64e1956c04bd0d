"""The plain mean of a pair, and each fast function against a slow and obvious version."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gossip.arithmetic.mixing import MAX_MASS, pair_weight, push_mass, subtract
from gossip.arithmetic.outer_step import OuterStep
from gossip.codecs import CODECS

finite = st.floats(-1e4, 1e4, width=32)


def test_the_pair_weight_is_the_mean_for_equals_and_falls_with_the_gap():
    assert pair_weight(0, 0.5) == 0.5
    assert pair_weight(3, 0.5) == 0.25
    assert pair_weight(3, 0.0) == 0.5
    assert pair_weight(3, 1.0, cap=0.4) == pytest.approx(0.1)
    assert pair_weight(math.inf, 0.5) == 0.0
    assert pair_weight(math.nan, 0.5) == 0.0


@given(st.floats(-1e300, 1e300), st.floats(0, 2))
def test_both_sides_compute_one_weight(gap, exponent):
    assert pair_weight(gap, exponent) == pair_weight(-gap, exponent)
    assert 0.0 <= pair_weight(gap, exponent) <= 0.5


@given(st.integers(0, 3000), st.integers(0, 2**32))
def test_the_difference_is_that_of_the_obvious_version(size, seed):
    theirs, mine = np.random.default_rng(seed).standard_normal((2, size)).astype(np.float32)
    out = np.empty_like(mine)
    square, own = subtract(theirs, mine, out)
    np.testing.assert_array_equal(out, [t - m for t, m in zip(theirs, mine, strict=True)])
    assert square == pytest.approx(sum(float(d) ** 2 for d in out), rel=1e-5)
    assert own == pytest.approx(sum(float(m) ** 2 for m in mine), rel=1e-5)


@pytest.mark.parametrize("where", [0, 4097, 262_143])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("side", [0, 1])
def test_whatever_is_not_finite_shows_in_the_sum_of_squares(where, bad, side):
    pair = np.zeros((2, 262_144), np.float32)
    pair[side, where] = bad
    assert not math.isfinite(subtract(pair[0], pair[1], np.empty_like(pair[0]))[0])
    pair[1 - side, where] = bad  # inf - inf is NaN and not 0
    if not math.isfinite(bad):
        assert not math.isfinite(subtract(pair[0], pair[1], np.empty_like(pair[0]))[0])


# test_codecs_moniqua.py tests the codecs that need a known spread.
UNBOUND = {name: codec for name, codec in CODECS.items() if not codec.needs_spread}


def exchange(a, b, codec, weight):
    """Return both shifts of one exchange, each computed from that side's vector and the other's bytes."""
    shifts = []
    for mine, theirs in ((a, b), (b, a)):
        data = bytearray(codec.encoded_bytes(theirs.size))
        codec.encode(theirs, data)
        received, own, out = np.empty_like(theirs), np.empty_like(mine), np.empty_like(mine)
        codec.decode(data, received)
        codec.quantised(mine, own)
        subtract(received, own, out)
        shifts.append(OuterStep(a.size, 0.0, 1.0).shift(mine, out, weight))
    return shifts


@pytest.mark.parametrize("codec", UNBOUND.values(), ids=UNBOUND)
@given(pair=hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(1, 50)), elements=finite), gap=st.floats(0, 100))
def test_a_pair_moves_its_mean_by_exactly_nothing_whatever_the_codec_loses(codec, pair, gap):
    to_a, to_b = exchange(pair[0], pair[1], codec, pair_weight(gap, 0.5))
    assert np.all(to_a + to_b == 0.0)


def test_the_plain_step_is_the_pair_mean():
    a, b = np.random.default_rng(0).standard_normal((2, 999)).astype(np.float32)
    to_a, to_b = exchange(a, b, CODECS["fp32"], 0.5)
    np.testing.assert_allclose(a + to_a, (a + b) / 2, atol=1e-6)
    np.testing.assert_allclose(b + to_b, (a + b) / 2, atol=1e-6)


@given(st.fractions(min_value=Fraction(1, 10**6), max_value=100), st.integers(1, 16))
def test_pushes_of_one_mix_and_what_stays_are_equal_shares_of_the_mass(mass, pushes):
    given, left = [], mass
    for remaining in range(pushes, 0, -1):
        share, left = push_mass(left, remaining, conserves=True)
        given.append(share)
    assert set(given) == {left} == {mass / (pushes + 1)}


@given(st.lists(st.floats(5e-324, MAX_MASS), max_size=30), st.integers(1, 16), st.integers(0, 3_000))
def test_whatever_masses_were_accepted_the_next_push_is_acceptable(masses, partners, silent_mixes):
    """Members may push the largest masses again and again, or take all that this one gives and give nothing back."""
    mass = 1.0
    for got in masses:
        mass += got
        given, mass = push_mass(mass, partners, conserves=True)
        assert 0 < given <= MAX_MASS
    for _ in range(silent_mixes):
        given, mass = push_mass(mass, partners, conserves=True)
    given, mass = push_mass(mass, partners, conserves=True)
    assert 0 < given <= MAX_MASS
    assert 0 < mass <= MAX_MASS


@given(st.floats(0.1, 100), st.integers(1, 16))
def test_where_nothing_is_conserved_every_vector_counts_as_one(mass, pushes):
    assert push_mass(mass, pushes, conserves=False) == (1.0, 1.0)
