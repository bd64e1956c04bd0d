"""The mixing of a model's statistics (a BatchNorm's running mean and variance), which are no weights.

A difference that is added to a statistic which local steps have changed meanwhile can take it beyond both sides'
values, and a variance below zero. So statistics travel as values, and the boundary moves the live ones towards them:

    x <- (1 - w) x + w clip(p, a - r, a + r)        r = 2 max |tensor of a|, or 1 where that is all zero

The result lies between both sides' values. The anchor ``a`` are the values that the last local step left, so that
partners move a statistic by at most ``r`` until the next local steps, which restore it. An element that no local step
has changed is a constant of the model, which no partner moves while the node trains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["REACH", "Statistics"]

Floats = NDArray[np.float32]

REACH = 2.0  # How far partners move a statistic, in the largest one of its tensor. Means of unlike data are as far.


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
