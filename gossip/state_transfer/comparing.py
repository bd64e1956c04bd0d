"""Whether the donors of a newcomer gave the same model: a chunk of what each gave is asked of the next one as well.

With donors in a ring each takes part in two comparisons. Members of one run are apart by their consensus distance, and
so are what they give; one whose two comparisons are both far off, while another comparison is not, gave something else.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossip.ids import PeerId

__all__ = ["FEWEST", "Comparison", "odd_ones", "spread_sq"]

FEWEST = 3  # donors: of two that differ nobody can say which is wrong
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
    apart_sq: float = 0.0  # |other's - owner's|^2
    own_sq: float = 0.0

    @property
    def mean_sq(self) -> float:
        """Of one element of the difference."""
        return self.apart_sq / max(self.stop - self.start, 1)


def odd_ones(results: list[Comparison]) -> set[PeerId]:
    """Those whose every comparison, two at least, is far off. Fewer than half of all compared, or none."""
    if len(results) < FEWEST:
        return set()
    limit_sq = far_sq(results)
    taken: dict[PeerId, list[bool]] = {}
    for one in results:
        for peer in (one.owner, one.other):
            taken.setdefault(peer, []).append(not one.mean_sq <= limit_sq)
    odd = {peer for peer, far in taken.items() if len(far) >= 2 and all(far)}
    return odd if 2 * len(odd) < len(taken) else set()


def near_sq(results: list[Comparison]) -> float:
    """Up to which mean square of a difference's elements two models are the same one."""
    own_sq = sorted(one.own_sq / max(one.stop - one.start, 1) for one in results)
    return NEAR * NEAR * own_sq[len(own_sq) // 2]


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
