"""The panels of results: one small picture for each question about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sim.arrays import F64
from sim.report import charts
from sim.report.charts import COLOURS, DASHES, INK, SHADE, Key, Panel, line_of, plain_ticks
from sim.report.result import Result
from sim.report.units import bytes_axis, duration_text, time_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.scenario.conditions import NetworkCut
    from sim.scenario.scenario import Scenario

LOG_RATIO = 20.0  # An axis over more than this ratio is logarithmic.
EVALUATED = "On held-out samples: each peer's own model, and the average of all models."
BAND = "On held-out samples: the mean of the peers, and the band from least to greatest."


def panels_of(results: Sequence[Result]) -> list[Panel]:
    """Return the panels with data: no accuracy for a task without one, no durations without exchanges."""
    is_single = len(results) == 1
    evaluated = EVALUATED if is_single else BAND
    loss = evaluated
    if all(result.scenario.task.dataset == "averaging" for result in results):
        loss = f"Half the mean square of the peers' vectors{', and of their average' if is_single else ''}."
    members = "Peers that are up" + (", and those of them that have joined and train." if is_single else ".")
    distance = "How far the peers' models lie from their average, root mean square."
    sent = "By all peers together since the beginning, control messages included."
    panels = [
        over_time("loss", "Loss", loss, draw_loss, results),
        over_time("accuracy", "Accuracy", evaluated, draw_accuracy, results),
        over_time("metric", "Metric", evaluated, draw_metric, results),
        over_time("consensus", "Consensus distance", distance, draw_consensus, results),
        over_time("members", "Members", members, draw_members, results),
        over_time("traffic", "Bytes sent", sent, draw_traffic, results),
    ]
    took = "Share of the finished exchanges that took no longer, from the snapshot to the mix."
    panels.append(Panel("durations", "Exchanges", took, partial(draw_durations, results=results)))
    data: dict[str, Callable[[Result], F64]] = {
        "accuracy": lambda result: result.column("accuracy_mean"),
        "metric": lambda result: result.column("metric_mean"),
        "consensus": distances,
        "durations": lambda result: result.exchange_s,
    }
    has_data = {name: any(np.isfinite(values(each)).any() for each in results) for name, values in data.items()}
    return [panel for panel in panels if has_data.get(panel.name, True)]


def key_of(results: Sequence[Result]) -> Key:
    """Return where a figure explains its curves: one result has several in a panel, and several have one each."""
    return "each" if len(results) == 1 else "once"


def draw_all(results: Sequence[Result]) -> Figure:
    """Return a figure of all panels."""
    return charts.draw(panels_of(results), key_of(results), heading=name_of(results[0]) if len(results) == 1 else "")


def save_all(results: Sequence[Result], folder: Path) -> None:
    """Write a PNG of each panel, named after it, and curves.png with all of them."""
    charts.save(draw_all(results), folder / "curves.png")
    for panel in panels_of(results):
        charts.save(charts.draw([panel], key_of(results), titled=False), folder / f"{panel.name}.png")


def cuts(results: Sequence[Result]) -> tuple[NetworkCut, ...]:
    """Return the network's cuts, if all results have the same; panels over time shade them."""
    first, *others = (each.scenario.network.partitions for each in results)
    return first if all(other == first for other in others) else ()


def over_time(
    name: str, title: str, caption: str, draw_on: Callable[[Axes, Sequence[Result]], None], results: Sequence[Result]
) -> Panel:  # fmt: skip
    """Return a panel over virtual time, with the cuts of the network shaded."""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        draw_on(axes, results)
        last_s = last_of(results)
        divisor, unit = time_axis(last_s)
        axes.set_xlim(0, last_s / divisor if last_s > 0 else 1)
        axes.set_xlabel(f"virtual time ({unit})")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        for cut in cuts(results):
            axes.axvspan(cut.at_s / divisor, min(cut.until_s, last_s) / divisor, color=SHADE, linewidth=0, zorder=0)

    return Panel(name, title, caption, draw)


def last_of(results: Sequence[Result]) -> float:
    """Return the latest virtual time of any row."""
    return max(float(each.column("virtual_s").max(initial=0.0)) for each in results)


def times_of(result: Result, results: Sequence[Result]) -> F64:
    """Return the virtual times of a result's rows, in the unit that suits all results, shape (rows,)."""
    divisor, _ = time_axis(last_of(results))
    return result.column("virtual_s") / divisor


def draw_band(axes: Axes, results: Sequence[Result], kind: str, scale: float = 1.0) -> None:
    """Draw the mean over peers as a line, least to greatest as a band, and the average model of a single result.

    ``kind`` begins the names of the columns: "loss", "accuracy" or "metric".
    """
    for number, result in enumerate(results):
        times = times_of(result, results)
        low, mean, high = (scale * result.column(f"{kind}_{part}") for part in ("min", "mean", "max"))
        is_single = len(results) == 1
        axes.fill_between(
            times, low, high, color=COLOURS[number % len(COLOURS)][0], alpha=0.22 if is_single else 0.13, linewidth=0,
            label="min to max" if is_single else None,
        )  # fmt: skip
        axes.plot(times, mean, **line_of(number, "mean" if is_single else name_of(result)))
        if is_single and np.isfinite(average := scale * result.column(f"{kind}_average_model")).any():
            axes.plot(times, average, color=COLOURS[1][0], linestyle=DASHES[1], label="average model")


