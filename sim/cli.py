"""The commands `gossip sim` and `gossip sim sweep`; `gossip.__main__` parses their options."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from gossip.errors import ConfigError, GossipError, LocalError
from gossip.ids import quantity
from sim.interrupt import interrupt
from sim.report.units import duration_text

if TYPE_CHECKING:
    from sim.jobs import Assignment
    from sim.report.progress_bar import Display
    from sim.report.result import Result
    from sim.scenario.scenario import Scenario
    from sim.sweep import Sweep

ending_on_signals = interrupt.ending_on(signal.SIGTERM, signal.SIGHUP)


# -- gossip sim --------------------------------------------------------------------------------------------------------
@ending_on_signals
def run(
    files: Sequence[Path],
    *,
    seed: int | None = None,
    out: Path | None = None,
    settings: Sequence[str] = (),
    as_json: bool = False,
    quiet: bool = False,
    jobs: int | None = None,
    trace: Path | None = None,
) -> int:
    """Simulate scenarios and return the exit code, 130 after ^C.

    Each result is saved as soon as its run is done, and its rows as they are measured. After ^C, SIGTERM or SIGHUP the
    partial results of interrupted runs are saved. The output is in the order of the files. ``jobs`` runs go on in
    parallel; None: one per core. ``trace`` is a file for the timeline of one scenario.

    Raises :class:`~gossip.errors.GossipError`, if possible before any run starts.
    """
    from sim.jobs import Assignment

    done: dict[int, Result] = {}  # The results of finished runs, by number: that of their file.
    partial: dict[int, Result] = {}  # The results of interrupted runs, by number.
    saved: list[int] = []  # Numbers of runs whose results are being written to their folders, or have been.
    folders: list[Path | None] = []  # By number; None if nothing is written.
    lines = OrderedLines()
    try:
        scenarios = read_scenarios(files, seed, settings)
        check_out(out)
        folders = folders_of(out, scenarios, files)
        if trace is not None and len(scenarios) != 1:
            raise ConfigError("--trace records one scenario: name one file.")
        todo = [Assignment(*each, trace) for each in zip(scenarios, titles_of(scenarios), folders, strict=True)]
        for number, result in results_of(todo, jobs, quiet, partial):
            done[number] = result
            if (folder := folders[number]) is not None:
                saved.append(number)  # Before save(), which may be interrupted after it has written the figures.
                result.save(folder)
            if as_json:
                lines.add(number, result.to_json())
        if out is not None and len(done) > 1:
            from sim.report.result import compare

            compare(in_order(done), out)
    except GossipError:
        print_results(in_order({} if as_json else done))
        raise
    except KeyboardInterrupt:
        for number, result in partial.items():
            if (folder := folders[number]) is not None:
                result.save(folder)
            if as_json:
                lines.add(number, result.to_json())
        lines.print_rest()
        if partial and not as_json and not saved:
            print_results(in_order(done | partial))
        saved_text = [f"what was finished is in {', '.join(str(folders[n]) for n in sorted(saved))}"] if saved else []
        saved_text += [
            f"what was seen of {partial[number].summary['name']} until then is in {folders[number]}"
            for number in sorted(partial) if folders[number] is not None
        ]  # fmt: skip
        print(f"gossip: stopped; {', and '.join(saved_text) or 'nothing was saved'}.", file=sys.stderr)
        return interrupt.exit_code
    finally:
        lines.print_rest()
    if not as_json:
        print_results(in_order(done))
        if out is not None:
            print(f"The report is {out / 'report.html'}")
    return 0


class OrderedLines:
    """An output buffer that prints numbered lines in order, each as soon as all earlier ones are printed."""

    def __init__(self) -> None:
        self.waiting: dict[int, str] = {}  # Lines that are not printed yet, by number.
        self.next_number = 0

    def add(self, number: int, line: str) -> None:
        self.waiting[number] = line
        while self.next_number in self.waiting:
            print(self.waiting.pop(self.next_number), flush=True)
            self.next_number += 1

    def print_rest(self) -> None:
        """Print the remaining lines, even if an earlier one is missing."""
        for number in sorted(self.waiting):
            print(self.waiting.pop(number), flush=True)


def in_order(results: Mapping[int, Result]) -> list[Result]:
    return [results[number] for number in sorted(results)]


def results_of(
    todo: Sequence[Assignment], at_once: int | None, quiet: bool, partial: dict[int, Result]
) -> Iterator[tuple[int, Result]]:
    """Yield the number and the result of each job as it finishes.

    ^C is raised again, after the partial results of the runs that it interrupts were put into ``partial``.
    """
    from sim.jobs import Workers, cores

    at_once = min(cores() if at_once is None else at_once, len(todo))
    if at_once == 1:
        yield from results_one_by_one(todo, quiet, partial)
        return
    began_at, title = time.monotonic(), f"{quantity(len(todo), 'run')}, {at_once} at once"
    with progress_bar(title, quiet) as display, Workers(todo, at_once) as workers:

        def show(share: float, finished: int) -> None:
            if display is not None:
                left_s = (time.monotonic() - began_at) * (1 - share) / share if share > 0 else math.inf
                display.note(share, f"{finished} done  {duration_text(left_s)} left")

        try:
            yield from workers.results(show)
        except KeyboardInterrupt:
            partial.update(workers.stop())
            raise


def results_one_by_one(
    todo: Sequence[Assignment], quiet: bool, partial: dict[int, Result]
) -> Iterator[tuple[int, Result]]:
    """Do the same as :func:`results_of` in this process, with a progress bar for each run."""
    from sim.jobs import play
    from sim.report.result import row_file
    from sim.simulation import Stopped

    for number, job in enumerate(todo):
        title = job.title if len(todo) == 1 else f"{number + 1}/{len(todo)} {job.title}"
        try:
            with row_file(job.folder) as rows, progress_bar(title, quiet) as display:
                result = play(job.scenario, False if display is None else display.update, rows, job.trace)
        except Stopped as stopped:
            partial[number] = stopped.result
            raise
        yield number, result


def read_scenarios(files: Sequence[Path], seed: int | None, settings: Sequence[str]) -> list[Scenario]:
    """Read all scenarios before any run, so that a mistake in the last file does not cost the time of the first run."""
    from sim.scenario.scenario import Scenario

    changes = changes_of(settings)
    return [Scenario.from_toml(file, seed=seed, changes=changes) for file in files]


def changes_of(settings: Iterable[str]) -> dict[str, str]:
    """Parse ``key=value`` texts. Raises :class:`ConfigError` for other texts and for a key given twice."""
    changes: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {setting} cannot be read: write key=value, as gossip.mix_every_steps=4.")
        if key in changes:
            raise ConfigError(f"--set {key} is given twice: leave one out.")
        changes[key] = value.strip()
    return changes


def check_out(out: Path | None) -> None:
    """Check that a report can be written, before hours are spent on the runs."""
    if out is None:
        return
    from sim.report.charts import require_matplotlib

    require_matplotlib()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"The folder {out} cannot be made ({error.strerror}): name another.") from None
    if not os.access(out, os.W_OK):
        raise LocalError(f"The folder {out} cannot be written to: name another.")


def folders_of(out: Path | None, scenarios: Sequence[Scenario], files: Sequence[Path]) -> list[Path | None]:
    """Return the folder of each result: ``out`` itself for a single one, else a subfolder by name.

    Raises ConfigError if a result would overwrite one of the scenarios' own files.
    """
    from sim.report.result import folder_names

    if out is None:
        return [None] * len(scenarios)
    names = folder_names([scenario.name for scenario in scenarios]) if len(scenarios) > 1 else [""]
    for kept in (out / name / "scenario.toml" for name in names):
        if kept.resolve() in {file.resolve() for file in files}:
            raise ConfigError(f"{kept} is the scenario itself, which --out would overwrite: name another folder.")
    return [out / name for name in names]


def titles_of(scenarios: Sequence[Scenario]) -> list[str]:
    """Return a unique title for each scenario: its name, with its number if the name is not unique."""
    names = [scenario.name for scenario in scenarios]
    return [name if names.count(name) == 1 else f"{name} (number {n})" for n, name in enumerate(names, start=1)]


def progress_bar(title: str, quiet: bool) -> AbstractContextManager[Display | None]:
    """Return a progress bar, lines where stderr is no terminal, or nothing if ``quiet``."""
    if quiet:
        return nullcontext()
    from sim.report.progress_bar import Bar, Lines

    return Bar(title) if sys.stderr.isatty() else Lines(title)


def print_results(results: Sequence[Result]) -> None:
    """Print a table with one column of figures for each result."""
    from rich.console import Console
    from rich.table import Table

    if not results:
        return
    table = Table(show_header=len(results) > 1)
    table.add_column("")
    for result in results:
        table.add_column(str(result.summary["name"]), justify="right")
    if len(results) == 1:
        table.title = f"{results[0].summary['name']}, seed {results[0].summary['seed']}"
        table.title_justify = "left"
    columns = [result.figures() for result in results]
    for head in dict.fromkeys(head for figures in columns for head in figures):
        table.add_row(head, *(figures.get(head, "-") for figures in columns))
    console = Console(highlight=False, markup=False)
    console.print(table)
    for sentence, names in names_by_sentence(results).items():
        console.print(sentence if len(results) == len(names) else f"{', '.join(names)}: {sentence}")


def names_by_sentence(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return the names of the results by what a sentence says: their level, and why no exchange finished."""
    names: dict[str, list[str]] = {}
    for result in results:
        for sentence in filter(None, (result.fidelity.sentence, result.summary["no_exchange"])):
            names.setdefault(sentence, []).append(str(result.summary["name"]))
    return names


