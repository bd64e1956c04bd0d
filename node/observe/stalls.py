"""Stalls, each reported once: a training loop that reaches no step boundary, and donors that send nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from gossip.peer import Peer
from node.observe.events import NodeEvent, StalledEvent

__all__ = ["STANDS_S", "Stalls"]

# Seconds without a step boundary before a report: longer than most steps, shorter than a user's patience.
STANDS_S = 5.0


class Stalls:
    """The stall detector of one node; ``trains`` tells whether its training loop has begun."""

    def __init__(
        self, peer: Peer, trains: Callable[[], bool], announce: Callable[[NodeEvent], None],
        on_event: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self.peer, self.trains, self.announce, self.on_event = peer, trains, announce, on_event
        # Elements of the weights that a newcomer still lacks, and since when that number is the same.
        self.left, self.left_since = 0, 0.0
        # Seconds without a boundary, once reported; and the threshold for a report.
        self.stood_s, self.patience_s = 0.0, STANDS_S
        # The last look; and the last time at which the whole process had been suspended.
        self.looked_at, self.woke_at = math.inf, -math.inf

    def look(self, now: float) -> None:
        """Check for stalls; call it every quarter of ``STANDS_S``.

        If that much has passed since the last call, the whole process was suspended and not just the loop.
        """
        asleep_s, self.looked_at = now - self.looked_at, now
        if asleep_s >= STANDS_S:
            self.woke_at = now
            text = f"This process stood still for {asleep_s:.0f} s (a machine asleep, or too busy, or a debugger): the"
            self.on_event("asleep", text + " others went on without this node, and it finds them again.")
        self.look_at_loop(now)
        self.look_at_donors(now)

    def look_at_loop(self, now: float) -> None:
        """Report once that no boundary is reached, since no member can mix with this node meanwhile.

        A loop with steps that long is reported at the first of them, and again only for a stall twice as long.
        """
        stood_s = now - max(self.peer.view.boundary_at, self.woke_at)
        if stood_s < STANDS_S:
            if self.stood_s:
                text = f"The training loop is at a step boundary again, after {self.stood_s:.0f} s."
                self.announce(StalledEvent("moving", time.time(), text, self.stood_s))
                self.patience_s, self.stood_s = max(self.patience_s, 2 * self.stood_s), 0.0
        elif self.peer.view.ready and self.trains():
            if not self.stood_s and stood_s >= self.patience_s:
                text = f"The training loop has reached no step boundary for {stood_s:.0f} s"
                text += (
                    " (an evaluation, a loader that yields nothing?): until it does, no member can mix with this node."
                )
                self.announce(StalledEvent("stalled", time.time(), text, stood_s))
                self.stood_s = stood_s
            elif self.stood_s:
                self.stood_s = stood_s

    def look_at_donors(self, now: float) -> None:
        """Report once that the donors send no weights, because the newcomer would otherwise wait silently."""
        left = self.peer.joining.missing_elements
        if left != self.left or not left:
            self.left, self.left_since = left, now
        elif self.peer.joining.is_starved and now - self.left_since >= STANDS_S:
            self.left_since = math.inf  # Reported.
            text = f"The members that hold the weights have given none for {STANDS_S:.0f} s: their training loops stand"
            self.on_event("waiting", text + " (an evaluation?), or they serve others. This node waits for them.")
