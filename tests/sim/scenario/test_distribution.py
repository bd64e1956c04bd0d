"""Durations follow their distributions, including the rest of durations that are already running."""

import math

import numpy as np
import pytest

from sim.scenario.distribution import Distribution

EACH = [
    Distribution.constant(3.0), Distribution.uniform(1.0, 4.0), Distribution.lognormal(2.0, 0.6),
    Distribution.exponential(2.5), Distribution.weibull(0.7, 2.0),
]  # fmt: skip
DRAWS = 200_000


@pytest.mark.parametrize("distribution", EACH, ids=str)
def test_draws_have_the_stated_mean_and_quantiles(distribution):
    drawn = distribution.draw(np.random.default_rng(1), DRAWS)
    error = drawn.std() / math.sqrt(DRAWS)
    assert abs(drawn.mean() - distribution.mean) <= 5 * error + 1e-12
    shares = np.array([0.05, 0.5, 0.95])
    below = (drawn[:, None] <= distribution.quantiles(shares)).mean(axis=0)
    if distribution.kind != "constant":  # a share p of n draws has the standard error sqrt(p (1 - p) / n)
        assert (abs(below - shares) < 5 * np.sqrt(shares * (1 - shares) / DRAWS)).all()


@pytest.mark.parametrize("distribution", EACH, ids=str)
def test_a_residual_is_that_of_a_duration_found_running(distribution):
    """The slow version lays durations end to end, looks in at random times, and takes what is left."""
    rng = np.random.default_rng(2)
    ends = np.cumsum(distribution.draw(rng, DRAWS))
    looks = rng.uniform(0, ends[-1] * 0.999, 20_000)
    left = np.sort(ends[np.searchsorted(ends, looks)] - looks)
    drawn = np.sort([distribution.residual(rng) for _ in range(20_000)])
    # Two-sample Kolmogorov-Smirnov: equal distributions exceed 1.95 sqrt(2 / n) once in a thousand.
    grid = np.concatenate([left, drawn])
    apart = abs(np.searchsorted(left, grid, "right") - np.searchsorted(drawn, grid, "right")).max() / 20_000
    assert apart < 1.95 * math.sqrt(2 / 20_000)
