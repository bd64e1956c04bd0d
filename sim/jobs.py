"""A pool of worker processes for parallel simulations; a single run uses one core."""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, Self

from gossip.errors import ConfigError, DataError, LocalError
from sim.interrupt import interrupt
from sim.report.result import Progress, Result, RowHandler, row_file
from sim.scenario.scenario import Scenario

STOP_S = 60.0  # Time for partial results to arrive after ^C: a worker first brings all models up to date.
# The types that a worker's errors keep on their way, since a subclass may not pickle.
REPORTED = (ConfigError, DataError, LocalError)


def cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def play(
    scenario: Scenario,
    progress: Callable[[Progress], None] | bool = False,
    rows: RowHandler | None = None,
    trace: Path | None = None,
) -> Result:
    """Simulate a scenario; a lack of memory becomes a :class:`LocalError`."""
    from sim.simulation import simulate

    try:
        return simulate(scenario, progress=progress, rows=rows, trace=trace)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # This is how torch reports it.
            raise
        size = f"peers = {scenario.peers} with a model of this size"
        raise LocalError(f"{scenario.name}: {size} need more memory than there is: make one smaller.") from None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A scenario to simulate, its title in messages, and the folder to which its rows are written as they come."""

    scenario: Scenario
    title: str
    folder: Path | None = None
    trace: Path | None = None  # A file for the run's timeline.


def start_context() -> ForkServerContext | SpawnContext:
    """Return the way to start workers: forks of one process that has imported the simulator, where there are forks.

    A fork of this process would copy the threads' locks without the threads that hold them.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sim.simulation"])
    return context


class Workers:
    """A pool of processes that simulate: ``with Workers(jobs, at_once) as workers``; none survives the block.

    A run gives the same history and digest as alone, and computes in one thread. A worker is known by the connection to
    it. It sends messages (kind, value): "share" of its run that is done, "result", "stopped" with a partial result, and
    "failed".
    """

    def __init__(self, jobs: Sequence[Assignment], at_once: int) -> None:
        self.jobs, self.at_once = jobs, at_once
        self.shares = [0.0] * len(jobs)  # Progress of each run, 0 to 1.
        self.finished_jobs = 0
        self.failed: dict[int, Exception] = {}  # By job number.
        self.busy: dict[Connection, int] = {}  # The job number of each busy worker.
        self.idle: list[Connection] = []
        self.processes: dict[Connection, multiprocessing.process.BaseProcess] = {}

    def __enter__(self) -> Self:
        context = start_context()
        for _ in range(self.at_once):
            self.start_worker(context)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()  # After ^C a run may have hours left, and stop() has fetched its partial result.
        for connection, process in self.processes.items():
            process.join()
            connection.close()

    def start_worker(self, context: ForkServerContext | SpawnContext) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # The worker then holds the only other end, so we get EOF when it dies.
        self.processes[ours] = process
        self.idle.append(ours)

    def results(self, on_progress: Callable[[float, int], None] | None = None) -> Iterator[tuple[int, Result]]:
        """Yield the number and the result of each job as it finishes, in any order.

        ``on_progress`` is called with the overall progress, 0 to 1, and the number of finished jobs. As in a serial
        run, the error of the earliest failed job is raised once all jobs before it are done. A killed process, for
        example by the kernel's OOM killer, raises :class:`LocalError`.
        """
        waiting = iter(range(len(self.jobs)))
        while True:
            while self.idle and not self.failed and (number := next(waiting, None)) is not None:
                self.begin_job(number)
            earliest = min(self.failed, default=len(self.jobs))
            if not any(number < earliest for number in self.busy.values()):
                break
            for connection in self.wait_for_messages():
                kind, value = self.receive(connection)
                number = self.busy[connection]
                if kind == "share":
                    self.shares[number] = value
                else:  # The run has ended.
                    del self.busy[connection]
                    self.idle.append(connection)
                    self.shares[number] = 1.0
                if kind == "failed":
                    self.failed[number] = value
                if kind == "result":
                    self.finished_jobs += 1
                if on_progress is not None:
                    on_progress(sum(self.shares) / len(self.shares), self.finished_jobs)
                if kind == "result":
                    yield number, value
        if self.failed:
            raise self.failed[min(self.failed)]

    def begin_job(self, number: int) -> None:
        connection = self.idle.pop()
        self.busy[connection] = number
        with suppress(OSError):  # receive() reports a worker that has died.
            connection.send(self.jobs[number])

    def wait_for_messages(self, timeout_s: float | None = None) -> list[Connection]:
        """Wait for busy workers that have sent a message or died, and return them."""
        return [connection for connection in wait(list(self.busy), timeout_s) if isinstance(connection, Connection)]

    def receive(self, connection: Connection) -> tuple[str, Any]:
        """Receive a worker's next message, or return a failure if it has died."""
        try:
            message: tuple[str, Any] = connection.recv()
        except (EOFError, OSError):
            process = self.processes[connection]
            process.join()
            return "failed", LocalError(self.reason_of_death(self.busy[connection], process.exitcode or 0))
        return message

    def reason_of_death(self, number: int, code: int) -> str:
        how = f"with code {code}"
        if code < 0:
            how = f"by {signal.Signals(-code).name}, most likely for want of memory"
        fewer = f": use fewer at once, as --jobs {self.at_once // 2}." if self.at_once > 1 else "."
        return f"{self.jobs[number].title}: its process was ended {how}{fewer}"

    def stop(self) -> list[tuple[int, Result]]:
        """Interrupt all runs in progress, and return their numbers and partial results in order.

        A further ^C raises KeyboardInterrupt here, so the user need not wait.
        """
        for connection in self.busy:
            if (pid := self.processes[connection].pid) is not None:
                with suppress(OSError):  # receive() reports a worker that has died.
                    os.kill(pid, signal.SIGUSR1)
        partial, until = list[tuple[int, Result]](), time.monotonic() + STOP_S
        while self.busy and (left_s := until - time.monotonic()) > 0:
            for connection in self.wait_for_messages(left_s):
                number = self.busy[connection]
                kind, value = self.receive(connection)
                if kind != "share":
                    del self.busy[connection]
                if kind in ("stopped", "result"):
                    partial.append((number, value))
        return sorted(partial, key=lambda item: item[0])


# -- in the worker -----------------------------------------------------------------------------------------------------
def work(connection: Connection) -> None:
    """Simulate the jobs that arrive until the connection closes.

    ^C, SIGHUP and often SIGTERM reach every process of a group, so a worker ignores them. The parent process interrupts
    it with SIGUSR1.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with interrupt.ending_on(signal.SIGUSR1), suppress(KeyboardInterrupt, EOFError, OSError):
        while True:
            job: Assignment = connection.recv()
            connection.send(outcome_of(job, lambda progress: connection.send(("share", progress.done))))


def outcome_of(job: Assignment, on_progress: Callable[[Progress], None]) -> tuple[str, Any]:
    """Run a job, and return the message that reports its outcome."""
    from sim.simulation import Stopped

    try:
        with row_file(job.folder) as rows:
            return "result", play(job.scenario, on_progress, rows)
    except Stopped as stopped:
        return "stopped", stopped.result
    except REPORTED as error:
        return "failed", next(kind for kind in REPORTED if isinstance(error, kind))(str(error))
    except Exception:
        return "failed", RuntimeError(f"{job.title}:\n{traceback.format_exc()}")
