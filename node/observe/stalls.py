"""Stalls, each reported once: a training loop that reaches no step boundary, and donors that send nothing."""

import math
import time
from collections.abc import Callable

from gossip.peer import Peer
from node.observe.events import NodeEvent, StalledEvent

# Seconds without a step boundary before a report: longer than most steps, shorter than a user's patience.
STALL_AFTER_S = 5.0


class Stalls:
    """The stall detector of one node.

    Args:
        peer: The node's peer.
        has_begun: Returns True once the training loop has begun.
        announce: Announces a structured event.
        on_event: Announces a sentence of a kind.
    """

    def __init__(
        self, peer: Peer, has_begun: Callable[[], bool], announce: Callable[[NodeEvent], None],
        on_event: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self.peer, self.has_begun, self.announce, self.on_event = peer, has_begun, announce, on_event
        # The number of elements of the weights that this newcomer still lacks, and the time of its last change.
        self.missing_elements, self.missing_since = 0, 0.0
        self.reported_stall_s = 0.0  # Seconds without a boundary in the stall that was reported; 0 if none is.
        self.patience_s = STALL_AFTER_S  # Seconds without a boundary after which a stall is reported.
        self.checked_at = math.inf  # The time of the last check; inf before the first, which then finds no pause.
        self.woke_at = -math.inf  # The time of the first check after a suspension of the whole process; -inf: none.

    def check(self, now: float) -> None:
        """Check for stalls; call it every quarter of ``STALL_AFTER_S``.

        If that much has passed since the last call, the whole process was suspended and not just the loop.
        """
        asleep_s, self.checked_at = now - self.checked_at, now
        if asleep_s >= STALL_AFTER_S:
            self.woke_at = now
            text = f"This process stood still for {asleep_s:.0f} s (a machine asleep, or too busy, or a debugger): the"
            self.on_event("asleep", text + " others went on without this node, and it finds them again.")
        self.check_loop(now)
        self.check_donors(now)

    def check_loop(self, now: float) -> None:
        """Report once that no boundary is reached, since no member can mix with this node meanwhile.

        A loop with steps that long is reported at the first of them, and again only for a stall twice as long.
        """
        stall_s = now - max(self.peer.view.boundary_at, self.woke_at)
        if stall_s < STALL_AFTER_S:
            if self.reported_stall_s:
                text = f"The training loop is at a step boundary again, after {self.reported_stall_s:.0f} s."
                self.announce(StalledEvent("moving", time.time(), text, self.reported_stall_s))
                self.patience_s, self.reported_stall_s = max(self.patience_s, 2 * self.reported_stall_s), 0.0
        elif self.peer.view.ready and self.has_begun():
            if not self.reported_stall_s and stall_s >= self.patience_s:
                text = f"The training loop has reached no step boundary for {stall_s:.0f} s"
                text += (
                    " (an evaluation, a loader that yields nothing?): until it does, no member can mix with this node."
                )
                self.announce(StalledEvent("stalled", time.time(), text, stall_s))
                self.reported_stall_s = stall_s
            elif self.reported_stall_s:
                self.reported_stall_s = stall_s

    def check_donors(self, now: float) -> None:
        """Report once that the donors send no weights, because the newcomer would otherwise wait silently."""
        missing = self.peer.joining.missing_elements
        if missing != self.missing_elements or not missing:
            self.missing_elements, self.missing_since = missing, now
        elif self.peer.joining.is_starved and now - self.missing_since >= STALL_AFTER_S:
            self.missing_since = math.inf  # It was reported, and is not again until a piece arrives.
            text = f"The members that hold the weights have given none for {STALL_AFTER_S:.0f} s: their training loops "
            self.on_event("waiting", text + "stand (an evaluation?), or they serve others. This node waits for them.")
