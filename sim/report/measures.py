"""What can be said of a swarm at one instant: how well it has learned, how far apart its members are, what it cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.host import Host
from sim.engine.swarm import Swarm
from sim.learning.learners import Learners
from sim.report.figures import HISTORY, SUMMARY
from sim.scenario.scenario import Scenario

__all__ = ["End", "Look", "Measures"]

Floats = NDArray[np.float64]

BLOCK_ROWS = 256


class Look:
    """A swarm at one instant. Models are looked at as they are at the end of the step that each peer is in. Where some
    attack, losses, accuracies and the consensus distance are of the honest ones alone."""

    def __init__(self, swarm: Swarm, scenario: Scenario, learners: Learners) -> None:
        swarm.training.settle(swarm.now)
        self.swarm: Swarm = swarm
        self.scenario: Scenario = scenario
        self.alive: list[Host] = [host for host in swarm.hosts if not host.gone]
        self.ready: list[Host] = [host for host in self.alive if host.peer.ready]
        self.losses: Floats = np.array([math.nan])  # (evaluated,)
        self.accuracies: Floats = self.losses
        self.average_loss: float = math.nan
        self.average_accuracy: float = math.nan
        self.distance: float = math.nan
        self.exchange_s: Floats = np.array(swarm.sessions.durations_s or [math.nan])  # (sample,)
        honest = [host for host in self.ready if host.liar is None]
        if honest:
            mean, self.distance = spread(honest)
            chosen = honest[:: -(-len(honest) // scenario.report.evaluate_peers)]
            self.losses, self.accuracies = learners.evaluate(np.stack([host.vector for host in chosen]))
            one_loss, one_accuracy = learners.evaluate(mean[None])
            self.average_loss, self.average_accuracy = float(one_loss[0]), float(one_accuracy[0])


@dataclass(frozen=True, slots=True)
class End:
    """A run that is over, and what it took."""

    swarm: Swarm
    scenario: Scenario
    last: dict[str, float]  # row of the history
    done: float  # of the run, 0 to 1
    wall_s: float
    cpu_s: float
    setup_s: float
    peak_rss_mb: float

    @property
    def refused(self) -> dict[str, int]:
        """What the honest peers that are up now refused of others, and what they cut off ("clipped"), by reason."""
        counts: dict[str, int] = {}
        for host in self.swarm.alive():
            if host.liar is None:
                for (_, code), times in host.peer.refusals.items():
                    counts[code] = counts.get(code, 0) + times
        return dict(sorted(counts.items()))


class Measures:
    """Rows of the history and the summary."""

    def __init__(self, swarm: Swarm, scenario: Scenario, learners: Learners) -> None:
        self.swarm, self.scenario, self.learners = swarm, scenario, learners

    def row(self) -> dict[str, float]:
        look = Look(self.swarm, self.scenario, self.learners)
        return {column.name: float(column.of(look)) for column in HISTORY}

    def summary(self, last: dict[str, float], **spent: float) -> dict[str, Any]:
        """The figures of the end; ``spent`` as :class:`End` has them."""
        end = End(self.swarm, self.scenario, last, **spent)
        return {total.name: total.of(end) for total in SUMMARY}


def spread(hosts: list[Host]) -> tuple[NDArray[np.float32], float]:
    """The mean of their vectors, and the root of the mean square distance from it: the consensus distance."""
    total = np.zeros(hosts[0].vector.size)
    blocks = range(0, len(hosts), BLOCK_ROWS)
    for start in blocks:
        total += np.sum([host.vector for host in hosts[start : start + BLOCK_ROWS]], axis=0, dtype=np.float32)
    mean = (total / len(hosts)).astype(np.float32)
    square = 0.0
    for start in blocks:
        apart = np.stack([host.vector for host in hosts[start : start + BLOCK_ROWS]]) - mean
        square += float(np.vdot(apart, apart))
    return mean, math.sqrt(square / len(hosts))
