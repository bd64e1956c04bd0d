"""The result of a simulation: rows over virtual time, final figures, and a report."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gossip.codecs import AUTO
from gossip.errors import ConfigError, LocalError, did_you_mean
from gossip.ids import every, quantity
from sim.arrays import F64
from sim.report.figures import COLUMNS
from sim.report.units import bytes_text, count_text, duration_text, figure_text, number, share_text
from sim.scenario.fidelity import Fidelity

if TYPE_CHECKING:
    from sim.scenario.scenario import Scenario

RowHandler = Callable[[dict[str, float]], None]  # Receives each row of a run's history as it is measured.


class Progress(NamedTuple):
    """The progress of a simulation."""

    virtual_s: float
    done: float  # From 0 to 1.
    events: int
    events_per_s: float  # Events per second of real time.
    left_s: float  # Real seconds until the end; inf while unknown.


@dataclass(slots=True, repr=False)
class Result:
    """A finished simulation, which displays itself in a notebook.

    Attributes:
        scenario: The scenario that was played.
        history: Rows of COLUMNS, in order of virtual time.
        summary: The final figures, as in docs/figures.md.
        exchange_s: Durations of a sample of the finished exchanges, in seconds, (sample,).
    """

    scenario: Scenario
    history: list[dict[str, float]]
    summary: dict[str, Any]
    exchange_s: F64 = field(default_factory=lambda: np.zeros(0))

    def column(self, name: str) -> F64:
        """Return a copy of a column of the history; nan where a row lacks it.

        Raises:
            ConfigError: There is no such column.
        """
        check_column(name, COLUMNS)
        return np.array([row.get(name, math.nan) for row in self.history], np.float64)

    def to_json(self) -> str:
        """Return the summary as one line of JSON; a figure that is not a number is null."""
        return json.dumps(as_json_data(self.summary), allow_nan=False)

    def plot(self, path: str | Path) -> None:
        """Write one picture of all curves.

        Args:
            path: The file; its suffix says which kind (.png, .svg, .pdf).

        Raises:
            LocalError: matplotlib is missing, or the file cannot be written.
        """
        from sim.report import charts, plots

        charts.require_matplotlib()
        charts.save(plots.draw_all([self]), Path(path))

    def save(self, folder: str | Path) -> Path:
        """Write history.csv, summary.json, scenario.toml, report.html and PNGs into a folder.

        Tables are written before pictures, so that a failure to draw does not lose the numbers.

        Args:
            folder: The folder, which is created if needed.

        Returns:
            The path of the report.

        Raises:
            LocalError: matplotlib is missing, or a file cannot be written.
        """
        folder = Path(folder)
        summary = json.dumps(as_json_data(self.summary), indent=2) + "\n"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "history.csv").write_text(self.csv_text(), encoding="utf-8")
            (folder / "summary.json").write_text(summary, encoding="utf-8")
            (folder / "scenario.toml").write_text(self.scenario.to_toml(), encoding="utf-8")
        return write_report([self], folder)

    def csv_text(self) -> str:
        """Return the history as CSV with a header row; unknown values are empty."""
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows([COLUMNS, *map(cells, self.history)])
        return stream.getvalue()

    @property
    def fidelity(self) -> Fidelity:
        """Return the level of detail of the simulation, and the reason if it is not the fast level."""
        return Fidelity(self.summary["fidelity"], self.summary["fidelity_reason"])

    def figures(self) -> dict[str, str]:
        """Return the main figures of the summary as text with units, the most important first."""
        return {title: text for title, text_of in SHOWN if (text := text_of(self))}

    def __str__(self) -> str:
        summary, shown = self.summary, self.figures()
        learned = (
            f"accuracy {shown['accuracy, mean of peers']} ({shown['least to greatest']}; "
            f"average model {shown['average model']}), "
            if "average model" in shown
            else ""
        )
        return (
            f"{summary['name']} (seed {summary['seed']}): {shown['alive at the end']} peers alive after "
            f"{shown['virtual time']} of virtual time; {learned}loss {shown['loss, mean of peers']}, "
            f"consensus distance {shown['consensus distance']}; {quantity(summary['exchanges_done'], 'exchange')}, "
            f"{shown['failed']} failed; {shown['sent']} sent. Simulated in {shown['real time']}."
            + f" {summary['no_exchange']}".rstrip()
        )

    def __repr__(self) -> str:
        """Return one sentence, so that an interpreter does not print all rows."""
        return f"<Result: {self}>"

    def _repr_html_(self) -> str:
        """Return the figures as a table and the curves, for notebooks."""
        from sim.report import charts, plots

        rows = "".join(
            f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in self.figures().items()
        )
        title = f"{escape(str(self.summary['name']))}, seed {self.summary['seed']}"
        table = f"<table><caption>{title}</caption>{rows}</table>"
        try:
            charts.require_matplotlib()
        except LocalError as error:
            return f"<div>{table}<p>{escape(str(error))}</p></div>"
        # Draw on white, since a page cannot tell whether the notebook's theme is light or dark.
        picture = charts.svg_of(plots.draw_all([self]), f"Curves of {self.summary['name']}", themed=False)
        return f'<div>{table}<div style="background:#fff;max-width:1100px;padding:8px">{picture}</div></div>'


# -- the main figures as text ------------------------------------------------------------------------------------------
def accuracy(result: Result, key: str) -> float:
    return number(result.summary["accuracy"][key])


def if_accurate(result: Result, text: str) -> str:
    """Return the text, or nothing if no model has an accuracy."""
    return "" if math.isnan(accuracy(result, "mean")) else text


def metric_text(result: Result) -> str:
    """Return the task's metric as text, if it has one."""
    mean, low, high = (number(result.summary["metric"][key]) for key in ("mean", "min", "max"))
    return "" if math.isnan(mean) else f"{figure_text(mean)} ({figure_text(low)} to {figure_text(high)})"


