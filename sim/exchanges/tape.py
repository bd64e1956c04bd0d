"""A log of the peers' decisions, which the models replay later: when to take snapshots and when to add mixes.

No decision depends on the models' values. Decisions can therefore run ahead and log the arithmetic in order. An
exchange is two snapshots and two additions, one of each per side.
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

# Kinds of entries, in the order in which a visit to a boundary performs them. ADD: add the result of an exchange. SNAP:
# take a snapshot for an exchange. GIVE: take a donor's snapshot for a newcomer. DROP: free the snapshots of an
# exchange. TAKE: adopt the weights that the donors gave.
ADD, SNAP, GIVE, DROP, TAKE = 0, 1, 2, 3, 4
MOST_SIDES = 16  # limit on an exchange's sides and a newcomer's donors: a code has 4 bits for their number


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries sorted by row, and within a row in the order of execution; all arrays have shape (entries,).

    ``side`` is 0 for the initiator and 1 for the responder; for a donor it is the index among the donors.
    """

    row: I64
    steps: I64  # the row's step count at the boundary
    kind: I64
    exchange: I64
    side: I64

    def __len__(self) -> int:
        return len(self.row)


class Tape:
    """The entries in the order of decision, which may be long before their boundary."""

    def __init__(self) -> None:
        self.rows, self.steps = array("q"), array("q")
        self.codes = array("q")  # exchange, side and kind, packed
        self.first = array("l")  # initiator, by exchange
        self.second = array("l")  # responder, by exchange
        self.weight = array("d")  # share of the difference that each side adds, by exchange
        # Local steps in an interval of each side, by exchange: when it was agreed, and at the side's end of it.
        self.every, self.every_at_end = (array("l"), array("l")), (array("l"), array("l"))
        self.ranges: dict[int, list[tuple[int, int]]] = {}  # element range of each donor's piece, by join
        self._hash = hashlib.sha256()
        self._hashed = 0

    def exchange(self, first: int, second: int = -1, weight: float = 0.0) -> int:
        """Register an exchange, or a newcomer's join, and return its number."""
        self.first.append(first)
        self.second.append(second)
        self.weight.append(weight)
        for side in (*self.every, *self.every_at_end):
            side.append(1)
        return len(self.first) - 1

    def put(self, row: int, steps: int, kind: int, exchange: int, side: int) -> None:
        self.rows.append(row)
        self.steps.append(steps)
        self.codes.append(exchange << 8 | side << 4 | kind)

    def take(self, done: I64, cut: bool = True) -> Batch:
        """Remove and return the entries of boundaries that have passed.

        Args:
            done: Steps that each row has done by now, shape (rows,).
            cut: True to split exchanges in progress. If False, they stay on the tape with all later entries of their
                rows, unless at least half of the passed entries would stay.
        """
        self._note()
        row, steps, code = (np.array(values, np.int64) for values in (self.rows, self.steps, self.codes))
        order = np.lexsort((code & 7, steps, row))  # stable: equal keys keep the order of decision
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
        self._hash.update(new.T.tobytes())  # entry by entry, so that the hash does not depend on when it is read
        self._hashed = len(self.rows)

    def digest(self) -> hashlib._Hash:
        """Return the SHA-256 state over all entries so far, as a copy that the caller may update."""
        self._note()
        return self._hash.copy()


def under_way(row: I64, code: I64, passed: Flags) -> Flags:
    """Return a mask (entries,) of the entries that must wait for an exchange in progress.

    An exchange is in progress if a snapshot of it has passed but an addition has not. Its entries wait, and so do all
    later entries of the same rows. If an entry waits, all entries of its exchange wait.
    """
    numbers, exchange = np.unique(code >> 8, return_inverse=True)
    kind, count = code & 7, len(numbers)
    snaps, adds, drops = (np.bincount(exchange[passed & (kind == one)], minlength=count) for one in (SNAP, ADD, DROP))
    unfinished = (snaps > adds) & (drops == 0)
    first = np.searchsorted(row, row)  # index of the first entry of the same row
    while True:
        behind = np.cumsum(unfinished[exchange])
        held: Flags = behind > np.where(first > 0, behind[first - 1], 0)
        wider = np.bincount(exchange[held], minlength=count) > 0
        if (wider == unfinished).all():
            return held
        unfinished = wider
