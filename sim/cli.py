"""What `gossip sim` and `gossip sim sweep` do, once `gossip.__main__` has read their options."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gossip.errors import ConfigError, LocalError

if TYPE_CHECKING:
    from sim.report.result import Progress, Result
    from sim.scenario.scenario import Scenario
    from sim.sweep import Point, Sweep

__all__ = ["run", "sweep"]


Rows = Callable[[dict[str, float]], None]


class Shown(Protocol):
    """What shows how far a run is."""

    def update(self, progress: Progress) -> None: ...
    def note(self, done: float, figures: str) -> None: ...


# -- gossip sim --------------------------------------------------------------------------------------------------------
def run(
    files: Sequence[Path],
    *,
    seed: int | None = None,
    out: Path | None = None,
    settings: Sequence[str] = (),
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Play scenarios one after the other; the exit code, 130 after ^C.

    Each is saved as soon as it is done, its rows as they come, and after ^C what was seen of the one under way. Raises
    :class:`~gossip.errors.GossipError`, before anything is played where that can be known.
    """
    from sim.simulation import Stopped

    done: list[Result] = []
    saved: list[Path] = []
    under_way: Path | None = None
    try:
        scenarios = read(files, seed, settings)
        check_out(out)
        folders = folders_of(out, scenarios)
        for number, (scenario, folder) in enumerate(zip(scenarios, folders, strict=True)):
            under_way = folder
            with row_file(folder) as rows:
                result = play(scenario, title_of(scenario, number, len(scenarios)), quiet, rows)
            done.append(result)
            if as_json:
                print(result.to_json(), flush=True)
            if folder is not None:
                saved.append(folder)  # first, since its figures are there before its pictures
                result.save(folder)
        if out is not None and len(done) > 1:
            from sim.report.result import compare

            compare(done, out)
    except KeyboardInterrupt as stopped:
        kept = [f"what was finished is in {', '.join(map(str, saved))}"] if saved else []
        if isinstance(stopped, Stopped):
            done.append(stopped.result)
            if as_json:
                print(stopped.result.to_json(), flush=True)
            elif not saved:
                print_results(done)
            if under_way is not None:
                stopped.result.save(under_way)
                kept.append(f"what was seen of {stopped.result.summary['name']} until then is in {under_way}")
        print(f"gossip: stopped; {', and '.join(kept) or 'nothing was saved'}.", file=sys.stderr)
        return 130
    if not as_json:
        print_results(done)
        if out is not None:
            print(f"The report is {out / 'report.html'}")
    return 0


def read(files: Sequence[Path], seed: int | None, settings: Sequence[str]) -> list[Scenario]:
    """All scenarios, before any is played: a mistake in the last file should not cost the time of the first."""
    from sim.scenario.scenario import Scenario

    changes = changes_of(settings)
    return [Scenario.from_toml(file, seed=seed, changes=changes) for file in files]


def changes_of(settings: Iterable[str]) -> dict[str, str]:
    """``key=value`` texts as a mapping. Raises :class:`ConfigError` for one that is none, or a key given twice."""
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
    """Whatever would keep a report from being written, before hours are spent on what goes into it."""
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


def folders_of(out: Path | None, scenarios: Sequence[Scenario]) -> list[Path | None]:
    """Where each result goes: one alone into the folder itself, several into folders of their names."""
    from sim.report.result import folder_names

    if out is None or len(scenarios) == 1:
        return [out] * len(scenarios)
    return [out / name for name in folder_names([scenario.name for scenario in scenarios])]


def title_of(scenario: Scenario, number: int, count: int) -> str:
    return scenario.name if count == 1 else f"{number + 1}/{count} {scenario.name}"


def row_file(folder: Path | None) -> AbstractContextManager[Rows | None]:
    """Where rows go as they come: whatever ends the process, those until then are there."""
    from sim.report.result import RowFile

    return nullcontext() if folder is None else RowFile(folder)


def play(scenario: Scenario, title: str, quiet: bool, rows: Rows | None = None) -> Result:
    """One scenario, with a bar on stderr where that is a terminal."""
    from sim.simulation import simulate

    with bar(title, quiet) as shown:
        update: Callable[[Progress], None] | bool = False if shown is None else shown.update
        try:
            return simulate(scenario, progress=update, rows=rows)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch has no other for it
                raise
            size = f"peers = {scenario.peers} with a model of this size"
            raise LocalError(f"{scenario.name}: {size} need more memory than there is: make one smaller.") from None


