"""Budgets: a bound on how far one partner may move a node, three times a typical partner's movement plus two moves.

A lie shorter than the clip radius is taken whole, so a partner that comes often could move a node without limit.
Movement is counted in moves: half a difference of the radius' length is one. Partner p's movement decays with the
node's own intervals:

    S_p <- S_p exp(-dt / T) + moves           S_p <= B = FACTOR median(S of the other partners) + SAVED

If a difference would take S_p beyond B, only the rest is taken. Only the node's own steps count as time, so that no
peer can speed up the decay. Let B be the largest bound within t intervals. Then p takes at most ``B (1 + t / T)`` in
that time: S_p is at most B at the end, and at most B dt / T of it decays in dt.

``SAVED`` allows for chance. Two nodes of a large swarm may meet three times in a few intervals and then not for
long. Meanwhile the median of sums of one or two meetings is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["FACTOR", "MEMORY", "OTHERS", "PARTNERS", "SAVED", "Budget"]

FACTOR = 3.0  # Times the median of the other partners: a partner of four times our pace is met 2.5 times as often.
# In moves: without them 4 % of the exchanges of 32 honest nodes hit the budget, with one 0.7 %, with two 0.1 %.
SAVED = 2.0
MEMORY = 64.0  # Intervals in which movement is forgotten (T).
# The least number of other partners for a budget: one alone would set it, and a liar could set it to nothing.
OTHERS = 2
PARTNERS = 64  # The number remembered: about as many are met in that time.

Here = Callable[[Iterable[PeerId]], list[PeerId]]  # Returns those of some members that are present.


class Budget:
    """The recent movement that the partners of one node caused."""

    def __init__(self) -> None:
        self._moved = Recent[PeerId, tuple[float, float]](PARTNERS)  # Moves, and our interval count at the time.

    def moved(self, partner: PeerId, at: float) -> float:
        """Return this partner's movement that is not forgotten, at this count of our own intervals."""
        moves, when = self._moved.get(partner, (0.0, at))
        return moves * math.exp(min(0.0, when - at) / MEMORY)

    def left(self, partner: PeerId, at: float, here: Here) -> float:
        """Return how many moves this partner has left; infinity without a budget.

        Only partners that are ``here`` count. Otherwise the movement of members that have died would bound those that
        remain.
        """
        others = sorted([self.moved(peer, at) for peer in here(self._moved) if peer != partner])
        if len(others) < OTHERS:
            return math.inf
        return max(0.0, FACTOR * others[len(others) // 2] + SAVED - self.moved(partner, at))

    def took(self, partner: PeerId, moves: float, at: float) -> None:
        """Count an exchange that moved us by this many moves."""
        self._moved[partner] = self.moved(partner, at) + moves, at
