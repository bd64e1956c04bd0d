"""The network thread as the training thread sees it: calls into it, and its newest runtime and peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from gossip.effects import Effect
from gossip.errors import LocalError
from gossip.peer import Peer
from node import running
from node.network.runtime import Runtime
from node.network.service import Service
from node.thread import NetworkThread

__all__ = ["NetworkSide"]


class NetworkSide:
    """The service and its thread. The training thread uses it; functions that it passes run in the network thread.

    A fault replaces the runtime and its peer, so keep no reference to either.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.thread = service, NetworkThread()

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

    def sync(self) -> None:
        """Wait until the network thread has run all earlier calls, which usually takes less than a millisecond."""
        reached = threading.Event()
        if self.thread.call(reached.set):
            reached.wait(1.0)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the network thread.

        Raises:
            LocalError: The network thread has ended. The loop must not train on alone without notice.
        """
        self.thread.check()
        if not self.thread.call(function, *args):
            raise LocalError(running.CLOSED)

    def report_to_peer(self, report: Callable[[Peer, float], list[Effect]]) -> None:
        """Call ``report(peer, now)`` with the newest peer in the network thread, and perform the effects."""

        def call() -> None:
            runtime = self.runtime
            runtime.perform(report(runtime.peer, runtime.now))

        self.thread.call(call)

    def notify(self, kind: str, sentence: str) -> None:
        """Let the network thread tell the user of an event."""
        self.thread.call(self.runtime.notify, kind, sentence)
