"""The pair exchanges in progress: the state of each one, for both of its sides, and the slots that they take.

The sides of an exchange are its *initiator*, side 0, and its *responder*, side 1. Each copies its model (the
*snapshot*) and streams the copy to the other. It sends a Commit once it has the other's. A peer has few slots, and each
exchange in progress takes one of them on either side. A peer *backgrounds* an exchange that lasts too long: it goes on,
but frees the slot.
"""

import math

from gossip.exchange.beginning import OFFERS_PER_PARTNER

INITIATOR, RESPONDER = 0, 1  # The sides.
BOTH = 0b11  # Both sides in a bit mask, which has the bit ``1 << side`` for a side.


class PairExchange:
    """A pair exchange in progress.

    ``ended`` and ``backgrounded`` are bit masks of sides. ``ended``: the exchange has ended for this side.
    ``backgrounded``: it takes none of this side's slots. A time is ``math.inf`` while no accepted offer determines it.
    """

    __slots__ = (
        "accept_arrives_at", "asked", "attempt", "backgrounded", "commits_at", "ended", "has_dead_side", "initiator",
        "initiator_steps", "max_asked", "number", "offered_at", "requested_at", "responder", "responder_steps",
        "snapshot_at", "weight",
    )  # fmt: skip

    def __init__(self, initiator: int, number: int, steps: int, now: float, asked: set[int]) -> None:
        self.initiator, self.responder = initiator, -1  # The peers of the two sides; -1 before the first offer.
        self.number = number  # Its number on the tape.
        self.attempt = 0  # The number of the latest offer; events of earlier offers are void.
        self.asked = asked  # No offer may go to these again: the asked ones, and the partners of other exchanges.
        self.max_asked = len(asked) + OFFERS_PER_PARTNER
        self.weight = 0.5  # The share of the difference that each side adds.
        self.initiator_steps, self.responder_steps = steps, 0  # Step counts at the two snapshots.
        self.requested_at = now  # When the initiator's snapshot was due.
        self.offered_at = now  # When the latest offer was sent.
        self.snapshot_at = math.inf  # When the responder takes its snapshot.
        self.accept_arrives_at = math.inf  # When the initiator receives the Accept.
        self.commits_at = (math.inf, math.inf)  # By side: when it has the partner's stream and sends its Commit.
        self.ended = self.backgrounded = 0
        self.has_dead_side = False  # True if one side has died, and the other one still mixes.

    def peer_and_partner(self, side: int) -> tuple[int, int]:
        """Return the peer of a side, and the other one."""
        return (self.responder, self.initiator) if side == RESPONDER else (self.initiator, self.responder)

    def has_ended_for(self, side: int) -> bool:
        return bool(self.ended >> side & 1)

    def is_backgrounded_by(self, side: int) -> bool:
        return bool(self.backgrounded >> side & 1)

    def partner_of(self, peer: int) -> int:
        return self.initiator if peer == self.responder else self.responder

    def streams_at(self, peer: int) -> float:
        """Return when this peer starts to stream."""
        return self.snapshot_at if peer == self.responder else self.accept_arrives_at

    def is_backgrounded_at(self, peer: int) -> bool:
        return self.is_backgrounded_by(RESPONDER if peer == self.responder else INITIATOR)


class Slots:
    """The slots of all peers, and their exchanges in progress. Each list holds one entry per peer."""

    def __init__(self, peers: int) -> None:
        self.exchanges: list[list[PairExchange]] = [[] for _ in range(peers)]
        self.own: list[list[PairExchange]] = [[] for _ in range(peers)]  # Initiated by the peer, and with a slot.
        self.used = [0] * peers  # Number of slots taken.

    def add(self, exchange: PairExchange, side: int) -> None:
        """Add an exchange to one side, where it takes a slot."""
        peer, _ = exchange.peer_and_partner(side)
        self.exchanges[peer].append(exchange)
        self.used[peer] += 1
        if side == INITIATOR:
            self.own[peer].append(exchange)

    def remove(self, exchange: PairExchange, side: int) -> None:
        """Remove an exchange from one side, and free the slot that it takes there."""
        peer, _ = exchange.peer_and_partner(side)
        self.exchanges[peer].remove(exchange)
        if not exchange.is_backgrounded_by(side):
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