# -- gossip sim sweep --------------------------------------------------------------------------------------------------
@ending_on_signals
def sweep(
    file: Path,
    grid: Sequence[str],
    *,
    seed: int | None = None,
    seeds: int = 1,
    out: Path | None = None,
    settings: Sequence[str] = (),
    as_json: bool = False,
    quiet: bool = False,
    jobs: int | None = None,
) -> int:
    """Simulate a scenario for every combination of values and every seed, and return the exit code, as :func:`run`.

    With ``out``, sweep.csv is rewritten after every run, so that ^C loses no finished run. ``jobs`` runs go on in
    parallel; None: one per core. Raises the same errors as :func:`run`.
    """
    from sim.jobs import Assignment
    from sim.sweep import Sweep

    table: Sweep | None = None
    lines = OrderedLines()
    try:
        table = Sweep.from_file(file, grid_of(grid), seed=seed, seeds=seeds, changes=changes_of(settings))
        check_out(out)
        for number, result in results_of(
            [Assignment(point.scenario, str(point)) for point in table.points], jobs, quiet, {}
        ):
            point = table.points[number]
            table.add(point, result)
            if as_json:
                lines.add(number, json.dumps({"values": dict(point.values)} | json.loads(result.to_json())))
            if out is not None:
                table.write_csv(out / "sweep.csv")
    except GossipError:
        if table is not None and table.rows and not as_json:
            print_sweep(table)
        raise
    except KeyboardInterrupt:
        finished = 0 if table is None else len(table.rows)
        saved_text = "nothing was saved"
        if table is not None and out is not None and finished:
            table.write_csv(out / "sweep.csv")  # ^C may have come before the last row was in it.
            verb = "is" if finished == 1 else "are"
            saved_text = f"the {quantity(finished, 'finished run')} {verb} in {out / 'sweep.csv'}"
        lines.print_rest()
        print(f"gossip: stopped; {saved_text}.", file=sys.stderr)
        return interrupt.exit_code
    finally:
        lines.print_rest()
    if out is not None:
        table.save(out)
    if not as_json:
        print_sweep(table)
        if out is not None:
            print(f"The report is {out / 'report.html'}, the rows are in {out / 'sweep.csv'}")
    return 0


