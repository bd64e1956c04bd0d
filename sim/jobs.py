"""Many simulations side by side, each in a process of its own: a sweep uses all cores, one run uses one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from gossip.errors import LocalError
from sim.report.result import Result
from sim.scenario.scenario import Scenario

__all__ = ["cores", "side_by_side"]


def cores() -> int:
    """How many processes run at once without waiting for each other, where the system tells what is ours."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(scenarios: Sequence[Scenario], jobs: int) -> Iterator[tuple[int, Result]]:
    """Play scenarios, ``jobs`` at a time, and yield the number of each with its result as it is done, in any order.

    A run gives the same history and digest as alone. Raises what a run raises, and :class:`LocalError` where a process
    was ended, as for want of memory; whatever happens, no process is left.
    """
    context = multiprocessing.get_context("spawn")  # a fork would take the threads' locks along, and not the threads
    waiting = iter(enumerate(scenarios))
    with ProcessPoolExecutor(jobs, context, initializer=leave_interrupts) as pool:
        try:
            under_way: dict[Future[Result], int] = {}
            while True:
                # No more than there are processes: what is not begun need not be called back.
                for number, scenario in waiting:
                    under_way[pool.submit(play, scenario)] = number
                    if len(under_way) == jobs:
                        break
                if not under_way:
                    return
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    yield under_way.pop(future), future.result()
        except BrokenProcessPool:
            raise LocalError(
                f"A simulation was ended by the system, most likely for want of memory: use fewer at once, as "
                f"--jobs {max(1, jobs // 2)}."
            ) from None
        finally:
            for process in multiprocessing.active_children():  # at ^C a run may have hours to go
                process.terminate()


def play(scenario: Scenario) -> Result:
    from sim.simulation import simulate

    return simulate(scenario, progress=False)


def leave_interrupts() -> None:
    """^C reaches every process of a terminal; the one that shows the sweep ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
