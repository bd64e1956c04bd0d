"""Clipping of long differences: to a radius that follows the usual distance, and to a partner's budget."""

from __future__ import annotations

import math

from gossip.config import Config
from gossip.filters.budget import Budget
from gossip.filters.rule import FEW, Filter, Here
from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["Clip", "clip_factor"]

# Partners in the sample. Its lower quartile sets the radius, and is honest even if three quarters are too long.
REMEMBERED = 16
ENOUGH = 4  # The least partners for a radius without a stand-in.
WHOLE = 5 / 3  # In radii, the longest that is ever taken whole: honest nodes with uneven data are up to this far away.
GAIN = 1 / 32  # In radii, saved by each exchange for longer ones; with two at once a fifth of flipped signs took over.
LEAST = 0.5  # In radii, the part of the furthest: at 1 flipped signs drag nodes along, at 0 two halves stay apart.
OWN = 0.5  # The share of the own movement's square that is added to the usual square: 1 lets more lies in.


def clip_factor(difference_sq: float, radius: float) -> float:
    """Return the share of the difference that is taken: ``min(1, radius / |difference|)``, 1 for a radius of 0.

    This is ``x_i + w clip(x_j - x_i, tau)`` (He, Karimireddy and Jaggi, "Byzantine-robust decentralized learning via
    ClippedGossip", 2022).
    """
    if radius <= 0 or difference_sq <= radius * radius:
        return 1.0
    return share(radius, math.sqrt(difference_sq))


def taper(reach: float, spare: float) -> float:
    """Return how many radii are taken of a difference of ``reach`` radii, with ``spare`` radii saved up.

    Up to ``1 + spare`` all is taken. Beyond ``WHOLE`` radii the part falls as the difference grows, down to ``LEAST``.
    That is a redescending influence (Hampel, "The influence curve and its role in robust estimation", 1974). Honest
    nodes with unlike data are up to two radii away, and harmful lies tens of radii.
    """
    return min(reach, 1.0 + spare, max(LEAST, 2 * WHOLE - reach))


def share(part: float, whole: float) -> float:
    """Return ``part / whole``, at most 1, rounded down to a 4,096th.

    Both sides of one fixed radius must cut off the same, but may add up the squares in another order. A result
    within a thousandth of a 4,096th below a step counts as that step. Otherwise, of two nodes exactly a radius apart,
    one might take all and the other not.
    """
    return min(1.0, math.floor(4096 * part / whole + 0.001) / 4096)


class Clip(Filter):
    """A radius, and the sample of distances that sets it."""

    usual = 1.5  # The radius in usual distances.

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # The mean square of an element's difference, in the last exchange with each partner.
        self.squares = Recent[PeerId, float](REMEMBERED)
        self.budget = Budget()
        self.spare = 0.0  # Radii saved for longer differences.
        self.recent = 0.0  # Distance that local steps alone went between the last two snapshots.
        self.movement = 0.0  # The largest of these distances.
        self.donors_sq = 0.0  # Mean square of an element's difference between the donors of our weights.

    def joined(self, donors_sq: float) -> None:
        """Forget the distances: they were measured from our old weights."""
        self.donors_sq = donors_sq
        self.squares.clear()

    def moved(self, distance: float) -> None:
        if distance >= 0:
            self.recent = distance
            self.movement = max(self.movement, distance)

    def take(
        self, partner: PeerId, weight: float, difference_sq: float, size: int, here: Here, at: float
    ) -> tuple[float, tuple[str, ...]]:
        # The radius follows from earlier exchanges alone.
        radius = self.radius(size)
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
        """Return the share of a difference that is taken before the budget, and its length in radii."""
        if radius <= 0:
            return 1.0, 1.0
        reach = math.sqrt(difference_sq) / radius
        if self.config.filter_limit is not None:
            return clip_factor(difference_sq, radius), reach
        wanted = taper(reach, self.spare)
        self.spare = min(WHOLE - 1.0, self.spare - max(0.0, wanted - 1.0) + GAIN)
        return (1.0 if wanted >= reach else share(wanted, reach)), reach

    def longest(self, elements: int) -> float:
        """Return the longest difference of this many elements that is taken whole; 0 means any."""
        return self.radius(elements) * (1.0 + self.spare if self.config.filter_limit is None else 1.0)

    def radius(self, elements: int) -> float:
        """Return the clip radius for this many elements, 0 for none: fixed, or a multiple of the usual distance.

        In the second case :func:`taper` decides how much of longer differences is taken. The usual distance is the
        lower quartile of those seen, one for each partner: meeting more often gives a partner no more influence. Lies
        are further away than the truth, and a node that fell for a few is far from all others. With a median, half of
        its distances could be lies or their echo, and it would fall for the next.

        Before enough distances are seen, the node's own steps replace them, since no peer can forge these. Nodes with
        the same weights that then move by ``m`` each are at most ``2 m`` apart. So are nodes that mix at random and
        move by ``m`` between two mixes, each in its own direction: V = V/2 + m^2, and a pair is sqrt(2 V) apart. The
        distance between the donors counts if it is longer: a newcomer without steps knows no other.

        A node whose own recent steps took it far widens its radius by them. That also applies to a part of the vector,
        since a mixed part is rarely as far apart as the whole.
        """
        config = self.config
        if config.filter_limit is not None:
            return config.filter_limit
        if elements < FEW:
            return 0.0
        known = sorted(self.squares.values())
        if len(known) < ENOUGH:
            stand_in = max(4 * self.movement**2 / elements, self.donors_sq)
            if not stand_in > 0:
                return 0.0
            known = sorted(known + [stand_in] * (ENOUGH + 1 - len(known)))
        return self.usual * math.sqrt(elements * known[len(known) // 4] + OWN * self.recent**2)
