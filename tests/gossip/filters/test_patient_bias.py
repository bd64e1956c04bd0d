"""A patient bias: a member that pushes always in one direction, as far as the filter takes it whole.

Honest nodes walk at random and mix in pairs; the liar knows each one's radius and reserve. No training pulls them back,
so that all of the drift shows. The bound is that of docs/algorithms.md#filter-what-is-accepted:

    tau / 2 (3 S + 2) (1 + t / 64)

within t intervals, with tau the radius and S the median movement by other partners in moves of tau / 2.
"""

import functools
import math

import numpy as np
import pytest

from gossip.config import Config
from gossip.filters.budget import MEDIAN_FACTOR, MEMORY_INTERVALS, SPARE_MOVES
from gossip.filters.clip import Clip
from gossip.ids import PeerId

INTERVALS = 138  # two memories of the budget, after ten intervals of calm
ELEMENTS, HONEST, STEP = 1_000, 8, 1.0  # each node's own steps move it by STEP between two mixes
LIAR = PeerId(b"l" * 16)


class Victim:
    """An honest node: its weights, its filter, and what the liar did to it."""

    def __init__(self, number: int) -> None:
        self.id = PeerId(bytes([number]) * 16)
        self.weights = np.zeros(ELEMENTS)
        self.filter = Clip(Config())
        self.pushed = self.radius = self.budget = 0.0

    def take(self, partner: PeerId, theirs: np.ndarray, at: float) -> np.ndarray:
        """Return what an exchange adds to the weights."""
        difference = theirs - self.weights
        share, _ = self.filter.take_share(partner, 0.5, float(difference @ difference), ELEMENTS, list, at)
        return 0.5 * share * difference

    def push(self, direction: np.ndarray, at: float) -> None:
        """Mix with the liar, and note the largest radius and budget of it so far."""
        self.radius = max(self.radius, self.filter.radius(ELEMENTS))
        budget = self.filter.budget
        moved = sorted(budget.movement_of(peer, at) for peer in budget._movements if peer != LIAR)
        self.budget = max(self.budget, MEDIAN_FACTOR * moved[len(moved) // 2] + SPARE_MOVES)
        added = self.take(LIAR, self.weights + self.filter.longest_whole(ELEMENTS) * direction, at)
        self.weights = self.weights + added
        self.pushed += float(added @ direction)


@functools.cache
def play(pushes: int, every: int) -> list[Victim]:
    """Let all train and mix; from the tenth interval on the liar pushes each node so often in every such interval.

    Tests share what comes of it, and only look.
    """
    random = np.random.default_rng(1)
    nodes = [Victim(number) for number in range(HONEST)]
    direction = np.ones(ELEMENTS) / math.sqrt(ELEMENTS)
    for at in range(INTERVALS):
        for node in nodes:
            step = random.normal(size=ELEMENTS)
            step -= (step @ direction) * direction
            node.weights = node.weights + STEP * step / np.linalg.norm(step)
            node.filter.on_moved(STEP)
        for node in nodes:
            other = nodes[random.choice([number for number in range(HONEST) if nodes[number] is not node])]
            ours, theirs = node.take(other.id, other.weights, at), other.take(node.id, node.weights, at)
            node.weights, other.weights = node.weights + ours, other.weights + theirs
            if at >= 10 and at % every == 0:
                for _ in range(pushes):
                    node.push(direction, at)
    return nodes


def drift(nodes: list[Victim]) -> float:
    """Return how far the honest mean moved in the liar's direction."""
    return float(np.mean([node.weights.sum() / math.sqrt(ELEMENTS) for node in nodes]))


def usual(nodes: list[Victim]) -> float:
    return float(np.mean([node.filter.radius(ELEMENTS) for node in nodes]))


@pytest.mark.parametrize(("pushes", "every"), [(1, 4), (1, 1), (16, 1)])
def test_a_patient_bias_moves_nobody_further_than_its_bound(pushes: int, every: int) -> None:
    """The liar pushes at the pace of an honest member, in every interval, or 16 times in each."""
    nodes = play(pushes, every)
    for node in nodes:
        assert 0 < node.pushed <= node.radius / 2 * node.budget * (1 + (INTERVALS - 10) / MEMORY_INTERVALS)
    pushed = float(np.mean([node.pushed for node in nodes]))
    assert drift(nodes) == pytest.approx(pushed, rel=0.05), "honest members pass it on, and add nothing to it"
    assert usual(nodes) < 1.5 * usual(play(0, 1)), "nor does what is usual follow it"


def test_a_patient_bias_gains_nothing_by_coming_more_often_than_once_an_interval() -> None:
    assert drift(play(16, 1)) < 1.15 * drift(play(1, 1))


def test_without_a_liar_nobody_moves_in_its_direction() -> None:
    assert abs(drift(play(0, 1))) < 0.01
