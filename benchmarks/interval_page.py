"""The page docs/results/interval.md, made from the figures of benchmarks/interval.py."""

import math
import statistics
import textwrap
from pathlib import Path

AIM = 0.3  # points that the default may be behind the best fixed pair
SLACK = 1.05  # The default may send so many times the budget's bytes, as int8 needs scales.

INTRODUCTION = """# Interval and codec: the default beside fixed pairs

Written by `make bench-interval`, with runs of {dates}. A `Config()` lets each node choose its interval and its codec
([how](../algorithms.md#how-often-and-in-how-many-bits), [why](../decisions/0096-nodes-choose-how-often.md)). This page
compares the choice with fixed pairs of an interval and a codec that send about the same bytes as fp32 every 8 steps.

All nodes of a world together train the same number of local steps: 30,720 on digits, 7,680 on Fashion-MNIST, in batches
of 8, with SGD, 0.1 s a step and the default method. Every setting of a world has the same learning rate: 1.0 on IID
data, and 0.3 (128 and 256 nodes: 0.6, Fashion-MNIST: 0.015) on Dirichlet 0.1. On a LAN a message takes 5 ms, over the
internet it takes measured latencies, and a node sends 100 Mbit/s. Accuracies are in %, of the mean node with the worst
node in brackets: the mean of four moments in the last tenth of a run. A moment falls anywhere between two mixes.

## The default beside the best fixed pair

**The aim is at most {aim} points behind the best fixed pair, at no more bytes than fp32 every 8 steps sends.** The
difference is the mean over the same seeds, ± its standard error. The best of five pairs with noise is ahead of its
true mean, so the aim is a strict one.

"""

REST = """
## All pairs

The cells have the mean node's accuracy, the worst node's in brackets, and the MB that a node sends.

"""

FOOT = """
\\*: one seed. moniqua4 every step sends more than fp32 every 8 and is not compared: it has 4.4 bits a value, and an
exchange that exceeds its bound is repeated in int8.
"""
EIGHTHS, FOURTHS = "int8 every 2", "int4 every 1"


def accuracy(runs):
    mean, worst = (100 * statistics.mean(run[name] for run in runs.values()) for name in ("mean", "worst"))
    return f"{mean:.1f} ({worst:.0f})"


def average(runs, name):
    return statistics.mean(run[name] for run in runs.values())


def table(heads, lines):
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *lines)]) + "\n"


def in_common(figures, worlds, settings):
    """Return the figures of these settings with only the seeds that all of them have, for worlds that have any."""
    common = {}
    for world in worlds:
        seeds = set.intersection(*(set(figures[world, setting]) for setting in settings))
        for setting in settings if seeds else ():
            common[world, setting] = {seed: figures[world, setting][seed] for seed in sorted(seeds)}
    return common


def bullet(text):
    return textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) + "\n"


def difference(runs, reference):
    """Return the mean of ``runs - reference`` in points over common seeds, and its standard error or None."""
    values = [100 * (runs[seed]["mean"] - reference[seed]["mean"]) for seed in sorted(runs.keys() & reference.keys())]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def coarser(figures):
    """Return why no node takes int4, with the world in which it is furthest behind int8."""
    worst_points, worst_world = min(
        (difference(runs, figures[world, EIGHTHS])[0], world)
        for (world, name), runs in figures.items()
        if name == FOURTHS
    )
    return (
        f"No node takes a codec coarser than int8 by itself: {FOURTHS} is up to {-worst_points:.1f} points behind "
        f"{EIGHTHS} elsewhere ({worst_world})."
    )


def cause(figures, world, default, best):
    """Return why the default is behind the best pair of a world, with the figures that show it."""
    ours, reference, sentences = figures[world, default], figures[world, EIGHTHS], []
    if best == FOURTHS:
        points, _ = difference(figures[world, best], reference)
        sentences.append(f"{best} is {points:.1f} points ahead of {EIGHTHS}.")
    points, _ = difference(ours, reference)
    steps = statistics.median(run["interval"] for run in ours.values())
    compared = (
        f"Compared with {EIGHTHS} the default has {points:+.1f} points, and {average(ours, 'mixes'):.0f} mixes where "
        f"that has {average(reference, 'mixes'):.0f}"
    )
    if steps > 2:
        compared += (
            f": an exchange takes {steps:.0f} steps over these links, and a node lets it end before the next is due"
        )
    sentences.append(compared + ".")
    return " ".join(sentences)


def write_page(path, figures, settings, default, budget, costly):
    """Write the page.

    Args:
        path: The page.
        figures: (world, setting) -> the figures of a run by its seed.
        settings: Names of the settings, in order.
        default: The one whose interval and codec each node chooses.
        budget: The fixed pair whose bytes the default may not exceed.
        costly: The pair that sends more, which is not compared.
    """
    pairs = [setting for setting in settings if setting not in (default, costly)]
    worlds = list(dict.fromkeys(world for world, _ in figures))
    equal = in_common(figures, worlds, [default, *pairs])
    whole = [world for world in worlds if (world, default) in equal]
    lines, missed = [], []
    for world in whole:
        ours = equal[world, default]
        pair = max(pairs, key=lambda candidate, world=world: average(equal[world, candidate], "mean"))
        best = equal[world, pair]
        points, error = difference(ours, best)
        shown = f"{round(points, 1) + 0.0:+.1f}" + ("" if error is None else f" ± {error:.1f}")
        allowed_mb = average(equal[world, budget], "mb")
        exceeds_budget = average(ours, "mb") > SLACK * allowed_mb
        lines.append([
            world, f"{pair}: {accuracy(best)}", accuracy(ours), shown,
            f"{average(best, 'mb'):.2f}, {average(ours, 'mb'):.2f}",
            f"{average(best, 'mixes'):.0f}, {average(ours, 'mixes'):.0f}", str(len(ours.keys() & best.keys())),
        ])  # fmt: skip
        if round(points, 1) < -AIM or exceeds_budget:
            at_more = f" at {average(ours, 'mb') / allowed_mb:.1f} times the bytes" if exceeds_budget else ""
            missed.append((world, points, at_more, pair))
    heads = [
        "world",
        "best fixed pair",
        "the default",
        "difference",
        "MB: pair, default",
        "mixes: pair, default",
        "seeds",
    ]
    days = sorted({run["date"] for runs in figures.values() for run in runs.values()})
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    reached = f"\nThe aim is reached in {len(whole) - len(missed)} of {len(whole)} worlds."
    if missed:
        if any(best == FOURTHS for *_, best in missed):
            reached += " " + coarser(equal)
        reached = "\n" + textwrap.fill(reached + " It is missed in these:", 120, break_on_hyphens=False).strip()
        reached += "\n\n" + "".join(
            bullet(f"**{world}**: {points:+.1f} points{more}. {cause(equal, world, default, best)}")
            for world, points, more, best in missed
        )
    body = [
        [world, *(cell(figures[world, setting]) for setting in settings)] for world in whole
    ]  # fmt: skip
    text = INTRODUCTION.format(dates=dates, aim=AIM) + table(heads, lines) + reached.rstrip("\n") + "\n"
    Path(path).write_text(text + REST + table(["", *settings], body) + FOOT, encoding="utf-8")


def cell(runs):
    """Return accuracy and bytes, with a mark if they are of one seed."""
    if not runs:
        return "-"
    return f"{accuracy(runs)} {average(runs, 'mb'):.2f}" + ("" if len(runs) > 1 else " \\*")
