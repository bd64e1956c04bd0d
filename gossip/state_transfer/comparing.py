"""Whether the donors of a newcomer gave the same model: a chunk of what each gave is asked of the next one as well.

With donors in a ring each takes part in two comparisons. Members of one run are apart by their consensus distance, and
so are what they give; one whose two comparisons are both far off, while another comparison is not, gave something else.
A donor that does not answer a comparison counts as far off in it, as long as another comparison shows that it is:
silence must not hide what it gave.

Where donors differ, members that were no donors are asked for two of these chunks each. Then the median of a donor's
comparisons decides, so that two liars among three donors are found while most members are honest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossip.ids import PeerId

__all__ = ["FEWEST", "WITNESSED", "Comparison", "differ", "odd_ones", "outvoted", "spread_sq"]

FEWEST = 3  # donors: of two that differ nobody can say which is wrong
WITNESSED = 2  # chunks that each member beyond the donors is asked for: a donor serves so many at once
FAR = 4.0  # times the smallest distance: honest donors differ by less, and one dropped wrongly costs one piece more
NEAR = 1e-3  # of the weights' own size: what is apart by less is the same model, however near the others are


@dataclass(slots=True)
class Comparison:
    """Elements [start, stop), given by ``owner``, asked of ``other``."""

    owner: PeerId
    other: PeerId
    start: int
    stop: int
    deadline: float
    apart_sq: float = math.inf  # |other's - owner's|^2, infinite as long as ``other`` has not answered
    own_sq: float = math.nan

    @property
    def answered(self) -> bool:
        return math.isfinite(self.own_sq)

    @property
    def mean_sq(self) -> float:
        """Of one element of the difference."""
        mean_sq = self.apart_sq / max(self.stop - self.start, 1)
        return mean_sq if math.isfinite(mean_sq) else math.inf


def odd_ones(results: list[Comparison]) -> set[PeerId]:
    """Those whose every comparison, two at least, is far off. Fewer than half of all compared, or none."""
    if len(results) < FEWEST:
        return set()
    limit_sq = far_sq(results)
    taken: dict[PeerId, list[bool]] = {}
    shown: set[PeerId] = set()  # to be far off, by a comparison that was answered
    for one in results:
        far = not one.mean_sq <= limit_sq
        for peer in (one.owner, one.other):
            taken.setdefault(peer, []).append(far)
            if far and one.answered:
                shown.add(peer)
    odd = {peer for peer in shown if len(taken[peer]) >= 2 and all(taken[peer])}
    return odd if 2 * len(odd) < len(taken) else set()


def differ(results: list[Comparison]) -> bool:
    """Return whether any two donors gave models that are far from each other."""
    limit_sq = far_sq(results)
    return any(one.answered and not one.mean_sq <= limit_sq for one in results)


def outvoted(results: list[Comparison], donors: set[PeerId]) -> set[PeerId]:
    """Return the donors whose median comparison is far off, and the witnesses that took their side.

    Args:
        results: All comparisons: between donors, and of donors with witnesses.
        donors: Those that gave pieces; every other member of a comparison is a witness.
    """
    answered = [one for one in results if one.answered]
    votes = {peer: sorted(one.mean_sq for one in answered if peer in (one.owner, one.other)) for peer in donors}
    medians = {peer: found[(len(found) - 1) // 2] for peer, found in votes.items() if found}
    if not medians:
        return set()
    limit_sq = max(FAR * FAR * min(medians.values()), near_sq(results))
    odd = {peer for peer, median in medians.items() if not median <= limit_sq}
    witnesses = [one for one in answered if one.other not in donors]
    return odd | {one.other for one in witnesses if (one.mean_sq <= limit_sq) == (one.owner in odd)}


def near_sq(results: list[Comparison]) -> float:
    """Up to which mean square of a difference's elements two models are the same one."""
    own_sq = sorted(one.own_sq / max(one.stop - one.start, 1) for one in results if one.answered)
    return NEAR * NEAR * own_sq[len(own_sq) // 2] if own_sq else 0.0


def far_sq(results: list[Comparison]) -> float:
    """Beyond which two are far from each other."""
    return max(FAR * FAR * min(one.mean_sq for one in results), near_sq(results))


def spread_sq(results: list[Comparison], elements: int) -> float:
    """How far the donors were from each other: the lower quartile of the mean squares, of the weights (the first so
    many ``elements``) alone and of those that are not far. 0 where too few were compared to tell a lie."""
    if len(results) < FEWEST:
        return 0.0
    limit_sq = far_sq(results)
    distances = sorted(one.mean_sq for one in results if one.stop <= elements and one.mean_sq <= limit_sq)
    return max(distances[len(distances) // 4], near_sq(results)) if distances else 0.0
