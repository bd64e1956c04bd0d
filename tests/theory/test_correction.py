"""The closed forms of the correction, against swarms of scalars that are mixed in random perfect matchings.

docs/theory.md derives them from the second moments of a node's deviation and of its correction.
"""

import numpy as np
import pytest

from gossip.arithmetic.correction import CORRECTION_LIMIT, LEAK, Correction, Lesson

NODES = 2048
SOME = 256  # nodes where a swarm contracts or diverges, by orders of magnitude
FEW, SCALARS, KAPPA = 32, 256, 0.2  # nodes that hold the project's own corrections, each of so many scalars


def correction_limit(failing: float = 0.0, weight: float = 0.5) -> float:
    """Return the limit of kappa under random pairs of this weight, of which a share ``failing`` fails."""
    kept_share = 1.0 - weight
    return 2.0 * kept_share * (1.0 - failing) / (1.0 + weight + kept_share * failing)


def variance(
    kappa: float, rounds: int, *, pull: float = 0.0, noise: float = 0.0, failing: float = 0.0, weight: float = 0.5,
    seed: int = 1, nodes: int = NODES,
):  # fmt: skip
    """Return the mean square distance from the mean just after a mix, over the last quarter of the rounds.

    Every node is moved by its own constant ``pull`` and by fresh ``noise`` in each round, both of unit variance times
    these factors, and by its correction; then random pairs mix, each pair failing by a coin of its own.
    """
    rng = np.random.default_rng(seed)
    own = pull * rng.standard_normal(nodes)
    own -= own.mean()
    x, c = np.zeros(nodes), np.zeros(nodes)
    found = []
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(rounds):
            x += own + c + noise * rng.standard_normal(nodes)
            pairs = rng.permutation(nodes).reshape(-1, 2)
            one, other = pairs[rng.random(len(pairs)) >= failing].T
            difference = weight * (x[other] - x[one])
            x[one] += difference
            x[other] -= difference
            c[one] += kappa * difference
            c[other] -= kappa * difference
            if number >= 3 * rounds // 4:
                found.append(np.mean((x - x.mean()) ** 2))
    assert abs(c.sum()) < 1e-6 * max(1.0, np.abs(c).max() * nodes), "partners learn exact opposites"
    return float(np.mean(found))


def test_a_constant_pull_leaves_three_times_its_square_with_plain_means_and_nothing_with_a_correction():
    assert variance(0.0, 200, pull=1.0) == pytest.approx(3.0, rel=0.1)
    assert variance(0.2, 400, pull=1.0) < 1e-6


@pytest.mark.parametrize("kappa", [0.0, 0.1, 0.2, 0.4])
def test_noise_leaves_that_of_plain_means_over_one_less_kappa_over_its_limit(kappa):
    assert correction_limit() == pytest.approx(CORRECTION_LIMIT)
    assert variance(kappa, 800, noise=1.0) == pytest.approx(1.0 / (1.0 - kappa / CORRECTION_LIMIT), rel=0.05)


def moments(kappa: float, weight: float, failing: float) -> tuple[np.ndarray, np.ndarray]:
    """Return matrix and offset of the recursion of (E x^2, E xc, E c^2) in docs/theory.md, with unit noise."""
    w, y_sq, yc, c_sq = weight, np.array([1.0, 2.0, 1.0]), np.array([0.0, 1.0, 1.0]), np.array([0.0, 0.0, 1.0])
    mixed = np.stack([
        (1 - 2 * w + 2 * w * w) * y_sq,
        (1 - w) * yc - kappa * w * (1 - 2 * w) * y_sq,
        c_sq - 2 * kappa * w * yc + 2 * kappa**2 * w * w * y_sq,
    ])  # fmt: skip
    of_noise = np.array([1 - 2 * w + 2 * w * w, -kappa * w * (1 - 2 * w), 2 * kappa**2 * w * w])
    failed, failed_of_noise = np.stack([y_sq, yc, c_sq]), np.array([1.0, 0.0, 0.0])
    q = failing
    return (1 - q) * mixed + q * failed, (1 - q) * of_noise + q * failed_of_noise


@pytest.mark.parametrize("weight", [1 / 2, 1 / 3, 1 / 4])
@pytest.mark.parametrize("failing", [0.0, 0.3, 0.6])
def test_the_closed_forms_follow_from_the_second_moments(failing, weight):
    limit = correction_limit(failing, weight)
    for kappa, is_stable in ((0.999 * limit, True), (1.001 * limit, False)):
        assert (np.abs(np.linalg.eigvals(moments(kappa, weight, failing)[0])).max() < 1) == is_stable
    kappas = np.array([1e-9, 0.1, 0.2])
    found = [np.linalg.solve(np.eye(3) - matrix, offset)[0] for matrix, offset in
             (moments(kappa, weight, failing) for kappa in kappas)]  # fmt: skip
    np.testing.assert_allclose(found / found[0], 1 / (1 - kappas / limit), rtol=1e-6)


@pytest.mark.parametrize("failing", [0.0, 0.3, 0.6])
def test_disagreement_contracts_below_the_limit_and_grows_above_it(failing):
    limit = correction_limit(failing)
    below = variance(0.85 * limit, 3000, pull=1.0, failing=failing, nodes=SOME)
    above = variance(1.3 * limit, 3000, pull=1.0, failing=failing, nodes=SOME)
    assert below < 1e-3
    assert not above < 1e3


def learned(rounds: int, weight: float, pull: float):
    """Mix nodes with the project's own corrections; return them, their pulls, and ``c`` averaged over the last half.

    The pulls and ``c`` have shape (nodes, scalars). ``c`` is as it is applied, times the share that is no noise.
    """
    rng = np.random.default_rng(1)
    own = (pull * rng.standard_normal((FEW, SCALARS))).astype(np.float32)
    own -= own.mean(axis=0)
    x, total = np.zeros_like(own), np.zeros(own.shape)
    nodes = [Correction(SCALARS, SCALARS, KAPPA, 1) for _ in range(FEW)]
    for number in range(rounds):
        applied = np.stack(
            [np.zeros(SCALARS) if node.pull is None else node.step_factor(1) * node.pull for node in nodes]
        )
        x += own + applied.astype(np.float32)
        if number >= rounds // 2:
            total += applied
        for one, other in rng.permutation(FEW).reshape(-1, 2):
            difference = x[other] - x[one]
            nodes[one].learn(difference, weight, Lesson(1.0, 1e12))
            nodes[other].learn(-difference, weight, Lesson(1.0, 1e12))
            x[one] += np.float32(weight) * difference
            x[other] -= np.float32(weight) * difference
    return nodes, own, total / (rounds - rounds // 2)


@pytest.mark.parametrize("weight", [1 / 2, 1 / 3])
def test_the_leak_leaves_its_share_of_a_constant_pull_at_every_weight(weight):
    """In the mean ``c <- (1 - leak) c + kappa d`` with ``d = -(b + s c)``, since mixes undo what steps do."""
    nodes, own, applied = learned(400, weight, 1.0)
    share = np.mean([node.applied_share for node in nodes])
    assert share > 0.5
    left = np.vdot(own + applied, own) / np.vdot(own, own)
    assert left == pytest.approx(LEAK / (LEAK + KAPPA * share), rel=0.05)
