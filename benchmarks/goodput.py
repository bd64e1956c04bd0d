"""The goodput of 1.2 million chips that fail once a year each: writes tables of docs/results/goodput.md.

    python benchmarks/goodput.py [--seeds 3] [--learners 16]... [--fresh] [--page]

Peers of the simulator are learners of 600,000 to 18,750 chips, and run the whole protocol. A learner dies when one of
its chips fails. It is down for the pause that the published figures imply (benchmarks/goodput_model.py), and fetches
the model of a member when it restarts. Virtual seconds are seconds of the real system: a step takes one, and links
carry a model of 5 B parameters in bf16. The swarm trains a perceptron on digits. Finished runs are kept in
runs/goodput.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import goodput_model as model
import goodput_page as page
import numpy as np
from pages import Runs, put

from sim.engine.host import FlowTransfer, Host
from sim.scenario.scenario import Scenario
from sim.simulation import Simulation
from sim.threads import one_thread

LEARNERS = (2, 4, 8, 16, 64)
STEPS = 960  # A run ends when its learners have taken so many each, on average.
STEP_S = 1.0  # 5 % either way
MODEL_MB = 20_000  # 5 B parameters in float32: the size of the published runs with failures
LEARNING_RATE = 0.3
LONGEST = 8  # a run ends early after this multiple of its steps' duration
PARTITIONS = {"iid": {"kind": "iid"}, "dirichlet": {"kind": "dirichlet", "alpha": 0.1}}
NAMES = {"iid": "IID", "dirichlet": "Dirichlet 0.1"}


class World(NamedTuple):
    """The conditions of a run: the kind of pause for a failure, the links' rate, and the steps between two mixes.

    Without a kind of pause nothing fails. 24 is the published number of steps. With ``notice`` learners are warned, and
    mix a last time before they end.
    """

    pause: str | None
    rate_gbit_s: float
    every: int = 24
    notice: bool = False


WORLDS = {
    "no failures": World(None, 100),
    "100 Gbit/s": World("elastic", 100),
    "with a notice": World("elastic", 100, notice=True),
    "a mix every 8 steps": World("elastic", 100, every=8),
    "5 Gbit/s": World("elastic", 5),
    "rigid learners": World("rigid", 100),
}
# These worlds are played on both partitions and compared by accuracy; the others on IID alone, for goodput.
BOTH_PARTITIONS = {
    "no failures": "no failures", "100 Gbit/s": "failures, 100 Gbit/s", "with a notice": "failures with a notice",
}  # fmt: skip
Job = tuple[int, str, str, int]  # learners, world, partition, seed


def scenario(job: Job) -> dict[str, Any]:
    """Return the scenario of a run as nested mappings."""
    learners, name, partition, seed = job
    world = WORLDS[name]
    table: dict[str, Any] = {
        "name": name, "seed": seed, "peers": learners, "duration_s": STEPS * STEP_S, "fidelity": "whole",
        "task": {
            "dataset": "digits", "model": "mlp", "model_mb": MODEL_MB, "partition": PARTITIONS[partition],
            "optimizer": {"lr": LEARNING_RATE},
        },
        "network": {
            "latency": {"kind": "constant", "value_ms": 30}, "rate_mbit_s": 1_000 * world.rate_gbit_s,
        },
        "compute": {"step_s": {"kind": "uniform", "low_s": 0.95 * STEP_S, "high_s": 1.05 * STEP_S}},
        "gossip": {"preset": "wan", "codec": "bf16", "mix_every_steps": world.every},
    }  # fmt: skip
    if world.pause is not None:
        table["churn"] = {
            "up": {"kind": "exponential", "mean_s": model.failure_s(model.CHIPS / learners)},
            "down": {"kind": "constant", "value_s": getattr(model.PAUSES, world.pause)},
            "farewell": float(world.notice),
        }
    return table


class Losses:
    """A count of the learners' steps that are lost.

    Others have a learner's steps once an exchange has ended whose snapshot it took after them. Later steps are lost if
    the learner dies or adopts the weights of another run.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.swarm, self.steps = simulation.swarm, 0.0
        self.shared = [0.0] * simulation.scenario.peers  # steps of each learner's current life that others have too
        learners, sessions = simulation.learners, self.swarm.sessions
        usual_count, usual_on_replaced, usual_kill = sessions.count_mix, learners.on_weights_replaced, self.swarm.kill

        def count(host: Host, transfer: FlowTransfer, share: float) -> None:
            usual_count(host, transfer, share)
            assert transfer.requested_at is not None
            since = (self.swarm.now - transfer.requested_at) / STEP_S
            self.shared[host.row] = max(self.shared[host.row], self.now(host) - since)

        def joined(row: int) -> None:
            usual_on_replaced(row)
            index = simulation.indices[row]
            assert index is not None
            self.lose(self.swarm.hosts[index], begins=False)

        def kill(index: int, silent: bool = False) -> None:
            self.lose(self.swarm.hosts[index], begins=True)
            usual_kill(index, silent)

        sessions.count_mix, learners.on_weights_replaced, self.swarm.kill = count, joined, kill  # type: ignore[method-assign]

    def now(self, host: Host) -> int:
        """Return the steps that this life has taken so far."""
        self.swarm.training.count_steps(host, self.swarm.now)
        return host.steps

    def lose(self, host: Host, begins: bool) -> None:
        """Count the steps that only this host had, because its life ends (``begins``) or it adopts other weights."""
        steps = self.now(host)
        self.steps += steps - self.shared[host.row]
        self.shared[host.row] = 0.0 if begins else steps


