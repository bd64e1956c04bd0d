"""One exchange under way, as both of its sides have it."""

from __future__ import annotations

import math

from gossip.exchange.beginning import TRIES

__all__ = ["FIRST", "SECOND", "Meeting"]

FIRST, SECOND = 0, 1  # who asks, and who is asked


class Meeting:
    """``ended`` and ``parked`` have a bit for each side: that it is over for it, and that it takes no slot of it."""

    __slots__ = (
        "answered", "asked", "at", "attempt", "begun", "broken", "ended", "first", "number", "parked", "second",
        "since", "steps", "tries", "verified", "weight", "wished",
    )  # fmt: skip

    def __init__(self, first: int, number: int, steps: int, now: float, asked: set[int]) -> None:
        self.first, self.second, self.number, self.attempt = first, -1, number, 0
        self.asked, self.tries = asked, len(asked) + TRIES
        self.weight = 0.5
        self.begun, self.steps = steps, 0  # at the snapshots
        self.wished = self.since = now  # who asked wanted its snapshot; somebody was asked
        self.at = self.answered = math.inf  # the other's snapshot; its answer is here
        self.verified = (math.inf, math.inf)  # the other's stream is here, and the COMMIT goes out
        self.ended = self.parked = 0
        self.broken = False  # one side died

    def partner(self, peer: int) -> int:
        """The other of the two."""
        return self.first if peer == self.second else self.second

    def parked_at(self, peer: int) -> int:
        """Whether it is parked at this one: 0 or 1."""
        return self.parked >> (peer == self.second) & 1
