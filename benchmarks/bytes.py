"""Accuracy against bytes sent, for every codec, part and interval (docs/results/bytes.md).

    python benchmarks/bytes.py [--job language | fashion-mnist | gpt] [--seeds 3] [--fresh] [--known]

The job "language", a small GPT compared with synchronous training, is in benchmarks/language.py. The jobs here are an
MLP on Fashion-MNIST, IID, and a byte-level GPT on Shakespeare with AdamW and a learning rate schedule. Every
configuration takes the same number of local steps at the same rates, and is compared with fp32 every 8 steps over the
same seeds. Finished runs are cached in runs/bytes.jsonl as long as their settings stay the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import language

from sim import Scenario, simulate

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "runs" / "bytes.jsonl"
DOCUMENT = ROOT / "docs" / "results" / "bytes.md"
PICTURE = ROOT / "docs" / "pictures" / "bytes.png"

GENTLER = {"outer_momentum": 0.3, "outer_rate": 0.9}
OUTER = {"outer_momentum": 0.5, "outer_rate": 0.7}
PLAIN = {"outer_momentum": 0.0, "outer_rate": 1.0}  # used unless a configuration names the outer step
STEP_S = 0.1
COSINE = {"schedule": "cosine", "schedule_steps": 3000}


def gpt(steps: int = 3000, **optimizer: Any) -> dict[str, Any]:
    """Return the job of the GPT with AdamW, for ``steps`` steps of a node."""
    task = {"dataset": "shakespeare", "model": "gpt", "batch_size": 8, "optimizer": {"name": "adamw"} | optimizer}
    return {"peers": 4, "duration_s": steps * STEP_S, "task": task}


JOBS: dict[str, dict[str, Any]] = {
    "fashion-mnist": {
        "peers": 8, "duration_s": 240.0,
        "task": {"dataset": "fashion-mnist", "model": "mlp", "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.1}},
    },
    # Peak rate and warm-up (30 %, as in torch's OneCycleLR) are the best for the base among those that were tried.
    "gpt": gpt(lr=0.005, **COSINE, warmup_steps=900),
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
    "fragments (Streaming DiLoCo)": [
        FREE | {"part": "fragments 4", "codec": "int8", "mix_every_steps": 6},
        BEST,
    ],
}
BASE = {"mix_every_steps": 8, "codec": "fp32"}
SEVERAL = GPT_FAMILIES["fragments (Streaming DiLoCo)"]
STREAMING = OUTER | {"part": "fragments 4", "codec": "int4", "mix_every_steps": 14, "max_version_gap": 0.5}
MONIQUA = FREE | {"codec": "moniqua4", "mix_every_steps": 56}
TRIED: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [  # name of the rates, job, configurations
    ("constant 0.003", gpt(lr=0.003), [STREAMING, {"codec": "moniqua4", "mix_every_steps": 56}]),
    ("cosine from 0.003", gpt(lr=0.003, **COSINE), [STREAMING]),
    ("cosine from 0.01, warm-up 100", gpt(lr=0.01, **COSINE, warmup_steps=100), [STREAMING]),
    (
        "cosine from 0.005, warm-up 100", gpt(lr=0.005, **COSINE, warmup_steps=100),
        [
            FREE | {"codec": "fp32", "mix_every_steps": 56}, MONIQUA, OUTER | MONIQUA,
            {
                "mixing": "group", "group_size": 4, "codec": "int8", "mix_every_steps": 150,
                "outer_momentum": 0.6, "outer_rate": 0.7,
            },
        ],
    ),
    (
        "cosine from 0.005 to 0.0005, warm-up 100, betas 0.9 and 0.99",
        gpt(lr=0.005, **COSINE, warmup_steps=100, min_lr=0.0005, betas=[0.9, 0.99]), [],
    ),
    (
        "cosine from 0.005, warm-up 900 (as above)", JOBS["gpt"],
        [
            BASE | FREE,
            FREE | {"codec": "moniqua4", "mix_every_steps": 56} | GENTLER, OUTER | BEST, BEST | GENTLER,
            FREE | {"mixing": "group", "group_size": 4, "codec": "int4", "mix_every_steps": 77},
            FREE | {"codec": "moniqua4", "mix_every_steps": 60, "selection": "exponential", "max_version_gap": 0.0},
        ],
    ),
    (
        "6000 steps, cosine from 0.003, warm-up 1800",
        gpt(6000, lr=0.003, schedule="cosine", schedule_steps=6000, warmup_steps=1800),
        [FREE | {"codec": "moniqua4", "mix_every_steps": 60}],
    ),
]  # fmt: skip


def families(job: str) -> dict[str, list[dict[str, Any]]]:
    return GPT_FAMILIES if job == "gpt" else FAMILIES


def seeds_of(job: str, settings: dict[str, Any], given: int | None) -> int:
    """Return the number of seeds for a configuration."""
    if given or job != "gpt":
        return given or 3
    return 2 if settings in (BASE, BEST, WITHIN) else 1


def play(name: str, job: dict[str, Any], settings: dict[str, Any], seed: int) -> dict[str, Any]:
    ends = {"report": {"every_s": job["duration_s"]}}  # one evaluation only, because evaluations would dominate
    scenario = Scenario.from_mapping({"name": name, "seed": seed, "gossip": PLAIN | settings} | ends | COMMON | job)
    result = simulate(scenario, progress=False)
    summary, last = result.summary, result.history[-1]
    return {
        "accuracy": summary["accuracy"]["mean"], "worst": summary["accuracy"]["min"], "loss": summary["loss"],
        "mb": summary["bytes_sent"] / scenario.peers / 1e6, "failed": summary["exchanges_failed"],
        "mixes": summary["node_updates"] / scenario.peers, "cpu_s": summary["cpu_s"],
        "average_loss": last["loss_average_model"], "average_accuracy": last["accuracy_average_model"],
    }  # fmt: skip


class Runs:
    """The cache of finished runs, by their settings."""

    def __init__(self, fresh: bool, seeds: int | None) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.seeds = seeds
        if CACHE.exists() and not fresh:
            for line in CACHE.read_text().splitlines():
                entry = json.loads(line)
                self.rows[entry["key"]] = entry["row"]
        CACHE.parent.mkdir(exist_ok=True)

    def row(self, name: str, job: dict[str, Any], settings: dict[str, Any], seed: int) -> dict[str, Any]:
        key = json.dumps([name, job, COMMON, settings, seed], sort_keys=True)
        if key not in self.rows:
            start = time.perf_counter()
            self.rows[key] = play(name, job, settings, seed)
            with CACHE.open("a") as file:
                file.write(json.dumps({"key": key, "row": self.rows[key]}) + "\n")
            print(f"{name} {settings} seed {seed}: {self.rows[key]} in {time.perf_counter() - start:.0f} s", flush=True)
        return self.rows[key]

    def mean(self, name: str, settings: dict[str, Any], job: dict[str, Any] | None = None) -> dict[str, float]:
        """Return a configuration's means over its seeds.

        ``base_*`` are the means of fp32 every 8 steps over the same seeds. ``lost`` compares with it: the loss in
        percent more, or points of accuracy less.
        """
        seeds = seeds_of(name, settings, self.seeds) if job is None else 1
        job = job or JOBS[name]
        rows = [self.row(name, job, settings, seed) for seed in range(1, seeds + 1)]
        base = [self.row(name, job, BASE, seed) for seed in range(1, seeds + 1)]
        means = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
        means |= {f"base_{key}": statistics.fmean(row[key] for row in base) for key in ("loss", "accuracy", "mb")}
        measure = "loss" if name == "gpt" else "accuracy"
        more, less = means["loss"] / means["base_loss"] - 1, means["base_accuracy"] - means["accuracy"]
        spread = max(row[measure] for row in rows) - min(row[measure] for row in rows)
        lost = 100 * (more if name == "gpt" else less)
        return means | {"spread": spread, "seeds": seeds, "lost": lost, "fewer": means["base_mb"] / means["mb"]}


def title(name: str, settings: dict[str, Any]) -> str:
    """Return the title of a row; a family with several codecs (only for the GPT) also names the codec."""
    several = settings in SEVERAL
    return ", ".join(each for each in (name, settings.get("part", ""), settings["codec"] if several else "") if each)


def table(job: str, runs: Runs) -> list[str]:
    loss = job == "gpt"
    lines = [
        f"| configuration | every steps | {'loss' if loss else 'accuracy, %'} | {'seeds | ' if loss else ''}spread | "
        f"{'loss more, %' if loss else 'points lost'} | of the average model | MB a node | times fewer bytes |",
        "|---|---|---|---|---|---|---|---|" + "---|" * loss,
    ]
    for name, family in families(job).items():
        for settings in family:
            row = runs.mean(job, settings)
            if loss:
                shown, average = f"{row['loss']:.3f} | {row['seeds']}", f"{row['average_loss']:.3f}"
                spread = f"{row['spread']:.3f}" if row["seeds"] > 1 else ""
                lost = f"{row['lost']:+.1f}"
            else:
                shown, average = f"{100 * row['accuracy']:.2f}", f"{100 * row['average_accuracy']:.2f}"
                spread, lost = f"{100 * row['spread']:.2f}", f"{row['lost']:+.2f}"
            lines.append(
                f"| {title(name, settings)} | {settings['mix_every_steps']} | "
                f"{shown} | {spread} | {lost} | {average} | {row['mb']:.2f} | {row['fewer']:.1f} |"
            )
    return lines


def draw(runs: Runs, jobs: list[str]) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(jobs), figsize=(6.5 * len(jobs), 6), squeeze=False)
    colours = plt.get_cmap("tab20").colors
    colour = {name: colours[number % 20] for number, name in enumerate(FAMILIES | GPT_FAMILIES)}
    for job, axis in zip(jobs, axes[0], strict=True):
        loss = job == "gpt"
        for name, family in families(job).items():
            rows = sorted((runs.mean(job, settings) for settings in family), key=lambda row: row["mb"])
            values = [row["loss"] if loss else 100 * row["accuracy"] for row in rows]
            axis.plot([row["mb"] for row in rows], values, "o-", color=colour[name], label=name, markersize=4)
        base, (fewer, allowed, _) = runs.mean(job, BASE), AIMS[job]
        axis.axhline(base["loss"] * (1 + allowed / 100) if loss else 100 * base["accuracy"] - allowed, **DOTTED)
        axis.axvline(base["mb"] / fewer, **DOTTED)
        axis.set_xscale("log")
        axis.set_xlabel("MB sent by a node")
        axis.set_ylabel("loss of the mean node" if loss else "accuracy of the mean node, %")
        axis.set_title("byte-level GPT, Shakespeare" if loss else "MLP, Fashion-MNIST, IID")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7, ncol=2, loc="upper right" if loss else "upper center")
    figure.text(0.5, 0.005, "dotted: the aims beside fp32 every 8 steps", ha="center")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=130)


LANGUAGE = "language"
DOTTED = {"color": "#888888", "linestyle": ":", "linewidth": 1}
AIMS = {"fashion-mnist": (20, 0.5, "at most 0.5 point lost"), "gpt": (50, 1.0, "at most 1 % more loss")}
TITLES = {
    "fashion-mnist": "An MLP on Fashion-MNIST, IID, {peers} nodes, {steps} steps of batch {batch}, 3 seeds",
    "gpt": "A byte-level GPT on Shakespeare, {peers} nodes, {steps} steps of batch {batch}, AdamW, a cosine",
}


def reached(job: str, runs: Runs) -> str:
    """Return a sentence on the fewest bytes with an allowed loss, and on the least loss at the aim if it is missed."""
    fewer, most, allowed = AIMS[job]
    every = [
        (runs.mean(job, settings), name, settings) for name, family in families(job).items() for settings in family
    ]
    kept = [each for each in every if each[0]["lost"] <= most]
    row, name, settings = max(kept, key=lambda each: each[0]["fewer"])
    steps = f"every {settings['mix_every_steps']} steps"
    if row["fewer"] >= fewer:
        return f"**{row['fewer']:.0f} times fewer bytes**, {allowed}: {name}, {steps} (the aim was {fewer} times)."
    few = [each for each in every if each[0]["fewer"] >= fewer]
    least, its, chosen = min(few, key=lambda each: each[0]["lost"])
    return (
        f"**The aim, {fewer} times fewer bytes with {allowed}, was not reached.** With {allowed} it is "
        f"**{row['fewer']:.1f} times** ({title(name, settings)}, {steps}); {least['fewer']:.0f} times fewer cost "
        f"**{least['lost']:.1f} %** ({title(its, chosen)}, every {chosen['mix_every_steps']} steps). What limits it: "
        "[performance](../performance.md#codecs)."
    )


def words(settings: dict[str, Any]) -> str:
    """Describe a configuration for a cell of a table."""
    outer = f"outer {settings['outer_momentum']:g}/{settings['outer_rate']:g}" if "outer_momentum" in settings else ""
    group = "group of all" if settings.get("mixing") == "group" else ""
    turns = "neighbours in turn, in step" if "selection" in settings else ""
    free = "nothing clipped" if settings == BASE | FREE else ""
    parts = (settings["codec"], settings.get("part", ""), group, outer, turns, free)
    said = ", ".join(each for each in parts if each)
    return f"{said}, every {settings['mix_every_steps']}"


def tried(runs: Runs) -> list[str]:
    """Return the table of further GPT runs with seed 1, each compared with fp32 every 8 steps at the same rates."""
    lines = [
        "### What else was tried", "",
        "Seed 1, 3000 steps where nothing else is said; each beside fp32 every 8 steps at the same rates.", "",
        "| rates | fp32 every 8: loss | tried | loss | loss more, % | times fewer bytes |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for rates, job, configurations in TRIED:
        base = f"{runs.mean('gpt', BASE, job)['loss']:.3f}"
        rows = [(words(settings), runs.mean("gpt", settings, job)) for settings in configurations]
        lines += [
            f"| {rates} | {base} | {said} | {row['loss']:.3f} | {row['lost']:+.1f} | {row['fewer']:.1f} |"
            for said, row in rows
        ] or [f"| {rates} | {base} | | | | |"]
    return lines


INTRODUCTION = """\
# Accuracy against bytes

