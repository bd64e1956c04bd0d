"""The samples behind the weights of one run: what is credited, and what its members make between two records.

A member states its rate, and until its next record comes it is taken to go on at it (dead reckoning). The sum over all
who are reckoned with so is ``sum(rate) now - sum(rate since)``: two numbers, whatever their count. Rates are whole
millionths of a sample a second and times whole microseconds, so that what was added is taken off again to the last
digit, and no error grows however long a run lasts.
"""

from __future__ import annotations

from gossip.membership.samples.credit import MOST_SAMPLES

__all__ = ["RunCount", "made"]

MICRO = 1_000_000  # of a sample a second, and of a second


class RunCount:
    """Sums over the members whose weights come from one genesis, of what is credited."""

    __slots__ = ("_flow", "_offset", "base", "claimed_base", "members", "paid_s", "samples")

    def __init__(self, now: float) -> None:
        self.members, self.samples, self.base = 0, 0, 0
        self.claimed_base = 0  # the largest that a member states: believed no faster than samples are
        self.paid_s = now
        self._flow = self._offset = 0  # of those reckoned with: the sums of rate, and of rate x since

    def add(self, samples: int) -> None:
        """So many more count; below 0: fewer were made than was reckoned."""
        self.samples = max(0, min(self.samples + samples, MOST_SAMPLES))

    def begin(self, rate: float, since_s: float) -> None:
        """A member makes ``rate`` samples a second since then."""
        flow = int(rate * MICRO)
        self._flow += flow
        self._offset += flow * int(since_s * MICRO)

    def end(self, rate: float, since_s: float) -> None:
        """Take off again what :meth:`begin` was told."""
        flow = int(rate * MICRO)
        self._flow -= flow
        self._offset -= flow * int(since_s * MICRO)

    def at(self, now: float) -> int:
        """What its members made until now."""
        reckoned = (self._flow * int(now * MICRO) - self._offset) // MICRO**2
        return max(0, min(self.samples + reckoned, MOST_SAMPLES))


def made(rate: float, since_s: float, now: float) -> int:
    """Whole samples that one member makes at this rate, summed as :class:`RunCount` sums them."""
    return max(0, int(rate * MICRO) * (int(now * MICRO) - int(since_s * MICRO)) // MICRO**2)
