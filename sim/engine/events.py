"""The event loop: an event heap, the virtual clock, and a hash of the event log.

*Virtual time* is the time inside the simulation; it jumps from each event to the next.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from sim.interrupt import interrupt

BULK = 1 << 60  # Larger than any event count, so that bulk events sort last within an instant.
HASHED_NUMBERS = 1 << 16  # Doubles of the log that are buffered until they are hashed: 512 KiB.


class Events:
    """Event loop in virtual time; handlers due at the same instant run in the order in which they were pushed."""

    def __init__(self) -> None:
        self.now = 0.0  # Virtual seconds.
        self.handled_events = 0
        self._heap: list[tuple[Any, ...]] = []  # Events: (when, count, handler, *its arguments).
        # Events pushed at this instant for this instant. They follow everything in the heap for it except bulk, so a
        # queue is enough. Without latency most events are of this kind.
        self._immediate: deque[tuple[Any, ...]] = deque()
        self._pushed_events = 0
        self._log: list[float] = []  # Rows of :meth:`log` that are not hashed yet, one after the other.
        self._hash = hashlib.sha256()

    def push(self, when: float, handler: Callable[..., None], *args: object) -> None:
        """Schedule ``handler(*args)`` for the virtual time ``when``, which is not in the past."""
        self._pushed_events += 1  # The count is unique, so the heap never compares handlers.
        if when == self.now:
            self._immediate.append((when, self._pushed_events, handler, *args))
        else:
            heapq.heappush(self._heap, (when, self._pushed_events, handler, *args))

    def push_bulk(self, when: float, handler: Callable[..., None], *args: object) -> None:
        """Schedule a handler behind all other events of its instant: control messages go ahead of bulk data."""
        self._pushed_events += 1
        heapq.heappush(self._heap, (when, BULK + self._pushed_events, handler, *args))

    def run_until(self, when: float) -> None:
        """Run all events due up to and including ``when``, also those pushed meanwhile.

        Raises:
            KeyboardInterrupt: ^C is pending. The state is that between two events.
        """
        heap, immediate = self._heap, self._immediate
        while not interrupt.is_pending:
            if immediate and (not heap or immediate[0] < heap[0]):  # Compares (when, count), which is unique.
                event = immediate.popleft()
            elif heap and heap[0][0] <= when:
                event = heapq.heappop(heap)
            else:
                break
            self.now = event[0]
            self.handled_events += 1
            event[2](*event[3:])
        interrupt.check()
        self.now = max(self.now, when)

    def log(self, host: int, source: int, code: int) -> None:
        """Add the row (now, host, source, code) to the event log; only the log's hash is kept."""
        log = self._log
        log += (self.now, host, source, code)
        if len(log) >= HASHED_NUMBERS:
            self._hash.update(array("d", log))
            log.clear()

    def digest(self) -> hashlib._Hash:
        """Return the SHA-256 state of the log so far, as a copy that the caller may update."""
        digest = self._hash.copy()
        digest.update(array("d", self._log))
        return digest