def grid_of(texts: Iterable[str]) -> Mapping[str, list[str]]:
    """Parse ``key=v1,v2`` texts into keys and values. Raises :class:`ConfigError` for other texts."""
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key, parts = key.strip(), split_at_commas(values)
        if not equals or not key or not all(parts):
            raise ConfigError(f"{text} cannot be swept: write key=v1,v2, as gossip.mix_every_steps=2,8,32.")
        if key in grid:
            raise ConfigError(f"{key} is swept twice: give all of its values at once.")
        if len(set(parts)) < len(parts):
            raise ConfigError(f"{text} names a value twice: leave one out, and repeat runs with --seeds.")
        grid[key] = parts
    return grid


def split_at_commas(values: str) -> list[str]:
    """Split at commas, except within brackets, braces or quotes, because a value may be a table."""
    parts, depth, quote = [""], 0, ""
    for c in values:
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        else:
            depth += (c in "[{") - (c in "]}")
        if c == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def print_sweep(table: Sweep) -> None:
    """Print one row of means over the seeds for each combination of values, and the conclusion."""
    heads, rows = table.table(brief=True)
    levels = [fidelity.sentence for fidelity in table.played.values()]
    sentences = [*filter(None, [table.conclusion]), *levels, *table.without_exchange()]
    print_table(f"{table.name}, {table.seeds_text}", heads, rows, sentences)


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], sentences: Iterable[str]) -> None:
    """Print a table whose first column names the rows, and sentences below it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    printed = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for number, head in enumerate(heads):  # Heads may wrap, but figures must fit into one line.
        width = max((len(row[number]) for row in rows), default=0)
        printed.add_column(head, justify="left" if number == 0 else "right", min_width=width)
    for row in rows:
        printed.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(printed)
    for sentence in sentences:
        console.print(sentence)
