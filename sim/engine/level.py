"""The interface through which reports measure a swarm that is simulated message by message."""

from __future__ import annotations

import statistics

import numpy as np
from numpy.typing import NDArray

from sim.engine.swarm import Swarm

__all__ = ["WholeLevel"]


class WholeLevel:
    """An adapter from :class:`Swarm` to :class:`sim.report.measures.Level`."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm

    def run_until(self, when: float) -> None:
        self.swarm.events.run_until(when)

    def settle(self) -> None:
        self.swarm.training.settle(self.swarm.now)

    @property
    def now(self) -> float:
        return self.swarm.now

    @property
    def handled(self) -> int:
        return self.swarm.events.handled

    @property
    def alive(self) -> int:
        return len(self.swarm.alive())

    @property
    def ready(self) -> int:
        return sum(host.peer.view.ready for host in self.swarm.alive())

    def honest(self) -> NDArray[np.int64]:
        rows = [host.row for host in self.swarm.alive() if host.peer.view.ready and host.liar is None]
        return np.array(rows, np.int64)

    @property
    def steps(self) -> int:
        return self.swarm.training.steps

    @property
    def interval_steps(self) -> int | None:
        found = [host.peer.schedule.every for host in self.swarm.hosts if not host.gone]
        steps = [each for each in found if each is not None]
        return statistics.median_low(steps) if steps else None

    @property
    def mixes(self) -> int:
        return self.swarm.sessions.mixes

    @property
    def exchanges(self) -> float:
        return self.swarm.sessions.exchanges

    @property
    def failed(self) -> int:
        return self.swarm.sessions.failed + sum(host.peer.exchanges.failures for host in self.swarm.alive())

    @property
    def bytes_sent(self) -> int:
        return self.swarm.links.carrier.flows.sent_bytes + self.swarm.links.message_bytes

    @property
    def durations_s(self) -> list[float]:
        return self.swarm.sessions.durations_s

    def refused(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for host in self.swarm.alive():
            if host.liar is None:
                for (_, code), times in host.peer.exchanges.refusals.counts.items():
                    counts[code] = counts.get(code, 0) + times
        return counts

    def digest(self) -> str:
        return self.swarm.digest()
