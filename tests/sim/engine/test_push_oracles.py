"""One-way pushes between vectors of mass one, with the arithmetic by which a boundary merges them."""

import math
from itertools import permutations

import numpy as np
import pytest

from gossip.arithmetic.mixing import push_mass
from gossip.averaging.boundary import Boundary
from gossip.averaging.vectors import Vector
from gossip.averaging.visit import Update, Visit
from sim.engine.vector_model import HostVectors, KeptVector, VectorModel


def push(values: np.ndarray, sender: int, receiver: int) -> None:
    """Push the sender's row to the receiver's; both masses are one."""
    given, mass = push_mass(1.0, 1, conserves=False)
    own = values[receiver]
    boundary = Boundary(VectorModel(own), HostVectors(lambda: None), KeptVector(own))
    boundary.mass = mass
    boundary.apply_update(Update(Vector(values[sender].copy()), given), Visit())
    assert boundary.mass == 2.0


def disagreement(values: np.ndarray) -> float:
    return float(np.sum((values - values.mean(axis=0)) ** 2))


@pytest.mark.parametrize("n", [2, 3, 8, 17])
def test_one_push_leaves_1_minus_n_plus_1_over_2n_n_minus_1_of_the_disagreement(n):
    values = np.random.default_rng(n).standard_normal((n, 5)).astype(np.float32)
    left = []
    for sender, receiver in permutations(range(n), 2):  # all pairs, so no sampling error
        after = values.copy()
        push(after, sender, receiver)
        left.append(disagreement(after) / disagreement(values))
    assert np.mean(left) == pytest.approx(1 - (n + 1) / (2 * n * (n - 1)), rel=1e-5)


@pytest.mark.slow
def test_pushes_end_away_from_the_mean_by_v0_over_n_n_plus_1():
    n, trials = 6, 4_000
    rng = np.random.default_rng(3)
    values = np.repeat(np.arange(n, dtype=np.float32)[:, None], trials, axis=1)  # every trial begins with the same
    before = disagreement(values[:, :1])
    for trial in range(trials):
        column = values[:, trial : trial + 1].copy()
        for _ in range(60):
            sender, receiver = rng.choice(n, 2, replace=False)
            push(column, sender, receiver)
        values[:, trial] = column[:, 0]
    square = (values.mean(axis=0) - (n - 1) / 2) ** 2
    error = 4 * float(square.std()) / math.sqrt(trials)
    assert abs(float(square.mean()) - before / (n * (n + 1))) < error
    assert error < 0.1 * before / (n * (n + 1)), "the sampling error tells the value from others"
