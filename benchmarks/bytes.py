"""How little can be sent: accuracy against bytes, for every codec, part and interval (docs/results/bytes.md).

    python benchmarks/bytes.py [--job fashion-mnist | gpt] [--seeds 3] [--fresh]

Fashion-MNIST, IID, an MLP; and a byte-level GPT on Shakespeare with AdamW. Every configuration takes the same number of
local steps, and is compared with fp32 every 8 steps. Finished runs are kept in runs/bytes.jsonl and not played again
while their settings are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from sim import Scenario, simulate

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "runs" / "bytes.jsonl"
DOCUMENT = ROOT / "docs" / "results" / "bytes.md"
PICTURE = ROOT / "docs" / "pictures" / "bytes.png"

OUTER = {"outer_momentum": 0.5, "outer_rate": 0.7}
JOBS: dict[str, dict[str, Any]] = {
    "fashion-mnist": {
        "peers": 8, "duration_s": 240.0,
        "task": {"dataset": "fashion-mnist", "model": "mlp", "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.1}},
    },
    "gpt": {
        "peers": 4, "duration_s": 300.0,
        "task": {
            "dataset": "shakespeare", "model": "gpt", "batch_size": 8, "optimizer": {"name": "adamw", "lr": 0.003},
        },
    },
}  # fmt: skip
COMMON = {
    "compute": {"step_s": {"kind": "lognormal", "median": 0.1, "sigma": 0.05}},
    "membership": {"mode": "ideal"},
    "network": {"latency": {"kind": "constant", "value_ms": 5}, "rate_mbit_s": 100},
}
FAMILIES: dict[str, list[dict[str, Any]]] = {
    "fp32": [{"codec": "fp32", "mix_every_steps": every} for every in (8, 32, 128)],
    "bf16": [{"codec": "bf16", "mix_every_steps": every} for every in (8, 64)],
    "int8": [{"codec": "int8", "mix_every_steps": every} for every in (8, 40, 104)],
    "int4": [{"codec": "int4", "mix_every_steps": every} for every in (8, 24, 56)],
    "moniqua8": [{"codec": "moniqua8", "mix_every_steps": every} for every in (8, 40)],
    "moniqua4": [{"codec": "moniqua4", "mix_every_steps": every} for every in (8, 24, 56)],
    "moniqua2": [{"codec": "moniqua2", "mix_every_steps": 8}],
    "int8, outer momentum": [OUTER | {"codec": "int8", "mix_every_steps": every} for every in (40, 104)],
    "int4, outer momentum": [OUTER | {"codec": "int4", "mix_every_steps": every} for every in (24, 56)],
    "top-k": [{"part": f"top {share}", "mix_every_steps": 8, "codec": "bf16"} for share in (0.1, 0.03, 0.01)],
    "random mask (SPARTA)": [
        {"part": f"mask {share}", "mix_every_steps": 1, "staleness_exponent": 0.0} for share in (0.05, 0.015, 0.005)
    ],
    "fragments (Streaming DiLoCo)": [
        OUTER | {"part": f"fragments {count}", "codec": "int4", "mix_every_steps": every, "max_version_gap": 0.5}
        for count, every in ((4, 8), (4, 14))
    ],
}
RARER = {"fp32": (8, 56), "int4": (56,), "moniqua4": (24, 56), "int4, outer momentum": (56,)}  # of the gpt
SEEDS = {"fashion-mnist": 3, "gpt": 1}
BASE = {"mix_every_steps": 8, "codec": "fp32"}


def families(job: str) -> dict[str, list[dict[str, Any]]]:
    """A step of the GPT costs a hundred of the MLP's: of it the configurations that matter most."""
    if job != "gpt":
        return FAMILIES
    chosen = {
        name: [
            (OUTER if "outer" in name else {}) | {"codec": name.partition(",")[0], "mix_every_steps": every}
            for every in steps
        ]
        for name, steps in RARER.items()
    }
    streaming = "fragments (Streaming DiLoCo)"
    return chosen | {streaming: FAMILIES[streaming][1:]}


