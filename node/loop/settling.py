"""The end of training: mix without it until the nodes agree, and give the final weights to newcomers."""

from __future__ import annotations

import math
import time
from typing import Protocol

from gossip.effects import MemberState
from gossip.ids import MemberRecord, quantity
from node.loop.held_run import HeldRun
from node.loop.live import LiveModel
from node.loop.network_side import NetworkSide
from node.network.service import REPORT_S
from node.observe.figures import known
from node.observe.reduced import Figures, settles

__all__ = ["SETTLED", "Settling"]

FAREWELL_S = 0.5  # Time for a newcomer to request the next piece of a finished run's weights.
HERE = MemberState.ALIVE, MemberState.SUSPECT
SETTLED = 1e-4  # |theirs - ours| / |ours| below which nodes agree.


class AtBoundary(Protocol):
    """The training loop at its step boundary."""

    def visit(self) -> None:
        """Fulfil the network thread's requests, and report."""


class Settling:
    """The waits of a training loop that takes no steps. Each visits the boundary meanwhile."""

    def __init__(self, live: LiveModel, network: NetworkSide, run: HeldRun, loop: AtBoundary) -> None:
        self.live, self.network, self.run, self.loop = live, network, run, loop
        self.own_figures = Figures()  # The figures that other members are told.
        self.settled_at: int | None = None  # The step count at which this loop settled, until it continues.

    def goes_on(self) -> None:
        """Withdraw the announcement that this loop settles, once it has taken another step."""
        if self.settled_at is not None and self.run.steps > self.settled_at:
            self.settled_at = None
            self.tell_settling(False)

    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        """Mix without training until the nodes agree, or for ``seconds``, once all have come or after ``wait_s``.

        Returns:
            The consensus distance; None if it is unknown.
        """
        peer = self.network.peer
        before, averaged = peer.exchanges.done_count, self.live.average.mixes
        self.settled_at = self.run.steps
        self.network.tell_peer(lambda peer, now: peer.settle(True, now))
        if self.meet(wait_s):
            before = (
                self.network.peer.exchanges.done_count
            )  # An agreement without the last members to come does not count.
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.live.wake.wait(0.02)
            self.loop.visit()
            if self.network.peer is not peer:  # After a fault the new peer counts from 0.
                peer, before = self.network.peer, 0
            if peer.exchanges.done_count - before >= 3 and peer.exchanges.agreement() < SETTLED:
                break
        with self.live.outer_lock:
            self.live.outer.rest()  # Otherwise an exchange that ends later would add the momentum to this node alone.
        self.network.tell_peer(lambda peer, now: peer.settle(False, now))
        self.finish_exchanges(min(1.0, seconds))
        self.network.thread.call(self.network.service.settled)
        self.network.heard()
        self.live.average.settled(averaged)
        if not self.live.outer.plain:
            self.live.reset_outer()
        distance: float | None = known(self.network.peer.exchanges.consensus_distance)
        return distance

    def meet(self, wait_s: float) -> bool:
        """Announce that this loop settles, and mix until all other members have come, have finished or are gone.

        It waits ``wait_s`` seconds at most, so that a member that lies costs no more.

        Returns:
            True if it had to wait.
        """
        until, looked_at, waited = time.monotonic() + wait_s, -math.inf, False
        missing: int | None = 0
        self.tell_settling(True)
        while (now := time.monotonic()) < until:
            if now - looked_at >= REPORT_S:
                looked_at, missing = now, self.missing()
                if missing == 0:
                    return waited
                waited = True
            self.live.wake.wait(0.02)
            self.loop.visit()
        if missing:
            others = quantity(missing, "member") + (" that has" if missing == 1 else " that have")
            text = f"Waited {wait_s:g} s to settle with {others} not come: this node settles without."
            self.network.notice("waited", text)
        return waited

    def missing(self) -> int | None:
        """Count the run's members that neither settle nor have finished; None if the network thread is too busy.

        Suspected members count, since slow machines are often suspected.
        """
        found: list[list[tuple[MemberRecord, MemberState]]] = []
        self.tell_settling(True)  # Repeat it: figures are dropped when a run is given up for another.
        self.network.thread.call(lambda: found.append(self.network.peer.membership.members()))
        self.network.heard()
        self.network.thread.check()
        if not found:
            return None
        run = self.network.peer.view.run_id
        here = [one for one, state in found[0] if state in HERE and one.ready and one.run_id == run]
        return sum(not (record.finished or settles(record)) for record in here)

    def tell_settling(self, on: bool) -> None:
        """Announce whether this loop settles, until its next step."""
        packed = self.own_figures.settle(on, self.network.peer.view.run_id, self.run.swarm_samples)
        self.network.tell_peer(lambda peer, now: peer.tell_figures(packed, now))

    def finish_exchanges(self, seconds: float) -> None:
        """Let running exchanges land, so that evaluated or saved weights equal the partners'."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.live.wake.wait(0.005)
            self.loop.visit()
            if not self.network.peer.exchanges.table and not self.live.boundary.owed and not self.live.boundary.wanted:
                return

    def finish(self, seconds: float) -> None:
        """Mark the run as complete. Wait while newcomers fetch its weights, for up to ``seconds``."""
        if not self.network.peer.view.finished:
            self.network.notice("finished", "This run is finished: this node's program said so.")
        self.network.tell_peer(lambda peer, now: peer.finish(now))
        self.network.heard()
        self.run.keep_final()
        if said := self.network.service.state_dir.finish(self.network.peer.view.run_id):
            self.network.notice("state", said)
        now = time.monotonic()
        until, quiet_at = now + seconds, now + FAREWELL_S
        while now < until and (now < quiet_at or self.network.peer.view.serving):
            self.live.wake.wait(0.02)
            self.loop.visit()
            now = time.monotonic()
            if not self.network.peer.view.finished:  # A fault came in between.
                self.network.tell_peer(lambda peer, now: peer.finish(now))
            if self.network.peer.view.serving:
                quiet_at = now + FAREWELL_S
