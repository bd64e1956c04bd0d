"""A stretch of the optimizer's state on its way to a newcomer: copied at the step boundary, a part at a time.

The state is as long as the weights or twice as long, and no loop should stand for a copy of all of it. Each part is of
one boundary. That they are not all of one costs nothing: a newcomer's pieces come from different members anyway, which
are farther apart than a few steps of one.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from gossip.averaging.vectors import Vector

if TYPE_CHECKING:
    from gossip.averaging.boundary import Model, Pending

__all__ = ["OptimizerCopy"]

SHARE = 4  # a part is a quarter of the weights: a boundary that adds and copies all of them takes little longer
SMALL_ELEMENTS = 1 << 20  # copied in a millisecond, which is not worth another boundary
WITHIN_S = 1.5
"""So long it may take: a newcomer is told after 2.5 s that the loop stands, and gives up after 3. Parts are larger
where boundaries are far apart; a loop of so long steps loses a smaller share of its time by a copy."""


class OptimizerCopy:
    """Into all of ``vector``, whose ``start`` says where the stretch begins in what newcomers take. ``since``: when it
    was wanted."""

    __slots__ = ("copied", "copied_at", "copy", "lives", "since", "vector")

    def __init__(self, vector: Vector, since: float) -> None:
        self.vector, self.since = vector, since
        self.copied = 0  # elements
        self.copied_at = math.nan
        self.lives = -1  # of which weights they are
        self.copy: Pending | None = None  # the last, which may be under way

    def advance(self, model: Model, lives: int, busy: bool, now: float) -> bool:
        """Copy the next part; not at a boundary that is ``busy``, where there will be others in time. Whether that was
        the last. Where the state has changed its length the vector then holds nothing."""
        vector, size = self.vector, self.vector.array.size
        left = self.boundaries_left(now)
        if busy and left > 1 and size > SMALL_ELEMENTS:
            return False
        if lives != self.lives:  # these are the weights of another run, and with them goes another state
            self.copied, self.lives = 0, lives
        place = model.optimizer_range()
        if not place.start <= vector.start <= vector.start + size <= place.stop:
            vector.start = sys.maxsize
            return True
        part = max(model.size() // SHARE, SMALL_ELEMENTS, -(-(size - self.copied) // left))
        stop = min(self.copied + part, size)
        self.copy = model.begin_read_optimizer(vector.array[self.copied : stop], vector.start + self.copied)
        self.copied, self.copied_at = stop, now
        return stop == size

    def boundaries_left(self, now: float) -> int:
        """How many there will be in time, this one among them. Before the first part nobody knows how far apart they
        are: as likely as not twice as far as the first was away."""
        waited_s = now - self.since
        if not waited_s < WITHIN_S:
            return 1
        apart_s = 2 * waited_s if math.isnan(self.copied_at) else now - self.copied_at
        return max(int((WITHIN_S - waited_s) / max(apart_s, 1e-3)), 1)

    @property
    def idle(self) -> bool:
        """Nothing writes to the vector at the moment."""
        return self.copy is None or self.copy.done()
