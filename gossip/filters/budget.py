"""Budgets: a bound on how far one partner may move a node, three times a typical partner's movement plus two moves.

The filter :mod:`gossip.filters.clip` shortens a difference to the *clip radius*, a multiple of the usual distance
between this node and its partners. A lie shorter than that is taken whole. So without a budget, a partner that
comes often could move the node without limit.

Movement is counted in *moves*. One move is half the radius: a pair mixes to its mean, so a difference as long as the
radius moves a node by half of it. The movement S_p that partner p caused decays with the *intervals* of local steps
that this node has trained. It must not exceed the budget B:

    S_p <- S_p exp(-dt / T) + moves           S_p <= B = 3 median(S of the other partners) + 2

``3`` is :data:`MEDIAN_FACTOR`, ``2`` is :data:`SPARE_MOVES`, and ``T`` is :data:`MEMORY_INTERVALS`. If a difference
would take S_p beyond B, only the rest is taken. Only the node's own training counts as time, so that no peer can speed
up the decay.

The spare moves allow for chance. Two nodes of a large swarm may meet three times in a few intervals and then not for
long. Meanwhile the median of sums of one or two meetings is small.

**Bound.** Within t intervals a partner moves the node by at most ``M (1 + t / T)`` moves, where M is the largest budget
in that time. *Proof.* Each of its moves is still in S_p at the end, or has decayed. S_p is at most M at the end, and at
most M dt / T of it decays in dt.
"""

import math
from collections.abc import Callable, Iterable

from gossip.ids import PeerId
from gossip.recent import Recent

# Fast partners are honest too: one that trains four times as fast as this node is met 2.5 times as often as others.
MEDIAN_FACTOR = 3.0
# Without spare moves 4 % of the exchanges of 32 honest nodes hit the budget, with one 0.7 %, with two 0.1 %.
SPARE_MOVES = 2.0
MEMORY_INTERVALS = 64.0  # Number of our intervals in which movement decays to 1/e.
# The fewest other partners that set a budget. A single one would be the median, and a liar could then lower the budget
# to the spare moves by never moving us.
MIN_OTHERS = 2
MAX_PARTNERS = 64  # Partners that are remembered: about as many are met in MEMORY_INTERVALS.

PresentAmong = Callable[[Iterable[PeerId]], list[PeerId]]
"""Return those of some members that are present: ALIVE, and with weights of our run."""


class Budget:
    """The recent movement that each partner of one node caused, which bounds what it may still cause.

    Times are numbers of intervals that the node has trained, and may be fractions.
    """

    def __init__(self) -> None:
        # For each partner its movement in moves, and the time for which this value holds.
        self._movements = Recent[PeerId, tuple[float, float]](MAX_PARTNERS)

    def movement_of(self, partner: PeerId, intervals: float) -> float:
        """Return this partner's movement in moves, decayed to the time ``intervals``."""
        moves, counted_at = self._movements.get(partner, (0.0, intervals))
        return moves * math.exp(min(0.0, counted_at - intervals) / MEMORY_INTERVALS)

    def moves_left(self, partner: PeerId, wanted: float, intervals: float, present_among: PresentAmong) -> float:
        """Return how many moves this partner has left at the time ``intervals``; infinity if ``wanted`` are.

        Only present partners set the budget. Otherwise the movement of members that have died would bound those that
        remain. Too few others set none.
        """
        caused = self.movement_of(partner, intervals)
        if caused + wanted <= SPARE_MOVES:  # The median is not needed, which takes longer than all else here.
            return math.inf
        present = present_among(self._movements)
        others = sorted([self.movement_of(other, intervals) for other in present if other != partner])
        if len(others) < MIN_OTHERS:
            return math.inf
        median = others[len(others) // 2]  # Of an even number, the upper of the two in the middle.
        return max(0.0, MEDIAN_FACTOR * median + SPARE_MOVES - caused)

    def add(self, partner: PeerId, moves: float, intervals: float) -> None:
        """Count an exchange with this partner at the time ``intervals`` that moved the node by ``moves``."""
        self._movements[partner] = self.movement_of(partner, intervals) + moves, intervals
