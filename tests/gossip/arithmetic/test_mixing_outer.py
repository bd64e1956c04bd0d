"""The outer momentum step: the fast version against a slow one, whole and in parts, and where it is stable."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.arithmetic.mixing import BLOCK_ELEMENTS, OuterStep, check_outer, stability_limit
from gossip.config import Config
from gossip.config.methods import METHODS
from gossip.errors import ConfigError
from tests.gossip.arithmetic.averaging import spread

# -- the outer step ---------------------------------------------------------------------------------------------------


class SlowOuter:
    """The two lines of the algorithm, in float64."""

    def __init__(self, start, alpha, beta):
        self.phi, self.m, self.alpha, self.beta = start.astype(np.float64), np.zeros(start.size), alpha, beta

    def mixed(self, theta, partner, weight):
        mean = theta + weight * (partner - theta)
        self.m = self.alpha * self.m + self.beta * (mean - self.phi)
        self.phi = self.phi + self.m
        return self.phi


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


@pytest.mark.parametrize("part", [False, True])
def test_a_late_difference_is_added_plainly_and_is_nobodys_progress(part):
    """A late difference moves the model and the outer step's reference alike.

    The next mix then finds the progress that it would find without the late one.
    """
    random = np.random.default_rng(5)
    start, partner, progress, theirs = random.standard_normal((4, 100)).astype(np.float32)
    positions = np.array([0, 7, 59, 60, 99]) if part else None
    with_late, without = OuterStep(60, 0.5, 0.7), OuterStep(60, 0.5, 0.7)
    for step in (with_late, without):
        step.reset(start)
        start_shift = step.shift(start, partner - start, 0.5)
    theta = start + start_shift + progress
    moved = np.zeros(100, np.float32)
    given = theirs - start if positions is None else (theirs - start)[positions]
    own = start if positions is None else start[positions]
    late = with_late.shift(own, given.copy(), 0.25, positions, is_late=True)
    weights = 60 if positions is None else 3
    np.testing.assert_allclose(late[:weights], 0.25 * given[:weights], rtol=1e-6)
    np.testing.assert_array_equal(late[weights:], given[weights:])  # Statistics are mixed elsewhere.
    moved[slice(None) if positions is None else positions] = late
    # Move the partner too, so that both mixes see the same difference.
    later = with_late.shift(theta + moved, partner - theta, 0.5)
    plain = without.shift(theta, partner - theta, 0.5)
    np.testing.assert_allclose(later, plain, atol=1e-5)


@pytest.mark.parametrize("part", [False, True])
def test_without_momentum_the_mean_is_where_the_next_mix_counts_from(part):
    """A plain mix acts like a step of momentum 0 and rate 1, but keeps the momentum for the next mix."""
    random = np.random.default_rng(6)
    start, partner, theta, theirs, progress = random.standard_normal((5, 100)).astype(np.float32)
    positions = np.array([0, 7, 59, 60, 99]) if part else None
    step = OuterStep(60, 0.5, 0.7)
    step.reset(start)
    step.shift(start, partner - start, 0.5)
    momentum, phi = step._momentum.copy(), step._phi.copy()
    own = theta if positions is None else theta[positions]
    given = theirs - theta if positions is None else (theirs - theta)[positions]
    shift = step.shift(own, given.copy(), 0.25, positions, plain=True)
    weights = 60 if positions is None else 3
    np.testing.assert_array_equal(shift[:weights], np.float32(0.25) * given[:weights])
    np.testing.assert_array_equal(shift[weights:], given[weights:])
    np.testing.assert_array_equal(step._momentum, momentum)
    places = np.arange(60) if positions is None else positions[:3]
    phi[places] = (own + shift)[: len(places)]
    np.testing.assert_array_equal(step._phi, phi)
    slow = SlowOuter(phi[:60], 0.5, 0.7)
    slow.m = momentum.astype(np.float64)
    fast = step.shift(theta + progress, theirs - theta, 0.5)
    expected = slow.mixed((theta + progress)[:60].astype(float), (theirs + progress)[:60], 0.5)
    np.testing.assert_allclose((theta + progress + fast)[:60], expected, atol=1e-5)


def test_what_lies_behind_the_parameters_is_left_as_it_is():
    """Momentum could drive a running variance below zero; gossip.averaging.vectors mixes buffers instead."""
    a, b = np.abs(np.random.default_rng(3).standard_normal((2, 100))).astype(np.float32)
    for step in (OuterStep(60, 0.5, 0.7), OuterStep(60, 0.0, 1.0)):
        step.reset(a)
        given = b - a
        given[60:] = b[60:]
        np.testing.assert_array_equal(step.shift(a, given, 0.5)[60:], b[60:])


@given(
    st.integers(1, 400), st.floats(0, 0.9), st.floats(0.05, 0.35), st.floats(0.05, 1.0), st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_part_of_the_outer_step_is_that_of_the_whole_and_the_rest_stands_still(size, alpha, beta, share, own, seed):
    """Compare a step on a part with a step on the whole whose other elements are put back.

    Both agree bit for bit, over several mixes with different parts, with buffers behind the parameters.
    """
    random = np.random.default_rng(seed)
    parameters = int(own * size)
    part, whole = OuterStep(parameters, alpha, beta), OuterStep(parameters, alpha, beta)
    model = random.standard_normal(size).astype(np.float32)
    part.reset(model)
    whole.reset(model)
    for weight in (0.5, 0.25, 0.5):
        positions = np.sort(random.permutation(size)[: max(1, int(share * size))])
        d = random.standard_normal(size).astype(np.float32)
        outside = np.setdiff1d(np.arange(parameters), positions)
        if not whole.is_plain:
            kept = whole._phi[outside], whole._momentum[outside]
        given = d[positions]
        shift = part.shift(model[positions], given, weight, positions)
        assert shift is given
        expected = whole.shift(model, d.copy(), weight)
        np.testing.assert_array_equal(shift, expected[positions])
        if not whole.is_plain:
            whole._phi[outside], whole._momentum[outside] = kept
            np.testing.assert_array_equal(part._phi, whole._phi)
            np.testing.assert_array_equal(part._momentum, whole._momentum)
        model[positions] += shift
        model += (0.1 * random.standard_normal(size)).astype(np.float32)


@given(st.integers(1, 300), st.floats(0.05, 1.0), st.integers(0, 2**32 - 1))
def test_the_plain_mean_of_a_part_moves_the_mean_of_the_pair_by_nothing(size, share, seed):
    random = np.random.default_rng(seed)
    a, b = random.standard_normal((2, size)).astype(np.float32)
    positions = np.sort(random.permutation(size)[: max(1, int(share * size))])
    step = OuterStep(size, 0.0, 1.0)
    shifts = [
        step.shift(mine[positions], theirs[positions] - mine[positions], 0.5, positions)
        for mine, theirs in ((a, b), (b, a))
    ]
    assert np.all(shifts[0] + shifts[1] == 0.0)


def test_a_reset_forgets_every_mix_before_it():
    start, d = np.random.default_rng(4).standard_normal((2, 50)).astype(np.float32)
    used, fresh = OuterStep(50, 0.9, 0.2), OuterStep(50, 0.9, 0.2)
    used.reset(d)
    used.shift(start, d.copy(), 0.5)
    used.reset(start)
    fresh.reset(start)
    np.testing.assert_array_equal(used.shift(start, d.copy(), 0.5), fresh.shift(start, d.copy(), 0.5))


def rounds(alpha, beta, nodes, elements, count, noise, seed):
    """Yield phi (nodes, elements) after each round of a random perfect matching.

    The outer step is elementwise, so one call on all nodes in one vector gives exactly what one step a node gives.
    """
    random = np.random.default_rng(seed)
    phi = random.standard_normal((nodes, elements)).astype(np.float32)
    step = OuterStep(phi.size, alpha, beta)
    step.reset(phi.ravel())
    for _ in range(count):
        theta = phi + np.float32(noise) * random.standard_normal(phi.shape, np.float32) if noise else phi
        order = random.permutation(nodes).reshape(-1, 2)
        partner = np.empty(nodes, int)
        partner[order[:, 0]], partner[order[:, 1]] = order[:, 1], order[:, 0]
        shift = step.shift(theta.ravel(), (theta[partner] - theta).ravel(), 0.5)
        phi = theta + shift.reshape(phi.shape)
        yield phi


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.9), (0.5, 0.7), (0.0, 1.0), (0.7, 0.51)])
def test_the_outer_rules_variance_tends_to_its_closed_form(alpha, beta):
    """beta (1 + alpha) / (2 (1 - alpha^2) - beta): 1.3125 at (0.5, 0.7).

    N = 512 nodes x 64 elements, mean of 40 late rounds. N is finite, which takes 3/N = 0.6 % off (exactly so at
    alpha 0, where V' = (n-2)/(2(n-1)) (V + n-1)). All elements share the matchings, so the nodes alone are independent:
    over six seeds the sampling error was at most 0.6 %; the tolerance is twice that.
    """
    nodes = 512
    history = list(rounds(alpha, beta, nodes, elements=64, count=120, noise=1.0, seed=5))
    variance = np.mean([spread(phi) / phi.size for phi in history[80:]])
    expected = beta * (1 + alpha) / (stability_limit(alpha) - beta)
    assert variance == pytest.approx(expected * (1 - 3 / nodes), rel=0.012)
    if (alpha, beta) == (0.5, 0.7):
        assert expected == pytest.approx(1.3125)


def growth(alpha, beta):
    """Return the factor by which E[V] changes in a round without noise.

    It is the largest eigenvalue of the map of the second moments, with m' = alpha m + beta (g - f) / 2 and f' = f + m'.
    The partner's deviation g is independent of f and has its variance.
    """
    f, g, m = np.eye(3)  # each quantity as a linear form in (f, g, m)
    m_after = alpha * m + beta * (g - f) / 2
    f_after = f + m_after

    def moment(a, b):  # E[a b] as a linear form in (E[f^2], E[f m], E[m^2]); g is uncorrelated with both
        return [a[0] * b[0] + a[1] * b[1], a[0] * b[2] + a[2] * b[0], a[2] * b[2]]

    step = np.array([moment(f_after, f_after), moment(f_after, m_after), moment(m_after, m_after)])
    return float(np.abs(np.linalg.eigvals(step)).max())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("side", [0.95, 1.05])
def test_disagreement_contracts_below_the_limit_and_diverges_above(monkeypatch, alpha, side):
    """Compare the growth 5 % below and above the limit with the rate of the second moments.

    One matching serves all elements, so only the 512 nodes are independent: one round's factor of V has a standard
    error of about sqrt(2/512) = 6 %. The geometric mean of 75 rounds (alpha 0) has 0.7 %, that of 300 rounds 0.4 %.
    Larger alphas have less, since a step moves V by less. Over ten seeds the error was at most 0.0033.
    """
    monkeypatch.setattr("gossip.arithmetic.mixing.check_outer", lambda *_: None)  # it would refuse the larger rate
    beta = side * stability_limit(alpha)
    count = 100 if alpha == 0.0 else 400  # 0.905 a round would meet float32's rounding after 400
    history = list(rounds(alpha, beta, nodes=512, elements=8, count=count, noise=0.0, seed=6))
    rate = (spread(history[-1]) / spread(history[count // 4 - 1])) ** (1 / (count - count // 4))
    assert (rate < 1) == (side < 1)
    assert rate == pytest.approx(growth(alpha, beta), abs=0.007)


def test_the_limit_is_where_the_second_moments_neither_grow_nor_shrink():
    for alpha in (0.0, 0.3, 0.5, 0.7, 0.9):
        assert growth(alpha, stability_limit(alpha)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("alpha", "beta"),
    [
        (0.9, 0.7),
        (0.5, 1.5),
        (0.5, 0.0),
        (0.5, -1.0),
        (0.0, 2.0),
        (1.0, 0.1),
        (-0.1, 0.5),
        (0.5, math.nan),
        (math.nan, 1),
    ],
)
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
    check_outer(0.5, 0.7)
    check_outer(0.0, 1.0)


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_published_outer_step_can_be_made_of_what_its_config_says(name):
    config = Config.published(name)
    step = OuterStep(10, config.outer_momentum, config.outer_rate, config.averaged)
    assert (step.alpha, step.beta) == (config.outer_momentum, config.outer_rate)


def test_diloco_is_stable_in_groups_and_refused_in_pairs():
    OuterStep(10, 0.9, 0.7, group=16)
    with pytest.raises(ConfigError, match="apart"):
        OuterStep(10, 0.9, 0.7)


def group_growth(alpha, beta, group):
    """Return growth() with the mean h of the other members: m' = alpha m + beta (group - 1) / group (h - f)."""
    f, h, m = np.eye(3)
    m_after = alpha * m + beta * (group - 1) / group * (h - f)
    f_after = f + m_after

    def moment(a, b):  # h is uncorrelated with both, of variance E[f^2] / (group - 1)
        return [a[0] * b[0] + a[1] * b[1] / (group - 1), a[0] * b[2] + a[2] * b[0], a[2] * b[2]]

    step = np.array([moment(f_after, f_after), moment(f_after, m_after), moment(m_after, m_after)])
    return float(np.abs(np.linalg.eigvals(step)).max())


@pytest.mark.parametrize("group", [2, 3, 4, 8, 16, 1000])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9])
def test_the_limit_of_a_group_is_where_its_second_moments_neither_grow_nor_shrink(alpha, group):
    limit = stability_limit(alpha, group)
    assert group_growth(alpha, limit, group) == pytest.approx(1.0, abs=1e-6)
    assert group_growth(alpha, 0.98 * limit, group) < 1 < group_growth(alpha, 1.02 * limit, group)
    assert stability_limit(alpha, 2) == stability_limit(alpha) == pytest.approx(2 * (1 - alpha**2))


