"""The measured outer momentum: where it settles with noise alone, and where a common progress leads the nodes."""

import math

import numpy as np
import pytest

from gossip.arithmetic.outer_step import ALIKE, MAX_MOMENTUM, SAMPLED, OuterStep, measured_momentum, sample_of

NODES, ELEMENTS = 64, 200


def rounds(steps, count, noise, progress, seed=0):
    """Play rounds of random pairs, and return the mean correlation of successive outer steps in the later half.

    In each round a node moves by noise of this scale, and by a direction of length ``progress`` that all share.
    """
    rng = np.random.default_rng(seed)
    x = np.zeros((NODES, ELEMENTS), np.float32)
    towards = rng.standard_normal(ELEMENTS).astype(np.float32) * np.float32(progress)
    alike, last = [], np.zeros_like(x)
    for step, own in zip(steps, x, strict=True):
        step.reset(own)
    for number in range(count):
        x += towards + np.float32(noise) * rng.standard_normal(x.shape).astype(np.float32)
        before, moved = x.copy(), np.empty_like(x)
        for one, other in rng.permutation(NODES).reshape(-1, 2):
            for mine, theirs in ((one, other), (other, one)):
                x[mine] += steps[mine].shift(before[mine], before[theirs] - before[mine], 0.5)
                moved[mine] = steps[mine].state()[1]
        if number > count // 2:
            lengths = np.sqrt((moved**2).sum(1) * (last**2).sum(1))
            alike.append(float(((moved * last).sum(1) / lengths).mean()))
        last = moved
    return float(np.mean(alike))


@pytest.mark.parametrize(("alpha", "beta"), [(0.001, 1.0), (0.3, 0.9), (0.5, 0.75)])
def test_with_noise_alone_successive_steps_are_alike_by_alpha_less_a_quarter_of_beta(alpha, beta):
    steps = [OuterStep(ELEMENTS, alpha, beta) for _ in range(NODES)]
    assert rounds(steps, 60, 1.0, 0.0) == pytest.approx(alpha - beta / 4, abs=0.02)


def test_with_noise_alone_the_measured_momentum_is_the_root_of_that_equation():
    steps = [OuterStep(ELEMENTS, 0.0, 1.0, measures=True) for _ in range(NODES)]
    assert rounds(steps, 240, 1.0, 0.0) == pytest.approx(ALIKE, abs=0.03)
    expected = 2 * (math.sqrt(1.25 + ALIKE) - 1)  # Solve alpha - (1 - alpha^2) / 4 = ALIKE: 0.41.
    assert np.mean([step.alpha for step in steps]) == pytest.approx(expected, abs=0.02)
    assert all(step.beta == 1 - step.alpha**2 for step in steps)


def test_progress_that_all_share_leaves_plain_means():
    steps = [OuterStep(ELEMENTS, 0.0, 1.0, measures=True) for _ in range(NODES)]
    assert rounds(steps, 60, 1.0, 1.5) > ALIKE
    assert max(step.alpha for step in steps) < 0.02


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, 1e30])
def test_steps_that_cannot_be_compared_leave_the_momentum(value):
    before, after = np.ones(8, np.float32), np.full(8, value, np.float32)
    assert measured_momentum(0.3, before, after) == 0.3
    assert measured_momentum(0.3, after, before) == 0.3


def test_no_steps_drive_the_momentum_out_of_its_bounds():
    alpha, step = 0.0, np.ones(8, np.float32)
    for _ in range(100):
        alpha = measured_momentum(alpha, step, -step)
    assert alpha == MAX_MOMENTUM
    for _ in range(100):
        alpha = measured_momentum(alpha, step, step)
    assert alpha == 0.0


def test_other_weights_begin_with_plain_means():
    step = OuterStep(ELEMENTS, 0.0, 1.0, measures=True)
    vector = np.zeros(ELEMENTS, np.float32)
    step.reset(vector)
    for sign in (1, -1, 1, -1):
        step.shift(vector.copy(), np.full(ELEMENTS, sign, np.float32), 0.5)
    assert step.alpha > 0
    step.replace(vector)
    assert (step.alpha, step.beta) == (0.0, 1.0)


@pytest.mark.parametrize("size", [0, 1, SAMPLED, SAMPLED + 1, 10 * SAMPLED + 7])
def test_a_sample_is_spread_evenly_and_bounded(size):
    sample = sample_of(np.arange(size, dtype=np.float32))
    assert sample.size <= SAMPLED
    assert sample.size >= min(size, SAMPLED // 2)
