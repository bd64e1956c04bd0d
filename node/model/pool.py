"""A pool of reusable host vectors."""

from __future__ import annotations

import contextlib
import math
import threading
import time

from gossip.averaging.vectors import Floats, Lease, Vector
from node.model.state import State
from node.storage.vectors import FileVectors

__all__ = ["VectorPool"]


class VectorPool:
    """A pool of host vectors for both threads.

    An exchange needs two (snapshot and difference). Fresh memory would cost as much in page faults as the transfer.
    """

    KEPT = 8  # 2 x (1 outgoing + 2 incoming), and one or two donations to joiners.
    AT_ONCE_ELEMENTS = 1 << 20  # Below this, page faults at a step boundary take only milliseconds.
    MAPPED_ELEMENTS = 65_536  # The least size that gets pages of its own, 256 KiB: smaller ones are little to keep.
    # Times the weights: enough for a newcomer's vector with Adam's state. A donor's claim takes no more of the disk.
    MAPPED_WEIGHTS = 4

    def __init__(self, state: State, files: FileVectors | None = None) -> None:
        self.state, self.files = state, files
        self.lock = threading.Lock()
        self.free: dict[int, list[Floats]] = {}  # By size, those returned last at the end.
        self.largest = self.held = 0  # In elements: the largest array, and all in `free`.
        # The newest snapshot, for newcomers that come while the training loop is idle. It needs no memory of its own: a
        # free vector holds it, and the next exchange takes that vector last.
        self.last: Vector | None = None
        self.last_at = -math.inf  # time.monotonic() when a snapshot was last taken or asked for.

    def take(self, elements: int | None = None) -> Vector:
        """Return a vector of ``elements`` elements, by default those that exchanges carry."""
        size = self.state.layout.exchanged if elements is None else elements
        with self.lock:
            kept, last = self.free.get(size), None if self.last is None else self.last.array
            array = None
            if kept:
                at = len(kept) - 1
                while at and kept[at] is last:
                    at -= 1
                array = kept.pop(at)
                self.held -= size
                if array is last:
                    self.last = None
        return Vector(self.buffer(size) if array is None else array)

    def buffer(self, elements: int) -> Floats:
        """Return a new vector, in a file if the node has a folder for them and its model needs no memory of its own."""
        if self.files is not None and elements >= self.MAPPED_ELEMENTS and not self.state.locks:
            array = self.files.zeros(elements)
            if self.state.takes(array):
                return array
        return self.state.buffer(elements)

    def at_hand(self, elements: int) -> bool:
        """Return True if a vector needs no fresh pages, which cost four times what a copy costs.

        Locking pages costs far more and may wait for the device, so a snapshot's difference must have its memory too.
        """
        if self.state.locks:
            return elements < self.MAPPED_ELEMENTS or len(self.free.get(elements, ())) > 1
        return elements < self.AT_ONCE_ELEMENTS or bool(self.free.get(elements))

    def reserve(self, elements: int) -> None:
        """Allocate and touch what :meth:`at_hand` lacks, in a thread that may wait."""
        for _ in range(2 if self.state.locks else 1):
            if self.at_hand(elements):
                return
            fresh = self.buffer(elements)
            fresh.fill(0.0)
            with self.lock:
                self.keep_free(fresh)

    def pass_by(self, elements: int) -> Vector:
        """Return a vector whose memory returns to the system when it is given back; an allocator would keep it."""
        if elements >= self.MAPPED_ELEMENTS:
            with contextlib.suppress(OSError):
                vector = self.mapped(elements)
                if self.state.takes(vector.array):
                    return vector
        return Vector(self.state.buffer(elements), passing=True)

    def mapped(self, elements: int) -> Vector:
        """Return zeros whose memory returns to the system with its last user; they collect other weights."""
        if self.files is None or elements > self.MAPPED_WEIGHTS * self.state.layout.size:
            return Vector.mapped(elements)
        return self.files.vector(elements)

    def lease(self, vector: Vector) -> Lease:
        """Add a user to the vector, which is not reused until all leases have ended."""
        with self.lock:
            vector.users += 1
        return Lease(self, vector)

    def keep(self, vector: Vector) -> None:
        """Remember the newest snapshot, which stays unchanged while it has users."""
        with self.lock:
            self.last, self.last_at = vector, time.monotonic()

    def recall(self) -> Vector | None:
        """Return the newest snapshot with one more user, or None."""
        with self.lock:
            last = self.last
            if last is None:
                return None
            if not last.users:
                kept = self.free[last.array.size]
                self.free[last.array.size] = [one for one in kept if one is not last.array]
                self.held -= last.array.size
            last.users += 1
            return last

    def forget(self) -> None:
        """Forget the newest snapshot: the weights were replaced."""
        with self.lock:
            self.last, self.last_at = None, -math.inf

    def give(self, vector: Vector) -> None:
        with self.lock:
            vector.users -= 1
            if vector.users:
                return
            since, vector.since = vector.since, None
            if not vector.passing:
                self.keep_free(vector.array)
            if since is not None:
                since.users -= 1
                if not since.users:
                    self.keep_free(since.array)

    def keep_free(self, array: Floats) -> None:
        """Keep an unused array for the next :meth:`take`. The caller holds the lock."""
        size = array.size
        kept = self.free[size] = self.free.pop(size, [])
        if len(kept) == self.KEPT:
            self.drop([array])
            return
        kept.append(array)
        self.held += size
        self.largest = max(self.largest, size)
        while self.held > self.KEPT * self.largest:  # Bound the memory: a partner's offer decides the size of a part.
            oldest = next(iter(self.free))
            self.held -= oldest * len(self.free[oldest])
            self.drop(self.free.pop(oldest))

    def drop(self, arrays: list[Floats]) -> None:
        """Forget the newest snapshot if it is in one of these arrays, which are no longer kept."""
        if self.last is not None and any(one is self.last.array for one in arrays):
            self.last = None
