"""The interface through which reports measure a swarm that is simulated message by message."""

from __future__ import annotations

import statistics

import numpy as np

from sim.arrays import I64
from sim.engine.swarm import Swarm

__all__ = ["WholeLevel"]


class WholeLevel:
    """An adapter from :class:`Swarm` to :class:`sim.report.measures.Level`."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm

    def run_until(self, when: float) -> None:
        self.swarm.events.run_until(when)

    def update_models(self) -> None:
        self.swarm.training.update_models(self.swarm.now)

    @property
    def now(self) -> float:
        return self.swarm.now

    @property
    def handled_events(self) -> int:
        return self.swarm.events.handled_events

    @property
    def live_peers(self) -> int:
        return len(self.swarm.alive())

    @property
    def ready_peers(self) -> int:
        return sum(host.peer.view.ready for host in self.swarm.alive())

    def honest_rows(self) -> I64:
        rows = [host.row for host in self.swarm.alive() if host.peer.view.ready and host.attacker is None]
        return np.array(rows, np.int64)

    @property
    def steps(self) -> int:
        return self.swarm.training.steps

    @property
    def interval_steps(self) -> int | None:
        intervals = [host.peer.schedule.every for host in self.swarm.alive()]
        by_steps = [steps for steps in intervals if steps is not None]
        return statistics.median_low(by_steps) if by_steps else None

    @property
    def mixes(self) -> int:
        return self.swarm.sessions.mixes

    @property
    def exchanges(self) -> float:
        return self.swarm.sessions.exchanges

    @property
    def failures(self) -> int:
        return self.swarm.sessions.failures_of_gone + sum(host.peer.exchanges.failures for host in self.swarm.alive())

    @property
    def sent_bytes(self) -> int:
        return self.swarm.links.carrier.flows.sent_bytes + self.swarm.links.message_bytes

    @property
    def durations_s(self) -> list[float]:
        return self.swarm.sessions.durations_s

    def refusals(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for host in self.swarm.alive():
            if host.attacker is None:
                for (_, code), times in host.peer.exchanges.refusals.counts.items():
                    counts[code] = counts.get(code, 0) + times
        return counts

    def digest(self) -> str:
        return self.swarm.digest()
