"""Durations and results of exchanges: how long one may take, how long a wait usually takes, and whether many fail.

The usual wait is the time after which an exchange is *backgrounded*: it goes on without a slot (see ``transitions``).
"""

import math
from collections import deque
from collections.abc import Collection

from gossip.ids import PeerId
from gossip.recent import Recent

DURATION_PARTNERS = 256  # Number of partners whose durations are remembered.
DURATIONS_PER_PARTNER = 8  # Number of last exchanges that count for each partner.
OLD_RATE_WEIGHT = 0.75  # Weight of the old rate, so that one exchange that shares the link hardly lowers the rate.

MIN_WAIT_LIMIT_S = 0.5  # Time that a scheduler, a garbage collection or a lost packet may add to any wait.
MIN_WAITS = 4  # Number of waits from which on their median counts.
# With fewer, a wait is too long from this many times the longest one on. A shorter limit held slow partners back.
FIRST_LIMIT = 4
WAITS_PER_PARTNER = 4  # Number of last waits that count for each partner.
WAIT_PARTNERS = 16  # Number of last partners whose waits count: a partner that answers often cannot set the median.
# Number of waits between two computations of the limit. A computation sorts WAIT_PARTNERS * WAITS_PER_PARTNER = 64
# waits, which at every exchange would be the slowest part of a mix.
WAITS_PER_UPDATE = 8

# Number of our last exchanges that count, and of failures among them that are many. Members that come and go cause
# fewer failures.
LAST_RESULTS, MANY_FAILURES = 8, 2


class Durations:
    """Durations and rates of the last exchanges, by partner; the one that mixed longest ago is forgotten first."""

    def __init__(self) -> None:
        self.durations_s: dict[PeerId, list[float]] = {}
        self.rates: dict[PeerId, float] = {}  # MB/s each way

    def add(self, partner: PeerId, seconds: float, moved_bytes: int = 0) -> None:
        """Record the duration of an exchange, and the bytes that it moved each way."""
        if seconds > 0 and moved_bytes:
            rate = 1e-6 * moved_bytes / seconds
            self.rates[partner] = rate + OLD_RATE_WEIGHT * (self.rates.pop(partner, rate) - rate)
        earlier_s = self.durations_s.pop(partner, [])[-DURATIONS_PER_PARTNER + 1 :]
        self.durations_s[partner] = [*earlier_s, seconds]
        if len(self.durations_s) > DURATION_PARTNERS:
            oldest = next(iter(self.durations_s))
            del self.durations_s[oldest]
            self.rates.pop(oldest, None)

    def rate(self, partner: PeerId) -> float | None:
        """Return the rate in MB/s each way, the wait for the partner's step boundary included.

        An unknown partner gets the median of the others; None if no rate is known.
        """
        rate = self.rates.get(partner)
        return median(self.rates.values()) if rate is None and self.rates else rate

    def longest_s(self, partner: PeerId) -> float:
        """Return the longest duration in seconds to expect of an exchange, 0 for an unknown partner.

        It is the median plus six median absolute deviations. Twice the median, as in :func:`wait_limit_s`, is not
        needed, because callers add this duration to the time that the vector takes at the slowest rate.
        """
        durations = self.durations_s.get(partner)
        if not durations:
            return 0.0
        middle, deviation = spread(durations)
        return middle + 6 * deviation


def spread(values: Collection[float]) -> tuple[float, float]:
    """Return the median and the median absolute deviation."""
    middle = median(values)
    return middle, median([abs(value - middle) for value in values])


def median(values: Collection[float]) -> float:
    """Return the median of a few values (statistics.median takes ten times as long for eight)."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Waits:
    """Waits of one kind, for answers to an Offer or for streams, and how long such a wait usually takes.

    Only waits of finished exchanges are added. An Accept alone costs its sender nothing, so an attacker could otherwise
    answer late and never stream. That would raise the limit, and with it the time for which a silent partner holds a
    slot. A finished exchange costs the attacker a whole vector.

    A partner that is always slower than the limit is backgrounded each time, and still mixes.
    """

    def __init__(self) -> None:
        self.waits_s = Recent[PeerId, list[float]](WAIT_PARTNERS)
        self.median_s = math.inf  # Infinite while fewer than MIN_WAITS waits are recorded.
        self.learned_limit_s = math.inf  # Infinite before the first wait.
        self.added_waits = 0

    def add(self, partner: PeerId, seconds: float) -> None:
        """Record a wait of a finished exchange."""
        self.waits_s[partner] = [*self.waits_s.get(partner, [])[-WAITS_PER_PARTNER + 1 :], seconds]
        self.added_waits += 1
        if self.added_waits < MIN_WAITS:
            self.learned_limit_s = FIRST_LIMIT * max(max(of_partner) for of_partner in self.waits_s.values())
        elif self.added_waits == MIN_WAITS or self.added_waits % WAITS_PER_UPDATE == 0:
            waits_s = [wait_s for of_partner in self.waits_s.values() for wait_s in of_partner]
            self.median_s, self.learned_limit_s = median(waits_s), wait_limit_s(waits_s)

    @property
    def limit_s(self) -> float:
        """Return the time after which a wait takes longer than usual."""
        return max(MIN_WAIT_LIMIT_S, self.learned_limit_s)


def wait_limit_s(waits_s: Collection[float]) -> float:
    """Return the median plus six median absolute deviations, and at least twice the median.

    A partner answers at its next step boundary, so a wait takes anything between nothing and one step. The median of
    such waits is half a step. Twice the median is therefore a whole step, the longest wait of an honest partner.
    """
    middle, deviation = spread(waits_s)
    return max(2 * middle, middle + 6 * deviation)


class OwnResults:
    """The results of the last exchanges that this peer began."""

    def __init__(self) -> None:
        self.failed: deque[bool] = deque(maxlen=LAST_RESULTS)

    def add(self, failed: bool) -> None:
        """Record that an exchange has finished or failed."""
        self.failed.append(failed)

    @property
    def are_failing(self) -> bool:
        """Return True if MANY_FAILURES of the last exchanges failed, which is rare among members that come and go."""
        return sum(self.failed) >= MANY_FAILURES
