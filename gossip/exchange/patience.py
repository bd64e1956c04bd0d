"""How long an exchange waits for its partner before others go first: as long as that usually takes."""

from __future__ import annotations

import math
from collections.abc import Collection

from gossip.exchange.durations import spread
from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["Patience"]

LEAST_S = 0.5  # what a scheduler, a garbage collection or a lost packet may add to anything
KNOWN = 4  # waits, before which nothing is usual; and of each partner: of three at once the next may take a step
AFRESH = 8  # waits, after which what is usual is computed again: medians of 64 take longer than all else of a mix
PARTNERS = 16  # whose waits say what is usual, the last of each: nobody is the median by answering often


class Patience:
    """What partners took to answer, or to stream. Only what was finished counts: what an ACCEPT costs whoever streams
    nothing is nothing. Who always takes longer is parked each time, and mixes all the same."""

    def __init__(self) -> None:
        self.past = Recent[PeerId, list[float]](PARTNERS)  # seconds
        self.usual_s = math.inf
        self.added = 0

    def add(self, partner: PeerId, seconds: float) -> None:
        """It took so long, and the exchange is finished."""
        self.past[partner] = [*self.past.get(partner, [])[-KNOWN + 1 :], seconds]
        self.added += 1
        if self.added == KNOWN or self.added % AFRESH == 0:
            self.usual_s = allowed([seconds for past in self.past.values() for seconds in past])

    @property
    def seconds(self) -> float:
        return max(LEAST_S, self.usual_s)


def allowed(waits: Collection[float]) -> float:
    """Median and six median absolute deviations; and twice the median at least, since who is asked waits for its next
    step boundary, which is anything between nothing and a step."""
    middle, deviation = spread(waits)
    return max(2 * middle, middle + 6 * deviation)
