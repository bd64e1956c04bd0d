"""The network thread: one trio loop beside the training loop, started, stopped and watched from the training thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from gossip.errors import LocalError

__all__ = ["NetworkThread"]


class NetworkThread:
    """Runs ``main(started)`` under trio in a daemon thread until it returns; ``started()`` says that it is ready."""

    def __init__(self) -> None:
        self.token: trio.lowlevel.TrioToken | None = None
        self.failure: BaseException | None = None
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        self.process = os.getpid()

    def start(self, main: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Returns when ``main`` has called ``started``; raises in the caller's thread what ``main`` raised before."""
        self.thread = threading.Thread(target=self.run, args=(main,), name="gossip-network", daemon=True)
        self.thread.start()
        self.begun.wait()
        if self.failure is not None:
            raise self.failure

    def run(self, main: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        async def begin() -> None:
            self.token = trio.lowlevel.current_trio_token()
            await main(self.begun.set)

        try:
            trio.run(begin)
        except BaseException as error:
            error = first_cause(error)
            self.failure = error
        finally:
            self.ended.set()
            self.begun.set()

    def call(self, function: Callable[..., Any], *args: Any) -> bool:
        """Run ``function(*args)`` in the network thread, soon; False once it has ended, and before it began."""
        if self.token is not None:
            try:  # contextlib.suppress would be three calls of functions at every report
                self.token.run_sync_soon(function, *args)
            except trio.RunFinishedError:
                return False
            return True
        return False

    def check(self) -> None:
        """Raise in the training thread what ended the network thread: going on alone would be silently wrong. A forked
        child has the object and no such thread."""
        if self.process != os.getpid():
            raise LocalError(
                f"This Node runs in process {self.process}, and this one was forked from it: step it there, or make a "
                "Node here, after the fork."
            )
        if self.failure is not None:
            if isinstance(self.failure, LocalError):
                raise self.failure
            raise LocalError(
                "The network thread ended by a fault of this library, and this node trains with nobody: "
                f"{type(self.failure).__name__}: {self.failure}."
            ) from self.failure

    def join(self, timeout_s: float) -> None:
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout_s)


def first_cause(error: BaseException) -> BaseException:
    """What a person can use: neither the groups that nurseries make nor trio's own wrapping."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, trio.TrioInternalError) and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error
