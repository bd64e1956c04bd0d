"""Measurements of a swarm at one instant: learning, distance between members, and cost.

A peer is *ready* once it holds the weights of a run. A *mix* is one side of an exchange, which adds its result.
"""

import math
from dataclasses import dataclass

import numpy as np

from gossip.arithmetic.mixing import is_finite
from gossip.ids import quantity
from sim.arrays import F32, F64, I64
from sim.learning.learners import Learners
from sim.level import Counts, Level
from sim.report.units import duration_text
from sim.scenario.fidelity import Fidelity
from sim.scenario.scenario import Scenario

BLOCK_ROWS = 256  # Rows of one pass, so that temporary arrays stay small.


class Instant:
    """A swarm at one instant.

    Models are evaluated as they are at the end of each peer's current step. If some peers attack, losses, accuracies
    and the consensus distance are those of the honest ones. A figure that cannot be measured is NaN.
    """

    def __init__(self, level: Level, scenario: Scenario, learners: Learners) -> None:
        level.update_models()
        self.now: float = level.now
        self.handled_events: int = level.handled_events
        self.mixes: int = level.mixes
        self.counts: Counts = level.counts()
        self.scenario: Scenario = scenario
        self.losses: F64 = np.array([math.nan])  # (evaluated,)
        self.accuracies: F64 = self.losses
        self.metrics: F64 = self.losses
        self.average_loss: float = math.nan
        self.average_accuracy: float = math.nan
        self.average_metric: float = math.nan
        self.distance: float = math.nan
        self.exchange_s: F64 = np.array(self.counts.durations_s or [math.nan])  # (sample,)
        honest = self.counts.honest_rows
        if len(honest):
            mean, self.distance = spread_of(learners.matrix, honest)
            chosen = honest[:: math.ceil(len(honest) / scenario.report.evaluate_peers)]
            self.losses, self.accuracies, self.metrics = learners.evaluate(learners.matrix[chosen])
            average = (float(figure[0]) for figure in learners.evaluate(mean[None]))
            self.average_loss, self.average_accuracy, self.average_metric = average


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run, and its cost."""

    level: Level
    counts: Counts
    scenario: Scenario
    learners: Learners
    last: dict[str, float]  # The last row of the history.
    fidelity: Fidelity
    done: float  # The played share of the run, 0 to 1.
    wall_s: float
    cpu_s: float
    setup_s: float
    peak_rss_mb: float

    @property
    def refused(self) -> dict[str, int]:
        """Return the refusals in alphabetical order."""
        return dict(sorted(self.counts.refusals.items()))

    @property
    def no_exchange(self) -> str:
        """Return a sentence with the likely reason if no exchange of several peers finished; else an empty text."""
        peers, alive = self.scenario.peers, int(self.last["alive"])
        if self.last["exchanges_done"] or peers == 1:
            return ""
        reason = "the first one was not over by then; play it for longer, or mix more often"
        if broken := sum(not is_finite(model) for model in self.learners.matrix):
            reason = (
                f"the weights of {broken} of {peers} peers are not finite, after a divergence or by an infinite "
                "constant in task.model, and nobody mixes with such peers"
            )
        elif refused := self.refused:
            reason = "peers refused vectors, " + ", ".join(f"{times:,} as {code}" for code, times in refused.items())
        elif self.counts.failures:
            reason = f"{quantity(self.counts.failures, 'exchange')} failed"
        elif alive < 2:
            reason = f"{alive} of {peers} peers were up at the end"
        return f"No exchange finished in {duration_text(self.last['virtual_s'])}: {reason}."


def spread_of(matrix: F32, rows: I64) -> tuple[F32, float]:
    """Return the mean of these rows, and the root of their mean square distance from it: the consensus distance."""
    total = np.zeros(matrix.shape[1])
    blocks = [rows[start : start + BLOCK_ROWS] for start in range(0, len(rows), BLOCK_ROWS)]
    for block in blocks:
        total += np.sum(matrix[block], axis=0, dtype=np.float32)
    mean = (total / len(rows)).astype(np.float32)
    square = 0.0
    for block in blocks:
        deviations = matrix[block] - mean
        square += float(np.vdot(deviations, deviations))
    return mean, math.sqrt(square / len(rows))
