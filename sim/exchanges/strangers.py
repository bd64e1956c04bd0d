"""Partners that are new to a peer, where exchanges with such fail: all of them count as one."""

from __future__ import annotations

import math

from gossip.recent import Recent
from gossip.selection.partners import WARY, WARY_S
from sim.exchanges.meeting import Meeting

__all__ = ["Strangers"]


class Strangers:
    """As :class:`gossip.selection.partners.Partners` treats them. ``table`` holds each peer's exchanges, ``met`` those
    that each mixed with lately."""

    def __init__(self, table: list[list[Meeting]], met: list[Recent[int, int]]) -> None:
        self.table, self.met = table, met
        self.failures = [0] * len(met)  # with partners that are new, less exchanges with such
        self.until = [-math.inf] * len(met)  # none of those is asked or heard

    def slow(self, peer: int, partner: int, now: float) -> None:
        """An exchange with it takes too long, or has come to nothing."""
        if partner not in self.met[peer]:
            self.failures[peer] = min(self.failures[peer] + 1, WARY + 1)
            if self.failures[peer] >= WARY:
                self.until[peer] = now + WARY_S

    def mixed(self, peer: int) -> None:
        """An exchange with one that is new was finished."""
        if self.failures[peer]:
            self.failures[peer] -= 1

    def forget(self, peer: int) -> None:
        """It begins anew."""
        self.failures[peer], self.until[peer] = 0, -math.inf

    def barred(self, peer: int, now: float) -> bool:
        """Whether it has nothing to do with those that are new at the moment."""
        if self.failures[peer] < WARY:
            return False
        met = self.met[peer]
        return now < self.until[peer] or any(one.partner(peer) not in met for one in self.table[peer])

    def shuns(self, peer: int, sender: int, now: float) -> bool:
        """Whether an offer of this one is not heard."""
        return self.failures[peer] >= WARY and sender not in self.met[peer] and self.barred(peer, now)
