"""A node's weights as one exact number, which exchanges change.

The model has a mass, as in push-sum. It stores ``total = mass * value``, which a push divides and a merge adds to, so
that fractions stay short. Row-stochastic mixing conserves nothing, so there the numbers are floats.
"""

from fractions import Fraction

from gossip.arithmetic.mixing import push_mass

Number = Fraction | float


class Model:
    """One number and its mass. ``pending`` shifts and ``merges`` (mass, mass * value) wait for the step boundary."""

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
        """Take a step of training, which adds ``more`` to the value."""
        if more:  # Adding fractions is slow.
            self.total += self.mass * more

    def apply(self) -> None:
        """Add the results of exchanges to the value."""
        for shift in self.pending:
            self.total += self.mass * shift
        self.pending.clear()
        for mass, total in self.merges:
            self.total, self.mass = self.total + total, self.mass + mass
        self.merges.clear()

    def give(self, pushes: int) -> Number:
        """Take away the mass of each of ``pushes`` pushes, and return the mass of one."""
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
        """Return (mass, mass * value), with the shifts and merges that wait for the boundary."""
        mass = self.mass + sum(mass for mass, _ in self.merges)
        return mass, self.total + self.mass * sum(self.pending) + sum(total for _, total in self.merges)
