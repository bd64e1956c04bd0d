"""Vectors in the host's memory: which weights they hold, how many sessions use them, and their pool's interface."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.moments import MomentForm
from gossip.arithmetic.subsets import ALL, Subset

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The elements of the weights that a snapshot of a part holds."""

    part: Subset
    positions: Positions  # In ascending order.


@dataclass(slots=True, eq=False)
class Vector:
    """A host vector, shared by ``users`` sessions; it returns to its pool when the last one gives it back."""

    array: Floats  # (elements,); with a cut: its elements, then the sampled ones (gossip.arithmetic.movement).
    users: int = 1
    cut: Cut | None = None  # The elements of the weights that it holds; None for all.
    is_transient: bool = False  # Its memory is freed when it has no more users.
    start: int = 0  # Position of its first element in the vector that newcomers take: weights, then optimizer state.
    memory: mmap.mmap | None = None  # The mapping that holds this vector alone.
    is_finite: bool | None = None  # True if all copied values are finite; None if they were not checked.
    visit_number: int = 0  # For a snapshot: the number of the boundary visit that took it.
    # For a snapshot: the sum of what other mixes, which overlap with its own, have added to the weights since.
    added_since: Vector | None = None
    # The form of the moments that it holds, elements [start, stop) of each, in place of weights.
    moments: MomentForm | None = None
    stop: int = 0

    @classmethod
    def mapped(cls, elements: int) -> Vector:
        """Return zeros in memory whose pages are allocated when they are written to."""
        memory = mmap.mmap(-1, 4 * elements, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(np.frombuffer(memory, np.float32), is_transient=True, memory=memory)

    def shorten(self, elements: int) -> None:
        """Shorten the vector, and return the mapped pages behind its new end to the system."""
        self.array = self.array[:elements]
        if self.memory is not None:
            stop = -(-4 * elements // mmap.PAGESIZE) * mmap.PAGESIZE
            if stop < len(self.memory):
                self.memory.madvise(mmap.MADV_DONTNEED, stop)

    @property
    def part(self) -> Subset:
        """Return the part of the weights that it holds."""
        return ALL if self.cut is None else self.cut.part

    @property
    def elements(self) -> int:
        """Return the number of elements without the sampled ones."""
        return self.array.size if self.cut is None else self.cut.positions.size

    def has_piece(self, start: int, stop: int) -> bool:
        """Return True if it holds elements [start, stop) of the vector that newcomers take."""
        return self.start <= start and stop <= self.start + self.array.size

    def piece(self, start: int, stop: int) -> Floats:
        """Return elements [start, stop) of the vector that newcomers take."""
        return self.array[start - self.start : stop - self.start]


def count_weights(vector: Vector, parameters: int) -> int:
    """Return how many of a vector's elements are weights of the model, whose first ``parameters`` they are.

    Statistics follow them, of a cut too, since its positions ascend.
    """
    if vector.cut is None:
        return parameters
    return int(np.searchsorted(vector.cut.positions, parameters))


REACH = 2.0  # How far partners move a statistic, in the largest one of its tensor. Means of unlike data are as far.


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """A partner's statistics (a BatchNorm's running mean and variance), to be mixed into the live ones.

    A difference that is added to a statistic which local steps have changed meanwhile can take it beyond both sides'
    values, and a variance below zero. So statistics travel as values, and the boundary moves the live ones to them:

        x <- (1 - w) x + w clip(p, a - r, a + r)        r = 2 max |tensor of a|, or 1 where that is all zero

    The result lies between both sides' values. The anchor ``a`` are the values that the last local step left, so that
    partners move a statistic by at most ``r`` until the next local steps, which restore it. An element that no local
    step has changed is a constant of the model, which no partner moves while the node trains.

    Attributes:
        vector: The partner's values, float32, one for each statistic of the model; NaN where a part has none.
        weight: The share by which the live ones move towards them.
        start: The position of the first statistic in the vector of the model.
        moves_all: True while the node settles: constants move too, since others' local steps may have changed them.
    """

    vector: Vector
    weight: float
    start: int
    moves_all: bool = False

    @property
    def values(self) -> Floats:
        return self.vector.array


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """A partner's moments of the optimizer, to be mixed into ours at a step boundary.

    A moment moves half of the way to the partner's, so that a second moment keeps at least half of its value:

        m <- (m + clip(m', -r, r)) / 2        r = 2 max |m| over our tensor

    Attributes:
        vector: What :meth:`gossip.arithmetic.moments.MomentForm.decode` left.
        form: The form of both sides.
        start: The first element, in each moment.
        stop: The element behind the last one.
    """

    vector: Vector
    form: MomentForm
    start: int
    stop: int

    @property
    def rows(self) -> Floats:
        """Return a row for each moment, float32 (moments, row)."""
        return self.form.split(self.vector.array)[0]


class Vectors(Protocol):
    """A pool of vectors. A driver with two threads guards it with a lock."""

    def take(self, elements: int) -> Vector:
        """Return an uninitialised vector of ``elements`` floats."""

    def take_scratch(self, elements: int) -> Vector:
        """Return an uninitialised vector that is neither copied from the model nor added to it."""

    def has_free(self, elements: int, cut: Cut | None = None) -> bool:
        """Return True if a snapshot of ``elements`` floats, of this cut, takes memory that exists, or is small."""

    def reserve(self, elements: int, cut: Cut | None = None) -> None:
        """Allocate memory so that :meth:`has_free` is true, in a thread that may wait."""

    def take_transient(self, elements: int) -> Vector:
        """Return an uninitialised vector for a newcomer's piece, whose memory is freed when it is given back."""

    def take_mapped(self, elements: int) -> Vector:
        """Return zeros whose memory is allocated when they are written to, and freed with their last user."""

    def give(self, vector: Vector) -> None:
        """Release one use of the vector."""

    def keep_snapshot(self, vector: Vector) -> None:
        """Keep a snapshot as the newest one; it must not change while it has users."""

    def take_last_snapshot(self) -> Vector | None:
        """Return the newest snapshot with one more user, None if there is none."""

    def forget_snapshot(self) -> None:
        """Forget the newest snapshot, because the weights were replaced."""


class Lease:
    """A reader's use of a vector, until :meth:`end`. Ending it again has no effect."""

    def __init__(self, vectors: Vectors, vector: Vector) -> None:
        self.vectors, self.vector, self.is_open = vectors, vector, True

    def end(self) -> None:
        if self.is_open:
            self.is_open = False
            self.vectors.give(self.vector)