def play(job: Job) -> dict[str, float]:
    """Simulate one run until its learners have taken their steps together, and return its figures.

    Returns:
        ``trained``, ``kept`` and ``idle`` as shares of possible steps and of time; ``accuracy``, ``worst`` and
        ``average`` of the learners that train then; ``mixes`` of each learner, ``virtual_s``, ``cpu_s``.
    """
    began_s = time.process_time()
    simulation = Simulation(Scenario.from_mapping(scenario(job)))
    losses, swarm = Losses(simulation), simulation.swarm
    training, learners, idle = swarm.training, job[0], 0
    with one_thread(), np.errstate(all="ignore"):  # a diverging model is a result
        while training.steps < STEPS * learners and swarm.now < LONGEST * STEPS * STEP_S:
            before = training.steps
            swarm.events.run_until(swarm.now + 2 * STEP_S)
            for host in swarm.hosts:
                if not host.gone:
                    training.count_steps(host, swarm.now)
            idle += training.steps == before
        while not any(host.peer.view.ready for host in swarm.alive()) and swarm.now < LONGEST * STEPS * STEP_S:
            swarm.events.run_until(swarm.now + STEP_S)
        possible, trained = learners * swarm.now / STEP_S, training.steps
        row = simulation.row()
    return {
        "trained": trained / possible, "kept": (trained - losses.steps) / possible,
        "idle": 2 * STEP_S * idle / swarm.now, "accuracy": row["accuracy_mean"], "worst": row["accuracy_min"],
        "average": row["accuracy_average_model"], "mixes": row["mixes"], "virtual_s": swarm.now,
        "cpu_s": time.process_time() - began_s,
    }  # fmt: skip


# -- all runs ------------------------------------------------------------------------------------------------------
def jobs(learners: tuple[int, ...], seeds: int) -> Iterator[Job]:
    """Yield all runs, the first seed of everything first: an interrupted run shows all rows."""
    for seed in range(1, seeds + 1):
        for count in learners:
            for world in WORLDS:
                for partition in PARTITIONS if world in BOTH_PARTITIONS else ("iid",):
                    yield count, world, partition, seed


def write(runs: page.Runs) -> None:
    """Write the tables of the simulator into the page."""
    failing = [world for world in WORLDS if WORLDS[world].pause is not None]
    put(page.PAGE, "goodput", page.goodput_rows(LEARNERS, runs))
    put(page.PAGE, "worlds", page.world_rows(LEARNERS, failing, runs))
    put(page.PAGE, "accuracy", page.accuracy_rows(LEARNERS, BOTH_PARTITIONS, NAMES, runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learners", type=int, action="append", help="so many alone; may be repeated")
    parser.add_argument("--fresh", action="store_true", help="play again what was played before")
    parser.add_argument("--page", action="store_true", help="play nothing: write the tables from what was played")
    arguments = parser.parse_args()
    finished = Runs("goodput", arguments.fresh)
    if not arguments.page:
        wanted = jobs(tuple(arguments.learners or LEARNERS), arguments.seeds)
        finished.play(wanted, play, scenario)
    runs: dict[tuple[int, str, str], list[dict[str, float]]] = {}
    for job in jobs(LEARNERS, arguments.seeds):
        figures = finished.get(scenario(job))
        if figures is not None:
            runs.setdefault(job[:3], []).append(figures)
    write(runs)


if __name__ == "__main__":
    main()
