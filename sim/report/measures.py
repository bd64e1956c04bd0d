"""What can be said of a swarm at one instant: how well it has learned, how far apart its members are, what it cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.host import Host
from sim.engine.swarm import Swarm
from sim.learning.learners import Learners
from sim.scenario.scenario import Scenario

__all__ = ["Measures"]

BLOCK_ROWS = 256
ROUNDED = 1e-3  # thirds and elevenths of groups, summed: below it up to 10^10 of them


class Measures:
    """Rows of the history and the summary. Models are looked at as they are at the end of the step that each peer is
    in. Where some attack, losses, accuracies and the consensus distance are of the honest ones alone."""

    def __init__(self, swarm: Swarm, scenario: Scenario, learners: Learners) -> None:
        self.swarm, self.scenario, self.learners = swarm, scenario, learners

    def row(self) -> dict[str, float]:
        swarm, scenario, learners = self.swarm, self.scenario, self.learners
        swarm.training.settle(swarm.now)
        alive = [host for host in swarm.hosts if not host.gone]
        ready = [host for host in alive if host.peer.ready]
        honest = [host for host in ready if host.liar is None]
        losses, accuracies, average = nothing(), nothing(), (math.nan, math.nan)
        distance = math.nan
        if honest:
            mean, distance = spread(honest)
            chosen = honest[:: -(-len(honest) // scenario.report.evaluate_peers)]
            losses, accuracies = learners.evaluate(np.stack([host.vector for host in chosen]))
            one_loss, one_accuracy = learners.evaluate(mean[None])
            average = float(one_loss[0]), float(one_accuracy[0])
        sessions, recent = swarm.sessions, np.array(swarm.sessions.durations_s or [math.nan])
        return {
            "virtual_s": swarm.now,
            "alive": float(len(alive)),
            "ready": float(len(ready)),
            "steps": swarm.training.steps / scenario.peers,
            "mixes": sessions.mixes / scenario.peers,
            "loss_mean": float(losses.mean()),
            "loss_min": float(losses.min()),
            "loss_max": float(losses.max()),
            "accuracy_mean": float(accuracies.mean()),
            "accuracy_min": float(accuracies.min()),
            "accuracy_max": float(accuracies.max()),
            "loss_average_model": average[0],
            "accuracy_average_model": average[1],
            "consensus_distance": distance,
            "exchanges_done": float(math.floor(sessions.exchanges + ROUNDED)),
            "exchanges_failed": float(sessions.failed + sum(host.peer.failures for host in alive)),
            "bytes_sent": float(sessions.stream_bytes + swarm.links.message_bytes),
            "exchange_s_median": float(np.median(recent)),
            "exchange_s_p95": float(np.percentile(recent, 95)),
            "events": float(swarm.events.handled),
        }

    def summary(self, last: dict[str, float]) -> dict[str, Any]:
        """The figures of the end; who measured the time adds what it took."""
        swarm, scenario = self.swarm, self.scenario
        return {
            "name": scenario.name,
            "seed": scenario.seed,
            "peers": scenario.peers,
            "virtual_s": last["virtual_s"],
            "events": int(last["events"]),
            "node_updates": swarm.sessions.mixes,
            "steps": swarm.training.steps,
            "loss": last["loss_mean"],
            "accuracy": {
                "mean": last["accuracy_mean"],
                "min": last["accuracy_min"],
                "max": last["accuracy_max"],
                "average_model": last["accuracy_average_model"],
            },
            "consensus_distance": last["consensus_distance"],
            "exchanges_done": int(last["exchanges_done"]),
            "exchanges_failed": int(last["exchanges_failed"]),
            "refused": self.refused(),
            "bytes_sent": int(last["bytes_sent"]),
            "digest": swarm.digest(),
        }

    def refused(self) -> dict[str, int]:
        """What the honest peers that are up now refused of others, and what they cut off ("clipped"), by reason."""
        counts: dict[str, int] = {}
        for host in self.swarm.alive():
            if host.liar is None:
                for (_, code), times in host.peer.refusals.items():
                    counts[code] = counts.get(code, 0) + times
        return dict(sorted(counts.items()))


def nothing() -> NDArray[np.float64]:
    return np.array([math.nan])


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
