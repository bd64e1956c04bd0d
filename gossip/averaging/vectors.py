"""Host vectors: which elements of the weights they hold, who uses them, and when they are free again."""

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
    """The elements of the weights that a snapshot holds, where it does not hold all."""

    part: Subset
    positions: Positions  # ascending


@dataclass(slots=True, eq=False)
class Vector:
    """A host vector, shared by ``users`` sessions."""

    array: Floats  # with a cut: its elements, and behind them the sampled ones
    users: int = 1
    cut: Cut | None = None
    passing: bool = False  # its memory is not kept when it has no more users
    start: int = 0  # of what newcomers take, where it begins
    memory: mmap.mmap | None = None  # the system's, in which it lies alone
    finite: bool | None = None  # whether all of what was copied there is, where that was seen on the way
    taken: int = 0  # of a snapshot: the number of the visit to the boundary at which it was taken
    since: Vector | None = None  # of a snapshot: the sum of what mixes have added to the weights after it was taken

    @classmethod
    def mapped(cls, elements: int) -> Vector:
        """Zeros, each page of which is taken when it is written to."""
        memory = mmap.mmap(-1, 4 * elements, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(np.frombuffer(memory, np.float32), passing=True, memory=memory)

    def shorten(self, elements: int) -> None:
        """It is of so many elements from now on; what is mapped and lies behind them goes back to the system."""
        self.array = self.array[:elements]
        if self.memory is not None:
            stop = -(-4 * elements // mmap.PAGESIZE) * mmap.PAGESIZE
            if stop < len(self.memory):
                self.memory.madvise(mmap.MADV_DONTNEED, stop)

    @property
    def elements(self) -> int:
        """Without the sampled ones."""
        return self.array.size if self.cut is None else self.cut.positions.size

    def holds(self, start: int, stop: int) -> bool:
        """Whether it has elements [start, stop) of what newcomers take."""
        return self.start <= start and stop <= self.start + self.array.size

    def piece(self, start: int, stop: int) -> Floats:
        """These elements."""
        return self.array[start - self.start : stop - self.start]


class Vectors(Protocol):
    """Where vectors come from and go back to; a driver with two threads guards it with a lock."""

    def take(self, elements: int) -> Vector:
        """One of so many elements, whatever they hold."""

    def at_hand(self, elements: int) -> bool:
        """Whether :meth:`take` gives one whose memory is there already, or is so little that nobody waits for it."""

    def pass_by(self, elements: int) -> Vector:
        """One whose memory goes when it is given back: of a length that exchanges do not need."""

    def give(self, vector: Vector) -> None:
        """One user needs it no more."""

    def keep(self, vector: Vector) -> None:
        """A snapshot, newer than any other, that nobody will change while it has users."""

    def recall(self) -> Vector | None:
        """The newest snapshot, with one more user; None where there is none."""

    def forget(self) -> None:
        """The weights are others now, and no snapshot is the newest."""


class Lease:
    """One more use of a vector, by one who reads it while others give it back; ends once, however often said."""

    def __init__(self, vectors: Vectors, vector: Vector) -> None:
        self.vectors, self.vector, self.open = vectors, vector, True

    def end(self) -> None:
        if self.open:
            self.open = False
            self.vectors.give(self.vector)
