"""The closed forms of the correction, beside swarms of scalars that are mixed in random perfect matchings."""

from __future__ import annotations

import numpy as np
import pytest

from gossip.arithmetic.correction import correction_limit

NODES = 2048


def variance(kappa: float, rounds: int, *, pull: float = 0.0, noise: float = 0.0, failing: float = 0.0, seed: int = 1):
    """Return the mean square distance from the mean just after a mix, over the last quarter of the rounds.

    Every node is moved by its own constant ``pull`` and by fresh ``noise`` in each round, both of unit variance times
    these factors, and by its correction; then random pairs take their mean, each pair failing by a coin of its own.
    """
    rng = np.random.default_rng(seed)
    own = pull * rng.standard_normal(NODES)
    own -= own.mean()
    x, c = np.zeros(NODES), np.zeros(NODES)
    found = []
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(rounds):
            x += own + c + noise * rng.standard_normal(NODES)
            pairs = rng.permutation(NODES).reshape(-1, 2)
            one, other = pairs[rng.random(len(pairs)) >= failing].T
            difference = 0.5 * (x[other] - x[one])
            x[one] += difference
            x[other] -= difference
            c[one] += kappa * difference
            c[other] -= kappa * difference
            if number >= 3 * rounds // 4:
                found.append(np.mean((x - x.mean()) ** 2))
    assert abs(c.sum()) < 1e-6 * max(1.0, np.abs(c).max() * NODES), "partners learn exact opposites"
    return float(np.mean(found))


def test_a_constant_pull_leaves_three_times_its_square_with_plain_means_and_nothing_with_a_correction():
    assert variance(0.0, 200, pull=1.0) == pytest.approx(3.0, rel=0.1)
    assert variance(0.2, 400, pull=1.0) < 1e-6


@pytest.mark.parametrize("kappa", [0.0, 0.1, 0.2, 0.4])
def test_noise_leaves_that_of_plain_means_over_one_less_kappa_over_its_limit(kappa):
    assert variance(kappa, 800, noise=1.0) == pytest.approx(1.0 / (1.0 - kappa / correction_limit()), rel=0.05)


@pytest.mark.parametrize("failing", [0.0, 0.3, 0.6])
def test_disagreement_contracts_below_the_limit_and_grows_above_it(failing):
    limit = correction_limit(failing)
    below = variance(0.85 * limit, 3000, pull=1.0, failing=failing)
    above = variance(1.3 * limit, 3000, pull=1.0, failing=failing)
    assert below < 1e-3
    assert not above < 1e3
