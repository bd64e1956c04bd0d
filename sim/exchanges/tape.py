"""What the peers decided, for the models to follow: when a snapshot is taken, and when what came of it is added.

No decision depends on a value, so decisions run ahead of the arithmetic and leave it behind in order. An exchange is
two snapshots and two additions, one each of either side.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ADD", "DROP", "GIVE", "MOST_SIDES", "SNAP", "TAKE", "Batch", "Tape"]

I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]

# What is done with a row at one of its boundaries, in the order of a boundary's visit: what came is added, and then
# snapshots are taken, for an exchange or of a donor for a newcomer. DROP: the snapshots of an exchange may go. TAKE:
# the row takes over what its donors gave.
ADD, SNAP, GIVE, DROP, TAKE = 0, 1, 2, 3, 4
MOST_SIDES = 16  # of an exchange or of weights that are taken over, as a code holds them


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries by row, and for each row in their order. ``side`` is 0 of who asked, 1 of who was asked; of donors it is
    their place."""

    row: I64
    steps: I64  # of the row, when it happens
    kind: I64
    exchange: I64
    side: I64

    def __len__(self) -> int:
        return len(self.row)


class Tape:
    """Entries in the order in which they were decided, which may be long before their boundary."""

    def __init__(self) -> None:
        self.rows, self.steps = array("q"), array("q")
        self.codes = array("q")  # exchange, side, kind
        self.first = array("l")  # of each exchange, by its number: who asked,
        self.second = array("l")  # who was asked,
        self.weight = array("d")  # and what of the difference each takes
        self.ranges: dict[int, list[tuple[int, int]]] = {}  # of weights taken over, the elements that each donor gives
        self._hash = hashlib.sha256()
        self._hashed = 0

    def exchange(self, first: int, second: int = -1, weight: float = 0.0) -> int:
        """The number of another exchange, or of weights that are taken over."""
        self.first.append(first)
        self.second.append(second)
        self.weight.append(weight)
        return len(self.first) - 1

    def put(self, row: int, steps: int, kind: int, exchange: int, side: int) -> None:
        self.rows.append(row)
        self.steps.append(steps)
        self.codes.append(exchange << 8 | side << 4 | kind)

    def take(self, done: I64, cut: bool = True) -> Batch:
        """The entries of boundaries that are passed, ``done`` being the steps of each row by now. Without ``cut`` what
        is under way stays here whole, with what follows it on its rows, unless that is most of all."""
        self._note()
        row, steps, code = (np.array(values, np.int64) for values in (self.rows, self.steps, self.codes))
        order = np.lexsort((code & 7, steps, row))  # a stable sort: of one boundary in the order of decision
        taken = (steps <= done[row])[order]
        if not cut:
            closed = taken & ~under_way(row[order], code[order], taken)
            taken = closed if 2 * np.count_nonzero(closed) > np.count_nonzero(taken) else taken
        left = np.ones(len(row), bool)
        left[order[taken]] = False
        self.rows, self.steps, self.codes = (array("q", values[left].tobytes()) for values in (row, steps, code))
        self._hashed = len(self.rows)
        order = order[taken]
        row, steps, code = row[order], steps[order], code[order]
        return Batch(row, steps, code & 7, code >> 8, code >> 4 & 15)

    def _note(self) -> None:
        since = self._hashed
        new = np.array([self.rows[since:], self.steps[since:], self.codes[since:]], "<i8")
        self._hash.update(new.T.tobytes())  # entry by entry, so that it does not matter how often somebody looks
        self._hashed = len(self.rows)

    def digest(self) -> hashlib._Hash:
        """SHA-256 over all entries so far, to be continued."""
        self._note()
        return self._hash.copy()


def under_way(row: I64, code: I64, passed: Flags) -> Flags:
    """Of entries by row, which belong to exchanges with a snapshot that is passed, and whose addition is not, or follow
    such a one on their row; and all of the exchanges that those belong to."""
    numbers, exchange = np.unique(code >> 8, return_inverse=True)
    kind, count = code & 7, len(numbers)
    snaps, adds, drops = (np.bincount(exchange[passed & (kind == one)], minlength=count) for one in (SNAP, ADD, DROP))
    unfinished = (snaps > adds) & (drops == 0)
    first = np.searchsorted(row, row)  # the first entry of the same row
    while True:
        behind = np.cumsum(unfinished[exchange])
        held: Flags = behind > np.where(first > 0, behind[first - 1], 0)
        wider = np.bincount(exchange[held], minlength=count) > 0
        if (wider == unfinished).all():
            return held
        unfinished = wider