def draw_loss(axes: Axes, results: Sequence[Result]) -> None:
    draw_band(axes, results, "loss")
    means = [positive(each.column("loss_mean")) for each in results]
    if all(each.size for each in means) and max(each.max() / each.min() for each in means) > LOG_RATIO:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(loss_label([each.scenario for each in results]))


def loss_label(scenarios: Sequence[Scenario]) -> str:
    """Return the label of the loss with its unit, if all scenarios have the same known one."""
    labels = set()
    for scenario in scenarios:
        task = scenario.task
        known = "loss (nats)" if ":" not in task.dataset else "loss"
        named = {"cross-entropy": "loss (nats)", "mse": "mean squared error", None: known}
        labels.add("half the mean square" if task.dataset == "averaging" else named.get(task.loss, "loss"))
    return labels.pop() if len(labels) == 1 else "loss"


def draw_metric(axes: Axes, results: Sequence[Result]) -> None:
    draw_band(axes, results, "metric")
    names = {str(each.scenario.task.metric).rpartition(":")[2] for each in results}
    axes.set_ylabel(names.pop().replace("_", " ") if len(names) == 1 else "metric")


def draw_accuracy(axes: Axes, results: Sequence[Result]) -> None:
    draw_band(axes, results, "accuracy", 100.0)
    axes.set_ylim(top=min(100.0, axes.get_ylim()[1]))
    axes.set_ylabel("accuracy (%)")


def draw_consensus(axes: Axes, results: Sequence[Result]) -> None:
    drawn = []
    for number, result in enumerate(results):
        drawn.append(distance := distances(result))
        axes.plot(times_of(result, results), distance, **line_of(number, name_of(result)))
    axes.set_yscale("log")
    spread = positive(np.concatenate(drawn))
    if spread.size and spread.max() < 1e4 * spread.min():
        plain_ticks(axes, spread.min(), spread.max())
    axes.set_ylabel("distance (L2 norm)")


def distances(result: Result) -> F64:
    """Return the consensus distance, without values that a logarithmic axis cannot show well.

    A swarm that starts from one model begins at 0, or at the rounding error of that. Such a point would press all other
    points into the top of the picture.
    """
    distance = result.column("consensus_distance")
    greatest = positive(distance).max(initial=0.0)
    hidden = (distance <= 0) | ((result.column("virtual_s") == 0) & (distance < 1e-4 * greatest))
    distance[hidden] = math.nan
    return distance


def draw_members(axes: Axes, results: Sequence[Result]) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, result in enumerate(results):
        times, is_single = times_of(result, results), len(results) == 1
        line = line_of(number, "alive" if is_single else name_of(result))
        axes.step(times, result.column("alive"), where="post", **line)
        if is_single:
            axes.step(
                times, result.column("ready"), where="post", color=COLOURS[2][0], linestyle=DASHES[1], label="training"
            )
    axes.set_ylim(0, 1.06 * max(axes.get_ylim()[1], 1.0))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("peers")


def draw_traffic(axes: Axes, results: Sequence[Result]) -> None:
    divisor, unit = bytes_axis(max(float(np.nanmax(each.column("bytes_sent"), initial=0.0)) for each in results))
    for number, result in enumerate(results):
        sent = result.column("bytes_sent") / divisor
        axes.plot(times_of(result, results), sent, **line_of(number, name_of(result)))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"sent by all peers ({unit})")


def draw_durations(axes: Axes, results: Sequence[Result]) -> None:
    """Draw cumulative shares of durations, and mark the median and the 95th percentile of a single result."""
    samples = [positive(each.exchange_s) for each in results]
    durations = np.concatenate(samples)
    divisor, unit = time_axis(float(np.quantile(durations, 0.95)))
    for number, (result, sample) in enumerate(zip(results, samples, strict=True)):
        if sample.size:
            times = np.concatenate([[0.0], np.sort(sample) / divisor])
            shares = np.linspace(0, 100, times.size)
            shown = np.unique(np.linspace(0, times.size - 1, 400).astype(int))  # A picture shows no more points.
            label = "_" if len(results) == 1 else name_of(result)  # matplotlib leaves "_" out of the key.
            axes.plot(times[shown], shares[shown], drawstyle="steps-post", **line_of(number, label))
    for share, words, style in ((0.5, "median", "-"), (0.95, "95 % within", DASHES[1])) if len(results) == 1 else ():
        value = float(np.quantile(durations, share))
        label = f"{words} {duration_text(value)}"
        axes.axvline(value / divisor, color=INK, linewidth=1.0, linestyle=style, label=label)
    low, high = float(durations.min()) / divisor, float(durations.max()) / divisor
    if high > LOG_RATIO * low:
        axes.set_xscale("log")
        plain_ticks(axes, low, high, "x")
        axes.set_xlim(low / 1.2, high * 1.2)
    else:
        axes.set_xlim(0, high * 1.03)
    axes.set_ylim(0, 101)
    axes.set_xlabel(f"duration of an exchange ({unit})")
    axes.set_ylabel("took no longer (%)")


def name_of(result: Result) -> str:
    """Return the name as matplotlib shows it: no formula between dollars, and in the key though it begins with "_"."""
    name = str(result.summary["name"]).replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def positive(values: F64) -> F64:
    """Return the values that a logarithmic axis can show."""
    shown: F64 = values[np.isfinite(values) & (values > 0)]
    return shown