def test_after_settling_a_mix_of_what_is_agreed_on_moves_nothing():
    """A mix that began while this node settled may end after that."""
    outer = OuterStep(3, 0.5, 0.7)
    start = np.zeros(3, np.float32)
    outer.reset(start)
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


# -- mixes that overlap -----------------------------------------------------------------------------------------------
class Live:
    """One node's live vector, to which overlapping mixes are added in any order."""

    def __init__(self, size, random, parameters=None):
        self.random = random
        self.outer = OuterStep(parameters or size, 0.5, 0.7)
        self.x = random.standard_normal(size).astype(np.float32)
        self.outer.reset(self.x)

    def train(self):
        step = 0.1 * self.random.standard_normal(self.x.size).astype(np.float32)
        self.x += step
        return step

    def mix(self, snapshot, difference, weight=0.5, **how):
        shift = self.outer.shift(snapshot, difference.copy(), weight, **how)
        self.x += shift
        return shift


@pytest.mark.parametrize("size", [1, 777, BLOCK_ELEMENTS + 3])
def test_overlapping_mixes_count_each_piece_of_local_progress_once(size):
    """Two mixes whose snapshots overlap act as two in turn do, if the differences are 0."""
    random = np.random.default_rng(size)
    one, other = Live(size, random), Live(size, np.random.default_rng(size))
    other.x[:] = one.x
    other.outer.reset(one.x)
    zero = np.zeros(size, np.float32)
    steps = [one.train(), one.train()]
    first = one.x - steps[1]
    second = one.x.copy()
    shift = one.mix(first, zero)
    one.mix(second, zero, added_since=shift)
    other.x += steps[0]
    shift = other.mix(other.x.copy(), zero)
    other.x += steps[1]
    other.mix(other.x.copy(), zero)
    np.testing.assert_allclose(one.x, other.x, atol=1e-5)
    for ours, theirs in ((one.outer._phi, other.outer._phi), (one.outer._momentum, other.outer._momentum)):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_the_difference_of_a_mix_beside_others_is_added_plainly(part, plain):
    """Several exchanges may find the same disagreement, and momentum would correct it several times."""
    random = np.random.default_rng(3)
    positions = np.array([0, 7, 59, 60, 99]) if part else None
    where = slice(None) if positions is None else positions
    with_it, without = Live(100, random, 60), Live(100, random, 60)
    without.x[:] = with_it.x
    without.outer.reset(with_it.x)
    since, given = random.standard_normal((2, 100)).astype(np.float32)[:, where]
    snapshot = with_it.x[where] - since
    how = {"positions": positions, "plain": plain, "added_since": since}
    brought = with_it.outer.shift(snapshot, given.copy(), 0.25, **how)
    nothing = without.outer.shift(snapshot, np.zeros_like(given), 0.25, **how)
    weights = 60 if positions is None else 3
    np.testing.assert_allclose(brought[:weights], (nothing + 0.25 * given)[:weights], atol=1e-5)
    moved = (with_it.outer._phi - without.outer._phi)[slice(60) if positions is None else positions[:3]]
    np.testing.assert_allclose(moved, 0.25 * given[: moved.size], atol=1e-5)
    np.testing.assert_array_equal(with_it.outer._momentum, without.outer._momentum)
