"""The judgement of compared pieces: which of a newcomer's donors are *odd*, so that they gave another model than most.

The donors form a ring. Each is compared with the next two, and with two members that gave nothing. Members of one run
differ by the consensus distance, and so do their chunks. A comparison is *far* if its distance is well beyond the
smallest one. A donor is odd if all its comparisons are far and another donor's are not. A comparison without an answer
counts as far for a donor that is far in another one, so that silence hides no lie.

If donors differ, witnesses (members that were no donors) are asked for the same chunks. Each member has one vote on
each donor, its largest distance from it, and the median decides. This finds all lying donors if most of donors and
witnesses together are honest, and either a donor is honest or the donors lie alike. Donors that each lie in a way of
its own, without an honest one among them, differ from each other as much as from witnesses, so nothing tells them from
honest ones.
"""

import math
from dataclasses import dataclass

from gossip.ids import PeerId

MIN_DONORS = 3  # Donors, and comparisons, of which an odd one can be told: if two differ, either may be wrong.
CHUNKS_PER_WITNESS = 2  # A donor serves as many at once.
# Ratio to the smallest distance from which on a comparison is far. Honest donors stay below it, and dropping one by
# mistake costs one more piece.
FAR_RATIO = 4.0
# Ratio of a distance to the norm of the weights up to which two models count as the same one. Up to it no comparison is
# far, however small the others are.
NEAR_RATIO = 1e-3


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
    def elements(self) -> int:
        return max(self.stop - self.start, 1)

    @property
    def mean_sq(self) -> float:
        """Return the mean square of the difference, for one element; infinity without an answer, never NaN."""
        mean_sq = self.apart_sq / self.elements
        return mean_sq if math.isfinite(mean_sq) else math.inf


def any_differ(results: list[Comparison]) -> bool:
    """Return True if any two members gave models that are far from each other."""
    if not results:
        return False
    limit_sq = far_sq(results)
    return any(comparison.is_answered and comparison.mean_sq > limit_sq for comparison in results)


def odd_in_ring(results: list[Comparison]) -> set[PeerId]:
    """Return the donors whose comparisons, at least two, are all far. Return none if they are half of all or more."""
    if len(results) < MIN_DONORS:
        return set()
    limit_sq = far_sq(results)
    verdicts: dict[PeerId, list[bool]] = {}  # For each comparison of a donor, whether it is far.
    proven_far: set[PeerId] = set()  # Donors with a far comparison that was answered.
    for comparison in results:
        is_far = comparison.mean_sq > limit_sq
        for peer in (comparison.owner, comparison.other):
            verdicts.setdefault(peer, []).append(is_far)
            if is_far and comparison.is_answered:
                proven_far.add(peer)
    odd = {peer for peer in proven_far if len(verdicts[peer]) >= 2 and all(verdicts[peer])}
    return odd if 2 * len(odd) < len(verdicts) else set()


def outvoted(results: list[Comparison], donors: set[PeerId]) -> set[PeerId]:
    """Return the donors whose median comparison is far, and the witnesses that took the side of such a donor.

    Args:
        results: All comparisons: between donors, and of donors with witnesses.
        donors: The members that gave pieces; every other member of a comparison is a witness.
    """
    answered = [comparison for comparison in results if comparison.is_answered]
    votes: dict[PeerId, dict[PeerId, float]] = {peer: {} for peer in donors}  # By donor, each member's once: its worst.
    for comparison in answered:
        for peer, voter in ((comparison.owner, comparison.other), (comparison.other, comparison.owner)):
            if peer in donors:
                votes[peer][voter] = max(comparison.mean_sq, votes[peer].get(voter, 0.0))
    medians = {peer: sorted(of.values())[(len(of) - 1) // 2] for peer, of in votes.items() if of}
    if not medians:
        return set()
    limit_sq = max(FAR_RATIO * FAR_RATIO * min(medians.values()), near_sq(results))
    # If all donors lie alike, most members are far from each of them, while they are near to each other.
    between_donors = [comparison.mean_sq for comparison in answered if comparison.other in donors]
    alike_sq = max(FAR_RATIO * FAR_RATIO * max(between_donors, default=math.inf), near_sq(results))
    if min(medians.values()) > alike_sq:
        limit_sq = alike_sq
    odd = {peer for peer, median in medians.items() if median > limit_sq}
    with_witness = [comparison for comparison in answered if comparison.other not in donors]
    # A witness takes the side of an odd donor if it is near to it, or if it is far from another donor.
    liars = [comparison for comparison in with_witness if (comparison.mean_sq <= limit_sq) == (comparison.owner in odd)]
    return odd | {comparison.other for comparison in liars}


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
    of_weights = [comparison for comparison in results if comparison.stop <= elements]
    distances = sorted(comparison.mean_sq for comparison in of_weights if comparison.mean_sq <= limit_sq)
    return max(distances[len(distances) // 4], near_sq(results)) if distances else 0.0


def near_sq(results: list[Comparison]) -> float:
    """Return the mean square of a difference up to which two models count as the same one."""
    squares = sorted(comparison.own_sq / comparison.elements for comparison in results if comparison.is_answered)
    return NEAR_RATIO * NEAR_RATIO * squares[len(squares) // 2] if squares else 0.0


def far_sq(results: list[Comparison]) -> float:
    """Return the mean square of a difference beyond which two models count as far from each other."""
    return max(FAR_RATIO * FAR_RATIO * min(comparison.mean_sq for comparison in results), near_sq(results))
