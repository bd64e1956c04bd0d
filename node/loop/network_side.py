"""The network thread as the training thread sees it: its calls there, and the values that it reads."""

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
    """The service and its thread. A fault replaces the runtime and its peer, so keep no reference to either."""

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

    def heard(self) -> None:
        """Wait until the network thread has processed all earlier calls: it is never far behind."""
        told = threading.Event()
        if self.thread.call(told.set):
            told.wait(1.0)

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """Call this in the network thread; raise if that has ended, since training on alone would be silently wrong."""
        self.thread.check()
        if not self.thread.call(function, *args):
            raise LocalError(running.CLOSED)

    def tell_peer(self, report: Callable[[Peer, float], list[Effect]]) -> None:
        """Have the newest peer handle this report, and perform its decisions."""

        def tell() -> None:
            runtime = self.runtime
            runtime.perform(report(runtime.peer, runtime.now))

        self.thread.call(tell)

    def notice(self, kind: str, sentence: str) -> None:
        """Have the network thread tell the user of an event."""
        self.thread.call(self.runtime.on_event, kind, sentence)
