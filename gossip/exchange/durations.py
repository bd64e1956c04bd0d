"""How long exchanges with each partner took: what the next one may take, and when others go first."""

from __future__ import annotations

import math
from collections.abc import Collection

from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["LEAST_S", "PARTNERS", "Durations", "Patience", "median", "spread"]

TIMED = 256  # partners whose durations are remembered,
KEPT = 8  # of the last exchanges
SMOOTHING = 0.75  # of what was known of a rate: one exchange beside others does not make a link slow

LEAST_S = 0.5  # what a scheduler, a garbage collection or a lost packet may add to anything
KNOWN = 4  # waits, before which nothing is usual; and of each partner: of three at once the next may take a step
AFRESH = 8  # waits, after which what is usual is computed again: medians of 64 take longer than all else of a mix
PARTNERS = 16  # whose waits say what is usual, the last of each: nobody is the median by answering often


class Durations:
    """Of the last exchanges, by partner; the partner of longest ago is forgotten first."""

    def __init__(self) -> None:
        self.past: dict[PeerId, list[float]] = {}
        self.rates: dict[PeerId, float] = {}  # MB/s each way

    def add(self, partner: PeerId, seconds: float, moved_bytes: int = 0) -> None:
        """An exchange took so long, and moved so many bytes each way."""
        if seconds > 0 and moved_bytes:
            rate = 1e-6 * moved_bytes / seconds
            self.rates[partner] = rate + SMOOTHING * (self.rates.pop(partner, rate) - rate)
        past = self.past.pop(partner, [])[-KEPT + 1 :]
        self.past[partner] = [*past, seconds]
        if len(self.past) > TIMED:
            oldest = next(iter(self.past))
            del self.past[oldest]
            self.rates.pop(oldest, None)

    def rate(self, partner: PeerId) -> float | None:
        """MB/s each way, the wait for the partner's boundary included; the median over the others for one without a
        past, None where there is none at all."""
        rate = self.rates.get(partner)
        return median(self.rates.values()) if rate is None and self.rates else rate

    def allowance(self, partner: PeerId) -> float:
        """Median and six median absolute deviations, in seconds; 0 for a partner without a past."""
        past = self.past.get(partner)
        if not past:
            return 0.0
        middle, deviation = spread(past)
        return middle + 6 * deviation


def spread(values: Collection[float]) -> tuple[float, float]:
    """(median, median absolute deviation)."""
    middle = median(values)
    return middle, median([abs(value - middle) for value in values])


def median(values: Collection[float]) -> float:
    """Of a few (statistics.median takes ten times as long over eight)."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Patience:
    """What partners took to answer, or to stream. Only what was finished counts: what an ACCEPT costs whoever streams
    nothing is nothing. Who always takes longer is parked each time, and mixes all the same."""

    def __init__(self) -> None:
        self.past = Recent[PeerId, list[float]](PARTNERS)  # seconds
        self.usual_s = self.median_s = math.inf  # what is allowed, and what half of them took at most
        self.added = 0

    def add(self, partner: PeerId, seconds: float) -> None:
        """It took so long, and the exchange is finished."""
        self.past[partner] = [*self.past.get(partner, [])[-KNOWN + 1 :], seconds]
        self.added += 1
        if self.added == KNOWN or self.added % AFRESH == 0:
            waits = [seconds for past in self.past.values() for seconds in past]
            self.median_s, self.usual_s = median(waits), allowed(waits)

    @property
    def seconds(self) -> float:
        return max(LEAST_S, self.usual_s)


def allowed(waits: Collection[float]) -> float:
    """Median and six median absolute deviations; and twice the median at least, since who is asked waits for its next
    step boundary, which is anything between nothing and a step."""
    middle, deviation = spread(waits)
    return max(2 * middle, middle + 6 * deviation)
