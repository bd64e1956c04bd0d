"""Play scenarios with real processes on emulated links, next to the simulator's predictions of them.

    python -m benchmarks.replay SCENARIO.toml... [--runs N] [--seeds N] [--seed N] [--set KEY=VALUE]... [--out DIR]

Needs root, Linux, gcc and /dev/net/tun, and runs in real time. From the repository: the package that users install
does not contain it. The exit code is 0 when all were played, 2 for a mistake in a scenario, 3 where nothing can be
played, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.replay import links
from benchmarks.replay.plan import Plan
from benchmarks.replay.play import forks, play
from benchmarks.replay.predict import predicted
from benchmarks.replay.report import Report, gap_table
from gossip.errors import ConfigError, GossipError, LocalError
from sim.cli import read_scenarios
from sim.jobs import cores


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line (that of the process if ``words`` is None), replay, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenarios", nargs="+", type=Path, metavar="SCENARIO.toml")
    parser.add_argument("--seed", type=int, help="instead of the scenario's own")
    parser.add_argument("--seeds", type=int, default=5, help="predictions, each with the next seed")
    parser.add_argument("--runs", type=int, default=1, help="real runs, each with the next seed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value for a setting")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for one JSON file per scenario, and gaps.md")
    arguments = parser.parse_args(words)
    reports: list[Report] = []
    out: Path | None = arguments.out
    try:
        plans = [Plan.of(each) for each in read_scenarios(arguments.scenarios, arguments.seed, arguments.set)]
        if obstacle := links.missing():
            raise LocalError(f"A replay plays real processes, and {obstacle}")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        for plan in plans:
            reports.append(report_of(plan, arguments.seeds, arguments.runs))
            print("\n".join(reports[-1].lines()), flush=True)
            if out is not None:
                (out / f"{plan.scenario.name}.json").write_text(reports[-1].to_json() + "\n", encoding="utf-8")
    except GossipError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 3
    except KeyboardInterrupt:
        saved_text = f"what was finished is in {out}" if out is not None and reports else "nothing was saved"
        print(f"Stopped; {saved_text}.", file=sys.stderr)
        return 130
    finally:
        if out is not None and reports:
            (out / "gaps.md").write_text(gap_table(reports) + "\n", encoding="utf-8")
    return 0


def report_of(plan: Plan, seeds: int, runs: int) -> Report:
    """Predict a scenario with ``seeds`` seeds, and play it ``runs`` times in real time, each with the next seed."""
    is_shown = sys.stderr.isatty()

    def say(sentence: str, run: str = "") -> None:
        if is_shown:
            print(f"\r\033[K{plan.scenario.name}: {run}{sentence}", end="", file=sys.stderr, flush=True)

    report = Report(plan.scenario.name)
    say(f"{seeds} simulations")
    with ProcessPoolExecutor(min(cores(), seeds), forks(), initializer=leave_interrupts) as pool:
        try:
            report.predictions += pool.map(predicted, [with_seed(plan, number) for number in range(seeds)])
        finally:
            for process in multiprocessing.active_children():  # At ^C do not wait for unfinished work.
                process.terminate()
    for number in range(runs):
        report.add_run(play(with_seed(plan, number), partial(say, run=f"run {number + 1} of {runs}, ")))
    say("")
    return report


def with_seed(plan: Plan, number: int) -> Plan:
    return Plan.of(plan.scenario.replace(seed=plan.scenario.seed + number))


def leave_interrupts() -> None:
    """Ignore ^C, which reaches every process of a terminal; the parent ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
