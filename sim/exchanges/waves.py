"""A schedule for replaying a batch of the tape: waves, each of which touches a row at most once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sim.exchanges.tape import ADD, GIVE, SNAP, TAKE, Batch

__all__ = ["Units"]

I64 = NDArray[np.int64]


class Units:
    """A batch divided into units, each of which is executed in one go.

    Most exchanges are whole units: two snapshots and two additions, with nothing in between on either row. Otherwise
    each entry is a unit of its own, and an addition waits for both snapshots.

    ``unit`` int64 (entries,) is the unit of each entry. The units below ``wholes`` are whole exchanges. ``first`` and
    ``last``, int64 (units,), are a unit's entries on its two rows; a single entry has both equal.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        count = len(batch)
        # Find the snapshots that are followed on their row by the addition of the same exchange.
        follows = np.zeros(count, bool)
        if count:
            follows[:-1] = (
                (batch.kind[:-1] == SNAP) & (batch.kind[1:] == ADD) & (batch.row[:-1] == batch.row[1:])
                & (batch.exchange[:-1] == batch.exchange[1:])
            )  # fmt: skip
        # An exchange is whole if this holds for both of its sides.
        numbers, self.place = np.unique(batch.exchange, return_inverse=True)
        sides = np.bincount(self.place[follows], minlength=len(numbers))
        heads = follows & (sides[self.place] == 2)
        tails = np.zeros(count, bool)
        tails[1:] = heads[:-1]
        kept = ~tails
        self.unit = np.full(count, -1)
        single = kept & ~heads
        exchange_unit = np.full(len(numbers), -1)
        of_whole = self.place[heads & (batch.side == 0)]
        exchange_unit[of_whole] = np.arange(len(of_whole))
        self.unit[heads] = exchange_unit[self.place[heads]]
        self.unit[single] = len(of_whole) + np.arange(np.count_nonzero(single))
        self.units = len(of_whole) + int(np.count_nonzero(single))
        self.wholes = len(of_whole)  # whole exchanges come first
        self.first, self.last = np.empty(self.units, np.int64), np.empty(self.units, np.int64)
        entries = np.flatnonzero(kept)
        self.first[self.unit[entries]] = entries
        self.last[self.unit[entries]] = entries
        initiators = np.flatnonzero(heads & (batch.side == 0))
        self.first[self.unit[initiators]] = initiators
        responders = np.flatnonzero(heads & (batch.side == 1))
        self.last[self.unit[responders]] = responders
        self._entries = entries  # sorted by row, without the additions of whole exchanges

    def waves(self) -> Iterator[I64]:
        """Yield arrays of units that can run together, in an order that keeps the order of every row."""
        batch, entries = self.batch, self._entries
        row, unit = batch.row[entries], self.unit[entries]
        count = len(entries)
        following = np.full(count + 1, -1)  # index into `entries` of the next entry of the same row, or -1
        following[:-2] = np.where(row[:-1] == row[1:], np.arange(1, count), -1) if count > 1 else -1
        place = np.empty(len(batch), np.int64)
        place[entries] = np.arange(count)
        at = place[self.first], place[self.last]  # indices into `entries`, by unit
        # Count what a unit waits for: its turn on each of its rows, and for an addition the partner's snapshot.
        waits = 1 + (at[0] != at[1]).astype(np.int64)
        waiter = self._awaited_by()
        awaited = waiter >= 0
        np.add.at(waits, waiter[awaited], 1)
        begin = np.ones(count, bool)
        begin[1:] = row[1:] != row[:-1]
        heads = unit[begin]
        while len(heads):
            np.subtract.at(waits, heads, 1)
            ready = np.unique(heads[waits[heads] == 0])
            if not len(ready):
                break
            yield ready
            one, two = at[0][ready], at[1][ready]
            ended = np.concatenate([one, two[two != one]])
            behind = following[ended]
            waiting = waiter[ready]
            heads = np.concatenate([unit[behind[behind >= 0]], waiting[waiting >= 0]])
        assert not waits.any(), "every row's entries were played"

    def _awaited_by(self) -> I64:
        """Return for each unit the unit of this batch that waits for its snapshot, or -1, shape (units,).

        The other side's addition waits for a SNAP, and a newcomer's TAKE waits for a GIVE.
        """
        batch, found = self.batch, np.full(self.units, -1)
        single = self._entries[self.unit[self._entries] >= self.wholes]
        for given, awaiting, other in ((SNAP, ADD, 1), (GIVE, TAKE, 0)):
            key = batch.exchange[single] * 2 + (batch.side[single] if other else 0)
            wait, snap = batch.kind[single] == awaiting, batch.kind[single] == given
            if not (wait.any() and snap.any()):
                continue
            order = np.argsort(key[wait])
            keys, units = key[wait][order], self.unit[single][wait][order]
            wanted = key[snap] ^ other
            spot = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            hit = keys[spot] == wanted
            found[self.unit[single][snap][hit]] = units[spot[hit]]
        return found
