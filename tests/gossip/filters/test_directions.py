"""The limit on movement in one direction: it finds lies that pull one way, and leaves honest differences alone."""

import functools
import math
from typing import NamedTuple

import numpy as np
import pytest

from gossip.arithmetic.sketch import WIDTH, Sketcher
from gossip.config import Config
from gossip.filters.clip import Clip
from gossip.filters.directions import MEMORY, MIN_MEMORY, Directions
from gossip.ids import PeerId

ELEMENTS, STEP = 2_000, 1.0  # each node's own steps move it by STEP between two mixes
RANDOM = np.random.default_rng(3)
ONE_WAY = np.zeros(WIDTH, np.float32)
ONE_WAY[7] = 1.0


def noise(length: float = 1.0) -> np.ndarray:
    """Return a sketch of this length in a random direction."""
    drawn = RANDOM.normal(size=WIDTH).astype(np.float32)
    return drawn * np.float32(length / np.linalg.norm(drawn))


def after(differences: list[np.ndarray]) -> Directions:
    """Return the memory of these differences."""
    directions = Directions()
    for sketch in differences:
        directions.take(sketch)
    return directions


# -- one node's memory -----------------------------------------------------------------------------------------------
def test_few_differences_set_no_limit():
    directions = after([noise(0.1) for _ in range(MIN_MEMORY - 1)])
    assert directions.take(ONE_WAY) == 1.0
    assert directions.take(ONE_WAY) < 1.0, "one more does"


def test_a_lie_that_is_no_longer_than_honest_differences_is_found_by_its_direction():
    differences = [0.5 * ONE_WAY + noise(0.2) if number % 8 == 0 else noise(0.7) for number in range(2 * MEMORY)]
    directions = after(differences)
    assert abs(directions.axes[0] @ ONE_WAY) > 0.8
    assert directions.take(0.5 * ONE_WAY + noise(0.2)) < 0.5
    shares = [directions.take(noise(0.7)) for _ in range(200)]
    assert np.mean(shares) > 0.97


def test_of_honest_differences_hardly_anything_is_taken_away():
    directions = after([noise(0.7) for _ in range(MEMORY)])
    shares = [directions.take(noise(0.7)) for _ in range(1_000)]
    assert np.mean(shares) > 0.98
    assert np.mean(np.array(shares) < 1) < 0.07


def test_with_data_of_ten_kinds_honest_differences_have_few_directions_and_are_left_alone():
    kinds = np.stack([noise() for _ in range(10)])

    def uneven() -> np.ndarray:
        first, second = RANDOM.dirichlet([0.3] * 10, size=2)
        return np.asarray((first - second) @ kinds, np.float32) + noise(0.5)

    directions = after([uneven() for _ in range(MEMORY)])
    shares = [directions.take(uneven()) for _ in range(1_000)]
    assert np.mean(shares) > 0.95


def test_what_all_partners_bring_is_taken_whole_such_as_progress_that_a_slow_node_lacks():
    directions = after([0.8 * ONE_WAY + noise(0.3) for _ in range(MEMORY)])
    shares = [directions.take(0.8 * ONE_WAY + noise(0.3)) for _ in range(500)]
    assert np.mean(shares) > 0.96


