"""The state of one pair exchange in progress, for both of its sides."""

from __future__ import annotations

import math

from gossip.exchange.beginning import OFFERS_PER_PARTNER

__all__ = ["BOTH", "INITIATOR", "RESPONDER", "PairExchange"]

INITIATOR, RESPONDER = 0, 1  # The sides.
BOTH = 0b11  # A bit mask of both sides.


class PairExchange:
    """A pair exchange in progress.

    ``ended`` and ``backgrounded`` are bit masks over the sides. ``ended``: the exchange is over for this side.
    ``backgrounded``: it takes none of this side's slots.
    """

    __slots__ = (
        "accept_arrives_at", "asked", "attempt", "backgrounded", "commits_at", "ended", "has_dead_side", "initiator",
        "initiator_steps", "max_asked", "number", "offered_at", "requested_at", "responder", "responder_steps",
        "snapshot_at", "weight",
    )  # fmt: skip

    def __init__(self, initiator: int, number: int, steps: int, now: float, asked: set[int]) -> None:
        self.initiator, self.responder, self.number = initiator, -1, number
        self.attempt = 0  # The number of the latest offer; events of earlier offers are void.
        self.asked, self.max_asked = asked, len(asked) + OFFERS_PER_PARTNER
        self.weight = 0.5
        self.initiator_steps, self.responder_steps = steps, 0  # Step counts at the two snapshots.
        self.requested_at = now  # When the initiator's snapshot was due.
        self.offered_at = now  # When the latest offer was sent.
        self.snapshot_at = math.inf  # When the responder takes its snapshot.
        self.accept_arrives_at = math.inf
        self.commits_at = (math.inf, math.inf)  # By side: when it has the partner's stream and sends its Commit.
        self.ended = self.backgrounded = 0
        self.has_dead_side = False

    def peer_and_partner(self, side: int) -> tuple[int, int]:
        """Return the peer of a side, and the other one."""
        return (self.responder, self.initiator) if side else (self.initiator, self.responder)

    def partner_of(self, peer: int) -> int:
        return self.initiator if peer == self.responder else self.responder

    def is_backgrounded_at(self, peer: int) -> int:
        """Return 1 if this peer has backgrounded the exchange, else 0."""
        return self.backgrounded >> (peer == self.responder) & 1
