"""The event loop: an event heap, the virtual clock, and a hash of the event log."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Events"]

BULK = 1 << 60  # larger than any event count, so that bulk events sort last within an instant
LOG_NUMBERS = 1 << 16  # doubles buffered before they are hashed


class Events:
    """Event loop in virtual time; handlers due at the same instant run in the order in which they were pushed."""

    def __init__(self) -> None:
        self.now = 0.0  # virtual seconds
        self.handled = 0
        self._heap: list[tuple[Any, ...]] = []  # (when, count, handler, its arguments)
        # Events pushed at this instant for this instant. They follow everything in the heap for it except bulk, so a
        # queue is enough. Without latency most events are of this kind.
        self._at_once: deque[tuple[Any, ...]] = deque()
        self._count = 0
        self._log: list[float] = []  # flat rows of four numbers
        self._hash = hashlib.sha256()

    def push(self, when: float, handler: Callable[..., None], *args: object) -> None:
        self._count += 1  # unique, so the heap never compares handlers
        if when == self.now:
            self._at_once.append((when, self._count, handler, *args))
        else:
            heapq.heappush(self._heap, (when, self._count, handler, *args))

    def push_bulk(self, when: float, handler: Callable[..., None], *args: object) -> None:
        """Schedule a handler behind all other events of its instant: control messages go ahead of bulk data."""
        self._count += 1
        heapq.heappush(self._heap, (when, BULK + self._count, handler, *args))

    def run_until(self, when: float) -> None:
        """Run all events due up to and including ``when``, also those pushed meanwhile."""
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
        """Add the row (now, where, source, what) to the event log; only the log's hash is kept."""
        log = self._log
        log += (self.now, where, source, what)
        if len(log) >= LOG_NUMBERS:
            self._hash.update(array("d", log))
            log.clear()

    def digest(self) -> hashlib._Hash:
        """Return the SHA-256 state of the log so far, as a copy that the caller may update."""
        whole = self._hash.copy()
        whole.update(array("d", self._log))
        return whole
