"""The correction for the pull of a node's own data: its arithmetic, its limits, and hostile numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.arithmetic.correction import (
    LEAK,
    MAX_INTERVALS,
    MAX_STEP_SHARE,
    Correction,
    Lesson,
    check_correction,
    credit,
)
from gossip.config import Config
from gossip.errors import ConfigError
from sim.learning.corrections import Corrections

EVERY, KAPPA, LONG = 8, 0.2, 1e6  # LONG: a squared norm of weights so large that the limit never binds


def correction(size=6, parameters=4):
    return Correction(size, parameters, KAPPA, EVERY)


def taught(times=1, rate=None):
    """Return a correction that has learned the same difference so often."""
    one = correction()
    if rate is not None:
        one.rate = rate
    for _ in range(times):
        one.learn(displacement(1), 0.5, Lesson(1.0, LONG))
    return one


def displacement(seed, size=6):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@given(st.lists(st.floats(0.0, 4.0), min_size=1, max_size=20), st.floats(0.0, 1.0))
def test_partners_learn_exact_opposites(intervals, weight):
    one, other = correction(), correction()
    for seed, trained in enumerate(intervals):
        difference = displacement(seed)
        counts = float(credit(trained, 1.5))
        one.learn(difference, weight, Lesson(counts, LONG))
        other.learn(-difference, weight, Lesson(counts, LONG))
    if one.pull is not None:
        np.testing.assert_array_equal(one.pull, -other.pull)


def test_it_takes_up_a_share_of_each_mix_and_nothing_of_buffers():
    one, difference = taught(), displacement(1)
    np.testing.assert_allclose(one.pull[:4], KAPPA * 0.5 * difference[:4], rtol=1e-6)
    np.testing.assert_array_equal(one.pull[4:], 0)


def test_a_mix_after_several_intervals_teaches_what_one_does():
    other = correction()
    other.learn(4 * displacement(1), 0.5, Lesson(float(credit(4.0, 4.0)), LONG))
    np.testing.assert_allclose(taught().pull, other.pull, rtol=1e-6)


@pytest.mark.parametrize(
    ("stated", "count"),
    [
        ((0.0, 0.0), 0.0),  # A node that has not trained teaches nothing.
        ((-1.0, 3.0), 0.0),
        ((2.0, 0.0), 0.0),
        ((0.25, 1.0), 0.25),  # A mix soon after another teaches as much less.
        ((0.25, 3.75), 0.25 / 2),
        ((1.0, 1.0, 0.1), 0.01),  # What a filter has shortened counts by the square of what it left.
        ((4.0, 4.0, 0.5), 0.0625),
    ],
    ids=str,
)
def test_a_mix_counts_by_the_intervals_that_both_have_trained_and_by_what_is_left_of_it(stated, count):
    assert credit(*stated) == pytest.approx(count)


def test_it_covers_the_steps_since_the_last_addition_and_follows_the_learning_rate():
    one = taught(20, rate=0.1)
    assert one.applied_share > 0.9
    assert one.step_factor(2) == pytest.approx(0.25 * one.applied_share)
    assert one.step_factor(100) == one.applied_share, "a loop that was held up is corrected by one interval at most"
    one.rate = 0.05
    assert one.step_factor(2) == pytest.approx(0.125 * one.applied_share)
    before = one.pull.copy()
    one.learn(np.zeros(6, np.float32), 0.5, Lesson(1.0, LONG))
    np.testing.assert_allclose(one.pull, before / 2 * (1 - LEAK), rtol=1e-6)
    assert one.step_factor(2) == pytest.approx(0.25 * one.applied_share), "what was learned is of the new rate now"


def test_lessons_without_a_common_direction_count_less_than_those_with_one():
    noise, pulled, half = correction(4000, 4000), correction(4000, 4000), correction(4000, 4000)
    pull = displacement(0, 4000)
    for seed in range(1, 9):
        fresh = displacement(seed, 4000)
        noise.learn(fresh, 0.5, Lesson(1.0, 100 * LONG))
        pulled.learn(pull, 0.5, Lesson(1.0, 100 * LONG))
        half.learn(fresh + pull, 0.5, Lesson(1.0, 100 * LONG))
    kept = 1 - LEAK
    alone, together = (1 - kept**16) / (1 - kept**2), ((1 - kept**8) / (1 - kept)) ** 2
    for one, times in ((noise, alone), (pulled, together), (half, (alone + together) / 2)):
        assert one.applied_share == pytest.approx(1 - alone / times, abs=0.05)


def test_lessons_that_shrink_leave_no_pull_where_they_have_no_common_direction():
    """The first steps of a language model are like this: differences become ten times shorter within some mixes."""
    noise = correction(4000, 4000)
    for seed in range(1, 30):
        noise.learn(0.8**seed * displacement(seed, 4000), 0.5, Lesson(1.0, 100 * LONG))
    assert noise.applied_share < 0.1


@pytest.mark.parametrize("rate", [0.0, math.nan, math.inf, -1.0])
def test_a_learning_rate_that_is_none_scales_nothing_that_is_learned(rate):
    one = taught(20, rate)
    assert one.step_factor(EVERY) == one.applied_share > 0.9
    assert np.isfinite(one.pull).all()


@given(st.lists(st.floats(0.0, 1e30), min_size=1, max_size=8), st.floats(0.0, 100.0))
def test_no_difference_makes_it_longer_than_its_limit(lengths, own_sq):
    one = correction(4)
    for length in lengths:
        with np.errstate(over="ignore", invalid="ignore"):
            one.learn(np.full(4, length, np.float32), 0.5, Lesson(1.0, own_sq))
    underflow = 1e-20  # squares underflow in float32
    assert np.linalg.norm(one.pull.astype(np.float64)) <= MAX_STEP_SHARE * EVERY * math.sqrt(own_sq) * 1.001 + underflow


def test_a_correction_that_has_overflowed_begins_anew():
    one = taught()
    one.pull[0] = np.inf
    one.learn(displacement(2), 0.5, Lesson(1.0, LONG))
    assert not one.pull.any()
    assert one.step_factor(EVERY) == 0.0


def test_other_weights_have_learned_nothing():
    one = taught()
    version = one.version
    one.reset()
    assert not one.pull.any()
    assert one.step_factor(EVERY) == 0.0
    assert one.version > version


@pytest.mark.parametrize("kappa", [-0.1, 2 / 3, 1.0, math.nan])
def test_a_kappa_that_drives_nodes_apart_is_refused(kappa):
    with pytest.raises(ConfigError, match="correction"):
        check_correction(kappa)


@given(st.floats(), st.floats())
def test_both_sides_give_one_credit_whatever_is_stated(ours, theirs):
    assert credit(ours, theirs) == credit(theirs, ours)
    assert 0.0 <= credit(ours, theirs) <= 1.0
    assert credit(math.nan, 0.5) == credit(1.0, 0.5)
    assert credit(MAX_INTERVALS, theirs) == credit(math.inf, theirs)


@pytest.mark.parametrize("own_sq", [LONG, 4.0])
def test_the_simulators_rows_are_what_nodes_hold_bit_for_bit(own_sq):
    rows = Corrections(2, 4, Config(mix_every_steps=EVERY, correction=KAPPA))
    nodes = [correction(4), correction(4)]
    rates = [0.1, 0.1, 0.1, 0.1, 0.05, 0.02]
    for step, rate in enumerate(rates):
        differences = np.stack([displacement(row, 4) + 0.1 * displacement(10 * step, 4) for row in (0, 1)])
        stated = np.array([[1.0, 2.5], [0.5, 4.0]]), np.array([1.0, 0.7])
        counts = credit(*stated[0], stated[1])
        each = zip(*stated[0].tolist(), stated[1].tolist(), strict=True)
        assert counts.tolist() == [float(credit(*one)) for one in each]
        both = np.array([0, 1])
        rows.learn(both, np.float32(0.5) * differences, counts, np.full(2, own_sq), np.full(2, rate))
        for node, difference, count in zip(nodes, differences, counts.tolist(), strict=True):
            node.rate = rate
            node.learn(difference, 0.5, Lesson(count, own_sq))
        models = np.ones((2, 4), np.float32)
        taken = np.array([EVERY // 2, EVERY // 2 + 1])
        rows.apply(models, both, taken, np.full(2, rate))
        np.testing.assert_array_equal(models[1], 1.0)  # not due
        expected = 1.0 + nodes[0].step_factor(EVERY // 2) * nodes[0].pull
        np.testing.assert_allclose(models[0], expected, rtol=1e-6)
        for row, node in zip(rows.pull, nodes, strict=True):
            np.testing.assert_array_equal(row, node.pull)
    np.testing.assert_allclose(rows.applied_share, [node.applied_share for node in nodes], rtol=1e-6)
    assert rows.applied_share.all() or own_sq < LONG


def test_with_the_interval_the_correction_of_an_interval_grows_and_that_of_a_step_stays():
    one, nothing = correction(), np.zeros(6, np.float32)
    for _ in range(6):
        one.learn(np.ones(6, np.float32), 0.5, Lesson(1.0, LONG))
    before, step = one.pull.copy(), one.step_factor(1) * one.pull.copy()
    one.learn(nothing, 0.5, Lesson(1.0, LONG, 2 * EVERY))
    np.testing.assert_allclose(one.pull, 2 * (1 - LEAK) * before, rtol=1e-6)
    assert one.interval_steps == 2 * EVERY
    # The share of noise moves a little.
    np.testing.assert_allclose(one.step_factor(1) * one.pull, (1 - LEAK) * step, rtol=0.1)


def test_where_exchanges_teach_nothing_the_interval_stays():
    one = correction()
    one.learn(displacement(1), 0.5, Lesson(0.0, LONG, 2))
    assert (one.interval_steps, one.pull) == (EVERY, None)


@pytest.mark.parametrize("every", [1, 2, 8, 32])
def test_a_constant_pull_is_corrected_alike_whatever_the_interval(every):
    pull = np.full(6, 0.01, np.float32)  # what one step moves a node
    one = correction()
    for _ in range(400):  # the partner is in the middle: a mix brings back half of what an interval drove apart
        apart = every * (pull + one.step_factor(1) * one.pull) if one.pull is not None else every * pull
        one.learn(-2 * apart.astype(np.float32), 0.5, Lesson(1.0, LONG, every))
    left = (pull + one.step_factor(1) * one.pull)[:4] / pull[:4]
    np.testing.assert_allclose(left, left[0], rtol=1e-5)
    assert left[0] == pytest.approx(expected_rest(), abs=0.02)


def expected_rest():
    """Return the share of a constant pull that the leak leaves, by the recursion for one number."""
    c, noise_sq = 0.0, 0.0
    for _ in range(400):
        share = max(0.0, 1.0 - noise_sq / (c * c)) if c else 0.0
        lesson = -(1.0 + share * c)
        c = (1.0 - LEAK) * c + KAPPA * lesson
        noise_sq = (1 - LEAK) ** 2 * noise_sq + (KAPPA * lesson) ** 2
    return 1.0 + max(0.0, 1.0 - noise_sq / (c * c)) * c


@given(
    st.lists(st.tuples(st.integers(0, 64), st.just(0.0) | st.floats(0.01, 1.0)), min_size=1, max_size=12),
    st.integers(0, 99),
)
def test_a_simulated_correction_follows_the_interval_as_a_nodes_does(lessons, seed):
    node, rows = correction(4, 4), Corrections(2, 4, Config(mix_every_steps=EVERY, correction=KAPPA))
    row = np.array([1])
    for number, (every, counts) in enumerate(lessons):
        taught = displacement(seed + number, 4)
        node.learn(taught, 0.5, Lesson(counts, LONG, every))
        shift = (np.float32(0.5) * taught)[None]
        rows.learn(row, shift, np.array([counts]), np.array([LONG]), np.array([0.0]), np.array([every]))
    assert rows.interval_steps.tolist() == [EVERY, node.interval_steps]
    if node.pull is not None:
        np.testing.assert_allclose(rows.pull[1], node.pull, rtol=1e-5, atol=1e-7)
        assert rows.applied_share[1] == pytest.approx(node.applied_share, rel=1e-5, abs=1e-6)
