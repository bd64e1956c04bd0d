"""Processes forked from this one, which has imported torch already: a node starts in a tenth of a second.

Import torch and the children's other modules first, and start no thread. The children then share these pages.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.replay.links import enter

CONTEXT = multiprocessing.get_context("fork")


class Forked(CONTEXT.Process):  # type: ignore[name-defined, misc]
    """A forked child with the methods of Popen that :class:`swarm_lab.Patient` uses.

    Its output goes to ``log``. ``namespace`` is its network namespace.
    """

    def __init__(self, work: Callable[[], None], log: Path, namespace: str | None = None) -> None:
        super().__init__(target=begin, args=(work, log, namespace), daemon=True)
        self.start()

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the child's end, and return its exit code. Raises TimeoutError."""
        self.join(seconds)
        if self.exitcode is None:
            raise TimeoutError(f"process {self.pid} did not end in {seconds:g} s")
        return self.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.exitcode is None:
            os.kill(self.pid, number)


def begin(work: Callable[[], None], log: Path, namespace: str | None) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    if namespace is not None:
        with open(f"/var/run/netns/{namespace}", "rb") as file:
            enter(file.fileno())
    work()
