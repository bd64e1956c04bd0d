"""The rows of a run's history, and its summary."""

from __future__ import annotations

from typing import Any

from sim.learning.learners import Learners
from sim.report.figures import HISTORY, SUMMARY
from sim.report.measures import FinishedRun, Instant, Level
from sim.scenario.fidelity import Fidelity
from sim.scenario.scenario import Scenario

__all__ = ["Measures"]


class Measures:
    """The measurement of a running swarm: rows of the history, and the summary at the end."""

    def __init__(self, level: Level, scenario: Scenario, learners: Learners) -> None:
        self.level, self.scenario, self.learners = level, scenario, learners

    def row(self) -> dict[str, float]:
        """Measure the swarm now, and return a row of the history."""
        instant = Instant(self.level, self.scenario, self.learners)
        return {column.name: float(column.measure(instant)) for column in HISTORY}

    def summary(self, last: dict[str, float], fidelity: Fidelity, **spent: float) -> dict[str, Any]:
        """Return the final figures; ``last`` is the last row, and ``spent`` are the costs as in FinishedRun."""
        run = FinishedRun(self.level, self.scenario, self.learners, last, fidelity, **spent)
        return {total.name: total.compute(run) for total in SUMMARY}
