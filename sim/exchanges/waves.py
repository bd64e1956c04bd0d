"""A schedule for replaying entries of the tape: waves, each of which touches a row (a peer's model) at most once.

It is a topological sort in layers (Kahn, 1962): a wave holds everything that waits for nothing outside earlier waves.
"""

from collections.abc import Iterator

import numpy as np

from sim.arrays import I64
from sim.exchanges.tape import ADD, ADOPT, GIVE, SNAPSHOT, Entries


class Units:
    """Entries of the tape divided into units, each of which is executed in one go.

    Most exchanges are whole units: two snapshots and two additions, with nothing in between on either row. Otherwise
    each entry is a unit of its own, and an addition waits for both snapshots.

    Attributes:
        unit: The unit of each entry, int64 (entries,); -1 for the additions of whole exchanges, which need none.
        whole_units: The units below this number are whole exchanges.
        first: A unit's entry on its first row, int64 (units,): the initiator's snapshot, or the single entry.
        last: The same on its last row: the responder's snapshot, or the single entry.
    """

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        count = len(entries)
        row, kind, exchange = entries.row, entries.kind, entries.exchange
        # Find the snapshots that are followed on their row by the addition of the same exchange.
        is_followed = np.zeros(count, bool)
        if count:
            is_followed[:-1] = (
                (kind[:-1] == SNAPSHOT) & (kind[1:] == ADD) & (row[:-1] == row[1:]) & (exchange[:-1] == exchange[1:])
            )
        # An exchange is whole if this holds for both of its sides.
        numbers, place = np.unique(exchange, return_inverse=True)
        followed_sides = np.bincount(place[is_followed], minlength=len(numbers))
        is_head = is_followed & (followed_sides[place] == 2)  # The snapshots of whole exchanges.
        is_tail = np.zeros(count, bool)
        is_tail[1:] = is_head[:-1]  # Their additions.
        is_single = ~is_head & ~is_tail
        initiators = np.flatnonzero(is_head & (entries.side == 0))
        responders = np.flatnonzero(is_head & (entries.side == 1))
        self.whole_units = len(initiators)
        singles = int(np.count_nonzero(is_single))
        self.units = self.whole_units + singles
        unit_of_exchange = np.full(len(numbers), -1)
        unit_of_exchange[place[initiators]] = np.arange(self.whole_units)
        self.unit = np.full(count, -1)
        self.unit[is_head] = unit_of_exchange[place[is_head]]
        self.unit[is_single] = self.whole_units + np.arange(singles)
        self.first, self.last = np.empty(self.units, np.int64), np.empty(self.units, np.int64)
        # All entries but the additions of whole exchanges, which run with their snapshots; sorted by row.
        self._scheduled = np.flatnonzero(~is_tail)
        self.first[self.unit[self._scheduled]] = self.last[self.unit[self._scheduled]] = self._scheduled
        self.first[self.unit[initiators]] = initiators
        self.last[self.unit[responders]] = responders

    def waves(self) -> Iterator[I64]:
        """Yield arrays of units that can run together, in an order that keeps the order of every row."""
        scheduled = self._scheduled  # The arrays by entry below have an element for each of these.
        row, unit, count = self.entries.row[scheduled], self.unit[scheduled], len(scheduled)
        following = np.full(count + 1, -1)  # Index into `scheduled` of the next entry of the same row, or -1.
        following[:-2] = np.where(row[:-1] == row[1:], np.arange(1, count), -1) if count > 1 else -1
        index_in_scheduled = np.empty(len(self.entries), np.int64)
        index_in_scheduled[scheduled] = np.arange(count)
        first, last = index_in_scheduled[self.first], index_in_scheduled[self.last]  # By unit.
        # Count what a unit waits for: its turn on each of its rows, and for an addition the partner's snapshot.
        open_waits = 1 + (first != last).astype(np.int64)
        waiter = self._waiters()
        np.add.at(open_waits, waiter[waiter >= 0], 1)
        is_first_of_row = np.ones(count, bool)
        is_first_of_row[1:] = row[1:] != row[:-1]
        reached = unit[is_first_of_row]  # Each unit once for every wait of it that has ended.
        while len(reached):
            np.subtract.at(open_waits, reached, 1)
            ready = np.unique(reached[open_waits[reached] == 0])
            if not len(ready):
                break
            yield ready
            first_entries, last_entries = first[ready], last[ready]
            has_two_rows = last_entries != first_entries
            next_on_row = following[np.concatenate([first_entries, last_entries[has_two_rows]])]
            waiters = waiter[ready]
            reached = np.concatenate([unit[next_on_row[next_on_row >= 0]], waiters[waiters >= 0]])
        assert not open_waits.any(), "every row's entries were played"

    def _waiters(self) -> I64:
        """Return for each unit the unit that waits for its snapshot, or -1 if there is none, shape (units,).

        The addition of an exchange's other side waits for a SNAPSHOT, and a newcomer's ADOPT waits for a GIVE.
        """
        entries, waiter = self.entries, np.full(self.units, -1)
        single = self._scheduled[self.unit[self._scheduled] >= self.whole_units]
        kind, unit = entries.kind[single], self.unit[single]
        for awaited_kind, waiting_kind, has_sides in ((SNAPSHOT, ADD, True), (GIVE, ADOPT, False)):
            # A key is an exchange with a side; the two sides' keys differ in the lowest bit. A join has one key.
            key = entries.exchange[single] * 2 + (entries.side[single] if has_sides else 0)
            is_waiting, is_awaited = kind == waiting_kind, kind == awaited_kind
            if not (is_waiting.any() and is_awaited.any()):
                continue
            order = np.argsort(key[is_waiting])
            sorted_keys, waiting_units = key[is_waiting][order], unit[is_waiting][order]
            waiting_key = key[is_awaited] ^ int(has_sides)  # The key of the entry that waits for each snapshot.
            index = np.minimum(np.searchsorted(sorted_keys, waiting_key), len(sorted_keys) - 1)
            is_found = sorted_keys[index] == waiting_key
            waiter[unit[is_awaited][is_found]] = waiting_units[index[is_found]]
        return waiter
