"""Many simulations side by side, each in a process of its own: several runs use all cores, one run uses one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, Self

from gossip.errors import ConfigError, DataError, LocalError
from sim.report.result import Progress, Result, RowFile
from sim.scenario.scenario import Scenario

__all__ = ["Assignment", "Workers", "cores", "play"]

STOP_S = 5.0  # for what was seen of a run to arrive after ^C; one event of the largest model ends within it
REPORTED = (ConfigError, DataError, LocalError)  # a run's sentences keep their kind on the way; the command knows these


def cores() -> int:
    """How many processes run at once without waiting for each other, where the system tells what is ours."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def play(
    scenario: Scenario,
    progress: Callable[[Progress], None] | bool = False,
    rows: Callable[[dict[str, float]], None] | None = None,
) -> Result:
    """Play a scenario; memory that does not suffice is one sentence, a :class:`LocalError`."""
    from sim.simulation import simulate

    try:
        return simulate(scenario, progress=progress, rows=rows)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch has no other for it
            raise
        size = f"peers = {scenario.peers} with a model of this size"
        raise LocalError(f"{scenario.name}: {size} need more memory than there is: make one smaller.") from None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A scenario, what a sentence calls it, and the folder in which its rows are written as they come."""

    scenario: Scenario
    title: str
    folder: Path | None = None


class Workers:
    """``with Workers(jobs, at_once) as workers``: processes that play; none is left afterwards, whatever happens.

    A run gives the same history and digest as alone, and each takes one thread of arithmetic.
    """

    def __init__(self, jobs: Sequence[Assignment], at_once: int) -> None:
        self.jobs, self.at_once = jobs, at_once
        self.shares = [0.0] * len(jobs)  # of each run, 0 to 1
        self.done = 0
        self.failed: dict[int, Exception] = {}
        self.under_way: dict[Connection, int] = {}
        self.idle: list[Connection] = []
        self.processes: dict[Connection, multiprocessing.process.BaseProcess] = {}

    def __enter__(self) -> Self:
        # A fork would take the threads' locks along, and not the threads.
        context = multiprocessing.get_context("spawn")
        for _ in range(self.at_once):
            self.start(context)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()  # at ^C a run may have hours to go, and what it has seen was asked for before
        for connection, process in self.processes.items():
            process.join()
            connection.close()

    def start(self, context: SpawnContext) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that the worker's end is the only one: where it dies, ours says so
        self.processes[ours] = process
        self.idle.append(ours)

    def results(self, shown: Callable[[float, int], None] | None = None) -> Iterator[tuple[int, Result]]:
        """The number of each job with its result as it is done, in any order; ``shown`` is told the share of all that
        is done, and how many are. Raises what the first job in order raised, once those before it are done, as one
        after the other would; and :class:`LocalError` for a process that was ended, as for want of memory."""
        waiting = iter(range(len(self.jobs)))
        while True:
            while self.idle and not self.failed and (number := next(waiting, None)) is not None:
                self.begin(number)
            earliest = min(self.failed, default=len(self.jobs))
            if not any(number < earliest for number in self.under_way.values()):
                break
            for connection in self.speaking():
                kind, value = self.told(connection)
                number = self.under_way[connection]
                if kind == "share":
                    self.shares[number] = value
                else:
                    del self.under_way[connection]
                    self.idle.append(connection)
                    self.shares[number] = 1.0
                if kind == "failed":
                    self.failed[number] = value
                if shown is not None:
                    shown(sum(self.shares) / len(self.shares), self.done + (kind == "result"))
                if kind == "result":
                    self.done += 1
                    yield number, value
        if self.failed:
            raise self.failed[min(self.failed)]

    def begin(self, number: int) -> None:
        connection = self.idle.pop()
        self.under_way[connection] = number
        with suppress(OSError):  # a worker that has died says so when it is listened to
            connection.send(self.jobs[number])

    def speaking(self, timeout_s: float | None = None) -> list[Connection]:
        """Workers under way that have something to say, or have died; waits for one."""
        return [each for each in wait(list(self.under_way), timeout_s) if isinstance(each, Connection)]

    def told(self, connection: Connection) -> tuple[str, Any]:
        """What a worker says next, or has become of it."""
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            process = self.processes[connection]
            process.join()
            return "failed", LocalError(self.epitaph(self.under_way[connection], process.exitcode or 0))
        return kind, raised_again(*value) if kind == "failed" else value

    def epitaph(self, number: int, code: int) -> str:
        how = f"with code {code}"
        if code < 0:
            how = f"by {signal.Signals(-code).name}, most likely for want of memory"
        fewer = f": use fewer at once, as --jobs {self.at_once // 2}." if self.at_once > 1 else "."
        return f"{self.jobs[number].title}: its process was ended {how}{fewer}"

    def stop(self) -> list[tuple[int, Result]]:
        """End all runs that are under way; their numbers, in order, with what was seen of them until then."""
        for connection in self.under_way:
            self.processes[connection].terminate()
        seen, until = list[tuple[int, Result]](), time.monotonic() + STOP_S
        while self.under_way and (left := until - time.monotonic()) > 0:
            for connection in self.speaking(left):
                number = self.under_way[connection]
                kind, value = self.told(connection)
                if kind != "share":
                    del self.under_way[connection]
                if kind in ("stopped", "result"):
                    seen.append((number, value))
        return sorted(seen, key=lambda item: item[0])


# -- in the worker -----------------------------------------------------------------------------------------------------
def work(connection: Connection) -> None:
    """Play what comes, until nobody listens. ^C reaches every process of a terminal: here SIGTERM stands for it, since
    the process that shows the runs decides what becomes of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt, EOFError, OSError):
        while True:
            job: Assignment = connection.recv()
            connection.send(outcome(job, lambda progress: connection.send(("share", progress.done))))


def outcome(job: Assignment, shown: Callable[[Progress], None]) -> tuple[str, Any]:
    """What came of a job, as it is told."""
    from sim.simulation import Stopped

    try:
        with nullcontext() if job.folder is None else RowFile(job.folder) as rows:
            return "result", play(job.scenario, shown, rows)
    except Stopped as stopped:
        return "stopped", stopped.result
    except REPORTED as error:
        kind = next(kind for kind in REPORTED if isinstance(error, kind))
        return "failed", (kind.__name__, str(error))
    except Exception:
        return "failed", ("", f"{job.title}:\n{traceback.format_exc()}")


def raised_again(name: str, sentence: str) -> Exception:
    """An error as another process told it: its kind where that is ours, else all that its traceback said."""
    return next((kind for kind in REPORTED if kind.__name__ == name), RuntimeError)(sentence)
