"""Host vectors, kept to be used again."""

from __future__ import annotations

import contextlib
import math
import threading
import time

import numpy as np

from gossip.averaging.vectors import Floats, Lease, Vector
from node.model.host_memory import HostMemory
from node.model.state import State

__all__ = ["VectorPool"]


class VectorPool:
    """Host vectors, reused: an exchange needs two (snapshot and difference) and page faults would cost as much as the
    transfer. Used by both threads."""

    KEPT = 8  # 2 x (1 outgoing + 2 incoming) and a joiner's donation or two
    AT_ONCE_ELEMENTS = 1 << 20  # whose pages a step boundary may take: some milliseconds
    SHARED_ELEMENTS = 65_536  # of a vector that other processes are given: 400 KB cost as much by a socket

    def __init__(self, state: State) -> None:
        self.state = state
        self.lock = threading.Lock()
        self.free: dict[int, list[Floats]] = {}  # by size, those given back last at the end
        self.sharing = False  # whether large ones lie where other processes of this host can be given them
        self.largest = self.held = 0  # elements: of one, and of all in free
        # The newest snapshot, for newcomers that come while the training loop stands. It costs nothing: what is kept is
        # a vector that the next exchange takes anyway, after all others; by then it has a newer snapshot.
        self.last: Vector | None = None
        self.last_at = -math.inf  # time.monotonic() when one was last taken or asked for

    def take(self, elements: int | None = None) -> Vector:
        """A vector of so many elements, by default of the weights that exchanges carry."""
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

    def at_hand(self, elements: int) -> bool:
        """Fresh pages cost four times what a copy costs."""
        return elements < self.AT_ONCE_ELEMENTS or bool(self.free.get(elements))

    def pass_by(self, elements: int) -> Vector:
        """One whose memory goes when it is given back: back to the system, where an allocator would keep it."""
        if not self.sharing and elements >= self.SHARED_ELEMENTS:
            with contextlib.suppress(OSError):
                vector = Vector.mapped(elements)
                if self.state.takes(vector.array):
                    return vector
        return Vector(self.buffer(elements), passing=True)

    def buffer(self, size: int) -> Floats:
        if self.sharing and size >= self.SHARED_ELEMENTS:
            with contextlib.suppress(OSError):
                vector = HostMemory(size).vector
                if self.state.takes(vector):
                    return vector
        return self.state.buffer(size)

    @property
    def lends(self) -> bool:
        """Whether vectors of the weights can lie where other processes are given them, once they are shared."""
        large = self.state.layout.exchanged >= self.SHARED_ELEMENTS
        return large and self.state.takes(np.empty(0, np.float32))

    def share(self) -> None:
        """From now on large vectors lie in memory that others of this host can be given to read. What is in use is
        replaced when it comes back."""
        with self.lock:
            if self.sharing:
                return
            self.sharing = True
            for size, kept in list(self.free.items()):
                dropped = [one for one in kept if self.replaced(one)]
                self.free[size] = [one for one in kept if not any(one is other for other in dropped)]
                self.held -= size * len(dropped)
                self.drop(dropped)

    def lease(self, vector: Vector) -> Lease:
        """The vector is nobody else's until that, and all others, have ended."""
        with self.lock:
            vector.users += 1
        return Lease(self, vector)

    def keep(self, vector: Vector) -> None:
        """A snapshot, newer than any other, that nobody will change while it has users."""
        with self.lock:
            self.last, self.last_at = vector, time.monotonic()

    def recall(self) -> Vector | None:
        """The newest snapshot, with one more user."""
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
        """The weights are others now."""
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
        """Keep an array that nobody uses for the next one who takes a vector; the lock is held."""
        size = array.size
        kept = self.free[size] = self.free.pop(size, [])
        if len(kept) == self.KEPT or (self.sharing and self.replaced(array)):
            self.drop([array])
            return
        kept.append(array)
        self.held += size
        self.largest = max(self.largest, size)
        while self.held > self.KEPT * self.largest:  # a partner's offer says how large a part is
            oldest = next(iter(self.free))
            self.held -= oldest * len(self.free[oldest])
            self.drop(self.free.pop(oldest))

    def replaced(self, array: Floats) -> bool:
        """Whether it was made before vectors were shared."""
        return array.size >= self.SHARED_ELEMENTS and HostMemory.of(array) is None and self.state.takes(array)

    def drop(self, arrays: list[Floats]) -> None:
        """These are no longer kept, and so the newest snapshot is not where it is among them."""
        if self.last is not None and any(one is self.last.array for one in arrays):
            self.last = None
