"""Long differences are cut off: at a radius that follows the usual distance, and by what one partner has moved us."""

from __future__ import annotations

import math
from collections import deque

from gossip.config import Config
from gossip.filters.rule import FEW, Filter, Here
from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["Clip", "clip_factor"]

REMEMBERED = 16  # partners whose distances' lower quartile a radius follows: with three quarters too long it is honest
WINDOW = 64  # exchanges in which movement is budgeted: nine with each of seven partners, give or take three
# times what the median other partner moved us: 1.5 for one far away, twice for one met more often by chance
BUDGET = 3.0
OTHERS = 2  # partners beside it, without whom there is no budget: one alone would set it, and a liar to nothing
ENOUGH = 4  # of them before they alone say what is usual
OWN = 0.5  # of the square of its own steps, what is added to the usual: twice as much lets more lies in


def clip_factor(difference_sq: float, radius: float) -> float:
    """What share of the difference is taken: ``min(1, radius / |difference|)``, for a radius of 0 all of it.

    ``x_i + w clip(x_j - x_i, tau)`` (He, Karimireddy and Jaggi, "Byzantine-robust decentralized learning via
    ClippedGossip", 2022).
    """
    if radius <= 0 or difference_sq <= radius * radius:
        return 1.0
    return share(radius, math.sqrt(difference_sq))


def share(part: float, whole: float) -> float:
    """``part / whole``, 1 at most, rounded down to a 4,096th, so that sides of one ``clip_radius`` cut off the same:
    they may add up the squares in another order. What is a 4,096th up to that is one: of two that are as far apart as
    the radius allows, one would take all and the other not."""
    return min(1.0, math.floor(4096 * part / whole + 0.001) / 4096)


class Clip(Filter):
    """A radius, and the distances by which it knows what is usual."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.squares = Recent[PeerId, float](
            REMEMBERED
        )  # mean square of a difference's elements, the last of each partner
        self.window: deque[tuple[PeerId, float]] = deque()  # of the last exchanges, who moved us how far
        self.moved_by: dict[PeerId, float] = {}  # and the sums
        self.recent = 0.0  # how far local steps alone went between the last two snapshots
        self.movement = 0.0  # and the furthest that they ever went
        self.donors_sq = 0.0  # mean square of a difference's elements between those who gave us our weights

    def joined(self, donors_sq: float) -> None:
        """Our own weights were further from everybody, or nearer, and say nothing of these."""
        self.donors_sq = donors_sq
        self.squares.clear()

    def moved(self, distance: float) -> None:
        if distance >= 0:
            self.recent = distance
            self.movement = max(self.movement, distance)

    def take(
        self, partner: PeerId, weight: float, difference_sq: float, size: int, here: Here
    ) -> tuple[float, tuple[str, ...]]:
        taken = clip_factor(difference_sq, self.radius(size))  # by what was known before
        why: tuple[str, ...] = ("clipped",) if taken < 1.0 else ()
        self.squares[partner] = difference_sq / size
        if size < FEW:
            return taken, why
        distance = weight * taken * math.sqrt(difference_sq)
        left = self.left(partner, here)
        if distance > left:
            kept = share(left, distance)
            taken, distance, why = taken * kept, distance * kept, (*why, "budget")
        self.took(partner, distance)
        return taken, why

    def radius(self, elements: int) -> float:
        """The longest difference of so many elements that is taken whole, 0 for any: fixed, or a multiple of the usual
        distance.

        Usual is the lower quartile of those seen, one for each partner: who is met more often, or sees to it, says no
        more of it than any other. Lies are further away than the truth, and a node that fell for a few
        is far from everybody: by the median half of its distances are lies or their echo, and it falls for the next.
        Before enough are seen the node's own steps stand for them, of which nobody can lie: nodes that hold the same
        and then move by ``m`` each are at most ``2 m`` apart, and so are those that mix at random and move by ``m``
        between two mixes, each in a direction of its own (V = V/2 + m^2, and a pair is sqrt(2 V) apart). Or, where it
        is longer, the distance between those who gave it its weights: a newcomer that has taken no step yet knows no
        other. And one whose steps have just taken it far knows that it is the far one: they widen its radius, that of a
        part as well, since what is mixed rarely is as far apart as all.
        """
        config = self.config
        if config.clip_radius is not None:
            return config.clip_radius
        if elements < FEW:
            return 0.0
        known = sorted(self.squares.values())
        if len(known) < ENOUGH:
            stand_in = max(4 * self.movement**2 / elements, self.donors_sq)
            if not stand_in > 0:
                return 0.0
            known = sorted(known + [stand_in] * (ENOUGH + 1 - len(known)))
        return config.clip_factor * math.sqrt(elements * known[len(known) // 4] + OWN * self.recent**2)

    def left(self, partner: PeerId, here: Here) -> float:
        """How far this partner may still move us, infinity without a budget.

        A lie that is shorter than the radius is taken whole, every time. So what one partner moves us within a window
        of exchanges is at most ``BUDGET`` times what the median of the others did; of those alone that are ``here``,
        or whoever is left after others died would be held to what the dead did lately.
        """
        moved = self.moved_by.get(partner)
        if moved is None:
            return math.inf  # the first in a window is held to the radius
        sums = self.moved_by
        others = sorted([sums[peer] for peer in here(sums) if peer != partner])
        if len(others) < OTHERS:
            return math.inf
        return max(0.0, BUDGET * others[len(others) // 2] - moved)

    def took(self, partner: PeerId, distance: float) -> None:
        """An exchange with this partner moves us so far."""
        self.window.append((partner, distance))
        self.moved_by[partner] = self.moved_by.get(partner, 0.0) + distance
        if len(self.window) > WINDOW:
            gone, _ = self.window.popleft()
            rest = [moved for peer, moved in self.window if peer == gone]  # anew: a difference would gather errors
            if rest:
                self.moved_by[gone] = math.fsum(rest)
            else:
                del self.moved_by[gone]