def bar(title: str, quiet: bool) -> AbstractContextManager[Shown | None]:
    if quiet or not sys.stderr.isatty():
        return nullcontext()
    from sim.report.progress_bar import Bar

    return Bar(title)


def print_results(results: Sequence[Result]) -> None:
    """A column of figures for each result."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=len(results) > 1)
    table.add_column("")
    for result in results:
        table.add_column(str(result.summary["name"]), justify="right")
    if len(results) == 1:
        table.title = f"{results[0].summary['name']}, seed {results[0].summary['seed']}"
        table.title_justify = "left"
    shown = [result.figures() for result in results]
    for head in dict.fromkeys(head for figures in shown for head in figures):
        table.add_row(head, *(figures.get(head, "-") for figures in shown))
    Console(highlight=False, markup=False).print(table)


# -- gossip sim sweep --------------------------------------------------------------------------------------------------
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
    """Play a scenario for every combination of values and every seed, ``jobs`` at once (None: as many as there are
    cores); the exit code, 130 after ^C.

    With ``out``, sweep.csv is rewritten after every run, so that ^C leaves all that was finished. Raises as
    :func:`run`.
    """
    from sim.sweep import Sweep

    table: Sweep | None = None
    try:
        table = Sweep.from_file(file, axes_of(grid), seed=seed, seeds=seeds, changes=changes_of(settings))
        check_out(out)
        for point, result in play_points(table.points, jobs, quiet):
            table.add(point, result)
            if as_json:
                print(json.dumps({"values": dict(point.values)} | json.loads(result.to_json())), flush=True)
            if out is not None:
                table.write_csv(out / "sweep.csv")
    except KeyboardInterrupt:
        finished = 0 if table is None else len(table.rows)
        kept = "nothing was saved"
        if out is not None and finished:
            kept = f"the {finished} finished runs are in {out / 'sweep.csv'}"
        print(f"gossip: stopped; {kept}.", file=sys.stderr)
        return 130
    if out is not None:
        table.save(out)
    if not as_json:
        print_sweep(table)
        if out is not None:
            print(f"The report is {out / 'report.html'}, the rows are in {out / 'sweep.csv'}")
    return 0


def play_points(points: Sequence[Point], jobs: int | None, quiet: bool) -> Iterator[tuple[Point, Result]]:
    """Each point and what came of it, in order with one job, else as they are done."""
    from sim.jobs import cores, side_by_side

    jobs = min(cores() if jobs is None else jobs, len(points))
    if jobs == 1:
        for number, point in enumerate(points):
            yield point, play(point.scenario, f"{number + 1}/{len(points)} {point}", quiet)
        return
    with bar(f"{len(points)} runs, {jobs} at once", quiet) as shown:
        found = side_by_side([point.scenario for point in points], jobs)
        for count, (number, result) in enumerate(found, start=1):
            if shown is not None:
                shown.note(count / len(points), f"{count} done")
            yield points[number], result


def axes_of(grid: Iterable[str]) -> Mapping[str, list[str]]:
    """``key=v1,v2`` texts as keys and values. Raises :class:`ConfigError` for one that is none."""
    axes: dict[str, list[str]] = {}
    for text in grid:
        key, equals, values = text.partition("=")
        key, parts = key.strip(), split(values)
        if not equals or not key or not all(parts):
            raise ConfigError(f"{text} cannot be swept: write key=v1,v2, as gossip.mix_every_steps=2,8,32.")
        if key in axes:
            raise ConfigError(f"{key} is swept twice: give all of its values at once.")
        if len(set(parts)) < len(parts):
            raise ConfigError(f"{text} names a value twice: leave one out, and repeat runs with --seeds.")
        axes[key] = parts
    return axes


def split(values: str) -> list[str]:
    """At commas, but not within brackets, braces or quotes: a value may be a table."""
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
    """A row for each combination, means over its seeds, and what follows from them."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    heads, rows = table.table(brief=True)
    printed = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title=f"{table.name}, {table.seeds_text}",
        title_justify="left",
    )
    for number, head in enumerate(heads):  # heads may take two lines, figures one
        width = max((len(row[number]) for row in rows), default=0)
        printed.add_column(head, justify="left" if number == 0 else "right", min_width=width)
    for row in rows:
        printed.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(printed)
    if table.answer:
        console.print(table.answer)
