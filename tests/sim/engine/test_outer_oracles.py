"""The closed forms of the outer rule, against swarms that mix by it for real (see oracles for how)."""

import math

import numpy as np
import pytest

from gossip.arithmetic.outer_step import stability_limit
from gossip.config import Config
from gossip.errors import ConfigError
from tests.harness.marks import rest_is_slow
from tests.sim.oracles import SEED, STEP_S, Measured, batch_error, disagreement, exchange, holds, told_to_mix


def outer_map(n: int, alpha: float, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the map (T, c) of the second moments in one exchange of a random pair: ``z <- T z + c s^2``.

    z = (P, Q, M, N) over distinct nodes i, j: ``P = E (phi_i - phi_j)^2``, ``Q = E (phi_i - phi_j) m_i``,
    ``M = E m_i^2``, ``N = E m_i m_j``; noise of variance s^2 comes to a node's theta after each of its mixes. With
    d = phi_j - phi_i and e the sum of both noises, i does ``m_i <- alpha m_i + beta/2 (d + e)``, ``phi_i <- phi_i +
    m_i``, and j the same with -d. Two nodes looked at afterwards are that pair with probability 2/(n(n-1)), one of them
    is in it with 4(n-2)/(n(n-1)), and else nothing changed; nodes are exchangeable, so that
    ``E (phi_i - phi_k)(phi_j - phi_i) = -P/2`` and ``E (phi_j - phi_i) m_k = 0``. Collecting the terms gives the rows.
    """
    a, b = alpha, beta
    both, one = 2 / (n * (n - 1)), 4 * (n - 2) / (n * (n - 1))
    p, q, m, k = np.eye(4)
    mixed = a * a * m + b * b / 4 * p - a * b * q  # m_i^2 of one who took part
    moved = a * q - b / 4 * p  # (phi_i - phi_k) times the m_i by which i then moved
    p_both = (1 - b) ** 2 * p + 4 * a * (1 - b) * q + 2 * a * a * (m - k)
    q_both = (2 * a * (1 - 2 * b) * q - b * (1 - b) * p) / 2 + a * a * (m - k)
    k_both = a * a * k - b * b / 4 * p + a * b * q
    rows = [
        p + both * (p_both - p) + one * (2 * moved + mixed),
        q + both * (q_both - q) + one * ((moved + mixed + q - a * k) / 2 - q),
        m + 2 / n * (mixed - m),
        k + both * (k_both - k) + one * (a * k - k),
    ]
    return np.stack(rows), b * b / 2 * np.array([one, one / 2, 2 / n, both])


def growth(n: int, alpha: float, beta: float) -> float:
    """Return the growth factor of the second moments in one exchange, in the long run."""
    return float(np.abs(np.linalg.eigvals(outer_map(n, alpha, beta)[0])).max())


def stationary(n: int, alpha: float, beta: float) -> float:
    """Return the variance of phi about its mean, V/n, with unit noise."""
    per_exchange, noise = outer_map(n, alpha, beta)
    return float(np.linalg.solve(np.eye(4) - per_exchange, noise)[0]) * (n - 1) / (2 * n)


def test_pairs_have_the_stationary_variance_of_matchings_in_a_large_swarm() -> None:
    # No sampling error: a node's partner is drawn from the same distribution in a matching as in a pair.
    law = 0.7 * 1.5 / (stability_limit(0.5) - 0.7)
    assert law == pytest.approx(1.3125)
    assert stationary(10**6, 0.5, 0.7) == pytest.approx(law, abs=1e-5)


def outer_noise(seed: int) -> Measured:
    """Measure the variance of phi about its mean in the swarm, at alpha 0.5 and beta 0.7.

    The theta of each of 16 peers gets unit noise after each mix; 512 elements, 3,600 exchanges after 200. It relaxes in
    25 exchanges: 24 batches of 150.
    """
    n, elements, count, warm = 16, 512, 3_600, 200
    rng, due = np.random.default_rng(seed), set(range(n))
    noise = np.zeros((n, elements), np.float32)

    def on_step(index: int, values: np.ndarray, steps: int) -> None:
        if index in due:
            due.remove(index)
            noise[index] = rng.standard_normal(elements, np.float32)
            values += noise[index]

    matrix = np.zeros((n, elements), np.float32)
    swarm = told_to_mix(matrix, seed, on_step=on_step, outer_momentum=0.5, outer_rate=0.7)
    seen = np.empty(count + warm)
    swarm.run_until(1.01 * STEP_S)
    for number in range(count + warm):
        before = matrix.copy()
        exchange(swarm, int(rng.integers(n)))
        mixed = np.flatnonzero((matrix != before).any(1))
        assert len(mixed) == 2
        noise[mixed] = 0
        seen[number] = disagreement(matrix - noise).mean() / n
        due.update(mixed.tolist())
        swarm.run_until(swarm.now + 1.01 * STEP_S)
    return float(seen[warm:].mean()), stationary(n, 0.5, 0.7), batch_error(seen[warm:], 24)


@pytest.mark.slow
def test_the_outer_rule_with_unit_noise_has_the_derived_variance() -> None:
    assert holds(outer_noise(SEED))


def outer_fall(seed: int, alpha: float, beta: float) -> Measured:
    """Measure V/n of the swarm after 12 exchanges without noise, with 8 peers and 192 elements.

    The 90 starts from N(0, 1) are independent, and their deviation gives the standard error.
    """
    n, length, starts = 8, 12, 90
    matrix, rng = np.zeros((n, 192), np.float32), np.random.default_rng(seed)
    swarm = told_to_mix(matrix, seed, outer_momentum=alpha, outer_rate=beta)
    seen = np.empty(starts)
    for start in range(starts):
        matrix[:] = rng.normal(size=matrix.shape)
        for host in swarm.hosts:
            host.averager.outer_step.reset(host.vector)
        for _ in range(length):
            exchange(swarm, int(rng.integers(n)))
        seen[start] = disagreement(matrix).mean() / n
    z = np.linalg.matrix_power(outer_map(n, alpha, beta)[0], length) @ np.array([2.0, 0, 0, 0])
    return float(seen.mean()), float(z[0]) * (n - 1) / (2 * n), float(seen.std(ddof=1) / math.sqrt(starts))


@pytest.mark.parametrize("alpha", rest_is_slow([0.5, 0.9, 0.0, 0.7], 2))
def test_the_outer_rule_contracts_below_its_limit_and_is_refused_above(alpha: float) -> None:
    limit = stability_limit(alpha)
    assert holds(outer_fall(SEED, alpha, 0.95 * limit))
    # These moments contract below the limit at every size, and diverge above it in large swarms. The test above
    # compares them with the swarm. No Config lets a swarm run above the limit.
    assert all(growth(n, alpha, 0.95 * limit) < 1 for n in (4, 8, 64, 256, 4_096))
    assert all(growth(n, alpha, 1.05 * limit) > 1 for n in (256, 4_096))
    with pytest.raises(ConfigError, match="outer_rate"):
        Config(outer_momentum=alpha, outer_rate=1.05 * limit)
