"""Host vectors: the elements of the weights that they hold, and their reference counts."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.subsets import Subset

__all__ = ["Cut", "Floats", "Lease", "Positions", "Vector", "Vectors"]

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The elements of the weights that a snapshot of a part holds."""

    part: Subset
    positions: Positions  # In ascending order.


@dataclass(slots=True, eq=False)
class Vector:
    """A host vector, shared by ``users`` sessions."""

    array: Floats  # With a cut: its elements, then the sampled ones.
    users: int = 1
    cut: Cut | None = None
    passing: bool = False  # Its memory is freed when it has no more users.
    start: int = 0  # Position of its first element in what newcomers take.
    memory: mmap.mmap | None = None  # Mapping that holds this vector alone.
    finite: bool | None = None  # True if all copied values are finite, None if not checked.
    taken: int = 0  # Snapshot: number of the boundary visit that took it.
    since: Vector | None = None  # Snapshot: sum of what mixes have added to the weights since.

    @classmethod
    def mapped(cls, elements: int) -> Vector:
        """Return zeros in memory whose pages are allocated when they are written to."""
        memory = mmap.mmap(-1, 4 * elements, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(np.frombuffer(memory, np.float32), passing=True, memory=memory)

    def shorten(self, elements: int) -> None:
        """Shorten the vector, and return the mapped pages behind its new end to the system."""
        self.array = self.array[:elements]
        if self.memory is not None:
            stop = -(-4 * elements // mmap.PAGESIZE) * mmap.PAGESIZE
            if stop < len(self.memory):
                self.memory.madvise(mmap.MADV_DONTNEED, stop)

    @property
    def elements(self) -> int:
        """Return the number of elements without the sampled ones."""
        return self.array.size if self.cut is None else self.cut.positions.size

    def holds(self, start: int, stop: int) -> bool:
        """Return True if it has elements [start, stop) of what newcomers take."""
        return self.start <= start and stop <= self.start + self.array.size

    def piece(self, start: int, stop: int) -> Floats:
        """Return elements [start, stop) of what newcomers take."""
        return self.array[start - self.start : stop - self.start]


class Vectors(Protocol):
    """A pool of vectors. A driver with two threads guards it with a lock."""

    def take(self, elements: int) -> Vector:
        """Return an uninitialised vector of ``elements`` floats."""

    def at_hand(self, elements: int) -> bool:
        """Return True if :meth:`take` would return a vector whose memory exists, or is too small to matter."""

    def reserve(self, elements: int) -> None:
        """Make :meth:`at_hand` true, in a thread that may wait."""

    def pass_by(self, elements: int) -> Vector:
        """Return a vector of a length that exchanges do not need; its memory is freed when it is given back."""

    def mapped(self, elements: int) -> Vector:
        """Return zeros that take memory when they are written to, and give it back with their last user."""

    def give(self, vector: Vector) -> None:
        """Release one use of the vector."""

    def keep(self, vector: Vector) -> None:
        """Keep a snapshot as the newest; it must not change while it has users."""

    def recall(self) -> Vector | None:
        """Return the newest snapshot with one more user, None if there is none."""

    def forget(self) -> None:
        """Forget the newest snapshot, because the weights were replaced."""


class Lease:
    """A use of a vector by a reader while others give it back. Ending it again has no effect."""

    def __init__(self, vectors: Vectors, vector: Vector) -> None:
        self.vectors, self.vector, self.open = vectors, vector, True

    def end(self) -> None:
        if self.open:
            self.open = False
            self.vectors.give(self.vector)
