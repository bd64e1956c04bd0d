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
    if obstacle := missing():
        raise LocalError(f"A replay plays real processes, and {obstacle}")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError(f"The folder {out} cannot be made ({error.strerror}): name another.") from None
    reports: list[Report] = []
    try:
        for plan, name in zip(plans, folder_names([plan.scenario.name for plan in plans]), strict=True):
            report = report_of(plan, seeds, runs, quiet)
            reports.append(report)
            print(report.to_json() if as_json else "\n".join(report.lines()), flush=True)
            if out is not None:
                report.write(out / f"{name}.json")
    except KeyboardInterrupt:
        saved_text = f"what was finished is in {out}" if out is not None and reports else "nothing was saved"
        print(f"Stopped; {saved_text}.", file=sys.stderr)
        return 130
    finally:
        if out is not None and reports:
            (out / "gaps.md").write_text(gap_table(reports) + "\n", encoding="utf-8")
    return 0


def report_of(plan: Plan, seeds: int, runs: int, quiet: bool) -> Report:
    """Predict a scenario with ``seeds`` seeds, and play it ``runs`` times in real time, each with the next seed."""
    from benchmarks.replay.forks import in_processes
    from benchmarks.replay.play import play
    from benchmarks.replay.predict import predicted
    from benchmarks.replay.report import Report
    from sim.jobs import cores

    is_shown = sys.stderr.isatty() and not quiet

    def say(sentence: str) -> None:
        if is_shown:
            print(f"\r\033[K{plan.scenario.name}: {sentence}", end="", file=sys.stderr, flush=True)

    report = Report(plan.scenario.name)
    try:
        say(f"{seeds} simulations")
        todo = [with_seed(plan, number) for number in range(seeds)]
        for figures in in_processes(predicted, todo, min(cores(), seeds)):
            report.predictions.append(figures)
            say(f"{len(report.predictions)} of {seeds} simulations are done")
        for number in range(runs):
            run = f"run {number + 1} of {runs}"
            say(f"{run}, processes start")
            disturbance = report.add_run(play(with_seed(plan, number), partial(say_of_run, say, run)))
            if disturbance and not quiet:
                say("")
                sentence = f"{plan.scenario.name}, {run}: disturbed, not counted: {disturbance}."
                print(sentence, file=sys.stderr, flush=True)
    finally:
        say("")
    return report


def with_seed(plan: Plan, number: int) -> Plan:
    from benchmarks.replay.plan import Plan

    return Plan.of(plan.scenario.replace(seed=plan.scenario.seed + number))


def say_of_run(say: Callable[[str], None], run: str, sentence: str) -> None:
    say(f"{run}, {sentence}")
