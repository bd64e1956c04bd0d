"""Accuracy against bytes sent, for every codec, part and interval: writes a table of docs/results/bytes.md.

    python benchmarks/bytes.py [--seeds 3] [--fresh]

The job is an MLP on Fashion-MNIST, IID. Every configuration takes the same number of local steps at the same rate, and
is compared with fp32 every 8 steps over the same seeds. Finished runs are kept in runs/bytes.jsonl.
benchmarks/language.py compares a small GPT with synchronous training.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from pages import RESULTS, Runs, put

from sim import Scenario, simulate

PAGE = RESULTS / "bytes.md"
OUTER = {"outer_momentum": 0.5, "outer_rate": 0.7}
PLAIN = {"outer_momentum": 0.0, "outer_rate": 1.0}  # used unless a configuration names the outer step
DURATION_S = 240.0
WORLD: dict[str, Any] = {
    "name": "bytes", "peers": 8, "duration_s": DURATION_S, "fidelity": "whole",
    "task": {"dataset": "fashion-mnist", "model": "mlp", "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.1}},
    "compute": {"step_s": {"kind": "lognormal", "median": 0.1, "sigma": 0.05}},
    "membership": {"mode": "ideal"},
    "network": {"latency": {"kind": "constant", "value_ms": 5}, "rate_mbit_s": 100},
    "report": {"every_s": DURATION_S},  # A single evaluation, because more would dominate the time.
}  # fmt: skip
# The default of its day. The default since has the correction (decision 94) and chooses codec and interval (107).
UNCORRECTED = "fp32, outer momentum, no correction"
FAMILIES: dict[str, list[dict[str, Any]]] = {
    "fp32": [{"codec": "fp32", "mix_every_steps": every} for every in (8, 32, 128)],
    UNCORRECTED: [OUTER | {"codec": "fp32", "mix_every_steps": 8}],
    "bf16": [{"codec": "bf16", "mix_every_steps": every} for every in (8, 64)],
    "int8": [{"codec": "int8", "mix_every_steps": every} for every in (8, 40, 104)],
    "int4": [{"codec": "int4", "mix_every_steps": every} for every in (8, 24, 56)],
    "moniqua4": [{"codec": "moniqua4", "mix_every_steps": every} for every in (8, 24, 56)],
    "int8, outer momentum": [OUTER | {"codec": "int8", "mix_every_steps": every} for every in (40, 104)],
    "int4, outer momentum": [OUTER | {"codec": "int4", "mix_every_steps": every} for every in (24, 56)],
    "random mask (SPARTA)": [
        {"part": f"mask {share}", "mix_every_steps": 1, "staleness_exponent": 0.0} for share in (0.05, 0.015, 0.005)
    ],
    "fragments (Streaming DiLoCo)": [
        OUTER | {"part": f"fragments {count}", "codec": "int4", "mix_every_steps": every, "max_version_gap": 0.5}
        for count, every in ((4, 8), (4, 14))
    ],
}
BASE = {"mix_every_steps": 8, "codec": "fp32"}
FIGURES = ("accuracy", "average", "mb")


def scenario(settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the scenario of a run as nested mappings."""
    return WORLD | {"seed": seed, "gossip": PLAIN | settings}


def play(table: dict[str, Any]) -> dict[str, float]:
    """Simulate one run, and return its figures."""
    result = simulate(Scenario.from_mapping(table), progress=False)
    return {
        "accuracy": result.summary["accuracy"]["mean"], "average": result.history[-1]["accuracy_average_model"],
        "mb": result.summary["bytes_sent"] / table["peers"] / 1e6,
    }  # fmt: skip


def rows(runs: Runs, seeds: range) -> list[list[str]]:
    """Return the table: each configuration's means over the seeds, compared with fp32 every 8 steps."""
    found = [[
        "configuration", "every steps", "accuracy, %", "seeds", "spread", "points lost", "of the average model",
        "MB a node", "times fewer bytes",
    ]]  # fmt: skip
    for name, family in FAMILIES.items():
        for settings in family:
            played, base = ([runs.get(scenario(each, seed)) for seed in seeds] for each in (settings, BASE))
            if None in played or None in base:
                continue
            accuracies = [100 * run["accuracy"] for run in played]
            accuracy, average, mb = (statistics.fmean(run[key] for run in played) for key in FIGURES)
            usual, _, usual_mb = (statistics.fmean(run[key] for run in base) for key in FIGURES)
            found.append([
                ", ".join(filter(None, [name, settings.get("part", "")])), str(settings["mix_every_steps"]),
                f"{100 * accuracy:.2f}", str(len(seeds)), f"{max(accuracies) - min(accuracies):.2f}",
                f"{100 * (usual - accuracy):+.2f}", f"{100 * average:.2f}", f"{mb:.2f}", f"{usual_mb / mb:.1f}",
            ])  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="play again what was played before")
    given = parser.parse_args()
    runs, seeds = Runs("bytes", given.fresh), range(1, given.seeds + 1)
    every = [settings for family in FAMILIES.values() for settings in family]
    runs.play([scenario(settings, seed) for seed in seeds for settings in every], play, lambda table: table)
    put(PAGE, "fashion-mnist", rows(runs, seeds))


if __name__ == "__main__":
    main()
