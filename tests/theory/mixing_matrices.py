"""Graphs as matrices, and their mixing matrices and spectral gaps, as a reference for selection rules."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gossip.selection.graphs import Graph
from gossip.selection.nearest import NEAR

Matrix = NDArray[np.float64]  # (n, n): entry [i, j] is what i takes from j


def graph_of(adjacency: Matrix) -> Graph:
    """Return the graph of ranks with a link wherever this symmetric (n, n) matrix is not 0 off its diagonal."""
    assert np.array_equal(adjacency != 0, (adjacency != 0).T), "whoever mixes with another is mixed with by it"
    return Graph.from_text("\n".join(f"{a} {b}" for a, b in np.argwhere(np.triu(adjacency, 1))))


# -- graphs ------------------------------------------------------------------------------------------------------------
def circulant(n: int, hops: Iterable[int]) -> Matrix:
    """Return (n, n), 1 from i to i + hop modulo n."""
    adjacency = np.zeros((n, n))
    here = np.arange(n)
    for hop in hops:
        adjacency[here, (here + hop) % n] = 1
    np.fill_diagonal(adjacency, 0)
    return adjacency


def complete(n: int) -> Matrix:
    """Return the complete graph: (n, n)."""
    return np.ones((n, n)) - np.eye(n)


def ring(n: int) -> Matrix:
    """Return the ring, in which each node is linked with the ones before and behind it: (n, n)."""
    return circulant(n, (1, -1))


def torus(q: int, q2: int) -> Matrix:
    """Return a torus: ``q`` columns by ``q2`` rows, numbered row by row: (n, n) with n = q q2."""
    place = np.arange(q * q2).reshape(q2, q)
    adjacency = np.zeros((q * q2, q * q2))
    for axis in (0, 1):
        for shift in (1, -1):
            adjacency[place, np.roll(place, shift, axis)] = 1
    np.fill_diagonal(adjacency, 0)
    return adjacency


def one_peer_exponential(n: int, round: int) -> Matrix:
    """Return a link to the node ``2^(round mod ceil(log2 n))`` further on: (n, n), directed.

    With n a power of two, log2 n rounds of means with that node give all nodes the exact mean (Ying et al. 2021, lemma
    1).
    """
    powers = (n - 1).bit_length()
    return circulant(n, (1 << round % powers,) if powers else ())


def dumbbell(n: int) -> Matrix:
    """Return two cliques with one link between them (He, Karimireddy and Jaggi 2022): (n, n).

    The first clique has ceil(n / 2) nodes. The link joins its last node and the first node of the second clique.
    """
    half = (n + 1) // 2
    adjacency = np.zeros((n, n))
    adjacency[:half, :half] = complete(half)
    adjacency[half:, half:] = complete(n - half)
    if n > half:
        adjacency[half - 1, half] = adjacency[half, half - 1] = 1
    return adjacency


# -- mixing matrices ---------------------------------------------------------------------------------------------------
def metropolis(adjacency: Matrix) -> Matrix:
    """Return the Metropolis weights of a graph: symmetric, and so doubly stochastic whatever the degrees.

    Each link has the weight 1 / (1 + max of the two degrees), and each node keeps the rest (Xiao, Boyd and Lall 2006).
    ``adjacency`` is symmetric, (n, n).
    """
    linked = adjacency != 0
    degrees = linked.sum(1)
    weights = np.where(linked, 1.0 / (1.0 + np.maximum.outer(degrees, degrees)), 0.0)
    np.fill_diagonal(weights, 1.0 - weights.sum(1))
    return np.asarray(weights, np.float64)


def expected_pair_mean(choice: Matrix) -> Matrix:
    """Return the expected mixing matrix of ONE exchange.

    A node drawn uniformly takes the mean with the one that its row of ``choice`` (n, n; chances, 0 on the diagonal)
    draws. The matrix is ``I - (D - P - P^T) / (2 n)``, with D the row and column sums (Boyd, Ghosh, Prabhakar and Shah
    2006, "Randomized gossip algorithms").

    A pair mean is a projection, so ``E V' = x^T W x`` and V shrinks by at least this matrix's spectral gap in
    expectation. n exchanges, as many as a round, are n gaps: uniform choice has 1 / (n - 1) of one exchange.
    """
    n = len(choice)
    both = choice + choice.T
    return np.asarray(np.eye(n) - (np.diag(both.sum(1)) - both) / (2 * n), np.float64)


def spectral_gap(matrix: Matrix) -> float:
    """Return 1 - the second largest |eigenvalue| of a mixing matrix (n, n): 1 is the mean at once, 0 is never.

    Ring 2/3 (1 - cos(2 pi / n)) and torus 2/5 (1 - cos(2 pi / q)) with :func:`metropolis`.
    """
    symmetric = np.array_equal(matrix, matrix.T)
    values = np.linalg.eigvalsh(matrix) if symmetric else np.linalg.eigvals(matrix)
    if len(values) < 2:
        return 1.0
    gap = 1.0 - float(np.sort(np.abs(values))[-2])
    return 0.0 if math.isclose(gap, 0.0, abs_tol=1e-12) else gap


def choice_matrix(cost: Matrix, shortcut: float, near: int = NEAR) -> Matrix:
    """Return the chances with which :class:`Nearest` chooses when all is measured, (n, n): row i is member i's.

    ``cost`` is that of an exchange of each pair, (n, n). The result is for :func:`expected_pair_mean`.
    """
    n = len(cost)
    chances = np.full((n, n), shortcut / (n - 1))
    others = np.where(np.eye(n, dtype=bool), np.inf, cost)
    nearest = np.argsort(others, 1, kind="stable")[:, : min(near, n - 1)]
    np.put_along_axis(chances, nearest, np.take_along_axis(chances, nearest, 1) + (1 - shortcut) / nearest.shape[1], 1)
    np.fill_diagonal(chances, 0.0)
    return chances
