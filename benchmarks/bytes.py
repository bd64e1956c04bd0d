"""Accuracy against bytes sent, for every codec, part and interval: writes two tables of docs/results/bytes.md.

    python benchmarks/bytes.py [--job fashion-mnist | gpt] [--seeds 3] [--fresh]

The jobs are an MLP on Fashion-MNIST, IID, and a byte-level GPT on Shakespeare with AdamW and a learning rate schedule.
Every configuration takes the same number of local steps at the same rates, and is compared with fp32 every 8 steps over
the same seeds. Finished runs are kept in runs/bytes.jsonl. benchmarks/language.py compares a small GPT with synchronous
training.
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
STEP_S = 0.1
JOBS: dict[str, dict[str, Any]] = {
    "fashion-mnist": {
        "peers": 8, "duration_s": 240.0,
        "task": {"dataset": "fashion-mnist", "model": "mlp", "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.1}},
    },
    # Peak rate and warm-up (30 %, as in torch's OneCycleLR) are the best for the base among those that were tried.
    "gpt": {
        "peers": 4, "duration_s": 3000 * STEP_S,
        "task": {
            "dataset": "shakespeare", "model": "gpt", "batch_size": 8,
            "optimizer": {
                "name": "adamw", "lr": 0.005, "schedule": "cosine", "schedule_steps": 3000, "warmup_steps": 900,
            },
        },
    },
}  # fmt: skip
COMMON = {
    "compute": {"step_s": {"kind": "lognormal", "median": 0.1, "sigma": 0.05}},
    "membership": {"mode": "ideal"},
    "fidelity": "whole",
    "network": {"latency": {"kind": "constant", "value_ms": 5}, "rate_mbit_s": 100},
}
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
# A step of the GPT costs a hundred steps of the MLP, so each family has only one or two intervals. Nothing is clipped,
# because honest distances grow while a learning rate rises.
FREE = {"filter": "none"}
WITHIN = FREE | {"codec": "moniqua4", "mix_every_steps": 14}  # WITHIN and BEST decide the result, so they get two seeds
BEST = FREE | {"part": "fragments 8", "codec": "int8", "mix_every_steps": 14}
GPT_FAMILIES: dict[str, list[dict[str, Any]]] = {
    "fp32": [{"codec": "fp32", "mix_every_steps": 8}, FREE | {"codec": "fp32", "mix_every_steps": 56}],
    UNCORRECTED: [OUTER | {"codec": "fp32", "mix_every_steps": 8}],
    "bf16": [FREE | {"codec": "bf16", "mix_every_steps": 16}],
    "int8": [FREE | {"codec": "int8", "mix_every_steps": 12}],
    "int4": [FREE | {"codec": "int4", "mix_every_steps": 56}],
    "moniqua4": [FREE | {"codec": "moniqua4", "mix_every_steps": every} for every in (8, 14, 24, 56)],
    "moniqua4, outer momentum": [
        OUTER | FREE | {"codec": "moniqua4", "mix_every_steps": every} for every in (14, 28, 56)
    ],
    "fragments (Streaming DiLoCo)": [FREE | {"part": "fragments 4", "codec": "int8", "mix_every_steps": 6}, BEST],
}
BASE = {"mix_every_steps": 8, "codec": "fp32"}
FIGURES = ("accuracy", "loss", "mb", "average_loss", "average_accuracy")


def seeds_of(job: str, settings: dict[str, Any], given: int | None) -> int:
    """Return the number of seeds for a configuration."""
    if given or job != "gpt":
        return given or 3
    return 2 if settings in (BASE, BEST, WITHIN) else 1


def scenario(job: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the scenario of a run as nested mappings."""
    ends = {"every_s": JOBS[job]["duration_s"]}  # one evaluation only, because evaluations would dominate
    return {"name": job, "seed": seed, "gossip": PLAIN | settings, "report": ends} | COMMON | JOBS[job]


def play(table: dict[str, Any]) -> dict[str, float]:
    """Simulate one run, and return its figures."""
    result = simulate(Scenario.from_mapping(table), progress=False)
    summary, last = result.summary, result.history[-1]
    return {
        "accuracy": summary["accuracy"]["mean"], "loss": summary["loss"],
        "mb": summary["bytes_sent"] / table["peers"] / 1e6,
        "average_loss": last["loss_average_model"], "average_accuracy": last["accuracy_average_model"],
    }  # fmt: skip


def families(job: str) -> dict[str, list[dict[str, Any]]]:
    return GPT_FAMILIES if job == "gpt" else FAMILIES


def rows(job: str, runs: Runs, given: int | None) -> list[list[str]]:
    """Return the table of a job: each configuration's means over its seeds, beside fp32 every 8 steps."""
    loss = job == "gpt"
    key, size, digits = ("loss", 1, 3) if loss else ("accuracy", 100, 2)
    head = ["configuration", "every steps", "loss" if loss else "accuracy, %", "seeds", "spread"]
    head += ["loss more, %" if loss else "points lost", "of the average model", "MB a node", "times fewer bytes"]
    found = [head]
    for name, family in families(job).items():
        for settings in family:
            seeds = range(1, seeds_of(job, settings, given) + 1)
            played, base = ([runs.get(scenario(job, each, seed)) for seed in seeds] for each in (settings, BASE))
            if None in played or None in base:
                continue
            means = {figure: statistics.fmean(run[figure] for run in played) for figure in FIGURES}
            usual = {figure: statistics.fmean(run[figure] for run in base) for figure in FIGURES}
            values = [size * run[key] for run in played]
            lost = 100 * (means["loss"] / usual["loss"] - 1 if loss else usual["accuracy"] - means["accuracy"])
            part = [settings["part"], settings["codec"]] if "part" in settings and loss else [settings.get("part", "")]
            found.append([
                ", ".join(filter(None, [name, *part])), str(settings["mix_every_steps"]),
                f"{size * means[key]:.{digits}f}", str(len(seeds)),
                f"{max(values) - min(values):.{digits}f}" if len(seeds) > 1 else "",
                f"{lost:+.{1 if loss else 2}f}", f"{size * means[f'average_{key}']:.{digits}f}", f"{means['mb']:.2f}",
                f"{usual['mb'] / means['mb']:.1f}",
            ])  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=[*JOBS], action="append")
    parser.add_argument("--seeds", type=int, help="of all; by default 3, of the GPT 1 or 2")
    parser.add_argument("--fresh", action="store_true", help="play again what was played before")
    given = parser.parse_args()
    runs = Runs("bytes", given.fresh)
    for job in given.job or JOBS:
        every = [settings for family in families(job).values() for settings in family]
        seeds = [(settings, seed + 1) for settings in every for seed in range(seeds_of(job, settings, given.seeds))]
        runs.play([scenario(job, settings, seed) for settings, seed in seeds], play, lambda table: table)
        put(PAGE, job, rows(job, runs, given.seeds))


if __name__ == "__main__":
    main()
