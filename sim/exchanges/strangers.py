"""Protection against failing exchanges with new partners: a peer that had such failures treats them all as one."""

from __future__ import annotations

import math

from gossip.recent import Recent
from gossip.selection.partners import WARY_FAILURES, WARY_S
from sim.exchanges.meeting import Meeting

__all__ = ["Strangers"]


class Strangers:
    """The failures of all peers with new partners, treated as in :class:`gossip.selection.partners.Partners`.

    ``table`` holds each peer's exchanges, ``met`` the partners of its recent mixes. Any other partner is new.
    """

    def __init__(self, table: list[list[Meeting]], met: list[Recent[int, int]]) -> None:
        self.table, self.met = table, met
        self.failures = [0] * len(met)  # failed exchanges with new partners, minus successful ones
        self.until = [-math.inf] * len(met)  # end of the period without new partners

    def slow(self, peer: int, partner: int, now: float) -> None:
        """Count an exchange that takes too long or has failed, if the partner is new."""
        if partner not in self.met[peer]:
            self.failures[peer] = min(self.failures[peer] + 1, WARY_FAILURES + 1)
            if self.failures[peer] >= WARY_FAILURES:
                self.until[peer] = now + WARY_S

    def mixed(self, peer: int) -> None:
        """Count a finished exchange with a new partner."""
        if self.failures[peer]:
            self.failures[peer] -= 1

    def forget(self, peer: int) -> None:
        """Reset a peer that starts a new life."""
        self.failures[peer], self.until[peer] = 0, -math.inf

    def barred(self, peer: int, now: float) -> bool:
        """Return True if the peer avoids all new partners now."""
        if self.failures[peer] < WARY_FAILURES:
            return False
        met = self.met[peer]
        return now < self.until[peer] or any(one.partner(peer) not in met for one in self.table[peer])

    def shuns(self, peer: int, sender: int, now: float) -> bool:
        """Return True if the peer ignores an offer from this sender."""
        return self.failures[peer] >= WARY_FAILURES and sender not in self.met[peer] and self.barred(peer, now)
