"""Parameter sweeps: one scenario over a grid of values and several seeds.

It has one run for each combination of values and each seed.
"""

from __future__ import annotations

import csv
import itertools
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossip.errors import ConfigError
from sim.arrays import F64
from sim.report import charts, describe, pages
from sim.report.charts import Panel, line_of, plain_ticks
from sim.report.plots import loss_label
from sim.report.result import Result, check_column, writing
from sim.report.units import bytes_text, count_text, duration_text, figure_text, number, share_text
from sim.scenario.fidelity import Fidelity, fidelity_of
from sim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_RUNS = 10_000  # Catches a mistake in a grid before it costs a week.
ACCURACY_POINT = 0.01  # An accuracy within this of the best one counts as equally good.

Formatter = Callable[[float], str]

# The results that are kept of each run, in the order of sweep.csv.
COLUMNS = (
    "accuracy_mean", "accuracy_min", "accuracy_max", "accuracy_average_model", "loss", "metric_mean", "metric_min",
    "metric_max", "metric_average_model", "consensus_distance",
    "exchanges_done", "exchanges_failed", "bytes_sent", "virtual_s", "wall_s", "digest",
)  # fmt: skip
# The columns of the table: key, head and formatter.
SHOWN: tuple[tuple[str, str, Formatter], ...] = (
    ("accuracy_mean", "accuracy", share_text), ("accuracy_min", "worst peer", share_text),
    ("accuracy_average_model", "average model", share_text), ("loss", "loss", figure_text),
    ("metric_mean", "metric", figure_text),
    ("consensus_distance", "consensus distance", figure_text), ("bytes_sent", "sent", bytes_text),
    ("virtual_s", "virtual time", duration_text), ("exchanges_done", "exchanges", lambda mean: count_text(round(mean))),
    ("exchanges_failed", "failed", lambda mean: count_text(round(mean))),
)  # fmt: skip
LEFT_OUT_OF_TERMINAL = 3  # Columns at the end of SHOWN for which a terminal of 80 characters has no room.


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep: a value, as text, for each swept key, and a scenario with a seed."""

    values: tuple[tuple[str, str], ...]
    scenario: Scenario

    def __str__(self) -> str:
        settings = " ".join(f"{short_key(key)}={value}" for key, value in self.values)
        return f"{settings} seed {self.scenario.seed}"


@dataclass(slots=True)
class Sweep:
    """A sweep: its grid, and the rows of the finished runs."""

    name: str
    grid: Mapping[str, Sequence[str]]  # By swept key, its values as texts.
    seeds: int
    points: list[Point]
    levels: list[Fidelity] = field(default_factory=list)  # The levels at which the points are to be simulated.
    played: dict[str, Fidelity] = field(default_factory=dict)  # By name, the levels at which finished runs were.
    rows: list[dict[str, Any]] = field(default_factory=list)  # Swept keys, "seed" and COLUMNS.

    @classmethod
    def from_file(
        cls,
        path: Path,
        grid: Mapping[str, Sequence[str]],
        *,
        seed: int | None = None,
        seeds: int = 1,
        changes: Mapping[str, str] | None = None,
    ) -> Sweep:
        """Read a scenario once for each point, so that every value is checked before the first run.

        The ``seeds`` seeds start at the scenario's own, or at ``seed``. Raises :class:`ConfigError`.
        """
        changes = dict(changes or {})
        if not grid:
            raise ConfigError("Nothing is swept: name a key and its values, as gossip.mix_every_steps=2,8,32.")
        if "seed" in grid:
            raise ConfigError("seed cannot be swept: repeat every run with --seeds N.")
        for key in grid:
            if key in changes:
                raise ConfigError(f"{key} is both swept and set: leave one out.")
        runs = seeds * math.prod(len(values) for values in grid.values())
        if runs > MAX_RUNS:
            raise ConfigError(f"This sweep has {runs:,} runs: leave values out until there are {MAX_RUNS:,} at most.")
        points, name = [], ""
        for values in itertools.product(*grid.values()):
            setting = tuple(zip(grid, values, strict=True))
            first = Scenario.from_toml(path, seed=seed, changes=changes | dict(setting))
            name = first.name
            points += [Point(setting, first.replace(seed=first.seed + count)) for count in range(seeds)]
        return cls(name, grid, seeds, *at_one_level(points))

    def add(self, point: Point, result: Result) -> None:
        """Add the result of a point."""
        summary = result.summary
        flat = summary | {
            f"{name}_{key}": value for name in ("accuracy", "metric") for key, value in summary[name].items()
        }
        row: dict[str, Any] = dict(point.values) | {"seed": point.scenario.seed}
        level = result.fidelity.level  # Another one if the fast level has found that it cannot play this point.
        self.played.setdefault(level, next((one for one in self.levels if one.level == level), result.fidelity))
        self.rows.append(row | {key: flat[key] for key in (*COLUMNS, "no_exchange")})

    def in_order(self) -> list[dict[str, Any]]:
        """Return the rows in the order of the grid, not of completion."""
        return [row for _, rows in self.groups() for row in rows]

    def without_exchange(self) -> list[str]:
        """Return a sentence for each run without a finished exchange, after its swept values and seed."""
        rows = [row for row in self.in_order() if row["no_exchange"]]
        values = [" ".join(f"{short_key(key)}={row[key]}" for key in self.grid) for row in rows]
        return [f"{text} seed {row['seed']}: {row['no_exchange']}" for text, row in zip(values, rows, strict=True)]

    @property
    def seeds_text(self) -> str:
        first = self.points[0].scenario.seed
        return f"seed {first}" if self.seeds == 1 else f"mean of seeds {first} to {first + self.seeds - 1}"

    # -- figures -------------------------------------------------------------------------------------------------
    def groups(self) -> Iterator[tuple[tuple[str, ...], list[dict[str, Any]]]]:
        """Yield the values and the rows of each combination that has run, in the order of the grid.

        The rows are sorted by seed, so that a mean is bit-identical whatever the order of completion.
        """
        for values in itertools.product(*self.grid.values()):
            setting = dict(zip(self.grid, values, strict=True))
            rows = [row for row in self.rows if all(row[key] == value for key, value in setting.items())]
            if rows:
                yield values, sorted(rows, key=lambda row: int(row["seed"]))

    def table(self, *, brief: bool = False) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return heads and rows of text: means over the seeds for each combination, and half the range of accuracy.

        ``brief`` leaves out columns that do not fit into a terminal of 80 characters.
        """
        learns = any(not math.isnan(value) for value in self.column("accuracy_mean", self.rows))
        unknown = [] if learns else [column for column in SHOWN if column[0].startswith("accuracy")]
        if np.isnan(self.column("metric_mean", self.rows)).all():
            unknown += [column for column in SHOWN if column[0].startswith("metric")]
        shown = [column for column in SHOWN if column not in unknown]
        if brief:
            shown = [column for column in shown[:-LEFT_OUT_OF_TERMINAL] if not (learns and column[0] == "loss")]
        rows = []
        for values, group in self.groups():
            cells = [as_text(float(self.column(key, group).mean())) for key, _, as_text in shown]
            if learns and len(group) > 1:
                cells[0] += f" ± {100 * np.ptp(self.column('accuracy_mean', group)) / 2:.1f}"
            rows.append((*values, *cells))
        return [*(short_key(key).replace("_", " ") for key in self.grid), *(head for _, head, _ in shown)], rows

    @property
    def conclusion(self) -> str:
        """Return the range of the one swept number with accuracy within a point of the best; "" if not applicable."""
        (key, texts), *other_keys = self.grid.items()
        values = as_numbers(texts)
        if other_keys or values is None or len(texts) < 2:
            return ""
        means = {text: float(self.column("accuracy_mean", rows).mean()) for (text,), rows in self.groups()}
        ordered = [text for _, text in sorted(zip(values, texts, strict=True)) if text in means]
        if not ordered or any(math.isnan(mean) for mean in means.values()):
            return ""
        best = max(ordered, key=means.__getitem__)
        is_good = [means[text] >= means[best] - ACCURACY_POINT for text in ordered]
        low = high = ordered.index(best)  # The ends of the range of good values around the best one.
        while low > 0 and is_good[low - 1]:
            low -= 1
        while high + 1 < len(ordered) and is_good[high + 1]:
            high += 1
        good = f"{ordered[low]} to {ordered[high]}" if low < high else ordered[low]
        note = "" if high + 1 < len(ordered) else ", the largest value tried"
        return (
            f"Within one point of the best mean accuracy ({share_text(means[best])} at {short_key(key)} = {best}): "
            f"{short_key(key)} = {good}{note}."
        )

    @staticmethod
    def column(key: str, rows: Sequence[Mapping[str, Any]]) -> F64:
        """Return one figure of the rows, shape (rows,). Raises :class:`ConfigError` for an unknown key."""
        check_column(key, COLUMNS)
        return np.array([number(row[key]) for row in rows], np.float64)

    # -- files ---------------------------------------------------------------------------------------------------
    def write_csv(self, path: Path) -> None:
        """Write a line for each run. Raises :class:`LocalError` if the file cannot be written, and leaves an older."""
        heads, partial = [*self.grid, "seed", *COLUMNS], path.with_name(f"{path.name}.partial")
        with writing(path.parent):
            with partial.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, heads, lineterminator="\n")
                writer.writeheader()
                for row in self.in_order():
                    writer.writerow({key: "" if is_unknown(row[key]) else row[key] for key in heads})
            partial.replace(path)

    def save(self, folder: Path) -> None:
        """Write sweep.csv, sweep.png and report.html. Raises :class:`LocalError`."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.write_csv(folder / "sweep.csv")
        panels, labels = self.panels(), self.labels()
        charts.save(charts.draw(panels, "once" if len(labels) > 1 else ""), folder / "sweep.png")
        heads, rows = self.table()
        description = describe.in_words(self.points[0].scenario, next(iter(self.played.values()), None))
        text = pages.page(
            panels, "", title=self.name, kind=f"Sweep of {', '.join(map(short_key, self.grid))}, {self.seeds_text}",
            lead=[self.conclusion], notes=[f"With the first of the values: {description}"], names=labels,
            tables_below=[pages.FigureTable(heads, {"": rows})],
        )  # fmt: skip
        with writing(folder):
            (folder / "report.html").write_text(text, encoding="utf-8")

    # -- pictures ------------------------------------------------------------------------------------------------
    def labels(self) -> list[str]:
        """Return the labels of the curves: one for each combination of all keys but the first, which is the x axis."""
        _, *other_keys = self.grid
        combinations = itertools.product(*(self.grid[key] for key in other_keys))
        return [label_of(other_keys, values) for values in combinations]

    def panels(self) -> list[Panel]:
        """Return the panels: each shows one figure over the first swept key."""
        titles = {"loss": "Loss"}
        if np.isfinite(self.column("accuracy_mean", self.rows)).any():
            titles = {"accuracy_mean": "Accuracy, mean of peers", "accuracy_min": "Accuracy, worst peer"}
        if np.isfinite(self.column("metric_mean", self.rows)).any():
            titles["metric_mean"] = "Metric, mean of peers"
        titles["consensus_distance"] = "Consensus distance"
        caption = "At the end of the run." + (" Small dots: single seeds; large: their mean." if self.seeds > 1 else "")
        return [Panel(key, title, caption, partial(self.draw, key=key)) for key, title in titles.items()]

    def draw(self, axes: Axes, key: str) -> None:
        """Draw one figure over the first swept key: a dot for each seed, and a curve through their means."""
        x_key, *other_keys = self.grid
        texts = list(self.grid[x_key])
        values = as_numbers(texts)
        x_of = dict(zip(texts, values if values is not None else range(len(texts)), strict=True))
        scale = 100.0 if key.startswith("accuracy") else 1.0
        # The points of each curve, by the values of the other keys: x, and the figures of all seeds, (seeds,).
        curves: dict[tuple[str, ...], list[tuple[float, F64]]] = {}
        for combination, rows in self.groups():
            curves.setdefault(combination[1:], []).append((x_of[combination[0]], scale * self.column(key, rows)))
        for index, (other_values, points) in enumerate(curves.items()):
            points.sort(key=lambda point: point[0])
            means = [float(figures.mean()) for _, figures in points]
            line = line_of(index, label_of(other_keys, other_values))
            if values is None:  # There is no line between values that are not numbers.
                line["linestyle"] = "none"
            axes.plot([x for x, _ in points], means, marker="o", markersize=4, **line)
            dots: dict[str, Any] = {"color": line["color"], "alpha": 0.45, "markersize": 3, "markeredgewidth": 0}
            for x, figures in points if self.seeds > 1 else ():
                axes.plot([x] * len(figures), figures, "o", **dots)
        drawn = [float(figure) for points in curves.values() for _, figures in points for figure in figures]
        if key == "consensus_distance" and all(value > 0 for value in drawn):
            axes.set_yscale("log")
            plain_ticks(axes, min(drawn), max(drawn))
        self.label_swept(axes, x_key, texts, values)
        loss = loss_label([point.scenario for point in self.points])
        y_labels = {"loss": loss, "metric_mean": "metric", "consensus_distance": "distance (L2 norm)"}
        axes.set_ylabel(y_labels.get(key, "accuracy (%)"))

    @staticmethod
    def label_swept(axes: Axes, key: str, texts: Sequence[str], values: Sequence[float] | None) -> None:
        """Set ticks at the swept values; the axis is logarithmic if they span more than a factor of eight."""
        from matplotlib.ticker import NullLocator

        if values is not None and min(values) > 0 and max(values) > 8 * min(values):
            axes.set_xscale("log")
        axes.set_xticks(list(values) if values is not None else list(range(len(texts))), [shortened(t) for t in texts])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(UNITS.get(short_key(key), short_key(key).replace("_", " ")))


def at_one_level(points: Sequence[Point]) -> tuple[list[Point], list[Fidelity]]:
    """Return the points and the levels at which they are simulated.

    If one point with fidelity = "auto" needs the whole level, all such points use it. A difference between two rows
    then comes from the swept values.
    """
    levels = [fidelity_of(point.scenario) for point in points]
    auto_points = [number for number, point in enumerate(points) if point.scenario.fidelity == "auto"]
    common_level = next((levels[number] for number in auto_points if levels[number].level == "whole"), None)
    changed = list(points)
    if common_level is not None:
        for number in auto_points:
            levels[number] = common_level
            changed[number] = replace(points[number], scenario=replace(points[number].scenario, fidelity="whole"))
    return changed, list(dict.fromkeys(levels))


# Last words of keys that occur in more than one table of a scenario.
AMBIGUOUS = ("kind", "name", "mode", "start", "preset", "up", "down")
# Axis labels with units, by short key; other keys are labelled by their names.
UNITS = {
    "mix_every_steps": "mix every (steps)", "mix_every_s": "mix every (s)", "duration_s": "duration (virtual s)",
    "network.loss": "loss (share of packets)", "batch_size": "batch (samples)", "lr": "learning rate",
}  # fmt: skip


def label_of(keys: Sequence[str], values: Sequence[str]) -> str:
    return ", ".join(f"{short_key(key)} {value}" for key, value in zip(keys, values, strict=True))


def short_key(key: str) -> str:
    """Return a key as a label: without its tables, unless the short name is ambiguous or also the name of a figure."""
    name = key.rpartition(".")[2]
    return key if name in COLUMNS or name in AMBIGUOUS else name


def shortened(text: str) -> str:
    return text if len(text) <= 16 else text[:15] + "…"


def is_unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def as_numbers(texts: Sequence[str]) -> list[float] | None:
    """Return the values as numbers, or None if one is not a finite number."""
    values = []
    for text in texts:
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):  # Invalid TOML, a number of thousands of digits, or deep nesting.
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
            return None
        values.append(float(min(max(value, -1e308), 1e308)))
    return values
