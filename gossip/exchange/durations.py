"""Durations of exchanges with each partner: time limits for the next one, and the time after which it is parked."""

from __future__ import annotations

import math
from collections.abc import Collection

from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["LEAST_S", "PARTNERS", "Durations", "Patience", "median", "spread"]

TIMED = 256  # Partners whose durations are remembered.
KEPT = 8  # Last exchanges that count for each partner.
SMOOTHING = 0.75  # Weight of the old rate: one exchange that shares the link does not make it slow.

LEAST_S = 0.5  # Time that a scheduler, a garbage collection or a lost packet may add to any wait.
KNOWN = 4  # Waits needed before a usual time is known, and waits that count for each partner.
AFRESH = 8  # Waits between two computations of the usual time: a median of 64 is the slowest part of a mix.
PARTNERS = 16  # Last partners whose waits count, so that no partner sets the median by answering often.


class Durations:
    """Durations and rates of the last exchanges, by partner; the one that mixed longest ago is forgotten first."""

    def __init__(self) -> None:
        self.past: dict[PeerId, list[float]] = {}
        self.rates: dict[PeerId, float] = {}  # MB/s each way

    def add(self, partner: PeerId, seconds: float, moved_bytes: int = 0) -> None:
        """Record the duration of an exchange, and the bytes that it moved each way."""
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
        """Return the rate in MB/s each way, the wait for the partner's step boundary included.

        An unknown partner gets the median of the others; None if no rate is known.
        """
        rate = self.rates.get(partner)
        return median(self.rates.values()) if rate is None and self.rates else rate

    def allowance(self, partner: PeerId) -> float:
        """Return the median plus six median absolute deviations in seconds, 0 for an unknown partner."""
        past = self.past.get(partner)
        if not past:
            return 0.0
        middle, deviation = spread(past)
        return middle + 6 * deviation


def spread(values: Collection[float]) -> tuple[float, float]:
    """Return the median and the median absolute deviation."""
    middle = median(values)
    return middle, median([abs(value - middle) for value in values])


def median(values: Collection[float]) -> float:
    """Return the median of a few values (statistics.median takes ten times as long for eight)."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Patience:
    """The usual time until partners answer, or until their streams end.

    Only finished exchanges count, because an Accept alone costs an attacker nothing. A partner that is always slower is
    parked each time, and mixes all the same.
    """

    def __init__(self) -> None:
        self.past = Recent[PeerId, list[float]](PARTNERS)  # seconds
        self.usual_s = self.median_s = math.inf  # The usual limit, and the median.
        self.added = 0

    def add(self, partner: PeerId, seconds: float) -> None:
        """Record the wait of a finished exchange."""
        self.past[partner] = [*self.past.get(partner, [])[-KNOWN + 1 :], seconds]
        self.added += 1
        if self.added == KNOWN or self.added % AFRESH == 0:
            waits = [seconds for past in self.past.values() for seconds in past]
            self.median_s, self.usual_s = median(waits), allowed(waits)

    @property
    def seconds(self) -> float:
        return max(LEAST_S, self.usual_s)


def allowed(waits: Collection[float]) -> float:
    """Return the median plus six median absolute deviations, and at least twice the median.

    The partner waits for its next step boundary, which takes anything between nothing and a step.
    """
    middle, deviation = spread(waits)
    return max(2 * middle, middle + 6 * deviation)
