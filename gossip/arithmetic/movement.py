"""The distance that local steps alone have moved a model, estimated from a few thousand of its elements."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["Movement"]

Floats = NDArray[np.float32]

SAMPLED = 4_096  # Elements to sample: their sum of squares errs by 2 % if elements are alike, in microseconds.


class Movement:
    """The movement of a vector of ``size`` elements by the training loop's own steps, without that of exchanges."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.every = slice(0, size, max(1, size // SAMPLED))
        self.places = np.arange(0, size, self.every.step)
        self.expected: Floats | None = None  # The sampled elements as they would be without local steps.

    def added(self, shift: Floats, positions: NDArray[np.int64] | None = None, weight: float = 1.0) -> None:
        """Account for an exchange's shift, times ``weight``.

        ``shift`` is float32 of the whole vector, or of ``positions``, which are ascending and not empty.
        """
        if self.expected is None:
            return
        if positions is None:
            self.expected += np.float32(weight) * shift[self.every]
            return
        among = np.minimum(np.searchsorted(positions, self.places), len(positions) - 1)
        hit = positions[among] == self.places
        self.expected[hit] += np.float32(weight) * shift[among[hit]]

    def sample(self, vector: Floats) -> Floats:
        """Return the elements of a vector that :meth:`merged` needs."""
        return vector[self.every].copy()

    def merged(self, sample: Floats, ratio: float) -> None:
        """Account for ``x += ratio (vector - x)`` with another node's vector.

        It also shrinks the displacement by earlier local steps.
        """
        if self.expected is not None:
            self.expected += np.float32(ratio) * (sample - self.expected)

    def since(self, snapshot: Floats) -> float:
        """Return the norm of the local steps since the last call; NaN at the first."""
        return self.moved(self.sample(snapshot))

    def moved(self, now: Floats) -> float:
        """Return the same as :meth:`since` for a :meth:`sample`, which is kept and must not be changed."""
        before, self.expected = self.expected, now
        if before is None:
            return math.nan
        with np.errstate(all="ignore"):  # The weights of a diverging model may be infinite or NaN.
            moved = now - before
            return math.sqrt(float(np.dot(moved, moved)) * self.size / len(self.places))
