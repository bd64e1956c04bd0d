"""What can be said of a swarm at one instant: how well it has learned, how far apart its members are, what it cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.learning.learners import Learners
from sim.report.figures import HISTORY, SUMMARY
from sim.scenario.fidelity import Fidelity
from sim.scenario.scenario import Scenario

__all__ = ["End", "Level", "Look", "Measures", "spread"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

BLOCK_ROWS = 256


class Level(Protocol):
    """A swarm under way, however closely it is played."""

    def run_until(self, when: float) -> None:
        """Let virtual time pass up to ``when``, seconds."""

    def settle(self) -> None:
        """Every model is as it is at the end of the step that its peer is in."""

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""

    @property
    def handled(self) -> int:
        """Events."""

    @property
    def alive(self) -> int:
        """Peers up."""

    @property
    def ready(self) -> int:
        """Those of them that hold a run's weights."""

    def honest(self) -> Rows:
        """Those of them that do not attack, as rows of the learners' matrix."""

    @property
    def steps(self) -> int:
        """Of all peers, as far as they have been counted."""

    @property
    def interval_steps(self) -> int | None:
        """Local steps between two mixes at present, of the median peer; None by the clock."""

    @property
    def mixes(self) -> int:
        """Applied, each side of an exchange counting."""

    @property
    def exchanges(self) -> float:
        """The same, each side counting for its share."""

    @property
    def failed(self) -> int:
        """Exchanges, as each peer counts them."""

    @property
    def bytes_sent(self) -> int: ...

    @property
    def durations_s(self) -> list[float]:
        """Of an even sample of the exchanges, seconds."""

    def refused(self) -> dict[str, int]:
        """What the honest peers that are up now refused of others, and what they cut off ("clipped"), by reason."""

    def digest(self) -> str:
        """SHA-256 of what happened and of all models, in hexadecimal."""


class Look:
    """A swarm at one instant. Models are looked at as they are at the end of the step that each peer is in. Where some
    attack, losses, accuracies and the consensus distance are of the honest ones alone."""

    def __init__(self, level: Level, scenario: Scenario, learners: Learners) -> None:
        level.settle()
        self.level: Level = level
        self.scenario: Scenario = scenario
        self.losses: Floats = np.array([math.nan])  # (evaluated,)
        self.accuracies: Floats = self.losses
        self.metrics: Floats = self.losses
        self.average_loss: float = math.nan
        self.average_accuracy: float = math.nan
        self.average_metric: float = math.nan
        self.distance: float = math.nan
        self.exchange_s: Floats = np.array(level.durations_s or [math.nan])  # (sample,)
        honest = level.honest()
        if len(honest):
            mean, self.distance = spread(learners.matrix, honest)
            chosen = honest[:: -(-len(honest) // scenario.report.evaluate_peers)]
            self.losses, self.accuracies, self.metrics = learners.evaluate(learners.matrix[chosen])
            average = (float(figure[0]) for figure in learners.evaluate(mean[None]))
            self.average_loss, self.average_accuracy, self.average_metric = average


@dataclass(frozen=True, slots=True)
class End:
    """A run that is over, and what it took."""

    level: Level
    scenario: Scenario
    last: dict[str, float]  # row of the history
    fidelity: Fidelity
    done: float  # of the run, 0 to 1
    wall_s: float
    cpu_s: float
    setup_s: float
    peak_rss_mb: float

    @property
    def refused(self) -> dict[str, int]:
        """What was refused, in the order of the alphabet."""
        return dict(sorted(self.level.refused().items()))


class Measures:
    """Rows of the history and the summary."""

    def __init__(self, level: Level, scenario: Scenario, learners: Learners) -> None:
        self.level, self.scenario, self.learners = level, scenario, learners

    def row(self) -> dict[str, float]:
        look = Look(self.level, self.scenario, self.learners)
        return {column.name: float(column.of(look)) for column in HISTORY}

    def summary(self, last: dict[str, float], fidelity: Fidelity, **spent: float) -> dict[str, Any]:
        """Return the figures of the end; ``spent`` as :class:`End` has them."""
        end = End(self.level, self.scenario, last, fidelity, **spent)
        return {total.name: total.of(end) for total in SUMMARY}


def spread(matrix: NDArray[np.float32], rows: Rows) -> tuple[NDArray[np.float32], float]:
    """The mean of these rows, and the root of the mean square distance from it: the consensus distance."""
    total = np.zeros(matrix.shape[1])
    blocks = [rows[start : start + BLOCK_ROWS] for start in range(0, len(rows), BLOCK_ROWS)]
    for block in blocks:
        total += np.sum(matrix[block], axis=0, dtype=np.float32)
    mean = (total / len(rows)).astype(np.float32)
    square = 0.0
    for block in blocks:
        apart = matrix[block] - mean
        square += float(np.vdot(apart, apart))
    return mean, math.sqrt(square / len(rows))
