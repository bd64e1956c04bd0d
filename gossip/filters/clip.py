"""Clipping of differences: to a radius that follows the usual distance, and to limits of direction and partner.

A difference is the partner's vector minus ours. The *radius* is 1.5 times the usual distance to partners, or
``filter_limit``. The *reach* of a difference is its length in radii. Each exchange also saves a small part of a radius,
and saved radii are spent on a longer difference, so that it is taken whole.
"""

import math

import numpy as np

from gossip.config import Config
from gossip.filters.budget import Budget
from gossip.filters.directions import Directions
from gossip.filters.rule import MIN_ELEMENTS, Filter, Floats, PresentAmong
from gossip.ids import PeerId
from gossip.recent import Recent

# Partners whose distances count. Their lower quartile sets the radius, and is honest while more than a quarter of the
# partners are.
MAX_PARTNERS = 16
MIN_PARTNERS = 4  # Fewest partners whose distances alone set a radius.
# Fewest partners with a limit of direction. The differences between few nodes have few directions, and none is odd.
PARTNERS_WITH_DIRECTIONS = 6
# The largest reach that is ever taken whole: honest nodes with uneven data are up to this far away.
MAX_WHOLE_RADII = 5 / 3
# Part of a radius that each exchange saves for longer differences. With two radii at once, attackers that flip the
# signs of their vectors took over as a fifth of all members.
SAVED_PER_EXCHANGE = 1 / 32
# Radii that are taken of the furthest vectors. With 1, such attackers drag honest nodes along. With 0, two halves of
# a swarm that drifted apart stay apart.
MIN_RADII = 0.5
OWN_SHARE = 0.5  # Share of the square of our own movement that is added to the usual square: 1 lets more lies in.


def clip_factor(difference_sq: float, radius: float) -> float:
    """Return the share of the difference that is taken: ``min(1, radius / |difference|)``, 1 for a radius of 0.

    This is ``x_i + w clip(x_j - x_i, tau)`` (He, Karimireddy and Jaggi, "Byzantine-robust decentralized learning via
    ClippedGossip", 2022).
    """
    if radius <= 0 or difference_sq <= radius * radius:
        return 1.0
    return rounded_share(radius, math.sqrt(difference_sq))


def taper(reach: float, saved: float) -> float:
    """Return how many radii are taken of a difference of ``reach`` radii, with ``saved`` radii saved up.

    Up to ``1 + saved`` radii all is taken. Beyond ``MAX_WHOLE_RADII`` the part falls as the difference grows, down to
    ``MIN_RADII``. That is a redescending influence (Hampel, "The influence curve and its role in robust estimation",
    1974). Honest nodes with unlike data are up to two radii away, and harmful lies tens of radii.
    """
    return min(reach, 1.0 + saved, max(MIN_RADII, 2 * MAX_WHOLE_RADII - reach))


def rounded_share(part: float, whole: float) -> float:
    """Return ``part / whole``, at most 1, rounded down to a 4,096th.

    Both sides of one fixed radius must cut off the same, but may add up the squares in another order. A result
    within a thousandth of a 4,096th below a step counts as that step. Otherwise, of two nodes exactly a radius apart,
    one might take all and the other not.
    """
    return min(1.0, math.floor(4096 * part / whole + 0.001) / 4096)


def rounded_length(length: float) -> float:
    """Return a positive length rounded to a power of 2^(1/8), at most 5 % away.

    As for :func:`rounded_share`, drivers may add up the squares in another order, and must decide the same.
    """
    return math.exp2(round(8 * math.log2(length)) / 8)


