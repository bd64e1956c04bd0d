"""The network thread as the training thread sees it: one trio loop in the background, with its newest runtime."""

import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from gossip.effects import Effect
from gossip.errors import FaultError, LocalError
from gossip.peer import Peer
from node import running
from node.faults import first_cause, place_of, report_to
from node.network.runtime import Runtime
from node.network.service import Service
from node.observe import notices

POLL_S = 1.0  # Seconds between two checks whether the network thread has ended.
# Such checks after which it is stuck. They are counted, and not seconds, because a stopped process may wake up later.
STUCK_POLLS = 60


class Clock(trio.abc.Clock):
    """A trio clock with the seconds of time.perf_counter, the same in all loops of the thread."""

    def start_clock(self) -> None:
        """Do nothing: the clock always runs."""

    def current_time(self) -> float:
        return time.perf_counter()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - time.perf_counter()


class NetworkSide:
    """A service, and the daemon thread that runs it under trio until it returns.

    The training thread uses it; functions that it passes run in the network thread. A fault replaces the runtime and
    its peer, so keep no reference to either.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.token: trio.lowlevel.TrioToken | None = None  # Lets other threads call functions in trio's newest loop.
        self.failure: BaseException | None = None  # The error that ended the network thread for good.
        self.begun = threading.Event()  # The service has started or failed.
        self.ended = threading.Event()  # The thread has ended.
        self.thread: threading.Thread | None = None  # None before :meth:`start`.
        self.process = os.getpid()  # A forked child has another.

    # -- the thread ------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the thread and return when the service has started; raise here what it raised before."""
        self.thread = threading.Thread(target=self.run, name="gossip-network", daemon=True)
        self.thread.start()
        self.begun.wait()
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        async def begin() -> None:
            self.token = trio.lowlevel.current_trio_token()
            await self.service.main(self.begun.set)

        try:
            while self.run_loop(begin):  # Another loop follows after a fault of trio's loop itself.
                pass
        finally:
            self.ended.set()
            self.begun.set()

    def run_loop(self, begin: Callable[[], Awaitable[None]]) -> bool:
        """Run trio's loop to its end. Return True if another one has to follow."""
        try:
            trio.run(begin, clock=Clock())
        except BaseException as error:
            cause = first_cause(error)
            if self.begun.is_set() and self.service.can_recover(cause):
                return True
            self.failure = cause
        return False

    def perform(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call a function in the network thread. Let an error end the network side, and not trio's loop."""
        try:
            function(*args)
        except Exception as error:
            if self.service.runtime is not None:
                self.service.runtime.fail(error)

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
        """Wait for the thread's end."""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout_s)

    # -- its newest state ------------------------------------------------------------------------------------------
    @property
    def runtime(self) -> Runtime:
        if self.service.runtime is None:
            raise LocalError("This Node is not running: use it inside its with block.")
        return self.service.runtime

    @property
    def peer(self) -> Peer:
        return self.runtime.peer

    @property
    def now(self) -> float:
        """Return the time by the network's clock."""
        return time.perf_counter() + self.service.clock_s

    # -- calls into it ---------------------------------------------------------------------------------------------
    def call(self, function: Callable[..., Any], *args: Any) -> bool:
        """Run ``function(*args)`` in the network thread, soon.

        A call between two of trio's loops is dropped, and a call before a fault may be.

        Returns:
            False if no thread will run it: none has started, or it has ended.
        """
        if self.token is not None:
            try:  # contextlib.suppress would cost three calls at every report.
                self.token.run_sync_soon(self.perform, function, args)
            except trio.RunFinishedError:
                return not self.ended.is_set()
            return True
        return False

    def must_call(self, function: Callable[..., Any], *args: Any) -> None:
        """Do as :meth:`call`, or raise LocalError: the loop must not train on alone without notice."""
        self.check()
        if not self.call(function, *args):
            raise LocalError(running.CLOSED)

    def sync(self) -> None:
        """Wait, for at most a second, until the network thread has run all earlier calls, usually within 1 ms."""
        reached = threading.Event()
        if self.call(reached.set):
            reached.wait(1.0)

    def run_to_end(self, function: Callable[[], None]) -> None:
        """Run a function in the network thread, and wait for its end, unless that thread ends.

        Raises:
            FaultError: That thread does nothing for a minute. The loop must not go on, since its weights may change.
        """
        self.check()
        done = threading.Event()

        def run() -> None:
            try:
                function()
            finally:
                done.set()  # After a fault in here the network side restarts, and the loop must continue.

        token, is_running, polls = self.token, self.call(run), 0
        while is_running and not done.wait(POLL_S) and not self.ended.is_set():
            polls += 1
            if self.token is not token:  # The call was dropped between two of trio's loops.
                token, is_running, polls = self.token, self.call(run), 0
            if polls >= STUCK_POLLS:
                raise FaultError(
                    f"The network thread of this node has done nothing for {polls * POLL_S:.0f} s. A handler of "
                    f"logging may block it; otherwise report it with its stack (py-spy dump) {report_to()}."
                )
        self.check()

    def report_to_peer(self, report: Callable[[Peer, float], list[Effect]]) -> None:
        """Call ``report(peer, now)`` with the newest peer in the network thread, and perform the effects."""

        def call() -> None:
            runtime = self.runtime
            runtime.perform(report(runtime.peer, runtime.now))

        self.call(call)

    def notify(self, kind: str, sentence: str) -> None:
        """Let the network thread tell the user of an event; log it if that thread has ended."""
        if not self.call(self.runtime.notify, kind, sentence):
            notices.log(self.service.identity.id.hex(), kind, sentence, True)
