"""The start of training: wait until this node holds weights to train, and then for other members."""

from __future__ import annotations

import time
from collections.abc import Callable

from gossip.errors import FaultError, LocalError
from gossip.ids import quantity
from node.faults import report_to
from node.loop.held_run import HeldRun
from node.loop.live import LiveModel
from node.loop.network_side import NetworkSide
from node.settings import Settings

__all__ = ["Startup"]

VISIT_PERIOD_S = 0.02  # Seconds between two visits of the boundary while the loop waits.


class Startup:
    """The waits of a training loop before its first step. Each of them visits the boundary meanwhile."""

    def __init__(
        self, settings: Settings, live: LiveModel, network: NetworkSide, run: HeldRun, visit: Callable[[], None]
    ) -> None:
        self.settings, self.live, self.network, self.run, self.visit = settings, live, network, run, visit

    def join(self) -> None:
        """Wait until this node holds weights to train, from the swarm or its own.

        Raises:
            FaultError: Faults of this library keep the network side from starting.
            LocalError: A seed refused this node, or ``settings.join_or_fail_s`` has passed.
        """
        service, began = self.network.service, time.monotonic()
        service.read_progress = self.network.runtime.read_progress = lambda: (self.run.steps, self.run.samples)
        is_ready = False
        while not is_ready:
            self.live.wake.wait(VISIT_PERIOD_S)
            self.network.check()
            if service.is_backing_off:
                raise FaultError(
                    "Could not join: faults of this library end the network side each time that it begins anew. Report "
                    f"the traceback, which the log has, {report_to()}."
                )
            self.visit()
            is_ready = self.network.peer.view.ready and not self.live.boundary.has_requests
            self.raise_failure(time.monotonic() - began, is_ready)
        self.begin_with_own_weights()
        self.visit()  # This also takes a copy for newcomers, because the first step may be far off.
        self.network.sync()  # The network thread then knows the sample count behind the weights.

    def raise_failure(self, waited_s: float, is_ready: bool) -> None:
        """Raise LocalError if a seed has refused this node for good, or the time to join has passed."""
        connector, limit_s = self.network.runtime.connector, self.settings.join_or_fail_s
        refusal = connector.seeds.refusal
        may_connect = bool(connector.dialling) or len(self.network.runtime.links) > 0
        # A seed that closes connections at once may be busy, or a forwarder whose node is down. That is final only when
        # the peer has given up waiting for it: it would train alone, although its seed exists.
        if refusal is not None and not may_connect and is_ready == (refusal.code == "closed"):
            raise LocalError(f"Could not join: {refusal}") from refusal
        if limit_s is not None and waited_s > limit_s and not is_ready:
            raise LocalError(f"Could not join within {limit_s:g} s: {connector.seeds.why_alone()}.")

    def begin_with_own_weights(self) -> None:
        """Start mixing from the node's own weights, unless it has adopted others, and allocate memory for exchanges."""
        if not self.live.has_weights:
            self.live.begin_mixing()
            self.network.runtime.streams.allocate_memory()

    def wait_for_others(self, began: float) -> None:
        """Wait until ``settings.wait_for`` members hold this run, up to ``settings.wait_s`` seconds after ``began``.

        Only members that this node has contacted count, because a peer may claim any others.
        """
        count, wait_s = self.settings.wait_for, self.settings.wait_s
        while (run_size := self.network.peer.membership.run_size) < count and not self.network.peer.view.finished:
            if time.monotonic() - began >= wait_s:
                if self.settings.others is not None and self.network.peer.view.alive_count < 2:
                    address = self.network.peer.membership.me.address or "none"
                    raise LocalError(
                        f"Waited {wait_s:g} s for {count} members that were launched together, and none of the others "
                        f"came to this node at {address} ({self.network.runtime.connector.seeds.why_alone()}): it does "
                        "not train alone. Look whether the others run and can reach this address."
                    )
                present = f"{run_size} is" if run_size == 1 else f"{run_size} are"
                text = (
                    f"Waited {wait_s:g} s for {quantity(count, 'member')}, of whom {present} here with the weights, "
                    "this one included: this node goes on, and mixes with the others when they come."
                )
                self.network.notify("waited", text)
                return
            self.live.wake.wait(VISIT_PERIOD_S)
            self.network.check()
            self.visit()
