"""The simulator's prediction, seen with the instruments of the real run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.replay.plan import Plan
from benchmarks.replay.seen import Seen, Watch
from gossip.errors import ConfigError
from sim.simulation import Simulation, no_garbage_collection
from sim.threads import one_thread

LOOK_S = 0.01  # The resolution of join times.


def predict(plan: Plan) -> Seen:
    """Play a scenario in virtual time."""
    with one_thread(), no_garbage_collection(), np.errstate(all="ignore"):
        simulation = Simulation(plan.scenario)
        if simulation.learners.parameters < simulation.learners.elements:
            raise ConfigError(
                f"task.model = {plan.scenario.task.model!r} has buffers, as the running statistics of BatchNorm are, "
                "which cannot be replayed yet: use GroupNorm or LayerNorm."
            )
        swarm, seen = simulation.swarm, Seen(plan)
        watches = [Watch(node) for node in range(len(plan.names))]
        for kind in Watch.WATCHED:
            swarm.performers[kind] = watched(swarm.performers[kind], watches, lambda: swarm.now)
        waiting, due = list(plan.lives), plan.every_s
        for tick in range(1, round(plan.duration_s / LOOK_S) + 1):
            now = tick * LOOK_S
            swarm.events.run_until(now)
            for life in [each for each in waiting if each.from_s < now]:
                index = simulation.indices[life.node]
                if index is not None and not swarm.hosts[index].gone and swarm.hosts[index].peer.view.ready:
                    waiting.remove(life)
                    if life.from_s > 0:  # The first has nothing to join.
                        seen.joins.append(now - life.from_s)
                elif now > life.until_s:
                    waiting.remove(life)
            if now >= due - 1e-9:
                due += plan.every_s
                swarm.run_until(now)  # With it, all steps up to now.
                row = simulation.row()
                seen.accuracy.append((now, row["accuracy_mean"]))
                seen.distance.append((now, row["consensus_distance"]))
        swarm.run_until(plan.duration_s)
        row = simulation.row()
        seen.failed, seen.sent_bytes = int(row["exchanges_failed"]), int(row["bytes_sent"])
        for watch in watches:
            seen.mixes += watch.mixes
            seen.streams += watch.streams
            seen.changes += watch.changes
        seen.ids = {host.id: int(host.name) for host in swarm.hosts}
    return seen


def predicted(plan: Plan) -> dict[str, float]:
    """Return the figures of :func:`predict`."""
    return predict(plan).figures()


def watched(
    perform: Callable[[Any, Any], None], watches: list[Watch], now: Callable[[], float]
) -> Callable[[Any, Any], None]:
    def both(host: Any, effect: Any) -> None:
        watches[int(host.name)].see(effect, now())
        perform(host, effect)

    return both
