"""What peers accept of each other: every row has the filter that a node has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.group_mean import norm_accepts
from gossip.config import Config
from gossip.filters.registry import filter_of
from gossip.ids import PeerId

__all__ = ["Acceptance"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Acceptance:
    """Of exchanges between pairs of rows, of which none occurs twice in a call. ``ready`` says of each row whether it
    might be met again."""

    def __init__(self, config: Config, rows: int, elements: int, ready: Sequence[bool]) -> None:
        self.config, self.bound, self.elements, self.ready = config, config.norm_bound, elements, ready
        self.filters = [] if config.filtering == "none" else [filter_of(config) for _ in range(rows)]
        self.refused: dict[int, Counter[str]] = {}  # by row and reason; of what was cut off as well
        self.failed = 0  # exchanges, each side of one counting

    def total(self) -> Counter[str]:
        """What those that are up refused or cut off, by reason."""
        return sum((counts for row, counts in self.refused.items() if self.ready[row]), Counter())

    def count(self, row: int, reasons: Iterable[str]) -> None:
        self.refused.setdefault(row, Counter()).update(reasons)

    def here(self, rows: Iterable[PeerId]) -> list[PeerId]:
        """Those of them that might be met again."""
        return [row for row in rows if self.ready[cast(int, row)]]

    def passes(self, rows: I64, apart_sq: F64, own_sq: F64) -> Flags:
        """Which pairs (pairs,) of these ``rows`` (2, pairs) pass the check of norms: ``apart_sq`` (pairs,) is
        ``|theirs - ours|^2``, ``own_sq`` (2, pairs) is either's own."""
        limit = self.bound * (np.sqrt(own_sq.min(axis=0)) + math.sqrt(self.elements))
        with np.errstate(invalid="ignore"):
            passed: Flags = np.isfinite(apart_sq) & np.isfinite(own_sq).all(axis=0) & (np.sqrt(apart_sq) <= limit)
        for place in np.flatnonzero(~passed).tolist():
            for side in (0, 1):
                reason = norm_accepts(float(apart_sq[place]), float(own_sq[side, place]), self.elements, self.bound)
                if reason is not None:
                    self.count(int(rows[side, place]), [reason])
            self.failed += 2
        return passed

    def moved(self, rows: I64, distances: F64) -> None:
        """Local steps alone moved these so far since their last mix."""
        filters = self.filters
        for row, distance in zip(rows.tolist(), distances.tolist(), strict=True):
            filters[row].moved(distance)

    def joined(self, row: int, donors_sq: float) -> None:
        """It begins with the weights of others, whose mean square distance is so much an element."""
        self.refused.pop(row, None)
        if self.filters:
            self.filters[row] = filter_of(self.config)
            self.filters[row].joined(donors_sq)

    def taken(self, rows: I64, partners: I64, weights: F64, apart_sq: F64, intervals: F64) -> F64:
        """Return the weights (rows,) that are left of these after each row's own filter, which learns from the
        distance; ``intervals`` (rows,) is what each row has had of its own."""
        if not self.filters:
            return weights
        filters, here, size = self.filters, self.here, self.elements
        left = weights.tolist()
        each = zip(rows.tolist(), partners.tolist(), apart_sq.tolist(), intervals.tolist(), strict=True)
        for place, (row, partner, square, at) in enumerate(each):
            taken, why = filters[row].take(cast(PeerId, partner), left[place], square, size, here, at)
            if why:
                left[place] *= taken
                self.count(row, why)
        return np.array(left)
