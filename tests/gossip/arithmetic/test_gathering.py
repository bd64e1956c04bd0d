"""Slices of a vector, and the mean of one member's slice."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.arithmetic.group_mean import group_mean, member_slices, trimmed_mean
from gossip.codecs import ALIGN
from gossip.config import Config
from gossip.filters.registry import filter_of
from gossip.filters.rule import Floats
from gossip.wire.messages import MAX_GROUP

BOUND = 10.0
plain = filter_of(Config(mixing="group")).mean


def trimmed(trim: int) -> Callable[[Floats], Floats]:
    return filter_of(Config(mixing="group", filter="trimmed", filter_limit=trim)).mean


@given(st.integers(1, 40_000), st.integers(2, MAX_GROUP))
def test_slices_cover_a_vector_in_whole_blocks_and_are_alike(elements: int, members: int) -> None:
    cuts = member_slices(elements, members)
    assert len(cuts) == members
    assert [0, *[cut.stop for cut in cuts]] == [*[cut.start for cut in cuts], elements]
    assert all(cut.start % ALIGN == 0 or cut.start == elements for cut in cuts)
    sizes = [cut.stop - cut.start for cut in cuts]
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) < 2 * ALIGN


@given(st.integers(2, MAX_GROUP), st.integers(0, 2**31))
def test_a_group_mean_is_the_mean_whoever_computes_it(members: int, seed: int) -> None:
    parts = np.random.default_rng(seed).normal(size=(members, 300)).astype(np.float32)
    means = [group_mean(parts, own, plain, BOUND) for own in range(members)]
    assert all(refused == {} for _, refused in means)
    assert all(np.array_equal(mean, means[0][0]) for mean, _ in means)
    np.testing.assert_allclose(means[0][0], parts.mean(0, dtype=np.float64), atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e20, 1e38])
def test_what_is_not_finite_or_too_far_is_left_out_and_named(value: float) -> None:
    parts = np.ones((4, 300), np.float32)
    parts[2, 17] = value
    parts[3] = 3.0
    mean, refused = group_mean(parts, 0, plain, BOUND)
    assert refused.keys() == {2}
    np.testing.assert_allclose(mean, 5 / 3, rtol=1e-6)


def test_the_own_row_is_kept_whatever_the_others_say() -> None:
    parts = np.full((3, 300), np.nan, np.float32)
    parts[1] = 7.0
    mean, refused = group_mean(parts, 1, trimmed(1), BOUND)
    assert refused.keys() == {0, 2}
    assert np.array_equal(mean, parts[1])


@pytest.mark.parametrize(("members", "trim", "expected"), [(5, 1, 2.0), (5, 2, 2.0), (3, 2, 1.0), (2, 4, 0.5)])
def test_as_many_values_are_trimmed_as_leave_one(members: int, trim: int, expected: float) -> None:
    parts = np.repeat(np.arange(members, dtype=np.float32)[:, None], 300, axis=1)
    mean, _ = group_mean(parts, 0, trimmed(trim), BOUND)
    assert np.array_equal(mean, np.full(300, expected, np.float32))


@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_the_trimmed_mean_is_that_of_the_middle_of_a_sort(trim, more, size, seed):
    vectors = np.random.default_rng(seed).normal(0.0, 3.0, (2 * trim + more, size)).round().astype(np.float32)
    kept = np.sort(vectors, axis=0)[trim : len(vectors) - trim]
    mean = trimmed_mean(vectors, trim)
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, kept.astype(np.float64).mean(axis=0), rtol=1e-5)
