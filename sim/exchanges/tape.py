"""The tape: a log of the peers' decisions, which the models replay later.

No decision depends on the models' values. Decisions can therefore run ahead and log the arithmetic in order. An
exchange is two snapshots (copies of the models) and two additions of the result, one of each per side. All happen at a
*boundary*, the end of a training step. A *row* is a peer: its model is a row of a matrix.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

import numpy as np

from sim.arrays import I64, Flags

# Kinds of entries, in the order in which a visit to a boundary performs them.
ADD = 0  # Add the result of an exchange.
SNAPSHOT = 1  # Take a snapshot for an exchange.
GIVE = 2  # Take a donor's snapshot for a newcomer.
DROP = 3  # Free the snapshots of an exchange.
ADOPT = 4  # Adopt the weights that the donors gave.
MAX_SIDES = 16  # Limit of an exchange's sides and a newcomer's donors: a code has 4 bits for their number.


# A code packs an entry's exchange, side and kind: exchange << 8 | side << 4 | kind.
def kinds_of(codes: I64) -> I64:
    return codes & 15


def sides_of(codes: I64) -> I64:
    return codes >> 4 & 15


def exchanges_of(codes: I64) -> I64:
    return codes >> 8


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries sorted by row, and within a row in the order of execution; all arrays have shape (entries,).

    ``exchange`` is the number of an exchange, or of a newcomer's join. ``side`` is 0 for the initiator and 1 for the
    responder; for a donor it is the index among the donors.
    """

    row: I64
    steps: I64  # The row's step count at the boundary.
    kind: I64
    exchange: I64
    side: I64

    def __len__(self) -> int:
        return len(self.row)


class Tape:
    """The entries in the order of decision, which may be long before the boundary at which they are performed.

    A newcomer's join has a number like an exchange.
    """

    def __init__(self) -> None:
        self.rows, self.steps = array("q"), array("q")
        self.codes = array("q")  # Packed; kinds_of(), sides_of() and exchanges_of() unpack them.
        self.initiators = array("l")  # Row of the initiator, by exchange.
        self.responders = array("l")  # Row of the responder, by exchange; -1 while there is none.
        self.weights = array("d")  # Share of the difference that each side adds, by exchange.
        # Local steps in an interval of each side, by exchange: when it was agreed, and at the side's end of it.
        self.intervals, self.end_intervals = (array("l"), array("l")), (array("l"), array("l"))
        self.piece_ranges: dict[int, list[tuple[int, int]]] = {}  # Element range of each donor's piece, by join.
        self._hash = hashlib.sha256()
        self._hashed_entries = 0

    def new_exchange(self, initiator: int, responder: int = -1, weight: float = 0.0) -> int:
        """Register an exchange, or a newcomer's join, and return its number."""
        self.initiators.append(initiator)
        self.responders.append(responder)
        self.weights.append(weight)
        for side in (*self.intervals, *self.end_intervals):
            side.append(1)
        return len(self.initiators) - 1

    def append(self, row: int, steps: int, kind: int, exchange: int, side: int) -> None:
        self.rows.append(row)
        self.steps.append(steps)
        self.codes.append(exchange << 8 | side << 4 | kind)

    def take(self, done: I64, splits: bool = True) -> Entries:
        """Remove and return the entries of boundaries that have passed.

        Args:
            done: Steps that each row has done by now, shape (rows,).
            splits: True to take the passed entries of exchanges in progress too. If False, these stay on the tape with
                all later entries of their rows, unless at least half of the passed entries would stay.
        """
        self._hash_new_entries()
        row, steps, code = (np.array(values, np.int64) for values in (self.rows, self.steps, self.codes))
        order = np.lexsort((kinds_of(code), steps, row))  # Stable: equal keys keep the order of decision.
        taken = (steps <= done[row])[order]
        if not splits:
            without_unfinished = taken & ~must_wait(row[order], code[order], taken)
            if 2 * np.count_nonzero(without_unfinished) > np.count_nonzero(taken):
                taken = without_unfinished
        stays = np.ones(len(row), bool)
        stays[order[taken]] = False
        self.rows, self.steps, self.codes = (array("q", values[stays].tobytes()) for values in (row, steps, code))
        self._hashed_entries = len(self.rows)
        order = order[taken]
        row, steps, code = row[order], steps[order], code[order]
        return Entries(row, steps, kinds_of(code), exchanges_of(code), sides_of(code))

    def digest(self) -> hashlib._Hash:
        """Return the SHA-256 state over all entries so far, as a copy that the caller may update."""
        self._hash_new_entries()
        return self._hash.copy()

    def _hash_new_entries(self) -> None:
        since = self._hashed_entries
        new = np.array([self.rows[since:], self.steps[since:], self.codes[since:]], "<i8")
        self._hash.update(new.T.tobytes())  # Entry by entry, so that the hash does not depend on when it is read.
        self._hashed_entries = len(self.rows)


def must_wait(row: I64, code: I64, passed: Flags) -> Flags:
    """Return a mask (entries,) of the entries that must wait for an exchange in progress.

    An exchange is in progress if a snapshot of it has passed but an addition has not. Its entries wait, and so do all
    later entries of the same rows. If an entry waits, all entries of its exchange wait.

    Args:
        row: Rows of the entries, sorted, shape (entries,).
        code: Their codes as on the tape.
        passed: True for each entry whose boundary has passed.
    """
    numbers, exchange = np.unique(exchanges_of(code), return_inverse=True)
    kind, count = kinds_of(code), len(numbers)
    snapshots, adds, drops = (
        np.bincount(exchange[passed & (kind == each)], minlength=count) for each in (SNAPSHOT, ADD, DROP)
    )
    unfinished = (snapshots > adds) & (drops == 0)  # (exchanges,)
    first = np.searchsorted(row, row)  # Index of the first entry of the same row.
    while True:  # Each pass may find further exchanges that have a waiting entry, until none is new.
        # Count the entries of unfinished exchanges up to each entry, on its own row.
        counts = np.cumsum(unfinished[exchange])
        waiting: Flags = counts > np.where(first > 0, counts[first - 1], 0)
        with_waiting = np.bincount(exchange[waiting], minlength=count) > 0
        if (with_waiting == unfinished).all():
            return waiting
        unfinished = with_waiting
