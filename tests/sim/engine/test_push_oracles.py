"""One-way pushes between vectors of mass one, with the arithmetic by which a boundary merges them."""

from itertools import permutations

import numpy as np
import pytest

from gossip.arithmetic.mixing import push_mass
from gossip.averaging.boundary import Boundary
from gossip.averaging.vectors import Vector
from gossip.averaging.visit import Update, Visit
from sim.engine.vector_model import HostVectors, KeptVector, VectorModel
from tests.sim.oracles import disagreement


def push(values: np.ndarray, sender: int, receiver: int) -> None:
    """Push the sender's row to the receiver's; both masses are one."""
    given, mass = push_mass(1.0, 1, conserves=False)
    own = values[receiver]
    boundary = Boundary(VectorModel(own), HostVectors(lambda: None), KeptVector(own))
    boundary.mass = mass
    boundary.apply_update(Update(Vector(values[sender].copy()), given), Visit())
    assert boundary.mass == 2.0


@pytest.mark.parametrize("n", [2, 3, 8, 17])
def test_one_push_leaves_1_minus_n_plus_1_over_2n_n_minus_1_of_the_disagreement(n):
    values = np.random.default_rng(n).standard_normal((n, 5)).astype(np.float32)
    left = []
    for sender, receiver in permutations(range(n), 2):  # all pairs, so no sampling error
        after = values.copy()
        push(after, sender, receiver)
        left.append(disagreement(after).sum() / disagreement(values).sum())
    assert np.mean(left) == pytest.approx(1 - (n + 1) / (2 * n * (n - 1)), rel=1e-5)
