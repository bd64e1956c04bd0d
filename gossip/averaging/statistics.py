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

from gossip.averaging.vectors import Floats, Vector

__all__ = ["REACH", "Statistics"]

REACH = 2.0  # How far partners move a statistic, in the largest one of its tensor. Means of unlike data are as far.


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """A partner's statistics, to be mixed into the live ones.

    Attributes:
        vector: The partner's values, float32, one for each statistic of the model; NaN where a part has none.
        weight: The share by which the live ones move towards them.
        start: The position of the first statistic in the vector of the model.
        moves_all: True while the node settles: constants move too, since others' local steps may have changed them.
    """

    vector: Vector
    weight: float
    start: int
    moves_all: bool = False

    @property
    def values(self) -> Floats:
        return self.vector.array
