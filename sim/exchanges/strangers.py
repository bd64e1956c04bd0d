"""Protection against failing exchanges with new partners: after a few failures a peer is wary of all of them.

A wary peer mixes for a while only with partners of recent mixes, and then with one new partner at a time.
"""

import math

from gossip.recent import Recent
from gossip.selection.partners import WARY_FAILURES, WARY_S
from sim.exchanges.pair_exchange import PairExchange


class Strangers:
    """The failures of all peers with new partners, treated as in :class:`gossip.selection.partners.Partners`.

    ``exchanges`` holds each peer's exchanges, ``mixed_with`` the partners of its recent mixes. All others are new.
    """

    def __init__(self, exchanges: list[list[PairExchange]], mixed_with: list[Recent[int, int]]) -> None:
        self.exchanges, self.mixed_with = exchanges, mixed_with
        self.failures = [0] * len(mixed_with)  # Failed exchanges with new partners, minus successful ones.
        self.wary_until = [-math.inf] * len(mixed_with)  # End of the period without new partners.

    def note_slow(self, peer: int, partner: int, now: float) -> None:
        """Count an exchange that takes too long or has failed, if the partner is new."""
        if partner not in self.mixed_with[peer]:
            self.failures[peer] = min(self.failures[peer] + 1, WARY_FAILURES + 1)
            if self.failures[peer] >= WARY_FAILURES:
                self.wary_until[peer] = now + WARY_S

    def note_mix(self, peer: int) -> None:
        """Count a finished exchange with a new partner."""
        if self.failures[peer]:
            self.failures[peer] -= 1

    def forget(self, peer: int) -> None:
        """Reset a peer that starts a new life."""
        self.failures[peer], self.wary_until[peer] = 0, -math.inf

    def is_wary(self, peer: int, now: float) -> bool:
        """Return True if the peer avoids all new partners now."""
        if self.failures[peer] < WARY_FAILURES:
            return False
        recent = self.mixed_with[peer]  # It tries one new partner at a time, so one in an exchange is enough.
        return now < self.wary_until[peer] or any(
            exchange.partner_of(peer) not in recent for exchange in self.exchanges[peer]
        )

    def is_declined(self, peer: int, sender: int, now: float) -> bool:
        """Return True if the peer refuses an offer from this sender."""
        return self.failures[peer] >= WARY_FAILURES and sender not in self.mixed_with[peer] and self.is_wary(peer, now)
