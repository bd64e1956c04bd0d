"""Whether the donors of a newcomer gave the same model: a chunk of what each gave is asked of the next one as well.

With donors in a ring each takes part in two comparisons. Members of one run are apart by their consensus distance, and
so are what they give; one whose two comparisons are both far off, while another comparison is not, gave something else.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossip.ids import PeerId

__all__ = ["FEWEST", "Comparison", "odd_ones"]

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


def odd_ones(results: list[Comparison]) -> set[PeerId]:
    """Those whose every comparison, two at least, is far off. Fewer than half of all compared, or none."""
    if len(results) < FEWEST:
        return set()
    sizes = [max(one.stop - one.start, 1) for one in results]
    apart_sq = [one.apart_sq / size for one, size in zip(results, sizes, strict=True)]
    near_sq = (
        NEAR * NEAR * sorted(one.own_sq / size for one, size in zip(results, sizes, strict=True))[len(results) // 2]
    )
    limit_sq = max(FAR * FAR * min(apart_sq), near_sq)
    taken: dict[PeerId, list[bool]] = {}
    for one, distance_sq in zip(results, apart_sq, strict=True):
        for peer in (one.owner, one.other):
            taken.setdefault(peer, []).append(not distance_sq <= limit_sq)
    odd = {peer for peer, far in taken.items() if len(far) >= 2 and all(far)}
    return odd if 2 * len(odd) < len(taken) else set()
