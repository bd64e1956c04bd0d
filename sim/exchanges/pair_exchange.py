"""The pair exchanges in progress: the state of each one, for both of its sides, and the slots that they take."""

from __future__ import annotations

import math

from gossip.exchange.beginning import OFFERS_PER_PARTNER

__all__ = ["BOTH", "INITIATOR", "RESPONDER", "PairExchange", "Slots"]

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

    def streams_at(self, peer: int) -> float:
        """Return when this peer starts to stream."""
        return self.snapshot_at if peer == self.responder else self.accept_arrives_at

    def is_backgrounded_at(self, peer: int) -> int:
        """Return 1 if this peer has backgrounded the exchange, else 0."""
        return self.backgrounded >> (peer == self.responder) & 1


class Slots:
    """The exchanges in progress of all peers, and the slots that they take. Each list holds one entry per peer."""

    def __init__(self, peers: int) -> None:
        self.exchanges: list[list[PairExchange]] = [[] for _ in range(peers)]
        self.own: list[list[PairExchange]] = [[] for _ in range(peers)]  # Those with a slot that the peer initiated.
        self.used = [0] * peers

    def add(self, exchange: PairExchange, side: int) -> None:
        """Add an exchange, which takes a slot of one side."""
        peer, _ = exchange.peer_and_partner(side)
        self.exchanges[peer].append(exchange)
        self.used[peer] += 1
        if side == INITIATOR:
            self.own[peer].append(exchange)

    def remove(self, exchange: PairExchange, side: int) -> None:
        """Remove an exchange from one side, and free the slot that it takes there."""
        peer, _ = exchange.peer_and_partner(side)
        self.exchanges[peer].remove(exchange)
        if not exchange.backgrounded >> side & 1:
            self.free(exchange, side)

    def free(self, exchange: PairExchange, side: int) -> None:
        """Free the slot of an exchange, which goes on."""
        peer, _ = exchange.peer_and_partner(side)
        self.used[peer] -= 1
        if side == INITIATOR:
            self.own[peer].remove(exchange)

    def clear(self, peer: int) -> None:
        """Forget the exchanges of a peer that dies or leaves."""
        self.exchanges[peer].clear()
        self.own[peer].clear()
        self.used[peer] = 0

    def backgrounded(self, peer: int) -> int:
        """Return the number of a peer's exchanges that take no slot."""
        return sum(exchange.is_backgrounded_at(peer) for exchange in self.exchanges[peer])