@pytest.mark.parametrize("far", [0.45, 0.5, 0.55])
def test_halves_of_a_swarm_that_were_apart_meet(far):
    directions = after([noise(0.1) for _ in range(MEMORY)])
    shares = []
    for _ in range(4 * MEMORY):
        is_far = RANDOM.random() < far
        share = directions.take(0.9 * ONE_WAY + noise(0.1) if is_far else noise(0.1))
        shares += [share] if is_far else []
    assert np.mean(shares[-len(shares) // 2 :]) > 0.95


def test_differences_of_zero_are_no_lies():
    directions = after([np.zeros(WIDTH, np.float32)] * MEMORY)
    assert directions.take(np.zeros(WIDTH, np.float32)) == 1.0
    assert np.isfinite(directions.axes).all()
    for _ in range(MEMORY):
        assert np.isfinite(directions.take(noise(0.5)))
    assert np.mean([directions.take(noise(0.5)) for _ in range(100)]) > 0.97, "and are forgotten"


# -- sketches --------------------------------------------------------------------------------------------------------
def test_inner_products_of_sketches_are_those_of_vectors_on_average():
    first, second = RANDOM.normal(size=(2, 5_000)).astype(np.float32)
    second = 0.6 * first + second
    products = [
        float(sketcher.sketch(first) @ sketcher.sketch(second))
        for sketcher in (Sketcher(5_000, seed) for seed in range(200))
    ]
    assert np.mean(products) == pytest.approx(float(first @ second), rel=0.03)
    assert np.std(products) < 0.15 * np.linalg.norm(first) * np.linalg.norm(second)


def test_a_change_of_a_single_element_is_in_the_sketch():
    for place in (0, WIDTH, 4_999):
        vector = np.zeros(5_000, np.float32)
        vector[place] = 3.0
        assert np.linalg.norm(Sketcher(5_000, 1).sketch(vector)) == pytest.approx(3.0)


def test_gradients_of_one_layer_do_not_meet_in_one_sum():
    """All rows of such a matrix are multiples of one row, as in the gradient of a layer for one sample."""
    lengths = []
    for seed in range(100):
        matrix = np.outer(RANDOM.normal(size=64), RANDOM.normal(size=256)).astype(np.float32).reshape(-1)
        sketch = Sketcher(matrix.size, seed).sketch(matrix)
        lengths.append(np.linalg.norm(sketch) / np.linalg.norm(matrix))
    assert np.std(lengths) < 0.2


# -- a swarm ---------------------------------------------------------------------------------------------------------
class Push(NamedTuple):
    """A liar's pushes: their length as a share of the longest that is taken whole, in one direction or new ones."""

    share: float
    is_one_way: bool = True


@functools.cache
def drift(push: Push, has_sketches: bool, liars: float = 0.1, nodes: int = 20, intervals: int = 200) -> float:
    """Return how far the mean of nodes that walk at random moves in the liars' direction, in own steps."""
    random = np.random.default_rng(1)
    config = Config(filter="clip")
    filters = [Clip(config) for _ in range(nodes)]
    sketchers = [Sketcher(ELEMENTS, seed) for seed in range(nodes)]
    ids = [PeerId(bytes([number]) * 16) for number in range(nodes + 4)]
    weights = np.zeros((nodes, ELEMENTS), np.float32)
    direction = np.ones(ELEMENTS, np.float32) / math.sqrt(ELEMENTS)

    def take(node: int, partner: int, difference: np.ndarray, at: float) -> np.ndarray:
        sketch = sketchers[node].sketch(difference) if has_sketches else None
        difference_sq = float(difference @ difference)
        share, _ = filters[node].take_share(ids[partner], 0.5, difference_sq, ELEMENTS, list, at, sketch)
        return np.float32(0.5 * share) * difference

    for at in range(intervals):
        steps = random.normal(size=weights.shape).astype(np.float32)
        steps -= (steps @ direction)[:, None] * direction
        weights += np.float32(STEP) * steps / np.linalg.norm(steps, axis=1, keepdims=True)
        for each in filters:
            each.on_moved(STEP)
        for node in range(nodes):
            if random.random() < liars:
                way = direction if push.is_one_way else random.normal(size=ELEMENTS).astype(np.float32)
                way = way / np.linalg.norm(way)
                length = push.share * filters[node].longest_whole(ELEMENTS)
                weights[node] += take(node, nodes + int(random.integers(4)), np.float32(length) * way, at)
                continue
            other = int(random.choice([number for number in range(nodes) if number != node]))
            difference = weights[other] - weights[node]
            ours, theirs = take(node, other, difference, at), take(other, node, -difference, at)
            weights[node] += ours
            weights[other] += theirs
    return float((weights @ direction).mean())


@pytest.mark.parametrize(("share", "left"), [(1.0, 0.2), (0.5, 0.35), (0.25, 0.8)])
def test_lies_within_the_radius_move_a_swarm_a_fraction_as_far(share, left):
    with_limit, without = drift(Push(share), True), drift(Push(share), False)
    assert without > 10 * share * STEP, "or nothing is proved"
    assert with_limit < left * without


def test_no_push_that_was_tried_moves_a_swarm_as_far_as_the_longest_did_without_the_limit():
    worst = max(drift(Push(share), True) for share in (0.1, 0.15, 0.25, 0.5, 1.0))
    assert worst < 0.25 * drift(Push(1.0), False)
