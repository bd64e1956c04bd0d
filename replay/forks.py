"""Processes forked from one that has read torch already: it is read once, and its pages are shared."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext
from typing import TypeVar

__all__ = ["forks", "in_processes"]

READ_BEFORE = ["replay.node", "replay.predict", "sim.learning.datasets"]

Given = TypeVar("Given")
Found = TypeVar("Found")


def forks() -> ForkServerContext:
    """Where processes come from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(READ_BEFORE)
    return context


def in_processes(work: Callable[[Given], Found], todo: Sequence[Given], at_once: int) -> Iterator[Found]:
    """What ``work`` makes of each, in their order; no process is left afterwards, whatever happens."""
    with ProcessPoolExecutor(at_once, forks(), initializer=leave_interrupts) as pool:
        try:
            yield from pool.map(work, todo)
        finally:
            for process in multiprocessing.active_children():  # at ^C nobody waits for what is under way
                process.terminate()


def leave_interrupts() -> None:
    """^C reaches every process of a terminal; the one that began the others ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
