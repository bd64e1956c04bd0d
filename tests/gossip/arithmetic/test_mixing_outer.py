"""The outer momentum step: the fast version against a slow one, whole and in parts, and which rates are refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.arithmetic.outer_step import BLOCK_ELEMENTS, OuterStep, check_outer
from gossip.config import Config
from gossip.config.methods import METHODS
from gossip.errors import ConfigError


class SlowOuter:
    """The two lines of the algorithm, in float64."""

    def __init__(self, start, alpha, beta):
        self.phi, self.m, self.alpha, self.beta = start.astype(np.float64), np.zeros(start.size), alpha, beta

    def mixed(self, theta, partner, weight):
        mean = theta + weight * (partner - theta)
        self.m = self.alpha * self.m + self.beta * (mean - self.phi)
        self.phi = self.phi + self.m
        return self.phi


PARAMETERS = 60  # of the 100 elements below; statistics lie behind them
whole_and_part = pytest.mark.parametrize("positions", [None, np.array([0, 7, 59, 60, 99])], ids=["whole", "part"])


def among(positions):
    """Return an index of these elements among all 100, and the number of parameters among them."""
    return (slice(None), PARAMETERS) if positions is None else (positions, 3)


@pytest.mark.parametrize("size", [1, 777, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 3])
def test_the_fast_outer_step_is_the_slow_one(size):
    random = np.random.default_rng(size)
    theta = random.standard_normal(size).astype(np.float32)
    fast, slow = OuterStep(size, 0.5, 0.7), SlowOuter(theta, 0.5, 0.7)
    fast.reset(theta)
    for weight in (0.5, 0.25, 0.5, 0.1):
        partner = (theta + random.standard_normal(size)).astype(np.float32)
        given = partner - theta
        shift = fast.shift(theta, given, weight)
        assert shift is given
        np.testing.assert_allclose(theta + shift, slow.mixed(theta.astype(float), partner, weight), atol=1e-5)
        theta = (theta + shift + 0.1 * random.standard_normal(size)).astype(np.float32)


@whole_and_part
def test_a_late_difference_is_added_plainly_and_is_nobodys_progress(positions):
    """A late difference moves the model and the outer step's reference alike.

    The next mix then finds the progress that it would find without the late one.
    """
    start, partner, progress, theirs = np.random.default_rng(5).standard_normal((4, 100)).astype(np.float32)
    where, weights = among(positions)
    with_late, without = OuterStep(PARAMETERS, 0.5, 0.7), OuterStep(PARAMETERS, 0.5, 0.7)
    for step in (with_late, without):
        step.reset(start)
        start_shift = step.shift(start, partner - start, 0.5)
    theta = start + start_shift + progress
    given = (theirs - start)[where]
    late = with_late.shift(start[where], given.copy(), 0.25, positions, is_late=True)
    np.testing.assert_allclose(late[:weights], 0.25 * given[:weights], rtol=1e-6)
    np.testing.assert_array_equal(late[weights:], given[weights:])  # Statistics are mixed elsewhere.
    moved = np.zeros(100, np.float32)
    moved[where] = late
    # Move the partner too, so that both mixes see the same difference.
    later = with_late.shift(theta + moved, partner - theta, 0.5)
    plain = without.shift(theta, partner - theta, 0.5)
    np.testing.assert_allclose(later, plain, atol=1e-5)


@whole_and_part
def test_without_momentum_the_mean_is_where_the_next_mix_counts_from(positions):
    """A plain mix acts like a step of momentum 0 and rate 1, but keeps the momentum for the next mix."""
    start, partner, theta, theirs, progress = np.random.default_rng(6).standard_normal((5, 100)).astype(np.float32)
    where, weights = among(positions)
    step = OuterStep(PARAMETERS, 0.5, 0.7)
    step.reset(start)
    step.shift(start, partner - start, 0.5)
    phi, momentum = (state.copy() for state in step.state())
    given = (theirs - theta)[where]
    shift = step.shift(theta[where], given.copy(), 0.25, positions, plain=True)
    np.testing.assert_array_equal(shift[:weights], np.float32(0.25) * given[:weights])
    np.testing.assert_array_equal(shift[weights:], given[weights:])
    phi[np.arange(100)[where][:weights]] = (theta[where] + shift)[:weights]
    np.testing.assert_array_equal(step.state(), (phi, momentum))
    slow = SlowOuter(phi, 0.5, 0.7)
    slow.m = momentum.astype(np.float64)
    fast = step.shift(theta + progress, theirs - theta, 0.5)
    expected = slow.mixed((theta + progress)[:PARAMETERS].astype(float), (theirs + progress)[:PARAMETERS], 0.5)
    np.testing.assert_allclose((theta + progress + fast)[:PARAMETERS], expected, atol=1e-5)


@pytest.mark.parametrize("plain", [False, True])
@whole_and_part
def test_the_difference_of_a_mix_beside_others_is_added_plainly(positions, plain):
    """Several exchanges may find the same disagreement, and momentum would correct it several times."""
    start, since, given = np.random.default_rng(3).standard_normal((3, 100)).astype(np.float32)
    where, weights = among(positions)
    with_it, without = OuterStep(PARAMETERS, 0.5, 0.7), OuterStep(PARAMETERS, 0.5, 0.7)
    for step in (with_it, without):
        step.reset(start)
    snapshot, given = (start - since)[where], given[where]
    how = {"positions": positions, "plain": plain, "added_since": since[where]}
    brought = with_it.shift(snapshot, given.copy(), 0.25, **how)
    nothing = without.shift(snapshot, np.zeros_like(given), 0.25, **how)
    np.testing.assert_allclose(brought[:weights], (nothing + 0.25 * given)[:weights], atol=1e-5)
    (phi, momentum), (other_phi, other_momentum) = with_it.state(), without.state()
    moved = (phi - other_phi)[np.arange(100)[where][:weights]]
    np.testing.assert_allclose(moved, 0.25 * given[:weights], atol=1e-5)
    np.testing.assert_array_equal(momentum, other_momentum)


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.7), (0.0, 1.0)])
def test_what_lies_behind_the_parameters_is_left_as_it_is(alpha, beta):
    """Momentum could drive a running variance below zero; gossip.averaging.vectors mixes buffers instead."""
    a, b = np.abs(np.random.default_rng(3).standard_normal((2, 100))).astype(np.float32)
    step = OuterStep(PARAMETERS, alpha, beta)
    step.reset(a)
    given = b - a
    given[PARAMETERS:] = b[PARAMETERS:]
    np.testing.assert_array_equal(step.shift(a, given, 0.5)[PARAMETERS:], b[PARAMETERS:])


@given(
    st.integers(1, 400), st.just((0.0, 1.0)) | st.tuples(st.floats(0, 0.9), st.floats(0.05, 0.35)),
    st.floats(0.05, 1.0), st.floats(0, 1), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_part_of_the_outer_step_is_that_of_the_whole_and_the_rest_stands_still(size, rates, share, own, seed):
    """Compare a step on a part with a step on the whole whose other elements are put back.

    Both agree bit for bit, over several mixes with different parts, with buffers behind the parameters. The plain mean
    is among them.
    """
    random = np.random.default_rng(seed)
    parameters = int(own * size)
    part, whole = OuterStep(parameters, *rates), OuterStep(parameters, *rates)
    model = random.standard_normal(size).astype(np.float32)
    part.reset(model)
    whole.reset(model)
    for weight in (0.5, 0.25, 0.5):
        positions = np.sort(random.permutation(size)[: max(1, int(share * size))])
        d = random.standard_normal(size).astype(np.float32)
        outside = np.setdiff1d(np.arange(parameters), positions)
        kept = [] if whole.is_plain else [state[outside] for state in whole.state()]
        given = d[positions]
        shift = part.shift(model[positions], given, weight, positions)
        assert shift is given
        expected = whole.shift(model, d.copy(), weight)
        np.testing.assert_array_equal(shift, expected[positions])
        if not whole.is_plain:
            for state, before in zip(whole.state(), kept, strict=True):
                state[outside] = before
            np.testing.assert_array_equal(part.state(), whole.state())
        model[positions] += shift
        model += (0.1 * random.standard_normal(size)).astype(np.float32)


def test_a_reset_forgets_every_mix_before_it():
    start, d = np.random.default_rng(4).standard_normal((2, 50)).astype(np.float32)
    used, fresh = OuterStep(50, 0.9, 0.2), OuterStep(50, 0.9, 0.2)
    used.reset(d)
    used.shift(start, d.copy(), 0.5)
    used.reset(start)
    fresh.reset(start)
    np.testing.assert_array_equal(used.shift(start, d.copy(), 0.5), fresh.shift(start, d.copy(), 0.5))


def test_after_settling_a_mix_of_what_is_agreed_on_moves_nothing():
    """A mix that began while this node settled may end after that."""
    outer = OuterStep(3, 0.5, 0.7)
    outer.reset(np.zeros(3, np.float32))
    trained = np.array([1.0, -2.0, 0.5], np.float32)
    here = trained + outer.shift(trained, np.array([-1.0, 2.0, 0.0], np.float32), 0.5)  # the momentum is not 0
    theirs = np.full(3, 0.25, np.float32)
    agreed = here + outer.shift(here, theirs - here, 0.5, plain=True)
    outer.forget_momentum()
    assert not outer.shift(agreed, np.zeros(3, np.float32), 0.5).any()


def test_to_begin_is_to_reset_without_a_copy():
    start = np.arange(6, dtype=np.float32)
    copied, own = OuterStep(4, 0.5, 0.7), OuterStep(4, 0.5, 0.7)
    assert not own.has_weights
    copied.reset(start)
    own.take_over(start)
    assert own.has_weights
    assert own.has_taken_over(start)
    assert not copied.has_taken_over(start)
    assert not own.has_taken_over(start[4:])
    for _ in range(3):
        snapshot, apart = np.ones(6, np.float32), np.full(6, 0.25, np.float32)
        np.testing.assert_array_equal(own.shift(snapshot, apart.copy(), 0.5), copied.shift(snapshot, apart.copy(), 0.5))
    assert (start[:4] != np.arange(4)).all(), "it moves where it lies"
    np.testing.assert_array_equal(start[4:], [4.0, 5.0])
    plain = OuterStep(4, 0.0, 1.0)
    assert plain.has_weights
    plain.take_over(start)
    assert not plain.has_taken_over(start)


@pytest.mark.parametrize(
    ("alpha", "beta"),
    [(0.9, 0.7), (0.5, 1.5), (0.5, 0.0), (0.5, -1.0), (0.0, 2.0), (1.0, 0.1), (-0.1, 0.5), (0.5, math.nan),
     (math.nan, 1)],
)  # fmt: skip
def test_numbers_that_drive_the_nodes_apart_are_refused_at_construction(alpha, beta):
    with pytest.raises(ConfigError, match=r"\.$"):
        OuterStep(10, alpha, beta)


def test_the_refusal_names_numbers_that_do():
    with pytest.raises(ConfigError) as caught:
        check_outer(0.9, 0.7)
    assert "an outer_rate below 0.376 (least disagreement near 0.19)" in str(caught.value)
    assert "an outer_momentum of at most 0.804" in str(caught.value)
    check_outer(0.9, 0.376)
    check_outer(0.804, 0.7)


@pytest.mark.parametrize("name", METHODS)
def test_every_published_outer_step_can_be_made_of_what_its_config_says(name):
    config = Config.published(name)
    step = OuterStep(10, config.outer_momentum, config.outer_rate, config.averaged)
    assert (step.alpha, step.beta) == (config.outer_momentum, config.outer_rate)
