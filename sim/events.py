"""One heap of what is still to happen, virtual time, and a hash of what has."""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Callable
from typing import Any

__all__ = ["Events"]

ROW = struct.Struct("<dIIB")  # when, where, from where, what
LOG_BYTES = 1 << 20  # hashed at once


class Events:
    """Handlers to be called at virtual times; those of one instant in the order in which they were caused."""

    def __init__(self) -> None:
        self.now = 0.0  # virtual seconds
        self.handled = 0
        self._heap: list[tuple[Any, ...]] = []  # (when, count, handler, its arguments)
        self._count = 0
        self._log = bytearray()
        self._hash = hashlib.sha256()

    def push(self, when: float, handler: Callable[..., None], *args: object) -> None:
        self._count += 1  # also keeps the heap from comparing handlers
        heapq.heappush(self._heap, (when, self._count, handler, *args))

    def run_until(self, when: float) -> None:
        """Handle everything due up to and at this time, what is caused on the way included."""
        heap = self._heap
        while heap and heap[0][0] <= when:
            event = heapq.heappop(heap)
            self.now = event[0]
            self.handled += 1
            event[2](*event[3:])
        self.now = max(self.now, when)

    def note(self, where: int, source: int, what: int) -> None:
        """Add a row to the log; only its hash is kept."""
        self._log += ROW.pack(self.now, where, source, what)
        if len(self._log) >= LOG_BYTES:
            self._hash.update(self._log)
            self._log.clear()

    def digest(self) -> hashlib._Hash:
        """SHA-256 over the log so far, to be continued."""
        whole = self._hash.copy()
        whole.update(self._log)
        return whole
