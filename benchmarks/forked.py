"""Processes forked from this one, which has imported torch already: a node starts in a tenth of a second.

Import torch and the children's other modules first, and start no thread. The children then share these pages.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

__all__ = ["Forked"]

CLONE_NEWNET = 0x40000000  # sched.h


class Forked:
    """A forked child with the methods of Popen that :class:`swarm_lab.Patient` uses.

    Its output goes to ``log``. ``namespace`` is its network namespace.
    """

    def __init__(self, work: Callable[[], None], log: Path, namespace: str | None = None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(handle, 1)
                os.dup2(handle, 2)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
                if namespace is not None:
                    enter(namespace)
                work()
                code = 0
            except SystemExit as leaving:
                code = leaving.code if isinstance(leaving.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # skips the parent's exit handlers

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the child's end, and return its exit code. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} did not end in {seconds:g} s")
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def enter(namespace: str) -> None:
    """Move this process into a network namespace (os.setns needs Python 3.12)."""
    with open(f"/var/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network namespace {namespace} cannot be entered")
