"""The tables of docs/results/goodput.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import goodput_model as model
from pages import RESULTS

PAGE = RESULTS / "goodput.md"
PLAYED, WARNED = "100 Gbit/s", "with a notice"  # These worlds are compared with the published figures.
ROUNDS = (24, 500)  # steps between barriers: Decoupled DiLoCo's interval, and DiLoCo's
Figures = Mapping[str, float]
Runs = Mapping[
    tuple[int, str, str], Sequence[Figures]
]  # The keys are learners, world and partition; each seed is a run.


def share(value: float) -> str:
    """Return a share in %, with one digit."""
    return f"{100 * value:.1f}"


def mean(runs: Sequence[Figures], key: str) -> str:
    """Return the mean over runs in %, and with several the standard deviation of a run."""
    if not runs:
        return "-"
    values = [100 * run[key] for run in runs]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def brackets(runs: Sequence[Figures], *keys: str) -> str:
    """Return the means of these figures in %, to stand behind another."""
    means = ", ".join(f"{statistics.fmean(100 * run[key] for run in runs):.1f}" for key in keys if runs)
    return f" ({means})" if means else ""


def goodput_rows(learners: Sequence[int], runs: Runs) -> list[list[str]]:
    """Compare published, calculated and simulated goodput of 1.2 million chips, a line for each number of learners.

    Our figures are with links of 100 Gbit/s: "trained" counts all steps, "kept" the steps that did not die with a
    learner, without a notice and with one.
    """
    head = ["learners", "chips each", "a failure every", "published", "elastic learners, calculated"]
    head += [f"with a barrier every {steps} steps, calculated" for steps in ROUNDS]
    rows = [[*head, "ours, trained", "ours, kept", "ours, kept with a notice"]]
    every = model.failure_s(model.CHIPS)
    for count in (1, *learners):
        known, played = model.PUBLISHED.get(count), runs.get((count, PLAYED, "iid"), ())
        rows.append([
            "1, elastic data parallel" if count == 1 else f"{count}", f"{model.CHIPS // count:,}",
            f"{every * count:,.0f} s", "-" if known is None else f"{known}",
            share(model.availability(model.CHIPS / count, model.PAUSES.elastic)),
            *("-" if count == 1 else share(model.barrier(count, model.CHIPS, model.PAUSES.elastic, s)) for s in ROUNDS),
            mean(played, "trained"), mean(played, "kept"), mean(runs.get((count, WARNED, "iid"), ()), "kept"),
        ])  # fmt: skip
    return rows


def world_rows(learners: Sequence[int], worlds: Sequence[str], runs: Runs) -> list[list[str]]:
    """Return our goodput in every world: steps trained, in brackets steps kept and the time in which none trained."""
    rows = [["learners", *worlds]]
    for count in learners:
        row = [f"{count}"]
        for world in worlds:
            played = runs.get((count, world, "iid"), ())
            row.append(mean(played, "trained") + brackets(played, "kept", "idle"))
        rows.append(row)
    return rows


def accuracy_rows(
    learners: Sequence[int], worlds: Mapping[str, str], partitions: Mapping[str, str], runs: Runs
) -> list[list[str]]:
    """Compare accuracies after equal samples: mean node, in brackets the worst node and the mean of all models.

    Args:
        learners: The numbers of learners, a line for each.
        worlds: The worlds to compare, and the name of each in the head.
        partitions: The same for the partitions of the data.
        runs: The finished runs.
    """
    rows = [["data", "learners", *worlds.values()]]
    for partition, name in partitions.items():
        for count in learners:
            row = [name, f"{count}"]
            for world in worlds:
                played = runs.get((count, world, partition), ())
                row.append(mean(played, "accuracy") + brackets(played, "worst", "average"))
            rows.append(row)
    return rows


def storm_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return what a storm did to real nodes, one figure a line."""
    rows = [["", "the storm", "undisturbed"]]
    calm, storm = found["calm"], found["storm"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(storm["kinds"].items()))
    rows += [
        ["faults", kinds or "none", "none"],
        ["faults an hour at the pace of ft-diloco", f"{storm['faults an hour']:.0f}", "0"],
        ["seconds", f"{storm['seconds']:.0f}", f"{calm['seconds']:.0f}"],
        ["steps trained, of possible", f"{share(storm['trained'])} %", "100 %"],
        ["less those that died with a node", f"{share(storm['kept'])} %", "100 %"],
        ["kill to the next exchange of a survivor, median, 95 %", seconds(storm["resume"]), "-"],
        ["restart to the next exchange of the killed, median, 95 %", seconds(storm["back"]), "-"],
    ]
    for samples, stormy, still in found["accuracies"]:
        rows.append([f"accuracy after {samples:,.0f} samples", f"{share(stormy)} %", f"{share(still)} %"])
    rows.append(["cuts", found["cuts"], "-"])
    return rows


def seconds(values: Sequence[float]) -> str:
    """Return the median and the 95th percentile, and of how many."""
    if not values:
        return "none"
    ordered = sorted(values)
    return f"{statistics.median(ordered):.2f} s, {ordered[int(0.95 * len(ordered))]:.2f} s (of {len(ordered)})"
