"""The panels of a report: one small picture per question, each readable at a phone's width.

:mod:`sim.report.charts` imports matplotlib and makes the axes that are drawn on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.arrays import F64
from sim.report.result import Result
from sim.report.units import bytes_axis, duration_text, time_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sim.scenario.conditions import NetworkCut
    from sim.scenario.scenario import Scenario

__all__ = ["COLOURS", "DASHES", "GRID", "INK", "MUTED", "SHADE", "Panel", "cuts", "panels_of", "plain_ticks"]

# (on a white page, on a dark page): each has a contrast of 3 or more to the page. CIELAB distances are at least 25 with
# protanopia and deuteranopia, and 19 with tritanopia (simulated after Machado, Oliveira and Fernandes, 2009).
COLOURS = (
    ("#0067a9", "#4ea8e6"),
    ("#d55e00", "#f28e3c"),
    ("#2ba561", "#57fecf"),
    ("#c66e99", "#aa6c66"),
    ("#783a05", "#e1e993"),
    ("#538eff", "#abe1ff"),
)
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))  # Used from the seventh curve on.
INK, MUTED, GRID, SHADE = "#1f2328", "#59636e", "#dfe3e8", "#eceff3"
LOG_RATIO = 20.0  # An axis over more than this ratio is logarithmic.
HISTOGRAM_BINS = 32
MIN_TICKS = 3  # The least ticks on a logarithmic axis, before more digits are used.
# Leading digits of ticks, from few to many.
TICK_DIGITS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture: its name in file names, its title, its caption, and the function that draws it."""

    name: str
    title: str
    caption: str
    draw: Callable[[Axes, Sequence[Result]], None]
    about_time: bool = True  # Its x axis is virtual time.
    draw_several: Callable[[Axes, Sequence[Result]], None] | None = None  # Draws several results, if `draw` cannot.
    caption_of_several: str = ""

    def caption_for(self, results: Sequence[Result]) -> str:
        """Return the caption for these results."""
        if self.name == "loss" and all(result.scenario.task.dataset == "averaging" for result in results):
            average = ", and of their average" if len(results) == 1 else ""
            return f"Half the mean square of the peers' vectors{average}."
        return self.caption_of_several if len(results) > 1 and self.caption_of_several else self.caption


def panels_of(results: Sequence[Result]) -> list[Panel]:
    """Return the panels with data: no accuracy for a task without one, no durations without exchanges."""
    return [
        panel
        for panel in PANELS
        if panel.name not in HAS_DATA or any(HAS_DATA[panel.name](result) for result in results)
    ]


def cuts(results: Sequence[Result]) -> tuple[NetworkCut, ...]:
    """Return the network's cuts, if all results have the same; panels over time shade them."""
    first, *others = (each.scenario.network.partitions for each in results)
    return first if all(other == first for other in others) else ()


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)][0]


def dash_of(number: int) -> Any:
    return DASHES[number // len(COLOURS) % len(DASHES)]


def line_of(number: int, label: str) -> dict[str, Any]:
    """Return the keywords of ``Axes.plot`` for a result's line."""
    return {"color": colour_of(number), "linestyle": dash_of(number), "label": label}


def times_of(result: Result, results: Sequence[Result]) -> F64:
    """Return the virtual times of a result's rows, in the unit that suits all results, shape (rows,)."""
    divisor, _ = time_axis(max(float(each.column("virtual_s").max(initial=0.0)) for each in results))
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
            times, low, high, color=colour_of(number), alpha=0.22 if is_single else 0.13, linewidth=0,
            label="min to max" if is_single else None,
        )  # fmt: skip
        axes.plot(times, mean, **line_of(number, "mean" if is_single else name_of(result)))
        if is_single and np.isfinite(average := scale * result.column(f"{kind}_average_model")).any():
            axes.plot(times, average, color=colour_of(1), linestyle=DASHES[1], label="average model")


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
                times, result.column("ready"), where="post", color=colour_of(2), linestyle=DASHES[1], label="training"
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
    """Draw a histogram, with the median and the 95th percentile marked."""
    (result,) = results
    sample = positive(result.exchange_s)
    divisor, unit = time_axis(float(np.quantile(sample, 0.95)))
    sample = sample / divisor
    low, high = float(sample.min()), float(sample.max())
    is_log = high > LOG_RATIO * low
    if high - low < 1e-6 * high:  # All are equal: draw one bar of some width.
        low, high = 0.9 * low, 1.1 * high
    edges = np.geomspace(low, high, HISTOGRAM_BINS + 1) if is_log else np.linspace(low, high, HISTOGRAM_BINS + 1)
    shares = np.full(sample.size, 100.0 / sample.size)
    axes.hist(sample, list(edges), weights=shares, color=colour_of(0), alpha=0.75, linewidth=0)
    if is_log:
        axes.set_xscale("log")
        plain_ticks(axes, low, high, "x")
    for share, words, style in ((0.5, "median", "-"), (0.95, "95 % within", DASHES[1])):
        value = float(np.quantile(sample, share))
        axes.axvline(
            value, color=INK, linewidth=1.0, linestyle=style, label=f"{words} {duration_text(value * divisor)}"
        )
    axes.set_xlabel(f"duration of an exchange ({unit})")
    axes.set_ylabel("share of exchanges (%)")


