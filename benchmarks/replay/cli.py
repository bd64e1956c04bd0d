"""Predict and play scenarios, once ``__main__`` has read the options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gossip.errors import LocalError

if TYPE_CHECKING:
    from benchmarks.replay.plan import Plan
    from benchmarks.replay.report import Report

__all__ = ["replay"]


def replay(
    files: Sequence[Path],
    *,
    seed: int | None = None,
    seeds: int = 5,
    runs: int = 1,
    settings: Sequence[str] = (),
    out: Path | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Predict and play scenarios one after the other.

    Args:
        files: The scenarios' files.
        seed: The first seed, in place of the files'.
        seeds: Number of simulations.
        runs: Number of real runs.
        settings: Changed keys, as KEY=VALUE.
        out: A folder for one JSON file per scenario, each written as soon as it is done, and gaps.md with all of them.
        as_json: Print JSON.
        quiet: Show no progress.

    Returns:
        The exit code, 130 after ^C.

    Raises:
        GossipError: A scenario cannot be played, which is checked before any starts, or a replay failed.
    """
    from benchmarks.replay.links import missing
    from benchmarks.replay.plan import Plan
    from benchmarks.replay.report import gap_table
    from sim.cli import read_scenarios
    from sim.report.result import folder_names

    plans = [Plan.of(scenario) for scenario in read_scenarios(files, seed, settings)]
    if why := missing():
        raise LocalError(f"A replay plays real processes, and {why}")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError(f"The folder {out} cannot be made ({error.strerror}): name another.") from None
    reports: list[Report] = []
    try:
        for plan, name in zip(plans, folder_names([plan.scenario.name for plan in plans]), strict=True):
            report = of(plan, seeds, runs, quiet)
            reports.append(report)
            print(report.to_json() if as_json else "\n".join(report.lines()), flush=True)
            if out is not None:
                report.write(out / f"{name}.json")
    except KeyboardInterrupt:
        kept = f"what was finished is in {out}" if out is not None and reports else "nothing was saved"
        print(f"Stopped; {kept}.", file=sys.stderr)
        return 130
    finally:
        if out is not None and reports:
            (out / "gaps.md").write_text(gap_table(reports) + "\n", encoding="utf-8")
    return 0


def of(plan: Plan, seeds: int, runs: int, quiet: bool) -> Report:
    """One scenario: so many predictions, and so many runs in real time, each with the next seed."""
    from benchmarks.replay.forks import in_processes
    from benchmarks.replay.play import play
    from benchmarks.replay.predict import predicted
    from benchmarks.replay.report import Report
    from sim.jobs import cores

    shown = sys.stderr.isatty() and not quiet

    def say(sentence: str) -> None:
        if shown:
            print(f"\r\033[K{plan.scenario.name}: {sentence}", end="", file=sys.stderr, flush=True)

    report = Report(plan.scenario.name)
    try:
        say(f"{seeds} simulations")
        todo = [with_seed(plan, number) for number in range(seeds)]
        for figures in in_processes(predicted, todo, min(cores(), seeds)):
            report.predictions.append(figures)
            say(f"{len(report.predictions)} of {seeds} simulations are done")
        for number in range(runs):
            head = f"run {number + 1} of {runs}"
            say(f"{head}, processes start")
            why = report.add_run(play(with_seed(plan, number), partial(told, say, head)))
            if why and not quiet:
                say("")
                print(f"{plan.scenario.name}, {head}: disturbed, not counted: {why}.", file=sys.stderr, flush=True)
    finally:
        say("")
    return report


def with_seed(plan: Plan, number: int) -> Plan:
    from benchmarks.replay.plan import Plan

    return Plan.of(plan.scenario.replace(seed=plan.scenario.seed + number))


def told(say: Callable[[str], None], head: str, sentence: str) -> None:
    say(f"{head}, {sentence}")