class Clip(Filter):
    """A filter that shortens differences to a radius, to the limit in one direction, and to a partner's budget."""

    usual_distances = 1.5  # The radius, as a multiple of the usual distance.

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.fixed_radius = config.filter_limit
        # The mean square of an element's difference, in the last exchange with each partner.
        self.mean_squares = Recent[PeerId, float](MAX_PARTNERS)
        self.budget = Budget()
        self.directions = Directions()
        self.saved_radii = 0.0  # Radii that were saved for longer differences.
        self.last_movement = 0.0  # Distance that local steps alone went between the last two snapshots.
        self.largest_movement = 0.0  # The largest of these distances.
        self.donors_sq = 0.0  # Mean square of an element's difference between the donors of our weights.

    def on_joined(self, donors_sq: float) -> None:
        """Forget the distances and directions, which were measured from our old weights."""
        self.donors_sq = donors_sq
        self.mean_squares.clear()
        self.directions = Directions()

    def on_moved(self, distance: float) -> None:
        if distance >= 0:
            self.last_movement = distance
            self.largest_movement = max(self.largest_movement, distance)

    def take_share(
        self, partner: PeerId, weight: float, difference_sq: float, size: int, present_among: PresentAmong,
        intervals: float, sketch: Floats | None = None,
    ) -> tuple[float, tuple[str, ...]]:  # fmt: skip
        radius = self.radius(size)  # It follows from earlier exchanges alone.
        share, reach = self.clip_to_radius(difference_sq, radius)
        reasons: tuple[str, ...] = ("clipped",) if share < 1.0 else ()
        if sketch is not None and radius > 0 and len(self.mean_squares) >= PARTNERS_WITH_DIRECTIONS:
            length = rounded_length(max(math.sqrt(difference_sq), radius))
            direction_share = self.directions.take(sketch / np.float32(length))
            if direction_share < 1.0:
                share, reasons = share * direction_share, (*reasons, "direction")
        self.mean_squares[partner] = difference_sq / size
        return self.spend(partner, weight, share, reach, size, present_among, intervals, reasons)

    def take_settling_share(
        self, partner: PeerId, weight: float, difference_sq: float, size: int, present_among: PresentAmong,
        intervals: float,
    ) -> tuple[float, tuple[str, ...]]:  # fmt: skip
        """Apply the radius of the training, and the budget. Members that settle differ in few directions."""
        share, reach = self.clip_to_radius(difference_sq, self.radius(size))
        reasons = ("clipped",) if share < 1.0 else ()
        return self.spend(partner, weight, share, reach, size, present_among, intervals, reasons)

    def spend(
        self, partner: PeerId, weight: float, share: float, reach: float, size: int, present_among: PresentAmong,
        intervals: float, reasons: tuple[str, ...],
    ) -> tuple[float, tuple[str, ...]]:  # fmt: skip
        """Take this share of a difference from the partner's budget; return the share that it affords, and why."""
        if size < MIN_ELEMENTS:
            return share, reasons
        moves = 2.0 * weight * share * reach  # A move is half a radius.
        moves_left = self.budget.moves_left(partner, moves, intervals, present_among)
        if moves > moves_left:
            affordable_share = rounded_share(moves_left, moves)
            share, moves, reasons = share * affordable_share, moves * affordable_share, (*reasons, "budget")
        self.budget.add(partner, moves, intervals)
        return share, reasons

    def clip_to_radius(self, difference_sq: float, radius: float) -> tuple[float, float]:
        """Return the share of a difference that is taken, and the reach of the whole; spend saved radii on it.

        Without a radius (0) the share is 1, and the reach counts as 1.
        """
        if radius <= 0:
            return 1.0, 1.0
        reach = math.sqrt(difference_sq) / radius
        if self.fixed_radius is not None:
            return clip_factor(difference_sq, radius), reach
        taken_radii = taper(reach, self.saved_radii)
        saved = self.saved_radii - max(0.0, taken_radii - 1.0) + SAVED_PER_EXCHANGE
        self.saved_radii = min(MAX_WHOLE_RADII - 1.0, saved)
        return (1.0 if taken_radii >= reach else rounded_share(taken_radii, reach)), reach

    def longest_whole(self, elements: int) -> float:
        """Return the longest difference of this many elements that is taken whole; 0 means any."""
        return self.radius(elements) * (1.0 + self.saved_radii if self.fixed_radius is None else 1.0)

    def radius(self, elements: int) -> float:
        """Return the clip radius for this many elements, 0 for none: fixed, or a multiple of the usual distance.

        In the second case :func:`taper` decides how much of longer differences is taken. The usual distance is the
        lower quartile of the last distances, one for each partner: meeting more often gives a partner no more
        influence. Lies are further away than the truth, and a node that was moved by a few is far from all others. With
        a median, half of its distances could be due to lies, and it would be moved by the next.

        Before enough distances are known, the node's own steps replace them, since no peer can forge these. Nodes with
        the same weights that then move by ``m`` each are at most ``2 m`` apart. So are nodes that mix at random and
        move by ``m`` between two mixes, each in its own direction. Their mean square distance V from the mean follows
        V = V/2 + m^2, and a pair is sqrt(2 V) apart. The distance between the donors of our weights counts if it is
        longer, since a newcomer without steps knows no other.

        A node whose own recent steps took it far widens its radius by them. That also applies to a part of the vector,
        since a mixed part is rarely as far apart as the whole.
        """
        if self.fixed_radius is not None:
            return self.fixed_radius
        if elements < MIN_ELEMENTS:
            return 0.0
        mean_squares = sorted(self.mean_squares.values())
        if len(mean_squares) < MIN_PARTNERS:
            substitute_sq = max(4 * self.largest_movement**2 / elements, self.donors_sq)
            if not substitute_sq > 0:
                return 0.0
            mean_squares = sorted(mean_squares + [substitute_sq] * (MIN_PARTNERS + 1 - len(mean_squares)))
        usual_sq = elements * mean_squares[len(mean_squares) // 4]
        return self.usual_distances * math.sqrt(usual_sq + OWN_SHARE * self.last_movement**2)