def draw_durations_of_several(axes: Axes, results: Sequence[Result]) -> None:
    """Draw cumulative shares of durations: lines, since bars would hide one another."""
    samples = [positive(each.exchange_s) for each in results]
    durations = np.concatenate(samples)
    divisor, unit = time_axis(float(np.quantile(durations, 0.95)))
    for number, (result, sample) in enumerate(zip(results, samples, strict=True)):
        if sample.size:
            times = np.concatenate([[0.0], np.sort(sample) / divisor])
            shares = np.linspace(0, 100, times.size)
            shown = np.unique(np.linspace(0, times.size - 1, 400).astype(int))  # A picture shows no more points.
            axes.plot(times[shown], shares[shown], drawstyle="steps-post", **line_of(number, name_of(result)))
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
    return str(result.summary["name"])


def positive(values: F64) -> F64:
    """Return the values that a logarithmic axis can show."""
    shown: F64 = values[np.isfinite(values) & (values > 0)]
    return shown


def plain_ticks(axes: Axes, low: float, high: float, which: str = "y") -> None:
    """Set round, written-out ticks on a logarithmic axis: powers of ten on a long axis, more digits on a short one."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = low / 1.15, high * 1.15
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for digits in TICK_DIGITS:
        if sum(low <= digit * 10.0**power <= high for power in powers for digit in digits) >= MIN_TICKS:
            break
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator([digit * 10.0**power for power in powers for digit in digits]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)


EVALUATED = "On held-out samples: each peer's own model, and the average of all models."
BAND = "On held-out samples: the mean of the peers, and the band from least to greatest."
PANELS = (
    Panel("loss", "Loss", EVALUATED, draw_loss, caption_of_several=BAND),
    Panel("accuracy", "Accuracy", EVALUATED, draw_accuracy, caption_of_several=BAND),
    Panel("metric", "Metric", EVALUATED, draw_metric, caption_of_several=BAND),
    Panel("consensus", "Consensus distance", "How far the peers' models lie from their average, root mean square.",
          draw_consensus),
    Panel("members", "Members", "Peers that are up, and those of them that have joined and train.", draw_members,
          caption_of_several="Peers that are up."),
    Panel("traffic", "Bytes sent", "By all peers together since the beginning, control messages included.",
          draw_traffic),
    Panel("durations", "Exchanges", "From the snapshot to the mix, over a sample of the finished exchanges.",
          draw_durations, about_time=False, draw_several=draw_durations_of_several,
          caption_of_several="Share of the finished exchanges that took no longer, from the snapshot to the mix."),
)  # fmt: skip
HAS_DATA: dict[str, Callable[[Result], bool]] = {
    "accuracy": lambda result: bool(np.isfinite(result.column("accuracy_mean")).any()),
    "metric": lambda result: bool(np.isfinite(result.column("metric_mean")).any()),
    "consensus": lambda result: bool(positive(result.column("consensus_distance")).size),
    "durations": lambda result: bool(positive(result.exchange_s).size),
}
