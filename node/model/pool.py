"""A pool of reusable host vectors, and the newest snapshot among them."""

import contextlib
import math
import threading
import time

from gossip.averaging.vectors import Cut, Floats, Lease, Vector
from node.model.state import State


class VectorPool:
    """A pool of host vectors. Both threads use it.

    An exchange needs two vectors, for a snapshot and a difference. In fresh memory page faults would cost as much as
    the transfer.
    """

    MAX_FREE = 8  # Free vectors of one size: 2 for each of 1 outgoing and 2 incoming exchanges, 2 for newcomers.
    SMALL_ELEMENTS = 1 << 20  # The page faults of a smaller vector delay a step boundary by milliseconds only.
    # The smallest vector with pages of its own, 256 KiB. They return to the system; an allocator may keep smaller ones.
    MAPPED_ELEMENTS = 65_536

    def __init__(self, state: State) -> None:
        self.state = state
        self.lock = threading.Lock()
        self.free_arrays: dict[int, list[Floats]] = {}  # By size; the array that was returned last is the last one.
        self.free_elements = 0  # The sum over all free arrays.
        self.largest_elements = 0  # The size of the largest array that was ever free.
        # The newest snapshot, for newcomers that come while the training loop is idle. It needs no memory of its own,
        # because a free vector holds it, which `take` returns only after the others.
        self.newest: Vector | None = None
        self.newest_at = -math.inf  # The time at which a snapshot was last taken or asked for, by time.monotonic.

    def take(self, elements: int | None = None) -> Vector:
        """Return a vector of ``elements`` elements, by default as many as exchanges carry."""
        size = self.state.layout.exchanged if elements is None else elements
        with self.lock:
            free, newest_array = self.free_arrays.get(size), None if self.newest is None else self.newest.array
            array = None
            if free:
                index = len(free) - 1
                while index and free[index] is newest_array:  # The newest snapshot is taken last.
                    index -= 1
                array = free.pop(index)
                self.free_elements -= size
                if array is newest_array:
                    self.newest = None
        return Vector(self.state.buffer(size) if array is None else array)

    def has_free(self, elements: int, cut: Cut | None = None) -> bool:
        """Return True if :meth:`take` needs no fresh pages, which cost four times as much as a copy into them.

        Locking pages costs far more, and may wait for the device. So a model that locks pages also needs memory for the
        exchange's difference, and the positions of its ``cut`` (a part of the weights) on the device.
        """
        return not self.missing_sizes(elements, cut) and (cut is None or self.state.has_positions(cut.positions))

    def missing_sizes(self, elements: int, cut: Cut | None) -> list[int]:
        """Return the sizes of the arrays that are missing for a snapshot of so many elements, and its difference."""
        sizes, min_elements = [elements], self.SMALL_ELEMENTS
        if self.state.locks:
            sizes, min_elements = [elements, elements if cut is None else cut.positions.size], self.MAPPED_ELEMENTS
        missing: list[int] = []
        for number, size in enumerate(sizes):
            taken_before = sizes[:number].count(size)  # Free arrays of this size that an earlier vector will take.
            if size >= min_elements and len(self.free_arrays.get(size, ())) <= taken_before:
                missing.append(size)
        return missing

    def reserve(self, elements: int, cut: Cut | None = None) -> None:
        """Allocate and write to the arrays that :meth:`has_free` lacks, in a thread that may wait."""
        if cut is not None:
            self.state.prepare_positions(cut.positions)
        for size in self.missing_sizes(elements, cut):
            fresh = self.state.buffer(size)
            fresh.fill(0.0)
            with self.lock:
                self.keep_free(fresh)

    def take_scratch(self, elements: int) -> Vector:
        """Return a vector that no copy from or to a device uses. It needs no page-locked memory."""
        return self.take_mapped(elements) if self.state.locks else self.take(elements)

    def take_transient(self, elements: int) -> Vector:
        """Return a vector outside the pool, whose memory returns to the system when it is given back."""
        if elements >= self.MAPPED_ELEMENTS:
            with contextlib.suppress(OSError):
                vector = self.take_mapped(elements)
                if self.state.takes(vector.array):
                    return vector
        return Vector(self.state.buffer(elements), is_transient=True)

    def take_mapped(self, elements: int) -> Vector:
        """Return zeros in which a newcomer collects weights. Their memory returns to the system with the last user."""
        return Vector.mapped(elements)

    def lease(self, vector: Vector) -> Lease:
        """Add a user to the vector, which is not reused until all leases have ended."""
        with self.lock:
            vector.users += 1
        return Lease(self, vector)

    def keep_snapshot(self, vector: Vector) -> None:
        """Remember the newest snapshot, which stays unchanged while it has users."""
        with self.lock:
            self.newest, self.newest_at = vector, time.monotonic()

    def take_last_snapshot(self) -> Vector | None:
        """Return the newest snapshot with one more user, or None."""
        with self.lock:
            newest = self.newest
            if newest is None:
                return None
            if not newest.users:
                size = newest.array.size
                self.free_arrays[size] = [array for array in self.free_arrays[size] if array is not newest.array]
                self.free_elements -= size
            newest.users += 1
            return newest

    def forget_snapshot(self) -> None:
        """Forget the newest snapshot: the weights were replaced."""
        with self.lock:
            self.newest, self.newest_at = None, -math.inf

    def give(self, vector: Vector) -> None:
        """Release one use of a vector, and with its last use the sum in its ``added_since`` too."""
        with self.lock:
            released: Vector | None = vector
            while released is not None:
                released.users -= 1
                if released.users:
                    return
                if not released.is_transient:
                    self.keep_free(released.array)
                following, released.added_since = released.added_since, None
                released = following

    def keep_free(self, array: Floats) -> None:
        """Add an unused array to the free ones, or drop some if they are too many. The caller holds the lock."""
        size = array.size
        free = self.free_arrays[size] = self.free_arrays.pop(size, [])  # The sizes are in the order of their last use.
        if len(free) == self.MAX_FREE:
            self.drop([array])
            return
        free.append(array)
        self.free_elements += size
        self.largest_elements = max(self.largest_elements, size)
        # Partners' offers decide the sizes of parts, so the sum of all sizes is bounded too.
        while self.free_elements > self.MAX_FREE * self.largest_elements:
            oldest_size = next(iter(self.free_arrays))
            self.free_elements -= oldest_size * len(self.free_arrays[oldest_size])
            self.drop(self.free_arrays.pop(oldest_size))

    def drop(self, arrays: list[Floats]) -> None:
        """Forget the newest snapshot if it is in one of these arrays, which are no longer kept."""
        if self.newest is not None and any(array is self.newest.array for array in arrays):
            self.newest = None
