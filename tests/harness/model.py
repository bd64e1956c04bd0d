"""A node's weights as one exact number, and what exchanges make of it.

A mass belongs to it, as push-sum has: what is kept is ``total = mass * value``, which a push divides and a merge adds
up, so that fractions stay short. Where nothing is conserved (row-stochastic) floats would do, and are used.
"""

from __future__ import annotations

from fractions import Fraction

from gossip.arithmetic.mixing import push_mass

__all__ = ["Model", "Number"]

Number = Fraction | float


class Model:
    """``pending`` are shifts, ``merges`` pushes (mass, mass * value) that wait for the step boundary."""

    __slots__ = ("conserves", "exact", "mass", "merges", "pending", "total")

    def __init__(self, value: int, conserves: bool, exact: bool) -> None:
        self.conserves, self.exact = conserves, exact
        self.mass: Number = Fraction(1) if exact else 1.0
        self.total: Number = self.mass * value
        self.pending: list[Number] = []
        self.merges: list[tuple[Number, Number]] = []

    @property
    def value(self) -> Number:
        return self.total if self.mass == 1 else self.total / self.mass

    def learn(self, more: int) -> None:
        """A step of training."""
        if more:  # A sum of fractions takes long.
            self.total += self.mass * more

    def apply(self) -> None:
        """What exchanges brought is in the weights now."""
        for shift in self.pending:
            self.total += self.mass * shift
        self.pending.clear()
        for mass, total in self.merges:
            self.total, self.mass = self.total + total, self.mass + mass
        self.merges.clear()

    def give(self, pushes: int) -> Number:
        """Take the mass of one push away, as Snapshot says."""
        given, left = push_mass(self.mass, pushes, self.conserves)  # type: ignore[arg-type]
        if self.conserves:
            self.total -= given * self.value
            self.mass = left
        else:
            self.total, self.mass = self.value, left
        return given

    def replace(self, value: Number) -> None:
        self.mass = Fraction(1) if self.exact else 1.0
        self.total = value
        self.pending.clear()
        self.merges.clear()

    def sums(self) -> tuple[Number, Number]:
        """(mass, mass * value), with what waits for the boundary."""
        mass = self.mass + sum(mass for mass, _ in self.merges)
        return mass, self.total + self.mass * sum(self.pending) + sum(total for _, total in self.merges)