What a node sends, all of it counted, against what comes of it; every configuration takes the same local
steps. Figures are of the mean node at the end, local steps since its last mix included; "of the average
model" is what `settle` leaves. Differences below the spread over the seeds are noise.

The default of an untouched `Config()` is played in the first table alone. It is ahead of the default until November
2026, the outer step alone in fp32 every 8 steps ([decision 113](../decisions/0113-a-weaker-outer-step.md)). Two aims
are missed: a loss within 1 % of synchronous training at 400 times fewer bytes (7.4 % at 378 times), and within 0.3 % at
16 times (1.4 % with an outer step of 0.2/0.9, 1.7 % by default, both with Muon). The mean of all weights after every
step is 0.2 % behind with Muon, so the interval is the cost. Models of 10 million parameters were not played.
Codecs and parts that were removed have their figures in
[decision 44](../decisions/0044-what-did-not-earn-its-place.md).

```
make bench-bytes
```

![accuracy against bytes](../pictures/bytes.png)

"""


def heading(job: str) -> str:
    """Return the title of a job's section."""
    if job == LANGUAGE:
        return language.TITLE
    task, steps = JOBS[job]["task"], round(JOBS[job]["duration_s"] / STEP_S)
    return TITLES[job].format(peers=JOBS[job]["peers"], steps=steps, batch=task["batch_size"])


