"""The judgement of compared pieces: which of a newcomer's donors gave another model than the others.

The donors form a ring, so each takes part in two comparisons. Members of one run differ by the consensus distance, and
so do their chunks. A donor gave something else if both its comparisons are far and another comparison is not. A donor
that does not answer a comparison counts as far in it, if another comparison shows that it is: silence hides no lie.

If donors differ, witnesses (members that were no donors) are asked for two of these chunks each. The median of a
donor's comparisons then decides. This finds two liars among three donors while most members are honest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossip.ids import PeerId

__all__ = ["CHUNKS_PER_WITNESS", "MIN_DONORS", "Comparison", "any_differ", "odd_ones", "outvoted", "spread_sq"]

MIN_DONORS = 3  # Donors, and comparisons, of which an odd one can be told: if two differ, either may be wrong.
CHUNKS_PER_WITNESS = 2  # A donor serves as many at once.
FAR = 4.0  # Times the smallest distance. Honest donors differ by less; a wrongly dropped one costs one more piece.
# Relative to the size of the weights. A smaller distance means the same model, however close the others are.
NEAR = 1e-3


@dataclass(slots=True)
class Comparison:
    """The comparison of elements [start, stop): given by ``owner``, fetched from ``other`` as well."""

    owner: PeerId
    other: PeerId
    start: int
    stop: int
    deadline: float
    apart_sq: float = math.inf  # |other's - owner's|^2; infinite until ``other`` has answered.
    own_sq: float = math.nan  # |owner's|^2; NaN until then.

    @property
    def is_answered(self) -> bool:
        return math.isfinite(self.own_sq)

    @property
    def mean_sq(self) -> float:
        """Return the mean square of the difference, for one element."""
        mean_sq = self.apart_sq / max(self.stop - self.start, 1)
        return mean_sq if math.isfinite(mean_sq) else math.inf


def any_differ(results: list[Comparison]) -> bool:
    """Return True if any two members gave models that are far from each other."""
    if not results:
        return False
    limit_sq = far_sq(results)
    return any(one.is_answered and not one.mean_sq <= limit_sq for one in results)


def odd_ones(results: list[Comparison]) -> set[PeerId]:
    """Return the donors whose comparisons, at least two, are all far. Return none if they are half or more of all."""
    if len(results) < MIN_DONORS:
        return set()
    limit_sq = far_sq(results)
    verdicts: dict[PeerId, list[bool]] = {}  # For each comparison of a donor, whether it is far.
    shown: set[PeerId] = set()  # Donors with a far comparison that was answered.
    for one in results:
        is_far = not one.mean_sq <= limit_sq
        for peer in (one.owner, one.other):
            verdicts.setdefault(peer, []).append(is_far)
            if is_far and one.is_answered:
                shown.add(peer)
    odd = {peer for peer in shown if len(verdicts[peer]) >= 2 and all(verdicts[peer])}
    return odd if 2 * len(odd) < len(verdicts) else set()


def outvoted(results: list[Comparison], donors: set[PeerId]) -> set[PeerId]:
    """Return the donors whose median comparison is far off, and the witnesses that took their side.

    Args:
        results: All comparisons: between donors, and of donors with witnesses.
        donors: The members that gave pieces; every other member of a comparison is a witness.
    """
    answered = [one for one in results if one.is_answered]
    votes = {peer: sorted(one.mean_sq for one in answered if peer in (one.owner, one.other)) for peer in donors}
    medians = {peer: found[(len(found) - 1) // 2] for peer, found in votes.items() if found}
    if not medians:
        return set()
    limit_sq = max(FAR * FAR * min(medians.values()), near_sq(results))
    odd = {peer for peer, median in medians.items() if not median <= limit_sq}
    witnesses = [one for one in answered if one.other not in donors]
    return odd | {one.other for one in witnesses if (one.mean_sq <= limit_sq) == (one.owner in odd)}


def spread_sq(results: list[Comparison], elements: int) -> float:
    """Return how far the donors' weights are apart: the lower quartile of the mean squares that are not far.

    Args:
        results: The comparisons.
        elements: The number of weights. Comparisons beyond them are left out.

    Returns:
        The mean square for one element; 0 if too few donors were compared to detect a lie.
    """
    if len(results) < MIN_DONORS:
        return 0.0
    limit_sq = far_sq(results)
    distances = sorted(one.mean_sq for one in results if one.stop <= elements and one.mean_sq <= limit_sq)
    return max(distances[len(distances) // 4], near_sq(results)) if distances else 0.0


def near_sq(results: list[Comparison]) -> float:
    """Return the mean square of a difference up to which two models count as the same one."""
    own_sq = sorted(one.own_sq / max(one.stop - one.start, 1) for one in results if one.is_answered)
    return NEAR * NEAR * own_sq[len(own_sq) // 2] if own_sq else 0.0


def far_sq(results: list[Comparison]) -> float:
    """Return the mean square of a difference beyond which two models count as far from each other."""
    return max(FAR * FAR * min(one.mean_sq for one in results), near_sq(results))
