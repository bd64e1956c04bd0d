"""A check that the small model of `gossip plan` ranks settings like the large model that it stands for.

    python benchmarks/planner.py [--seeds 2] [--json]

For each world the settings that `gossip plan` tries are simulated twice on the same links: with the stand-in (4,810
parameters that count as 1 MB), and with a perceptron of that size (250,000 parameters). The output has both accuracies
for each setting and Spearman's rank correlation. It also counts the pairs of settings that differ by more than a point
with both models, and those of them in the same order. It takes minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from sim.planner.candidates import candidates
from sim.planner.study import CandidateRuns, Study
from sim.planner.world import World
from sim.simulation import simulate

HIDDEN = 3_333  # hidden units of a perceptron with 249,985 parameters on digits, 1 MB
POINT = 0.01
WORLDS: dict[str, dict[str, Any]] = {
    "20 Mbit/s, 25 ms, 1 % lost": {
        "network": {"latency": {"kind": "constant", "value_ms": 25}, "rate_mbit_s": 20, "loss": 0.01},
    },
    "homes, 20 up, 100 down": {
        "network": {"latency": {"kind": "quantiles", "name": "internet"}, "rate_mbit_s": {"up": 20, "down": 100}},
        "compute": {"step_s": {"kind": "lognormal", "median": 0.1, "sigma": 0.3}},
    },
    "a LAN, 100 Mbit/s": {"network": {"latency": {"kind": "constant", "value_ms": 0.2}, "rate_mbit_s": 100}},
}


def played(study: Study) -> tuple[list[CandidateRuns], float]:
    """Simulate all runs of a study, and return its outcomes and the CPU seconds."""
    begun = time.process_time()
    study.take({number: simulate(run, progress=False) for number, (_, run) in enumerate(study.runs)})
    return study.outcomes, time.process_time() - begun


def compared(tables: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Compare both models' results for all settings of a world."""
    world = World.from_mapping(tables, "world", model_mb=4e-6 * (75 * HIDDEN + 10))
    tried = candidates(world.scenario, world.exchange_steps, world.base_settings)
    full = World(world.scenario.replace(**{"task.model_mb": None, "task.hidden": HIDDEN}))
    small, small_s = played(Study(world, tried, seeds))
    large, large_s = played(Study(full, tried, seeds))
    stand_in = np.array([outcome.mean for outcome in small])
    full_model = np.array([outcome.mean for outcome in large])
    clear = [
        (a, b) for a, b in itertools.combinations(range(len(tried)), 2)
        if abs(stand_in[a] - stand_in[b]) > POINT and abs(full_model[a] - full_model[b]) > POINT
    ]  # fmt: skip
    alike = sum((stand_in[a] > stand_in[b]) == (full_model[a] > full_model[b]) for a, b in clear)
    best = int(stand_in.argmax())
    return {
        "settings": [candidate.name for candidate in tried], "stand_in": stand_in.tolist(), "full": full_model.tolist(),
        "spearman": float(spearmanr(stand_in, full_model).statistic), "pairs": len(tried) * (len(tried) - 1) // 2,
        "clear": len(clear), "alike": alike, "lost_by_its_best": float(full_model.max() - full_model[best]),
        "stand_in_cpu_s": small_s, "full_cpu_s": large_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = {}
    for name, tables in WORLDS.items():
        figures = found[name] = compared(tables, arguments.seeds)
        if arguments.json:
            continue
        print(f"\n{name}\n\n| settings | stand-in | full |\n|---|---|---|")
        for setting, ours, theirs in sorted(
            zip(figures["settings"], figures["stand_in"], figures["full"], strict=True), key=lambda row: -row[2]
        ):
            print(f"| {setting} | {100 * ours:.1f} % | {100 * theirs:.1f} % |")
        print(
            f"\nSpearman {figures['spearman']:.2f} over {figures['pairs']} pairs; of {figures['clear']} that differ by "
            f"more than a point in both {figures['alike']} are in the same order; the stand-in's best is "
            f"{100 * figures['lost_by_its_best']:.1f} points below the best of the full model. "
            f"{figures['stand_in_cpu_s']:.0f} and {figures['full_cpu_s']:.0f} s of CPU.",
            flush=True,
        )
    if arguments.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
