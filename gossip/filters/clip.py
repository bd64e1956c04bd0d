"""Long differences are cut off: at a radius that follows the usual distance, and at what a partner's budget leaves."""

from __future__ import annotations

import math

from gossip.config import Config
from gossip.filters.budget import Budget
from gossip.filters.rule import FEW, Filter, Here
from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["Clip", "clip_factor"]

REMEMBERED = 16  # partners whose distances' lower quartile a radius follows: with three quarters too long it is honest
ENOUGH = 4  # of them before they alone say what is usual
WHOLE = 5 / 3  # radii, the longest that is ever taken whole: honest nodes of uneven data are up to so far away
GAIN = 1 / 32  # of a radius, what each exchange saves for that; with two at once a fifth of flipped signs took over
LEAST = 0.5  # radii that are taken of the furthest: with 1 flipped signs drag nodes along, and with 0 halves stay apart
OWN = 0.5  # of the square of its own steps, what is added to the usual: twice as much lets more lies in


def clip_factor(difference_sq: float, radius: float) -> float:
    """What share of the difference is taken: ``min(1, radius / |difference|)``, for a radius of 0 all of it.

    ``x_i + w clip(x_j - x_i, tau)`` (He, Karimireddy and Jaggi, "Byzantine-robust decentralized learning via
    ClippedGossip", 2022).
    """
    if radius <= 0 or difference_sq <= radius * radius:
        return 1.0
    return share(radius, math.sqrt(difference_sq))


def taper(reach: float, spare: float) -> float:
    """Return how many radii are taken of a difference of ``reach`` radii, where ``spare`` radii are saved up.

    All of it is taken up to ``1 + spare``. Beyond ``WHOLE`` radii what is taken falls as the difference grows, down to
    ``LEAST``: a redescending influence (Hampel, "The influence curve and its role in robust estimation", 1974). Honest
    nodes whose data are unlike the others' are up to two radii away, and lies that aim at harm tens of radii.
    """
    return min(reach, 1.0 + spare, max(LEAST, 2 * WHOLE - reach))


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
        self.budget = Budget()
        self.spare = 0.0  # radii
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
        self, partner: PeerId, weight: float, difference_sq: float, size: int, here: Here, at: float
    ) -> tuple[float, tuple[str, ...]]:
        radius = self.radius(size)  # by what was known before
        taken, reach = self.held(difference_sq, radius)
        why: tuple[str, ...] = ("clipped",) if taken < 1.0 else ()
        self.squares[partner] = difference_sq / size
        if size < FEW:
            return taken, why
        moves, left = 2.0 * weight * taken * reach, self.budget.left(partner, at, here)
        if moves > left:
            kept = share(left, moves)
            taken, moves, why = taken * kept, moves * kept, (*why, "budget")
        self.budget.took(partner, moves, at)
        return taken, why

    def held(self, difference_sq: float, radius: float) -> tuple[float, float]:
        """Return what share of a difference is taken, before its partner's budget, and how many radii long it is."""
        if radius <= 0:
            return 1.0, 1.0
        reach = math.sqrt(difference_sq) / radius
        if self.config.clip_radius is not None:
            return clip_factor(difference_sq, radius), reach
        wanted = taper(reach, self.spare)
        self.spare = min(WHOLE - 1.0, self.spare - max(0.0, wanted - 1.0) + GAIN)
        return (1.0 if wanted >= reach else share(wanted, reach)), reach

    def longest(self, elements: int) -> float:
        """Return the longest difference of so many elements that is taken whole, 0 for any."""
        return self.radius(elements) * (1.0 + self.spare if self.config.clip_radius is None else 1.0)

    def radius(self, elements: int) -> float:
        """The length that differences of so many elements are held to, 0 for none: fixed, or a multiple of the usual
        distance. Where it follows that, :func:`taper` says what is taken of longer ones.

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
