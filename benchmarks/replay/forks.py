"""Processes forked from one that has loaded torch already, so that its pages are shared."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext
from typing import TypeVar

__all__ = ["forks", "in_processes"]

READ_BEFORE = ["benchmarks.replay.node", "benchmarks.replay.predict", "sim.learning.datasets"]

Given = TypeVar("Given")
Found = TypeVar("Found")


def forks() -> ForkServerContext:
    """Return the context that starts processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(READ_BEFORE)
    return context


def in_processes(work: Callable[[Given], Found], todo: Sequence[Given], at_once: int) -> Iterator[Found]:
    """Yield the results of ``work`` in order. No process is left afterwards, whatever happens."""
    with ProcessPoolExecutor(at_once, forks(), initializer=leave_interrupts) as pool:
        try:
            yield from pool.map(work, todo)
        finally:
            for process in multiprocessing.active_children():  # At ^C do not wait for unfinished work.
                process.terminate()


def leave_interrupts() -> None:
    """Ignore ^C, which reaches every process of a terminal; the parent ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
