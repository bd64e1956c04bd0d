"""The filters of all peers, which refuse or clip what an exchange brings, as on a node.

A row is a peer. An exchange brings the difference, the partner's snapshot less the row's own. To *clip* it is to lower
its weight. A pair whose difference has too large a norm is refused whatever the filter.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from gossip.arithmetic.group_mean import norm_refusal
from gossip.arithmetic.sketch import Sketcher
from gossip.config import Config
from gossip.filters.registry import filter_of
from gossip.ids import PeerId
from sim.arrays import F32, F64, I64, Flags
from sim.seeds import derive_int


class Acceptance:
    """The filters of all rows, applied to batches of exchanges in which no row occurs twice.

    ``ready[row]`` is True for each row that may take part in exchanges.
    """

    def __init__(
        self, config: Config, names: Sequence[str], elements: int, ready: Sequence[bool], seed: int
    ) -> None:  # fmt: skip
        """Begin with a filter for each name, in the order of the rows."""
        self.config, self.norm_bound, self.elements, self.ready = config, config.internal.norm_bound, elements, ready
        self.filters = [] if config.filter_name == "none" else [filter_of(config) for _ in names]
        self.sketchers: list[Sketcher] = []  # Each row has a secret of its own, as each node has.
        if config.limits_directions:
            seeds = [derive_int(seed, name, "sketch") for name in names]
            self.sketchers = [Sketcher(elements, each) for each in seeds]
        self.refusals_of: dict[int, Counter[str]] = {}  # Refused or clipped differences, by row and reason.
        self.failures = 0  # Failed sides of exchanges.

    def refusals(self) -> Counter[str]:
        """Return how often the ready rows refused or clipped a difference, by reason."""
        return sum((counts for row, counts in self.refusals_of.items() if self.ready[row]), Counter())

    def note_refusals(self, row: int, reasons: Iterable[str]) -> None:
        self.refusals_of.setdefault(row, Counter()).update(reasons)

    def note_movement(self, rows: I64, distances: F64) -> None:
        """Tell the filters how far local steps moved these rows since their last mix; both have shape (rows,)."""
        for row, distance in zip(rows.tolist(), distances.tolist(), strict=True):
            self.filters[row].on_moved(distance)

    def check_norms(self, rows: I64, apart_sq: F64, own_sq: F64) -> Flags:
        """Check the norms of pairs, and note both sides' refusals of the pairs that fail.

        Args:
            rows: Rows of the two sides, shape (2, pairs).
            apart_sq: Squared norm of the difference, shape (pairs,).
            own_sq: Squared norm of each side's own snapshot, shape (2, pairs).

        Returns:
            True for the pairs that pass, shape (pairs,).
        """
        limit = self.norm_bound * (np.sqrt(own_sq.min(axis=0)) + math.sqrt(self.elements))
        with np.errstate(invalid="ignore"):
            passed: Flags = np.isfinite(apart_sq) & np.isfinite(own_sq).all(axis=0) & (np.sqrt(apart_sq) <= limit)
        for place in np.flatnonzero(~passed).tolist():
            for side in (0, 1):
                reason = norm_refusal(
                    float(apart_sq[place]), float(own_sq[side, place]), self.elements, self.norm_bound
                )
                if reason is not None:
                    self.note_refusals(int(rows[side, place]), [reason])
            self.failures += 2
        return passed

    def on_joined(self, row: int, donors_sq: float) -> None:
        """Begin a row's filter anew when it joins; ``donors_sq`` is the donors' mean squared distance per element."""
        self.refusals_of.pop(row, None)
        if self.filters:
            self.filters[row] = filter_of(self.config)
            self.filters[row].on_joined(donors_sq)

    def filter(
        self, rows: I64, partners: I64, weights: F64, apart_sq: F64, intervals: F64, differences: F32
    ) -> F64:  # fmt: skip
        """Apply each row's filter, which also learns from the distance, and return the weights that remain.

        Args:
            rows: The rows, shape (rows,), as of all other arrays.
            partners: Each row's partner.
            weights: Weights that the pairs agreed on.
            apart_sq: Squared distances between the partners.
            intervals: Intervals that each row has trained.
            differences: Theirs minus ours for the first half of the rows, shape (rows / 2, elements). Those of the
                second half are their negatives.
        """
        if not self.filters:
            return weights
        filtered = weights.tolist()
        sides = zip(rows.tolist(), partners.tolist(), apart_sq.tolist(), intervals.tolist(), strict=True)
        for place, (row, partner, distance_sq, trained) in enumerate(sides):
            factor, reasons = self.filters[row].take_share(
                cast(PeerId, partner), filtered[place], distance_sq, self.elements, self.ready_rows, trained,
                self.sketch(row, place, differences),
            )  # fmt: skip
            if reasons:
                filtered[place] *= factor
                self.note_refusals(row, reasons)
        return np.array(filtered)

    def sketch(self, row: int, place: int, differences: F32) -> F32 | None:
        """Return the row's sketch of the difference at this place (:meth:`filter`), if its filter needs one."""
        if not self.sketchers:
            return None
        sketch = self.sketchers[row].sketch(differences[place % len(differences)])
        return sketch if place < len(differences) else -sketch

    def ready_rows(self, rows: Iterable[PeerId]) -> list[PeerId]:
        """Return those of ``rows`` that are ready."""
        return [row for row in rows if self.ready[cast(int, row)]]
