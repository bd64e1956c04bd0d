"""What a filter is, and the one that accepts whatever is not broken.

A node cuts off by what it knows itself. Where both sides of a pair take the whole difference the mean moves by nothing,
and where one cuts off more than the other it moves by that. A refusal by either is an exchange that did not happen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.group_mean import norm_accepts
from gossip.config import Config
from gossip.filters.budget import Here
from gossip.ids import PeerId

__all__ = ["FEW", "Filter", "Floats", "Here"]

Floats = NDArray[np.float32]
FEW = 256  # elements: below that a distance is one draw and not the mean of many, and no distance is usual


class Filter:
    """One peer's rule for what it accepts; this one is ``filter = "none"``.

    Of pairs and pushes it is asked ``judge``, and of what passes ``take``; of groups ``mean`` alone.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def judge(self, partner: PeerId, difference_sq: float, own_sq: float, size: int, version: float) -> str | None:
        """None to accept the partner's vector, else the code of the reason: "not-finite", "norm", or this filter's
        name. ``difference_sq`` is ``|theirs - mine|^2`` and ``own_sq`` is ``|mine|^2``, both over ``size`` elements;
        ``version`` in mixing rounds."""
        return norm_accepts(difference_sq, own_sq, size, self.config.norm_bound)

    def take(
        self, partner: PeerId, weight: float, difference_sq: float, size: int, here: Here, at: float
    ) -> tuple[float, tuple[str, ...]]:
        """Return what share of an accepted difference is taken, and where it is not all, for which reasons.

        Args:
            partner: Whose vector it is. A filter learns from it.
            weight: The share of the difference that would move us.
            difference_sq: ``|theirs - mine|^2`` over ``size`` elements.
            size: The number of elements that are mixed.
            here: Says which of some members are there.
            at: The intervals of its own that this node has trained.
        """
        return 1.0, ()

    def moved(self, distance: float) -> None:
        """How far local steps alone moved the model since the last snapshot; nan: not measured."""

    def joined(self, donors_sq: float) -> None:
        """The weights are others' now, whose mean square distance is so much an element (0: not known)."""

    def mean(self, vectors: Floats) -> Floats:
        """Of ``vectors`` (members, elements), all within the norm bound, what stands for the group: float32
        (elements,). It learns nothing: threads may ask at once."""
        return np.asarray(vectors.mean(axis=0, dtype=np.float32))
