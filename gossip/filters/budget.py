"""Budgets: a bound on how far one partner may move a node, three times a typical partner's movement plus two moves.

A lie shorter than the clip radius is taken whole, so a partner that comes often could move a node without limit.
Movement is counted in moves: half a difference of the radius' length is one. Partner p's movement decays with the
node's own intervals:

    S_p <- S_p exp(-dt / T) + moves           S_p <= B = 3 median(S of the other partners) + 2

``3`` is :data:`MEDIAN_FACTOR`, ``2`` is :data:`SPARE_MOVES`, and ``T`` is :data:`MEMORY_INTERVALS`. If a difference
would take S_p beyond B, only the rest is taken. Only the node's own steps count as time, so that no
peer can speed up the decay. Let B be the largest bound within t intervals. Then p takes at most ``B (1 + t / T)`` in
that time: S_p is at most B at the end, and at most B dt / T of it decays in dt.

The spare moves allow for chance. Two nodes of a large swarm may meet three times in a few intervals and then not for
long. Meanwhile the median of sums of one or two meetings is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["MAX_PARTNERS", "MEDIAN_FACTOR", "MEMORY_INTERVALS", "MIN_OTHERS", "SPARE_MOVES", "Budget"]

MEDIAN_FACTOR = 3.0  # A partner of four times our pace is met 2.5 times as often.
# Without spare moves 4 % of the exchanges of 32 honest nodes hit the budget, with one 0.7 %, with two 0.1 %.
SPARE_MOVES = 2.0
MEMORY_INTERVALS = 64.0  # Number of our intervals in which movement decays to 1/e.
# Fewest other partners that set a budget. One alone would set it, and a liar could set it to nothing.
MIN_OTHERS = 2
MAX_PARTNERS = 64  # Partners that are remembered: about as many are met in that time.

Here = Callable[[Iterable[PeerId]], list[PeerId]]  # Returns those of some members that are present.


class Budget:
    """The recent movement that the partners of one node caused."""

    def __init__(self) -> None:
        # By partner: its movement in moves, and the number of our intervals at that time.
        self._moved = Recent[PeerId, tuple[float, float]](MAX_PARTNERS)

    def movement_of(self, partner: PeerId, at: float) -> float:
        """Return this partner's movement in moves, decayed to interval ``at`` of our own training."""
        moves, when = self._moved.get(partner, (0.0, at))
        return moves * math.exp(min(0.0, when - at) / MEMORY_INTERVALS)

    def moves_left(self, partner: PeerId, at: float, here: Here) -> float:
        """Return how many moves this partner has left at our interval ``at``; infinity if nothing sets a budget.

        Only partners that are ``here`` count. Otherwise the movement of members that have died would bound those that
        remain.
        """
        others = sorted([self.movement_of(peer, at) for peer in here(self._moved) if peer != partner])
        if len(others) < MIN_OTHERS:
            return math.inf
        return max(0.0, MEDIAN_FACTOR * others[len(others) // 2] + SPARE_MOVES - self.movement_of(partner, at))

    def add(self, partner: PeerId, moves: float, at: float) -> None:
        """Count an exchange with this partner that moved us by ``moves``, at our interval ``at``."""
        self._moved[partner] = self.movement_of(partner, at) + moves, at
