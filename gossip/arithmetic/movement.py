"""How far local steps alone have moved a model, from a few thousand of its elements."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["Movement"]

Floats = NDArray[np.float32]

SAMPLED = 4_096  # elements: their sum of squares errs by 2 % where the elements are alike, and costs microseconds


class Movement:
    """Of a vector of ``size`` elements. Tell it everything that others added, and it says what is left: the norm of
    what the training loop did itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.every = slice(0, size, max(1, size // SAMPLED))
        self.places = np.arange(0, size, self.every.step)
        self.expected: Floats | None = None  # the sampled elements as they would be without local steps

    def added(self, shift: Floats, positions: NDArray[np.int64] | None = None, weight: float = 1.0) -> None:
        """An exchange's shift was added, times ``weight``: float32 of the whole vector, or of ``positions``, ascending
        and some."""
        if self.expected is None:
            return
        if positions is None:
            self.expected += np.float32(weight) * shift[self.every]
            return
        among = np.minimum(np.searchsorted(positions, self.places), len(positions) - 1)
        hit = positions[among] == self.places
        self.expected[hit] += np.float32(weight) * shift[among[hit]]

    def sample(self, vector: Floats) -> Floats:
        """The elements of a vector that :meth:`merged` asks for."""
        return vector[self.every].copy()

    def merged(self, sample: Floats, ratio: float) -> None:
        """``x += ratio (vector - x)`` was done, with another's vector: what local steps did before shrinks with it."""
        if self.expected is not None:
            self.expected += np.float32(ratio) * (sample - self.expected)

    def since(self, snapshot: Floats) -> float:
        """The norm of what local steps did since the last call; nan at the first."""
        return self.moved(self.sample(snapshot))

    def moved(self, now: Floats) -> float:
        """The same of a :meth:`sample`, which is kept."""
        before, self.expected = self.expected, now
        if before is None:
            return math.nan
        with np.errstate(all="ignore"):  # a model that diverges has moved by infinity, or by nobody knows what
            moved = now - before
            return math.sqrt(float(np.dot(moved, moved)) * self.size / len(self.places))
