"""Random partners compared with mostly near ones, in two distant regions (docs/results/regions.md).

    python benchmarks/regions.py [--seeds 3]

Each region has 16 peers. The round trip is 2 ms with 1 Gbit/s within a region, and 80 ms with 20 Mbit/s a stream
between them. The job is a perceptron on digits, 960 steps of 25 ms. The table is printed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import sim.engine.carrier
import sim.simulation
from gossip.config.internal import Internal
from sim.engine.flows import Flow, Flows
from sim.scenario.scenario import Scenario
from sim.world.network import NetworkModel

REGION = 16  # peers
NEAR_S, FAR_S = 0.001, 0.040  # Latencies in one direction.
RATE_BYTES_S, ACROSS_BYTES_S = 1e9 / 8, 20e6 / 8
DURATION_S, STEP_S, LOOKS = 24.0, 0.025, 60
# The partition of the data, and the target accuracy.
DATA = {"IID": ({"kind": "iid"}, 0.94), "Dirichlet 0.1": ({"kind": "dirichlet", "alpha": 0.1}, 0.80)}
RULES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "nearest, shortcuts 0.1": {"selection": "nearest", "internal": Internal(shortcuts=0.1)},
    "nearest, shortcuts 0.3": {"selection": "nearest", "internal": Internal(shortcuts=0.3)},
}


def far(one: int, other: int) -> bool:
    return one // REGION != other // REGION


@dataclass(frozen=True, slots=True)
class Regions(NetworkModel):
    """A network of two regions: the first 16 peers and the others."""

    @property
    def longest_s(self) -> float:
        return FAR_S

    def latency(self, sender: int, receiver: int) -> float:
        return FAR_S if far(sender, receiver) else NEAR_S


class Streams(Flows):
    """Streams that are slow between regions; their bytes are counted."""

    across_bytes = 0

    def start(self, sender: int, receiver: int, *args: Any, ceiling: float = math.inf, **named: Any) -> Flow | None:
        if far(sender, receiver):
            self.across_bytes += args[0]
            ceiling = min(ceiling, ACROSS_BYTES_S)
        return super().start(sender, receiver, *args, ceiling=ceiling, **named)


def play(gossip: dict[str, Any], partition: dict[str, Any], aim: float, seed: int) -> dict[str, float]:
    """Simulate one run, and return its figures; bytes are those of a node."""
    table = {
        "seed": seed, "peers": 2 * REGION, "duration_s": DURATION_S, "membership": {"mode": "ideal"},
        "task": {"dataset": "digits", "model": "mlp", "partition": partition, "optimizer": {"lr": 0.3}},
        "compute": {"step_s": {"kind": "lognormal", "median": STEP_S, "sigma": 0.1}}, "gossip": gossip,
    }  # fmt: skip
    simulation = sim.simulation.Simulation(Scenario.from_mapping(table))
    swarm, measures, reached_s = simulation.swarm, simulation.measures, math.nan
    distances = []
    for look in range(1, LOOKS + 1):
        swarm.run_until(look * DURATION_S / LOOKS)
        row = measures.row()
        distances.append(row["consensus_distance"])
        if math.isnan(reached_s) and row["accuracy_mean"] >= aim:
            reached_s = row["virtual_s"]
    flows = swarm.links.carrier.flows
    assert isinstance(flows, Streams)
    return {
        "accuracy, %": 100 * row["accuracy_mean"], "worst, %": 100 * row["accuracy_min"], "s to the aim": reached_s,
        "exchange, ms": 1e3 * float(np.mean(swarm.sessions.durations_s)), "mixes": row["mixes"],
        "MB across": flows.across_bytes / 2 / REGION / 1e6,
        "MB": flows.sent_bytes / 2 / REGION / 1e6, "apart": statistics.fmean(distances[-LOOKS // 3 :]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(1, parser.parse_args().seeds + 1)
    torch.set_num_threads(1)
    sim.simulation.network_of = lambda *described: Regions(NEAR_S, RATE_BYTES_S)
    sim.engine.carrier.Flows = Streams
    titled = False
    for every in (8, 1):
        for data, (partition, aim) in DATA.items():
            for rule, settings in RULES.items():
                runs = [play(settings | {"mix_every_steps": every}, partition, aim, seed) for seed in seeds]
                if not titled:
                    print("| data | a mix every | partners |", " | ".join(runs[0]), "|")
                    print("|---" * (3 + len(runs[0])) + "|")
                    titled = True
                cells = [f"{statistics.fmean(run[key] for run in runs):.4g}" for key in runs[0]]
                spread = statistics.stdev(run["accuracy, %"] for run in runs) if len(runs) > 1 else math.nan
                cells[0] += f" ± {spread:.1f}"
                print(f"| {data}, aim {aim:.0%} | {every} | {rule} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