def failures_text(result: Result) -> str:
    """Return the failed exchanges, and their share of all."""
    done, failed = result.summary["exchanges_done"], result.summary["exchanges_failed"]
    share = failed / (failed + done) if failed + done else 0.0
    return f"{count_text(failed)} ({share_text(share)})"


def alive_text(result: Result) -> str:
    alive = result.history[-1]["alive"] if result.history else math.nan
    return f"{count_text(alive)} of {count_text(result.summary['peers'])}"


def interval_text(result: Result) -> str:
    """Return how often peers mix, and in which codec."""
    steps = result.summary.get("interval_steps")
    config = result.scenario.config
    codec = "each link's codec" if config.codec_name == AUTO else config.codec_name
    return "" if steps is None else f"{every(steps)}, in {codec}"


# The main figures of a result as text with units, in the order in which people ask. An empty text is left out.
SHOWN: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("accuracy, mean of peers", lambda result: if_accurate(result, share_text(accuracy(result, "mean")))),
    ("least to greatest", lambda result: if_accurate(
        result, f"{share_text(accuracy(result, 'min'))} to {share_text(accuracy(result, 'max'))}"
    )),
    ("average model", lambda result: if_accurate(result, share_text(accuracy(result, "average_model")))),
    ("loss, mean of peers", lambda result: figure_text(number(result.summary["loss"]))),
    ("metric, mean of peers", metric_text),
    ("consensus distance", lambda result: figure_text(number(result.summary["consensus_distance"]))),
    ("alive at the end", alive_text),
    ("exchanges", lambda result: count_text(result.summary["exchanges_done"])),
    ("failed", failures_text),
    ("interval", interval_text),
    ("sent", lambda result: bytes_text(result.summary["bytes_sent"])),
    ("played", lambda result: "message by message" if result.fidelity.level == "whole" else "exchange by exchange"),
    ("virtual time", lambda result: duration_text(result.summary["virtual_s"])),
    ("real time", lambda result: duration_text(result.summary["wall_s"])),
)  # fmt: skip


# -- files -------------------------------------------------------------------------------------------------------------
@contextmanager
def row_file(folder: Path | None) -> Iterator[RowHandler | None]:
    """Open the ``history.csv`` of a simulation that still runs, and yield what writes a row to it; None without folder.

    It is written row by row, so that no row is lost if the process dies. The row of 0 s begins the file: a
    scenario that cannot be played leaves an earlier result, and one that begins again at another level has only its
    last rows. :meth:`Result.save` writes the same file again at the end. The folder is created if needed.

    Raises:
        LocalError: The folder or the file cannot be written.
    """
    if folder is None:
        yield None
        return
    file: io.TextIOWrapper | None = None

    def write(row: Mapping[str, float]) -> None:
        nonlocal file
        with writing(folder):
            if file is None or row["virtual_s"] == 0.0:
                folder.mkdir(parents=True, exist_ok=True)
                file = (folder / "history.csv").open("w", encoding="utf-8", newline="", buffering=1)
                csv.writer(file, lineterminator="\n").writerow(COLUMNS)
            csv.writer(file, lineterminator="\n").writerow(cells(row))

    try:
        yield write
    finally:
        if file is not None:
            with writing(folder):
                file.close()


def cells(row: Mapping[str, float]) -> list[str]:
    """Return a row of the history as texts; unknown values are empty."""
    values = (row.get(name, math.nan) for name in COLUMNS)
    return ["" if math.isnan(value) else f"{value:.10g}" for value in values]


def compare(results: Sequence[Result], folder: str | Path) -> Path:
    """Write one report.html that compares several results, and its PNGs.

    Args:
        results: Two results or more.
        folder: The folder, which is created if needed.

    Returns:
        The path of the report.

    Raises:
        ConfigError: There are fewer results.
        LocalError: matplotlib is missing, or a file cannot be written.
    """
    if len(results) < 2:
        raise ConfigError("compare takes two results or more: save a single one with its own save().")
    return write_report(results, Path(folder))


def write_report(results: Sequence[Result], folder: Path) -> Path:
    """Write report.html and its PNGs into a folder, and return the page's path; as :func:`compare`."""
    from sim.report import charts, pages, plots

    charts.require_matplotlib()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        plots.save_all(results, folder)
        text = pages.report(results[0]) if len(results) == 1 else pages.comparison(results)
        (folder / "report.html").write_text(text, encoding="utf-8")
    return folder / "report.html"


def folder_names(names: Sequence[str]) -> list[str]:
    """Return a folder name for each name, with a number if names are equal, and without unsafe characters."""
    taken: list[str] = []
    for name in names:
        safe = "".join(c if c.isalnum() or c in "-_.+= " else "-" for c in name).strip(". ")[:80] or "scenario"
        chosen, count = safe, 1
        while chosen.lower() in (each.lower() for each in taken):  # Some file systems ignore case.
            count += 1
            chosen = f"{safe}-{count}"
        taken.append(chosen)
    return taken


def as_json_data(value: Any) -> Any:
    """Return data that JSON can hold: numpy's numbers as Python's, null for a value that is not finite."""
    if isinstance(value, Mapping):
        return {key: as_json_data(each) for key, each in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_column(name: str, columns: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for an unknown column, which would otherwise give an empty plot."""
    if name not in columns:
        meant = did_you_mean(name, columns) or f"; the columns are {', '.join(columns)}"
        raise ConfigError(f"{name!r} is not a column{meant}.")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a failed write into a :class:`LocalError`."""
    try:
        yield
    except OSError as error:
        raise LocalError(f"A file cannot be written to {folder} ({error.strerror}): name another folder.") from None
