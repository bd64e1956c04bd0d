"""The mixing of a model's statistics (a BatchNorm's running mean and variance), which are no weights.

A difference that is added to a statistic which local steps have changed meanwhile can take it beyond both sides'
values, and a variance below zero. So statistics travel as values, and the boundary moves the live ones towards them:

    x <- x + w clip(p - x, -r, r)           r = max(|x|, max |tensor| / 16), or 1 where a tensor is all zero

The result lies between both sides' values. The limit ``r`` bounds what one partner can do in one exchange; local steps
then restore the statistic. An element that no local step has changed is a constant of the model, which no partner moves
while the node trains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PEAK_SHARE", "Statistics"]

Floats = NDArray[np.float32]

PEAK_SHARE = 1 / 16  # The least limit of an element, as a share of the largest one of its tensor.


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """A partner's statistics, to be mixed into the live ones.

    Attributes:
        values: The partner's values, float32 (n,).
        weight: The share by which the live ones move towards them.
        start: The position of the first statistic in the vector of the model.
        positions: The positions of the values among all statistics, ascending; None for all.
        moves_all: True while the node settles: constants move too, since others' local steps may have changed them.
    """

    values: Floats
    weight: float
    start: int
    positions: NDArray[np.int64] | None = None
    moves_all: bool = False
