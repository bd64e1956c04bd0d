"""The distance that local steps alone moved a model, whatever others added meanwhile."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.arithmetic.movement import SAMPLED_ELEMENTS, Movement


def test_nothing_is_known_at_the_first_look_and_each_later_one_begins_anew():
    progress = Movement(10)
    progress.add_shift(np.ones(10, np.float32))
    assert math.isnan(progress.measure(np.zeros(10, np.float32)))
    assert progress.measure(np.full(10, 3.0, np.float32)) == pytest.approx(3 * math.sqrt(10))
    assert progress.measure(np.full(10, 3.0, np.float32)) == 0.0


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1))
def test_of_a_small_model_the_norm_is_exact_and_what_others_added_counts_nothing(size, seed):
    random = np.random.default_rng(seed)
    vector, local, shift, taken = random.standard_normal((4, size)).astype(np.float32)
    places = np.sort(random.permutation(size)[: 1 + size // 3])
    progress = Movement(size)
    progress.measure(vector)
    progress.add_shift(shift)
    progress.add_shift(taken, weight=-1.0)
    progress.add_shift(shift[places], places)
    progress.add_shift(taken[places], places, -1.0)
    vector = vector + shift - taken + local
    vector[places] += shift[places] - taken[places]
    assert progress.measure(vector) == pytest.approx(float(np.linalg.norm(local)), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("size", [SAMPLED_ELEMENTS + 1, 3 * SAMPLED_ELEMENTS - 1, 40_000])
def test_of_a_larger_one_it_errs_by_a_few_percent(size):
    random = np.random.default_rng(size)
    vector, local, shift = random.standard_normal((3, size)).astype(np.float32)
    places = np.arange(0, size, 7)
    progress = Movement(size)
    progress.measure(vector)
    progress.add_shift(shift[places], places)
    vector[places] += shift[places]
    assert SAMPLED_ELEMENTS <= len(progress.positions) < 2 * SAMPLED_ELEMENTS
    assert progress.measure(vector + local) == pytest.approx(float(np.linalg.norm(local)), rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_what_was_merged_of_another_counts_nothing_and_takes_from_what_was_done_before(seed):
    """Merge as row-stochastic pushes do, x += ratio (p - x), with local steps before and after."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=50).astype(np.float32)
    progress = Movement(50)
    progress.measure(x)
    first, second, theirs = (rng.normal(size=50).astype(np.float32) for _ in range(3))
    x = x + first
    progress.add_merge(progress.sample(theirs), 0.25)
    x = x + np.float32(0.25) * (theirs - x)
    x = x + second
    own = np.float32(0.75) * first + second
    assert progress.measure(x) == pytest.approx(float(np.linalg.norm(own)), rel=1e-5)
    progress.add_merge(progress.sample(theirs), 0.5)
    assert progress.measure(x + np.float32(0.5) * (theirs - x)) == pytest.approx(0.0, abs=1e-5)
