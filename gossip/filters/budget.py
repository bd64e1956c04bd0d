"""How far one partner may move a node: as three typical partners do, and two exchanges more.

A lie that is shorter than the clip radius is taken whole, so a partner that comes often would move a node as far as it
likes. Movement is counted in moves: half a difference as long as the radius is one. What partner p has moved the node
decays with the node's own intervals,

    S_p <- S_p exp(-dt / T) + moves           S_p <= B = FACTOR median(S of the other partners) + SAVED

and of a difference that would take S_p beyond B only the rest is taken. Only the node's own steps let time pass, so
that nobody hastens the decay. The sum of what p takes within t intervals is therefore at most ``B (1 + t / T)``, with B
for the largest bound in that time: S_p is at most B at the end, and at most B dt / T of it decays in dt.

``SAVED`` makes room for chance: two nodes of a large swarm may meet three times in a few intervals and then not for
long, while the median of sums of one or two meetings is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["FACTOR", "MEMORY", "OTHERS", "PARTNERS", "SAVED", "Budget"]

FACTOR = 3.0  # times what the median other partner moved us: a partner of four times our pace is met 2.5 times as often
SAVED = 2.0  # moves: without them 4 % of the exchanges of 32 honest nodes met the budget, with one 0.7, with two 0.1
MEMORY = 64.0  # intervals in which movement is forgotten (T)
OTHERS = 2  # partners beside it, without whom there is no budget: one alone would set it, and a liar to nothing
PARTNERS = 64  # remembered, as many as are met in about that time

Here = Callable[[Iterable[PeerId]], list[PeerId]]  # of some members, those that are there


class Budget:
    """What the partners of one node have moved it by lately."""

    def __init__(self) -> None:
        self._moved = Recent[PeerId, tuple[float, float]](PARTNERS)  # moves, as of which of our intervals

    def moved(self, partner: PeerId, at: float) -> float:
        """Return the moves of this partner that are not forgotten, at this count of our own intervals."""
        moves, when = self._moved.get(partner, (0.0, at))
        return moves * math.exp(min(0.0, when - at) / MEMORY)

    def left(self, partner: PeerId, at: float, here: Here) -> float:
        """Return how many moves this partner has left; infinity without a budget.

        Only partners that are ``here`` count: a node that is left after others died would be held to what the dead did
        lately.
        """
        others = sorted([self.moved(peer, at) for peer in here(self._moved) if peer != partner])
        if len(others) < OTHERS:
            return math.inf
        return max(0.0, FACTOR * others[len(others) // 2] + SAVED - self.moved(partner, at))

    def took(self, partner: PeerId, moves: float, at: float) -> None:
        """Count an exchange that moves us so far."""
        self._moved[partner] = self.moved(partner, at) + moves, at
