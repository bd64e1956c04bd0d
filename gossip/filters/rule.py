"""The base class of filters, which accepts everything that is not broken.

Each node cuts differences short by its own knowledge. If both sides of a pair take the whole difference, their mean
stays the same. If one side takes less than the other, the mean moves. If either side refuses, the exchange does not
happen.
"""

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.group_mean import norm_refusal
from gossip.config import Config
from gossip.filters.budget import PresentAmong
from gossip.ids import PeerId

__all__ = ["MIN_ELEMENTS", "Filter", "Floats", "PresentAmong"]

Floats = NDArray[np.float32]
# Fewest elements that have a usual distance. The distance of fewer ones is more chance than mean.
MIN_ELEMENTS = 256


class Filter:
    """One peer's rule for what it accepts; this one is ``filter = "none"``.

    Pairs and pushes call ``refusal``, and ``take_share`` for accepted vectors; groups call ``mean`` alone.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def refusal(self, partner: PeerId, difference_sq: float, own_sq: float, size: int, version: float) -> str | None:
        """Return the reason to refuse the partner's vector, or None to accept it.

        Args:
            partner: The sender of the vector.
            difference_sq: ``|theirs - mine|^2`` over ``size`` elements.
            own_sq: ``|mine|^2`` over ``size`` elements.
            size: The number of elements that are mixed.
            version: The mixing rounds behind our weights.

        Returns:
            "not-finite", "norm" (beyond the norm bound), this filter's name, or None.
        """
        return norm_refusal(difference_sq, own_sq, size, self.config.internal.norm_bound)

    def take_share(
        self, partner: PeerId, weight: float, difference_sq: float, size: int, present_among: PresentAmong,
        intervals: float, sketch: Floats | None = None,
    ) -> tuple[float, tuple[str, ...]]:  # fmt: skip
        """Return the share of an accepted difference that is taken, and the reasons if it is below 1.

        Args:
            partner: The sender of the vector. A filter learns from its distance.
            weight: The share of the difference that would move us.
            difference_sq: ``|theirs - mine|^2`` over ``size`` elements.
            size: The number of elements that are mixed.
            present_among: Returns those of some members that are present.
            intervals: The intervals that this node has trained.
            sketch: The difference's sketch (:mod:`gossip.arithmetic.sketch`), float32 (WIDTH,); None if it has none.
        """
        return 1.0, ()

    def take_settling_share(
        self, partner: PeerId, weight: float, difference_sq: float, size: int, present_among: PresentAmong,
        intervals: float,
    ) -> tuple[float, tuple[str, ...]]:  # fmt: skip
        """Return the share of an accepted difference that is taken while members settle, as :meth:`take_share`.

        Honest differences shrink meanwhile, so a filter learns no usual distance from them.
        """
        return self.take_share(partner, weight, difference_sq, size, present_among, intervals)

    def on_moved(self, distance: float) -> None:
        """Learn how far local steps alone moved the model since the last snapshot; NaN if it was not measured."""

    def on_joined(self, donors_sq: float) -> None:
        """Note that the weights were replaced by donors' weights.

        ``donors_sq`` is the mean square of an element's difference between donors; 0 means unknown.
        """

    def on_group(self, difference_sq: float, size: int) -> None:
        """Learn a pair's squared distance over ``size`` elements, as a group's mean shows it."""

    def mean(self, vectors: Floats) -> Floats:
        """Return the group's mean of ``vectors`` (members, elements), all within the norm bound: float32 (elements,).

        It does not learn, so threads may call it at once.
        """
        return np.asarray(vectors.mean(axis=0, dtype=np.float32))
