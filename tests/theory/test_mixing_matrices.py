"""The closed forms of mixing matrices and their gaps."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.theory.mixing_matrices import (
    adjacency_of,
    complete,
    dumbbell,
    expected_pair_mean,
    graph_of,
    metropolis,
    one_peer_exponential,
    ring,
    spectral_gap,
    static_exponential,
    torus,
    uniform_weights,
)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 33, 64])
def test_a_ring_has_two_thirds_of_1_minus_cos_2_pi_over_n(n):
    weights = metropolis(ring(n))
    assert np.unique(weights[weights > 0]) == pytest.approx(1 / 3)
    assert spectral_gap(weights) == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / n)), abs=1e-12)


@pytest.mark.parametrize("q", [3, 4, 5, 8])
def test_a_torus_has_two_fifths_of_1_minus_cos_2_pi_over_q(q):
    weights = metropolis(torus(q, q))
    assert np.unique(weights[weights > 0]) == pytest.approx(1 / 5)
    assert spectral_gap(weights) == pytest.approx(2 / 5 * (1 - math.cos(2 * math.pi / q)), abs=1e-12)


@pytest.mark.parametrize("n", [2, 4, 8, 64, 256])
def test_the_static_exponential_graph_has_2_over_1_plus_log2_n(n):
    assert spectral_gap(uniform_weights(static_exponential(n))) == pytest.approx(2 / (1 + math.log2(n)), abs=1e-12)


@pytest.mark.parametrize(("powers", "start"), [(1, 0), (2, 1), (3, 0), (3, 2), (6, 4)])
def test_log2_n_rounds_of_one_peer_give_everybody_the_exact_mean_from_whichever_round(powers, start):
    n = 1 << powers
    product = np.eye(n)
    for round in range(start, start + powers):
        assert not np.allclose(product, 1 / n)  # only the last round reaches the mean
        product = uniform_weights(one_peer_exponential(n, round)) @ product
    assert np.array_equal(product, np.full((n, n), 1 / n))


@pytest.mark.parametrize("n", [2, 3, 10, 65])
def test_one_random_pair_leaves_1_minus_1_over_n_minus_1(n):
    assert spectral_gap(expected_pair_mean(complete(n) / (n - 1))) == pytest.approx(1 / (n - 1), abs=1e-12)


def test_the_expected_matrix_of_an_exchange_is_the_mean_of_those_it_may_have():
    choice = np.random.default_rng(1).random((5, 5))
    np.fill_diagonal(choice, 0)
    choice /= choice.sum(1, keepdims=True)
    slow = np.zeros((5, 5))
    for i in range(5):
        for j in range(5):
            apart = np.eye(5)[i] - np.eye(5)[j]
            slow += choice[i, j] / 5 * (np.eye(5) - np.outer(apart, apart) / 2)
    assert expected_pair_mean(choice) == pytest.approx(slow, abs=1e-14)


def test_a_complete_graph_is_the_mean_at_once_and_parts_that_never_meet_have_no_gap():
    assert spectral_gap(metropolis(complete(7))) == pytest.approx(1)
    assert spectral_gap(metropolis(np.kron(np.eye(2), complete(4)))) == 0
    assert spectral_gap(np.ones((1, 1))) == 1


def test_a_dumbbell_is_two_cliques_and_one_link():
    graph = dumbbell(20)
    assert graph.sum() / 2 == 2 * 45 + 1
    assert np.flatnonzero(graph[:10, 10:]).tolist() == [90]  # the last of the first clique, the first of the second
    assert 0 < spectral_gap(metropolis(graph)) < 0.02 < spectral_gap(metropolis(ring(20)))


@given(st.integers(1, 12), st.integers(0, 2**32))
def test_metropolis_is_symmetric_doubly_stochastic_and_not_negative_on_any_graph(n, seed):
    upper = np.triu(np.random.default_rng(seed).random((n, n)) < 0.4, 1).astype(float)
    weights = metropolis(upper + upper.T)
    assert np.array_equal(weights, weights.T)
    assert weights.sum(1) == pytest.approx(1)
    assert weights.min() >= 0
    assert weights.diagonal().min() > 0


@pytest.mark.parametrize(
    "graph", [ring(2), torus(2, 2), torus(1, 5), torus(2, 3), complete(1), dumbbell(2), dumbbell(5)]
)
def test_no_graph_links_a_node_with_itself_or_twice(graph):
    assert not graph.diagonal().any()
    assert set(np.unique(graph)) <= {0, 1}
    assert np.array_equal(graph, graph.T)


def test_a_matrix_and_its_graph_are_the_same():
    for matrix in (ring(5), torus(3, 4), dumbbell(9)):
        assert np.array_equal(adjacency_of(graph_of(matrix)), matrix)
