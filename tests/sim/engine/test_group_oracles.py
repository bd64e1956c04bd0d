"""The closed forms of group means, against swarms that average in groups for real (see test_oracles for how).

One group of g members of n, drawn at random: the group's V becomes 0 about its own mean, which is g - 1 of its g
degrees of freedom, of n - 1 in all, so that E V'/V = 1 - (g-1)/(n-1).
"""

import math
from collections.abc import Callable

import numpy as np
import pytest

from gossip.ids import PeerId
from sim.engine.swarm import Swarm
from tests.sim.oracles import SEED, Measured, begin_mix, disagreement, exchange, holds, run_until_idle, told_to_mix


def one_group(seed: int, n: int, g: int) -> Measured:
    """Measure V'/V in 200 single groups with 192 elements of normal values.

    The standard error is that of the mean over groups, since the elements of one group share its members. These are
    drawn alike.
    """
    count, rng = 200, np.random.default_rng(seed)
    matrix = np.empty((n, 192), np.float32)
    swarm = told_to_mix(matrix, seed, mixing="group", group_size=g)
    ratios = np.empty(count)
    for number in range(count):
        matrix[:] = rng.normal(size=matrix.shape)
        before = disagreement(matrix).sum()
        exchange(swarm, int(rng.integers(n)))
        ratios[number] = disagreement(matrix).sum() / before
    assert swarm.mixes == g * count
    return float(ratios.mean()), 1 - (g - 1) / (n - 1), float(ratios.std() / math.sqrt(count))


@pytest.mark.parametrize(("n", "g"), [(8, 3), (12, 4)])
def test_one_random_group_takes_its_share_of_the_disagreement(n: int, g: int) -> None:
    assert holds(one_group(SEED, n, g))


GRID = {"selection": "grid"}
EVERYBODY = {"group_size": 0}


@pytest.mark.parametrize(
    ("side", "dimensions", "changes"), [(2, 3, GRID), (3, 2, GRID), (4, 2, GRID), (3, 3, GRID), (16, 1, EVERYBODY)]
)
def test_a_grid_of_groups_reaches_the_exact_mean_in_as_many_rounds_as_it_has_dimensions(
    side: int, dimensions: int, changes: dict[str, object]
) -> None:
    # Moshpit, n = M^d: whole numbers divisible by n keep every sum and mean exact in float32.
    n = side**dimensions
    matrix = n * np.random.default_rng(SEED).integers(-100, 101, (n, 300)).astype(np.float32)
    mean = matrix.mean(0, dtype=np.float64).astype(np.float32)
    swarm = told_to_mix(matrix, SEED, mixing="group", **{"group_size": side} | changes)
    for number in range(dimensions):
        assert not np.array_equal(matrix, np.broadcast_to(mean, matrix.shape))
        begin_mix(swarm, *swarm.hosts)
        run_until_idle(swarm)
        assert swarm.mixes == (number + 1) * n, "everybody in one group a round"
    assert np.array_equal(matrix, np.broadcast_to(mean, matrix.shape))


# -- the outer rule in groups ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n", "size", "alpha", "beta", "mixes"),
    [
        pytest.param(12, 4, 0.5, 1.2, 24, id="groups of four"),
        # A mix of two that are everybody is one of the whole swarm, whose limit is the heavy ball's.
        pytest.param(2, 2, 0.9, 0.7, 60, id="two that are everybody"),
    ],
)
def test_the_swarm_follows_the_outer_rule_in_groups(n: int, size: int, alpha: float, beta: float, mixes: int) -> None:
    """The swarm equals a plain loop on the same groups, to rounding."""
    rng = np.random.default_rng(SEED)
    matrix = rng.normal(size=(n, 300)).astype(np.float32)
    group_size = 0 if size == n else size
    swarm = told_to_mix(matrix, SEED, mixing="group", group_size=group_size, outer_momentum=alpha, outer_rate=beta)
    phi, momentum = matrix.astype(np.float64), np.zeros(matrix.shape)
    for _ in range(mixes):
        old = matrix.copy()
        exchange(swarm, int(rng.integers(n)))
        group = np.flatnonzero((matrix != old).any(1))
        assert len(group) == size
        momentum[group] = alpha * momentum[group] + beta * (phi[group].mean(0) - phi[group])
        phi[group] += momentum[group]
        np.testing.assert_allclose(matrix, phi, atol=1e-4)


def pairs_only(swarm: Swarm) -> None:
    """Let only one of the invited members join each group, as if the others were late."""
    for host in swarm.hosts:
        partners = host.peer.partners
        whole = partners.group

        def group(now: float, whole: Callable[[float], list[PeerId]] = whole) -> list[PeerId]:
            return whole(now)[:1]

        partners.group = group  # type: ignore[method-assign]


def test_momentum_that_is_stable_in_full_groups_does_not_drive_those_apart_that_begin_with_two() -> None:
    """DiLoCo's 0.9 and 0.7 exceed the pair limit of 0.38: with momentum 300 of such mixes leave 20 times the V."""
    matrix = np.random.default_rng(SEED).normal(size=(12, 64)).astype(np.float32)
    swarm = told_to_mix(matrix, SEED, mixing="group", group_size=0, outer_momentum=0.9, outer_rate=0.7)
    pairs_only(swarm)
    rng = np.random.default_rng(SEED)
    before = disagreement(matrix).sum()
    for _ in range(300):
        exchange(swarm, int(rng.integers(12)))
    assert swarm.mixes == 600, "all in groups of two"
    assert disagreement(matrix).sum() < 1e-6 * before
