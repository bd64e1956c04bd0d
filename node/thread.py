"""The network thread: one trio loop in the background, started, stopped and watched from the training thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import trio

from gossip.errors import FaultError, LocalError
from node.faults import first_cause, place_of, report_to

__all__ = ["Clock", "Main", "NetworkThread"]


class Main(Protocol):
    """The network thread's main program: a :class:`node.network.service.Service`."""

    async def main(self, started: Callable[[], None]) -> None:
        """Run to the end; ``started()`` says that it is ready."""

    def on_call_failed(self, error: Exception) -> None:
        """Handle an error of a call that the training thread made into the network thread."""

    def can_recover(self, error: BaseException) -> bool:
        """Return True to call ``main`` again after an error that ended trio's loop.

        False passes the error to the training thread.
        """


class Clock(trio.abc.Clock):
    """A trio clock with the seconds of time.perf_counter, the same in all loops of the thread."""

    def start_clock(self) -> None:
        """Do nothing: the clock always runs."""

    def current_time(self) -> float:
        return time.perf_counter()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - time.perf_counter()


class NetworkThread:
    """A daemon thread that runs a :class:`Main` under trio until it returns."""

    def __init__(self) -> None:
        self.token: trio.lowlevel.TrioToken | None = None
        self.failure: BaseException | None = None
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        self.main: Main | None = None
        self.process = os.getpid()

    def start(self, main: Main) -> None:
        """Start the thread and return when ``main`` has called ``started``; raise here what ``main`` raised before."""
        self.main = main
        self.thread = threading.Thread(target=self.run, args=(main,), name="gossip-network", daemon=True)
        self.thread.start()
        self.begun.wait()
        if self.failure is not None:
            raise self.failure

    def run(self, main: Main) -> None:
        async def begin() -> None:
            self.token = trio.lowlevel.current_trio_token()
            await main.main(self.begun.set)

        try:
            while self.run_once(main, begin):
                """Begin again after a fault of trio's loop itself."""
        finally:
            self.ended.set()
            self.begun.set()

    def run_once(self, main: Main, begin: Callable[[], Awaitable[None]]) -> bool:
        """Run trio's loop to its end. Return True if another one has to follow."""
        try:
            trio.run(begin, clock=Clock())
        except BaseException as error:
            cause = first_cause(error)
            if self.begun.is_set() and main.can_recover(cause):
                return True
            self.failure = cause
        return False

    def call(self, function: Callable[..., Any], *args: Any) -> bool:
        """Run ``function(*args)`` in the network thread, soon.

        A call between two of trio's loops is dropped, and a call before a fault may be.

        Returns:
            False before the thread has started and once it has ended.
        """
        if self.token is not None:
            try:  # contextlib.suppress would cost three calls at every report.
                self.token.run_sync_soon(self.perform, function, args)
            except trio.RunFinishedError:
                return not self.ended.is_set()
            return True
        return False

    def perform(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Contain the errors of a call, which would end trio's loop."""
        try:
            function(*args)
        except Exception as error:
            assert self.main is not None
            self.main.on_call_failed(error)

    @property
    def forked(self) -> bool:
        """Return True in a forked child, which has this object but no network thread."""
        return self.process != os.getpid()

    def check(self) -> None:
        """Raise in the training thread the error that ended the network thread for good."""
        if self.forked:
            raise LocalError(
                f"This Node runs in process {self.process}, and this one was forked from it: step it there, or make a "
                "Node here, after the fork."
            )
        if self.failure is not None:
            if isinstance(self.failure, LocalError):
                raise self.failure
            raise FaultError(
                f"The network side of this node ended by a fault of this library, and it trains with nobody: "
                f"{type(self.failure).__name__} in {place_of(self.failure)}. Report the traceback {report_to()}."
            ) from self.failure

    def join(self, timeout_s: float) -> None:
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout_s)
