"""The end of training: mix without it until the nodes agree, and give the final weights to newcomers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from gossip.effects import MemberState
from gossip.ids import MemberRecord, quantity
from node.loop.held_run import HeldRun
from node.loop.live import LiveModel
from node.loop.network_side import NetworkSide
from node.network.service import REPORT_S
from node.observe.figures import none_if_nan
from node.observe.reduced import SETTLING, Figures, is_settling

__all__ = ["SETTLED", "Settling"]

FAREWELL_S = 0.5  # Time for a newcomer to request the next piece of a finished run's weights.
VISIT_PERIOD_S = 0.02  # Seconds between two visits of the boundary while the loop waits.
QUICK_VISIT_PERIOD_S = 0.005  # The same for a wait that ends within a second.
PRESENT = MemberState.ALIVE, MemberState.SUSPECT  # Slow machines are often suspected, and still count.
SETTLED = 1e-4  # Nodes agree if the weights of the last partners and ours differ by less, relative to ours.
SETTLED_EXCHANGES = 3  # The least exchanges before an agreement counts: the first may all be with one partner.


class Settling:
    """The waits at the end of training, in the training thread. Each of them visits the boundary meanwhile."""

    def __init__(self, live: LiveModel, network: NetworkSide, run: HeldRun, visit: Callable[[], None]) -> None:
        self.live, self.network, self.run, self.visit = live, network, run, visit
        self.own_figures = Figures()  # The figures of this node that other members get.
        self.settled_at: int | None = None  # The step count at which this loop settled; None once it has continued.

    def on_step(self) -> None:
        """Withdraw the announcement that this loop settles, if it has taken a step since."""
        if self.settled_at is not None and self.run.steps > self.settled_at:
            self.settled_at = None
            self.announce_settling(False)

    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        """Mix without training until the nodes agree.

        Args:
            seconds: The time limit of the mixing.
            wait_s: The time limit of a wait before it, until all other members settle too.

        Returns:
            The consensus distance; None if it is unknown.
        """
        peer = self.network.peer
        done_before = peer.exchanges.done_count  # Exchanges that this peer had finished when settling began.
        self.settled_at = self.run.steps
        self.network.report_to_peer(lambda peer, now: peer.settle(True, now))
        if self.wait_for_settlers(wait_s):  # Exchanges before the last member came do not count.
            done_before = self.network.peer.exchanges.done_count
        until, looked_at = time.monotonic() + seconds, -math.inf
        while (now := time.monotonic()) < until:
            if peer.view.alive_count == 1 and now - looked_at >= REPORT_S:  # Others may be suspected only.
                looked_at = now
                if self.present_members() == []:  # A node that comes now takes the weights of this one.
                    break
            self.live.wake.wait(VISIT_PERIOD_S)
            self.visit()
            if self.network.peer is not peer:  # After a fault the new peer counts from 0.
                peer, done_before = self.network.peer, 0
            has_mixed = peer.exchanges.done_count - done_before >= SETTLED_EXCHANGES
            if has_mixed and peer.exchanges.largest_distance() < SETTLED:
                break
        with self.live.outer_lock:
            # Otherwise an exchange that ends later would add the momentum to this node alone.
            self.live.outer.forget_momentum()
        self.network.report_to_peer(lambda peer, now: peer.settle(False, now))
        self.finish_exchanges(min(1.0, seconds))
        self.network.call(self.network.service.on_settled)
        self.network.sync()
        if not self.live.outer.is_plain:
            self.live.reset_outer()
        distance: float | None = none_if_nan(self.network.peer.exchanges.consensus_distance)
        return distance

    def wait_for_settlers(self, wait_s: float) -> bool:
        """Announce that this loop settles, and mix until all other members settle too, have finished, or are gone.

        Args:
            wait_s: The time limit in seconds, so that a member that lies costs no more.

        Returns:
            True if it had to wait.
        """
        until, counted_at, waited = time.monotonic() + wait_s, -math.inf, False
        missing: int | None = 0  # None if it could not be counted.
        self.announce_settling(True)
        while (now := time.monotonic()) < until:
            if now - counted_at >= REPORT_S:
                counted_at, missing = now, self.count_missing()
                if missing == 0:
                    return waited
                waited = True
            self.live.wake.wait(VISIT_PERIOD_S)
            self.visit()
        if missing:
            others = quantity(missing, "member") + (" that has" if missing == 1 else " that have")
            text = f"Waited {wait_s:g} s to settle with {others} not come: this node settles without."
            self.network.notify("waited", text)
        return waited

    def count_missing(self) -> int | None:
        """Count the run's members that neither settle nor have finished; None if the network thread is too busy."""
        self.announce_settling(True)  # Announce it again, because figures are dropped with a run that is given up.
        run, others = self.network.peer.view.run_id, self.present_members()
        if others is None:
            return None
        sharers = [record for record in others if record.ready and record.run_id == run]
        return sum(not (record.finished or is_settling(record)) for record in sharers)

    def present_members(self) -> list[MemberRecord] | None:
        """Return the records of the other members that are not gone; None if the network thread is too busy."""
        answers: list[list[tuple[MemberRecord, MemberState]]] = []  # At most one, from the network thread.
        self.network.call(lambda: answers.append(self.network.peer.membership.members()))
        self.network.sync()
        self.network.check()
        return [record for record, state in answers[0] if state in PRESENT] if answers else None

    def announce_settling(self, is_settling_now: bool) -> None:
        """Announce whether this loop settles, until its next step."""
        self.announce(SETTLING, (1.0, 0) if is_settling_now else None)

    def announce(self, name: str, mark: tuple[float, int] | None) -> None:
        """Put a mark into this node's record, or remove it."""
        packed = self.own_figures.pack_mark(name, mark, self.network.peer.view.run_id, self.run.swarm_samples)
        self.network.report_to_peer(lambda peer, now: peer.publish_figures(packed, now))

    def finish_exchanges(self, seconds: float) -> None:
        """Wait for exchanges in progress, so that the weights that are evaluated or saved equal the partners'."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.live.wake.wait(QUICK_VISIT_PERIOD_S)
            self.visit()
            if (
                not self.network.peer.exchanges.table
                and not self.live.boundary.pending_updates
                and not self.live.boundary.has_requests
            ):
                return

    def finish(self, seconds: float) -> None:
        """Mark the run as complete, and wait for up to ``seconds`` while newcomers fetch its weights."""
        if not self.network.peer.view.finished:
            self.network.notify("finished", "This run is finished: this node's program said so.")
        self.network.report_to_peer(lambda peer, now: peer.finish(now))
        self.network.sync()
        self.run.save_final()
        if warning := self.network.service.state_dir.store_finished(self.network.peer.view.run_id):
            self.network.notify("state", warning)
        now = time.monotonic()
        until, quiet_at = now + seconds, now + FAREWELL_S
        while now < until and (now < quiet_at or self.network.peer.view.is_donating):
            self.live.wake.wait(VISIT_PERIOD_S)
            self.visit()
            now = time.monotonic()
            if not self.network.peer.view.finished:  # A fault has replaced the peer meanwhile.
                self.network.report_to_peer(lambda peer, now: peer.finish(now))
            if self.network.peer.view.is_donating:
                quiet_at = now + FAREWELL_S
