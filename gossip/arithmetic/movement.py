"""The distance that local steps alone have moved a model, estimated from a few thousand of its elements."""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SAMPLED_ELEMENTS = 4_096  # Their sum of squares errs by 2 % if all elements are alike, and takes microseconds.


class Movement:
    """The movement of a vector of ``size`` elements by local steps alone.

    A sample of elements is kept as it would be without further local steps: exchanges change the sample as they change
    the vector. The difference from the sample of the next snapshot is what local steps did.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sampled = slice(0, size, max(1, size // SAMPLED_ELEMENTS))  # Evenly spaced.
        self.positions = np.arange(0, size, self.sampled.step)  # Positions of the sampled elements, int64 (sample,).
        self.expected_sample: Floats | None = None  # The sampled elements as they would be without local steps.

    def sample(self, vector: Floats) -> Floats:
        """Return a copy of the sampled elements of a whole vector: float32 (sample,)."""
        return vector[self.sampled].copy()

    def measure(self, snapshot: Floats) -> float:
        """Return the norm of the local steps since the last measurement; NaN at the first."""
        return self.measure_sample(self.sample(snapshot))

    def measure_sample(self, sample: Floats) -> float:
        """Measure as :meth:`measure` does, from a :meth:`sample`, which is kept and must not be changed."""
        expected, self.expected_sample = self.expected_sample, sample
        if expected is None:
            return math.nan
        with np.errstate(all="ignore"):  # The weights of a diverging model may be infinite or NaN.
            moved = sample - expected
            return math.sqrt(float(np.dot(moved, moved)) * self.size / len(self.positions))

    def forget(self) -> None:
        """Measure from the next snapshot on, because the weights were replaced by ones that were not sampled."""
        self.expected_sample = None

    def add_shift(self, shift: Floats, positions: NDArray[np.int64] | None = None, weight: float = 1.0) -> None:
        """Account for ``x += weight shift`` of an exchange.

        ``shift`` is float32 of the whole vector, or of ``positions``, which are ascending and not empty.
        """
        if self.expected_sample is None:
            return
        if positions is None:
            self.expected_sample += np.float32(weight) * shift[self.sampled]
            return
        # By sampled element: the index of its position in ``positions`` (any if absent), and whether it is present.
        indices = np.minimum(np.searchsorted(positions, self.positions), len(positions) - 1)
        is_shifted = positions[indices] == self.positions
        self.expected_sample[is_shifted] += np.float32(weight) * shift[indices[is_shifted]]

    def add_merge(self, sample: Floats, share: float) -> None:
        """Account for ``x += share (vector - x)`` with another node's vector, of which ``sample`` is given.

        A merge also takes back this share of what local steps did before it.
        """
        if self.expected_sample is not None:
            self.expected_sample += np.float32(share) * (sample - self.expected_sample)
