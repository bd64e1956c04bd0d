"""The rows of a run's history, and its summary."""

from __future__ import annotations

from typing import Any

from sim.learning.learners import Learners
from sim.report.figures import HISTORY, SUMMARY
from sim.report.measures import End, Level, Look
from sim.scenario.fidelity import Fidelity
from sim.scenario.scenario import Scenario

__all__ = ["Measures"]


class Measures:
    """The rows of the history and the summary."""

    def __init__(self, level: Level, scenario: Scenario, learners: Learners) -> None:
        self.level, self.scenario, self.learners = level, scenario, learners

    def row(self) -> dict[str, float]:
        look = Look(self.level, self.scenario, self.learners)
        return {column.name: float(column.of(look)) for column in HISTORY}

    def summary(self, last: dict[str, float], fidelity: Fidelity, **spent: float) -> dict[str, Any]:
        """Return the final figures; ``spent`` are the costs as in :class:`End`."""
        end = End(self.level, self.scenario, last, fidelity, **spent)
        return {total.name: total.of(end) for total in SUMMARY}
