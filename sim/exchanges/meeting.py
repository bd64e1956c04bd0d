"""The state of one pair exchange in progress, for both of its sides."""

from __future__ import annotations

import math

from gossip.exchange.beginning import OFFERS_PER_PARTNER

__all__ = ["FIRST", "SECOND", "Meeting"]

FIRST, SECOND = 0, 1  # sides: the initiator and the responder


class Meeting:
    """A pair exchange in progress.

    ``ended`` and ``backgrounded`` are bit masks over the sides. ``ended``: the exchange is over for this side.
    ``backgrounded``: it takes none of this side's slots.
    """

    __slots__ = (
        "answered", "asked", "at", "attempt", "backgrounded", "begun", "broken", "ended", "first", "number", "second",
        "since", "steps", "tries", "verified", "weight", "wished",
    )  # fmt: skip

    def __init__(self, first: int, number: int, steps: int, now: float, asked: set[int]) -> None:
        self.first, self.second, self.number, self.attempt = first, -1, number, 0
        self.asked, self.tries = asked, len(asked) + OFFERS_PER_PARTNER
        self.weight = 0.5
        self.begun, self.steps = steps, 0  # step counts at the two snapshots
        # Virtual times: `wished`, the initiator's snapshot was due; `since`, the latest offer was sent; `at`, the
        # responder took its snapshot; `answered`, its Accept arrived; `verified`, by side, the Commit goes out because
        # the partner's stream has arrived.
        self.wished = self.since = now
        self.at = self.answered = math.inf
        self.verified = (math.inf, math.inf)
        self.ended = self.backgrounded = 0
        self.broken = False  # one side has died

    def partner(self, peer: int) -> int:
        """Return the other peer of the pair."""
        return self.first if peer == self.second else self.second

    def is_backgrounded_at(self, peer: int) -> int:
        """Return 1 if this peer has backgrounded the exchange, else 0."""
        return self.backgrounded >> (peer == self.second) & 1