def section(job: str, runs: Runs) -> str:
    """Return a job's section; this simulates missing runs."""
    lines = [f"## {heading(job)}", "", reached(job, runs), "", *(NOTES if job == "gpt" else ()), *table(job, runs)]
    return "\n".join([*lines, *(["", *tried(runs)] if job == "gpt" else ())])


def document(before: str, played: dict[str, str]) -> str:
    """Return the page; sections of jobs that were not simulated now are taken from the old page."""
    sections = {text.partition("\n")[0]: f"## {text.strip()}" for text in before.split("\n## ")[1:]}
    every = [played.get(job) or sections.get(heading(job), "") for job in (LANGUAGE, *JOBS)]
    return INTRODUCTION + "\n\n".join(text for text in every if text) + "\n"


NOTES = [
    "The rate rises to 0.005 over 900 steps and falls to 0 by half a cosine, for all alike. \"Loss more\" is beside",
    "fp32 every 8 steps with the plain mean, over the same seeds. Nothing is clipped (`filter = \"none\"`) but in that",
    "base and in the row without correction. The base is of the filter as it was when both sides cut alike: 1.875 on",
    "seed 1, where nothing clipped gives 1.878 and the filter of now 1.888, so that \"loss more\" is on the strict",
    "side. It is not synchronous training, which the table of the small GPT above has.", "",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=[LANGUAGE, *JOBS], action="append")
    parser.add_argument("--seeds", type=int, help="of all; by default 3, of the GPT 1 or 2")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--known", action="store_true", help="of the language model play nothing more")
    given = parser.parse_args()
    jobs, played = given.job or [LANGUAGE, *JOBS], dict[str, str]()
    if LANGUAGE in jobs:
        language_runs = language.Runs(play_missing=not given.known)
        if not given.known:
            language.play_all(language.ROWS, language_runs)
        played[LANGUAGE] = "\n".join(language.section(language_runs))
    others = [job for job in jobs if job != LANGUAGE]
    if others:
        runs = Runs(given.fresh, given.seeds)
        played |= {job: section(job, runs) for job in others}
        draw(runs, others)
    DOCUMENT.write_text(document(DOCUMENT.read_text() if DOCUMENT.exists() else "", played))
    print(DOCUMENT)


if __name__ == "__main__":
    main()
