"""What a finished exchange does to a model at the next step boundary."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Difference", "Merged", "Shift", "SubsetShift"]

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


class Shift(Protocol):
    def add_to(self, vector: Floats, mass: float) -> float:
        """Change ``vector`` in place; returns what its mass is then."""


class Difference:
    """Both sides of a pair hold one array, and one of them takes it away."""

    __slots__ = ("negative", "values")

    def __init__(self, values: Floats, negative: bool) -> None:
        self.values, self.negative = values, negative

    def add_to(self, vector: Floats, mass: float) -> float:
        if self.negative:
            vector -= self.values
        else:
            vector += self.values
        return mass


class SubsetShift:
    """A difference of some of the elements."""

    __slots__ = ("negative", "positions", "values")

    def __init__(self, values: Floats, negative: bool, positions: Positions) -> None:
        self.values, self.negative, self.positions = values, negative, positions

    def add_to(self, vector: Floats, mass: float) -> float:
        if self.negative:
            vector[self.positions] -= self.values
        else:
            vector[self.positions] += self.values
        return mass


class Merged:
    """A vector with its mass."""

    __slots__ = ("mass", "values")

    def __init__(self, values: Floats, mass: float) -> None:
        self.values, self.mass = values, mass

    def add_to(self, vector: Floats, mass: float) -> float:
        total = mass + self.mass
        vector += np.float32(self.mass / total) * (self.values - vector)
        return total
