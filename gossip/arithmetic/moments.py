"""The optimizer's moments: how they travel, and how a partner's are mixed into our own.

An adaptive optimizer scales its steps by state that only its own node's data made. So members also mix this state
(docs/algorithms.md, "The optimizer's moments"). A *moment* is one of its tensors with an element for each trained
weight, as Adam's first and second moments. Each has a role:

- ``second``: a mean of squares, not negative. Its logarithm to base 2 travels, relative to the largest one.
- ``first``: a mean of gradients, which travels divided by the root of the second moment next to it.
- ``plain``: any other, as the momentum of Muon, which travels as it is.

Ratios and plain moments travel in 4 bits, logarithms in 8. Rounding second moments themselves would bring small ones to
0, on which Adam's steps explode.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gossip.codecs import ALIGN, Codec, get_codec
from gossip.codecs.base import Floats
from gossip.codecs.rows import Rows
from gossip.codecs.tail import with_raw_tail

Role = Literal["first", "second", "plain"]

OCTAVES = 60.0  # Second moments travel down to 2^-60 of the largest one; those below count as 0.
ZERO_OCTAVES = 52.0  # Received ones that are this far below the largest count as 0: rounding errs by up to 5 octaves.
LARGEST_EXPONENT = 127.0  # Of a second moment: float32 holds no larger power of 2.
# The largest |first| / sqrt(second) that is taken from a partner. With Adam's 0.9 and 0.999 none is above
# (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)) = 7.3, by Cauchy and Schwarz. Equal gradients come to 6 in the first steps.
MAX_RATIO = 8.0


@dataclass(frozen=True, slots=True)
class MomentForm:
    """The moments of one optimizer, on which two members must agree.

    Attributes:
        names: The names of the moments, at most 4, since a newcomer takes no more of them.
        roles: The role of each.
        elements: The number of elements of each.
    """

    names: tuple[str, ...]
    roles: tuple[Role, ...]
    elements: int

    @property
    def code(self) -> str:
        """Return the wire form of the roles, a letter for each."""
        return "".join(role[0] for role in self.roles)

    @property
    def period_steps(self) -> int:
        """Return the local steps in which all moments should be mixed once.

        Second moments average over a thousand steps, and momentum over some twenty. Adam's moments gain as much in 32
        steps as in 16 (docs/decisions/0117-moments-are-mixed.md).
        """
        return 32 if "second" in self.roles else 16

    def next_part(self, start: int, interval_steps: int) -> tuple[int, int]:
        """Return the elements to mix after those before ``start``, with a mix every ``interval_steps`` local steps.

        Together the moments of a part are no longer than the weights.
        """
        count = max(len(self.names), round(self.period_steps / interval_steps))
        elements = self.part_elements(count)
        start = start if start < self.elements else 0
        return start, min(start + elements, self.elements)

    def part_elements(self, count: int) -> int:
        """Return the elements of each moment in the longest of ``count`` parts."""
        return self.row_elements(-(-self.elements // count))

    def row_elements(self, elements: int) -> int:
        """Return the length of one moment's row in a vector, a multiple of the codecs' blocks."""
        return -(-elements // ALIGN) * ALIGN

    def vector_elements(self, elements: int) -> int:
        """Return the length of the vector with ``elements`` of each moment: the rows, and then a number for each."""
        return len(self.names) * (self.row_elements(elements) + 1)

    def codec(self, elements: int) -> Codec:
        """Return the codec of such a vector: a codec for each row, and float32 for the numbers behind them."""
        row, count = self.row_elements(elements), len(self.names)
        codecs = [get_codec("int8" if role == "second" else "int4") for role in self.roles]
        return with_raw_tail(Rows(codecs, row), count * row, count * (row + 1))

    def split(self, vector: Floats) -> tuple[Floats, Floats]:
        """Return the rows of a vector, float32 (moments, row), and the numbers behind them, float32 (moments,)."""
        count = len(self.names)
        return vector[:-count].reshape(count, -1), vector[-count:]

    def second_of(self, row: int) -> int:
        """Return the row of the second moment that belongs to the first moment in this row."""
        return self.roles.index("second", row)

    def encode(self, vector: Floats) -> bool:
        """Turn moments into what travels, in place. Return False if they cannot be sent: not finite, or below 0."""
        rows, tops = self.split(vector)
        tops[:] = 0.0
        if not np.isfinite(rows).all():
            return False
        for row, role in enumerate(self.roles):
            if role == "first":
                second = rows[self.second_of(row)]
                np.divide(rows[row], np.sqrt(np.maximum(second, 0.0)), out=rows[row], where=second > 0.0)
                rows[row][second <= 0.0] = 0.0
        for row, role in enumerate(self.roles):
            if role == "second":
                values = rows[row]
                if values.min() < 0.0:
                    return False
                with np.errstate(divide="ignore"):
                    np.log2(values, out=values)
                top = max(values.max(), -LARGEST_EXPONENT)  # Without any above 0, it is -infinity.
                if top > LARGEST_EXPONENT:
                    return False
                tops[row] = top
                values -= tops[row]
                np.maximum(values, -OCTAVES, out=values)
        return True

    def decode(self, vector: Floats) -> bool:
        """Turn what arrived into moments, in place. Return False if no honest member sends it."""
        rows, tops = self.split(vector)
        if not (np.isfinite(vector).all() and (np.abs(tops) <= LARGEST_EXPONENT).all()):
            return False
        for row, role in enumerate(self.roles):
            values = rows[row]
            if role == "second":
                is_zero = values <= -ZERO_OCTAVES
                np.minimum(values, 0.0, out=values)
                values += tops[row]
                np.exp2(values, out=values)
                values[is_zero] = 0.0
        for row, role in enumerate(self.roles):
            if role == "first":
                np.clip(rows[row], -MAX_RATIO, MAX_RATIO, out=rows[row])
                rows[row] *= np.sqrt(rows[self.second_of(row)])
        return True