def play(job: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    ends = {"report": {"every_s": JOBS[job]["duration_s"]}}  # looked at once: evaluating would be most of the work
    scenario = Scenario.from_mapping({"name": job, "seed": seed, "gossip": settings} | ends | COMMON | JOBS[job])
    result = simulate(scenario, progress=False)
    summary, last = result.summary, result.history[-1]
    return {
        "accuracy": summary["accuracy"]["mean"], "worst": summary["accuracy"]["min"], "loss": summary["loss"],
        "mb": summary["bytes_sent"] / scenario.peers / 1e6, "failed": summary["exchanges_failed"],
        "mixes": summary["node_updates"] / scenario.peers, "cpu_s": summary["cpu_s"],
        "average_loss": last["loss_average_model"], "average_accuracy": last["accuracy_average_model"],
    }  # fmt: skip


class Runs:
    """Those that were played, by their settings."""

    def __init__(self, fresh: bool) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        if CACHE.exists() and not fresh:
            for line in CACHE.read_text().splitlines():
                entry = json.loads(line)
                self.rows[entry["key"]] = entry["row"]
        CACHE.parent.mkdir(exist_ok=True)

    def row(self, job: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
        key = json.dumps([job, JOBS[job], COMMON, settings, seed], sort_keys=True)
        if key not in self.rows:
            start = time.perf_counter()
            self.rows[key] = play(job, settings, seed)
            with CACHE.open("a") as file:
                file.write(json.dumps({"key": key, "row": self.rows[key]}) + "\n")
            print(f"{job} {settings} seed {seed}: {self.rows[key]} in {time.perf_counter() - start:.0f} s", flush=True)
        return self.rows[key]

    def mean(self, job: str, settings: dict[str, Any], seeds: int) -> dict[str, float]:
        rows = [self.row(job, settings, seed) for seed in range(1, seeds + 1)]
        means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
        measure = "loss" if job == "gpt" else "accuracy"
        return means | {"spread": max(row[measure] for row in rows) - min(row[measure] for row in rows)}


def table(job: str, runs: Runs, seeds: int) -> list[str]:
    base = runs.mean(job, BASE, seeds)
    loss = job == "gpt"
    lines = [
        f"| configuration | every steps | {'loss' if loss else 'accuracy, %'} | spread | "
        f"{'loss more, %' if loss else 'points lost'} | of the average model | MB a node | times fewer bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, family in families(job).items():
        for settings in family:
            row = runs.mean(job, settings, seeds)
            if loss:
                shown, lost = f"{row['loss']:.3f}", f"{100 * (row['loss'] / base['loss'] - 1):+.1f}"
                spread, average = f"{row['spread']:.3f}", f"{row['average_loss']:.3f}"
            else:
                shown, lost = f"{100 * row['accuracy']:.2f}", f"{100 * (base['accuracy'] - row['accuracy']):+.2f}"
                spread, average = f"{100 * row['spread']:.2f}", f"{100 * row['average_accuracy']:.2f}"
            part = settings.get("part", "")
            title = f"{name}{', ' + part if part else ''}"
            lines.append(
                f"| {title} | {settings['mix_every_steps']} | {shown} | {spread} | {lost} | {average} | "
                f"{row['mb']:.2f} | {base['mb'] / row['mb']:.1f} |"
            )
    return lines


def draw(runs: Runs, seeds: dict[str, int]) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(seeds), figsize=(6.5 * len(seeds), 6), squeeze=False)
    colours = plt.get_cmap("tab20").colors
    colour = {name: colours[number % 20] for number, name in enumerate(FAMILIES)}
    for job, axis in zip(seeds, axes[0], strict=True):
        loss = job == "gpt"
        for name, family in families(job).items():
            rows = sorted((runs.mean(job, settings, seeds[job]) for settings in family), key=lambda row: row["mb"])
            values = [row["loss"] if loss else 100 * row["accuracy"] for row in rows]
            axis.plot([row["mb"] for row in rows], values, "o-", color=colour[name], label=name, markersize=4)
        base = runs.mean(job, BASE, seeds[job])
        limit, fewer = (base["loss"] * 1.01, 50) if loss else (100 * base["accuracy"] - 0.5, 20)
        axis.axhline(limit, color="#888888", linestyle=":", linewidth=1)
        axis.axvline(base["mb"] / fewer, color="#888888", linestyle=":", linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel("MB sent by a node")
        axis.set_ylabel("loss of the mean node" if loss else "accuracy of the mean node, %")
        axis.set_title("byte-level GPT, Shakespeare" if loss else "MLP, Fashion-MNIST, IID")
        axis.grid(alpha=0.25)
    axes[0][0].legend(fontsize=7, ncol=2, loc="lower right")
    figure.text(0.5, 0.005, "dotted: the aims beside fp32 every 8 steps", ha="center")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=130)


AIMS = {"fashion-mnist": (20, 0.005, "at most 0.5 point lost"), "gpt": (50, 0.01, "at most 1 % more loss")}
TITLES = {
    "fashion-mnist": "An MLP on Fashion-MNIST, IID, {peers} nodes, {steps} steps of batch {batch}",
    "gpt": "A byte-level GPT on Shakespeare, {peers} nodes, {steps} steps of batch {batch}, AdamW",
}


def reached(job: str, runs: Runs, seeds: int) -> str:
    """The fewest bytes within what may be lost, in a sentence."""
    base, (fewer, _, allowed) = runs.mean(job, BASE, seeds), AIMS[job]
    kept = [
        (base["mb"] / row["mb"], name, settings)
        for name, family in families(job).items() for settings in family
        if (row := runs.mean(job, settings, seeds)) and within(job, row, base)
    ]  # fmt: skip
    times, name, settings = max(kept, key=lambda one: one[0])
    if times < fewer:
        return (
            f"**The aim, {fewer} times fewer bytes with {allowed}, was not reached**: see "
            "[performance](../performance.md#codecs) for what limits it."
        )
    said = f"**{times:.0f} times fewer bytes**, {allowed}: {name}, every {settings['mix_every_steps']} steps"
    return f"{said} (the aim was {fewer} times)."


def within(job: str, row: dict[str, float], base: dict[str, float]) -> bool:
    allowed = AIMS[job][1]
    return (
        row["loss"] <= base["loss"] * (1 + allowed) if job == "gpt" else row["accuracy"] >= base["accuracy"] - allowed
    )


def document(texts: dict[str, list[str]], runs: Runs, seeds: dict[str, int]) -> str:
    lines = [
        "# Accuracy against bytes", "",
        "What a node sends, all of it counted, against what comes of it; every configuration takes the same local",
        "steps. Figures are of the mean node at the end, local steps since its last mix included; \"of the average",
        "model\" is what `settle` leaves. Differences below the spread over the seeds are noise.", "",
        "```", "make bench-bytes", "```", "", "![accuracy against bytes](../pictures/bytes.png)",
    ]  # fmt: skip
    for job, rows in texts.items():
        task, steps = JOBS[job]["task"], round(JOBS[job]["duration_s"] / 0.1)
        title = TITLES[job].format(peers=JOBS[job]["peers"], steps=steps, batch=task["batch_size"])
        count = f"{seeds[job]} seed{'s' if seeds[job] > 1 else ''}"
        lines += ["", f"## {title}, {count}", "", reached(job, runs, seeds[job]), "", *rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=list(JOBS), action="append")
    parser.add_argument("--seeds", type=int, help="of both; by default 3 of the MLP and 1 of the GPT")
    parser.add_argument("--fresh", action="store_true")
    given = parser.parse_args()
    jobs, runs = given.job or list(JOBS), Runs(given.fresh)
    seeds = {job: given.seeds or SEEDS[job] for job in jobs}
    texts = {job: table(job, runs, seeds[job]) for job in jobs}
    draw(runs, seeds)
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(texts, runs, seeds))
    print(f"{DOCUMENT}\n{PICTURE}")


if __name__ == "__main__":
    main()
