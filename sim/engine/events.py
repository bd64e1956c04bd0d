"""One heap of what is still to happen, virtual time, and a hash of what has."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Events"]

BULK = 1 << 60  # above every count
LOG_NUMBERS = 1 << 16  # hashed at once, as doubles


class Events:
    """Handlers to be called at virtual times; those of one instant in the order in which they were caused."""

    def __init__(self) -> None:
        self.now = 0.0  # virtual seconds
        self.handled = 0
        self._heap: list[tuple[Any, ...]] = []  # (when, count, handler, its arguments)
        # Caused at this instant for this instant: behind all that the heap holds of it but bulk, so that they need no
        # place in it. Without latency that is most of them.
        self._at_once: deque[tuple[Any, ...]] = deque()
        self._count = 0
        self._log: list[float] = []  # four numbers a row
        self._hash = hashlib.sha256()

    def push(self, when: float, handler: Callable[..., None], *args: object) -> None:
        self._count += 1  # also keeps the heap from comparing handlers
        if when == self.now:
            self._at_once.append((when, self._count, handler, *args))
        else:
            heapq.heappush(self._heap, (when, self._count, handler, *args))

    def push_bulk(self, when: float, handler: Callable[..., None], *args: object) -> None:
        """The same, behind everything else of that instant: control goes ahead of bulk."""
        self._count += 1
        heapq.heappush(self._heap, (when, BULK + self._count, handler, *args))

    def run_until(self, when: float) -> None:
        """Handle everything due up to and at this time, what is caused on the way included."""
        heap, at_once = self._heap, self._at_once
        while True:
            if at_once and (not heap or at_once[0] < heap[0]):
                event = at_once.popleft()
            elif heap and heap[0][0] <= when:
                event = heapq.heappop(heap)
            else:
                break
            self.now = event[0]
            self.handled += 1
            event[2](*event[3:])
        self.now = max(self.now, when)

    def note(self, where: int, source: int, what: int) -> None:
        """Add a row to the log, when, where, from where and what; only its hash is kept."""
        log = self._log
        log += (self.now, where, source, what)
        if len(log) >= LOG_NUMBERS:
            self._hash.update(array("d", log))
            log.clear()

    def digest(self) -> hashlib._Hash:
        """SHA-256 over the log so far, to be continued."""
        whole = self._hash.copy()
        whole.update(array("d", self._log))
        return whole
