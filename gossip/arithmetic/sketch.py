"""Sketches: a few numbers by which long vectors can be compared, made by a secret random map."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Numbers in a sketch. In attacks on Fashion-MNIST 251 were as good as 1,021. A prime number is no multiple of a layer's
# width, so that equal columns of a layer do not meet in one sum.
WIDTH = 251


class Sketcher:
    """A secret random linear map of vectors of ``size`` elements to ``WIDTH`` numbers.

    Number j is the sum of the elements j, j + WIDTH, j + 2 WIDTH, ... with random signs. The expectation of the inner
    product of two sketches is that of the two vectors (Alon, Matias and Szegedy, "The space complexity of approximating
    the frequency moments", 1996). All elements count, so nothing can be hidden in elements that are not sampled. An
    attacker who does not know the signs cannot choose a vector that a sketch leaves out.
    """

    def __init__(self, size: int, seed: int) -> None:
        """Draw the signs. ``seed`` must be secret, and lasts as long as sketches are compared."""
        draws = np.random.default_rng(seed).random(size // WIDTH + 1)
        self.signs = np.where(draws < 0.5, np.float32(-1), np.float32(1))  # One for each WIDTH elements.

    def sketch(self, vector: Floats) -> Floats:
        """Return the sketch of a vector of ``size`` elements: float32 (WIDTH,)."""
        rows = vector.size // WIDTH
        sums: Floats = self.signs[:rows] @ vector[: rows * WIDTH].reshape(rows, WIDTH)
        rest = vector[rows * WIDTH :]
        sums[: rest.size] += self.signs[rows] * rest
        return sums
