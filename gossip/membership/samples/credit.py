"""How much of what members say they trained is believed: samples count only as fast as they can be made.

A record may state any number. What is credited of it begins at nothing when its owner is first seen, and grows by at
most ``fastest_member`` times the median pace of those we are linked with, ourselves included, up to what is stated. So
an honest member is counted in full, a moment late at most, and the number of a liar adds no more than so many honest
members would. The median is the lower one, and ours is among them: of two members the slower is believed, and one that
lies has no say in what it may claim unless at least half of those with a pace lie.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from itertools import islice

from gossip.ids import PeerId
from gossip.membership.entry import Entry

__all__ = ["MOST_SAMPLES", "Credit", "Pace"]

MOST_SAMPLES = 2**53 - 1  # what a record may state; every sum of samples ends here
WINDOW_S = 2.0  # a pace is measured over so long at least: reports come four times a second
FIRST_S = 0.05  # our own first steps say something sooner, and until then nobody could be believed anything
PACES = 64  # members whose pace is watched: a median of more would be no better
FLOOR_PER_S = 1.0  # the pace while nobody is known to train; what is credited late is credited all the same


class Pace:
    """Samples a second of one member: of its last window, or half of what the one before it came to."""

    __slots__ = ("made", "mark", "per_s", "since_s")

    def __init__(self, now: float) -> None:
        self.made = 0  # credited samples since we watch it
        self.per_s = 0.0
        self.mark, self.since_s = 0, now

    def look(self, now: float) -> None:
        """Close the window if it is over. One in which nothing was made stays open: a step may take longer than it, and
        who evaluates for an hour is no slower afterwards."""
        elapsed_s, more = now - self.since_s, self.made - self.mark
        if not more and not self.per_s:
            self.since_s = now  # it has not begun
        elif more and elapsed_s >= WINDOW_S:
            self.per_s = max(more / elapsed_s, self.per_s / 2)
            self.mark, self.since_s = self.made, now
        elif more and not self.per_s and elapsed_s >= FIRST_S:
            self.per_s = more / elapsed_s  # the window goes on, and will say better

    def first(self, more: int, now: float) -> None:
        """So many samples were made."""
        self.made += more
        if not self.per_s:
            self.look(now)


class Credit:
    """Of one table. ``per_s`` is what one member may be credited a second."""

    def __init__(self, fastest: float, now: float) -> None:
        self._fastest = fastest
        self.mine = Pace(now)
        self._paces: dict[PeerId, Pace] = {}
        self.per_s = fastest * FLOOR_PER_S
        self._looked_s = now

    def made(self, peer: PeerId | None, samples: int, now: float) -> None:
        """So many more samples of this member (None: of our own) count."""
        pace = self.mine if peer is None else self._paces.get(peer)
        if pace is None:
            return
        unknown = not pace.per_s
        pace.first(samples, now)
        if unknown and pace.per_s:
            self._settle()

    def due(self, now: float) -> bool:
        """Whether it is time to measure anew."""
        return now >= self._looked_s + WINDOW_S

    def watch(self, links: Iterable[PeerId], entries: Mapping[PeerId, Entry], now: float) -> None:
        """Measure anew; ``links``: those we are linked with, the longest first. Their entries say at which rate they
        are reckoned to make samples, which :meth:`made` is not told of; 0.0: at none."""
        self._looked_s, paces = now, self._paces
        watched: dict[PeerId, Pace] = {}
        for peer in islice(links, PACES):
            pace = paces.get(peer)
            watched[peer] = pace = Pace(now) if pace is None else pace
            rate = entries[peer].rate
            if rate:  # it is taken to go on at this pace, which therefore is its pace
                pace.per_s, pace.mark, pace.since_s = rate, pace.made, now
            else:
                pace.look(now)
        self._paces = watched
        self.mine.look(now)
        self._settle()

    def _settle(self) -> None:
        paces = [pace.per_s for pace in (self.mine, *self._paces.values()) if pace.per_s]
        self.per_s = self._fastest * (statistics.median_low(paces) if paces else FLOOR_PER_S)
