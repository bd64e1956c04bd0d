"""The requests of members, limited so that members that ask all the time do not become most of our partners.

A node chooses half of its partners, and these are as honest as the members are. The other half chose it. Members that
ask as often as they may would be nearly all of that half. With 30 such members of 100, each asking 16 times as often as
honest ones, 77 % of all partners were among the 30. The filter (:mod:`gossip.filters.clip`) takes the nearest quarter
of the partners for honest, so that they would set its radius.

A node with more than ``CROWDED`` times the usual mixes of an interval is *crowded*. It answers BUSY to a member with
more requests than ``MEDIAN_FACTOR`` times the median of the others, and ``SPARE`` more. Requests decay over ``MEMORY``
intervals for each member, in which a usual one asks four times. A node that is not crowded declines no requests for
this reason: members that train faster ask more often, and do no harm. A slow node has more mixes in each of its
intervals, by as much as most members train faster (:class:`Paces`).
"""

import math
import statistics
from collections.abc import Callable, Iterable

from gossip.ids import PeerId
from gossip.recent import Recent

MEMORY = 8.0  # Of our intervals for each member in which a request decays to 1/e. A usual member asks 4 times in it.
MEDIAN_FACTOR, SPARE = 1.25, 1.0
MIN_MEMBERS = 8  # Fewest others with a limit. In a smaller swarm a single fast member may be much of all mixing.
MAX_ASKERS = 1_024  # Members whose requests are remembered.
MIX_MEMORY = 128.0  # Intervals in which a mix decays to 1/e.
CROWDED = 1.1  # Mixes of an interval beyond which a node is crowded, as a multiple of the usual number.
PACE_INTERVALS, PACE_SHARE = 4.0, 0.25  # Paces are compared over so much of our training, and this share of all.
SAME_PACE = 1.25  # Up to this ratio paces count as the same, since the members' records are seconds old.
PACE_MIXES = 2.0  # Growth of the usual mixes of an interval with the pace of the median member: some are faster still.


class Requests:
    """The recent mixes of one node, and those among them that others asked for.

    Times are in intervals that this node has trained, so that no member can speed them up.
    """

    def __init__(self, mixes_per_interval: float) -> None:
        self.most_mixes = CROWDED * mixes_per_interval * MIX_MEMORY
        self.mixes = mixes_per_interval * MIX_MEMORY  # Decayed number, that of a usual node from the beginning.
        self.noted_at = 0.0
        self.counts = Recent[PeerId, tuple[float, float]](MAX_ASKERS)  # Decayed number, and its time.
        self.paces = Paces()

    def note_mix(self, asker: PeerId | None, intervals: float, members: int) -> None:
        """Note a finished mix, in a swarm of so many other members; ``asker`` is None if this node asked for it."""
        self.mixes = self.recent_mixes(intervals) + 1.0
        self.noted_at = intervals
        if asker is not None:
            self.counts[asker] = self.count_of(asker, intervals, members) + 1.0, intervals

    def recent_mixes(self, intervals: float) -> float:
        return self.mixes * math.exp((self.noted_at - intervals) / MIX_MEMORY)

    def count_of(self, asker: PeerId, intervals: float, members: int) -> float:
        count, counted_at = self.counts.get(asker, (0.0, intervals))
        return count * math.exp((counted_at - intervals) / (MEMORY * max(members, 1)))

    def is_too_much(
        self, asker: PeerId, intervals: float, members: int, present: Callable[[Iterable[PeerId]], list[PeerId]]
    ) -> bool:  # fmt: skip
        """Return True if this node is crowded, and this member asks too often."""
        if members < MIN_MEMBERS or self.recent_mixes(intervals) <= self.most_mixes * self.paces.more_mixes:
            return False
        counts = sorted(
            [self.count_of(other, intervals, members) for other in present(self.counts) if other != asker], reverse=True
        )
        middle = (members - 1) // 2  # Of the other members' counts in this order; most of them may never have asked.
        median = counts[middle] if middle < len(counts) else 0.0
        return self.count_of(asker, intervals, members) >= MEDIAN_FACTOR * median + SPARE


class Paces:
    """How fast the other members train, by the step counts that they state; at least half of them are honest."""

    def __init__(self) -> None:
        self.median = 1.0  # Steps of the median member for each of ours.
        self.compared_at = 0.0  # In intervals, as the following counts.
        self.own_steps = 0
        self.steps: dict[PeerId, int] = {}

    @property
    def more_mixes(self) -> float:
        """Return the usual mixes of an interval, as a multiple of those of a node that is as fast as the median."""
        return 1.0 + PACE_MIXES * max(self.median - SAME_PACE, 0.0)

    def note_steps(self, own_steps: int, intervals: float, steps_of_others: Callable[[], dict[PeerId, int]]) -> None:
        """Compare the steps since the last comparison, if ``PACE_INTERVALS`` have passed."""
        if self.steps and intervals - self.compared_at < max(PACE_INTERVALS, PACE_SHARE * intervals):
            return
        steps, own = steps_of_others(), own_steps - self.own_steps
        taken = [steps[member] - self.steps[member] for member in steps if member in self.steps]
        if taken and own > 0:
            self.median = statistics.median_low(taken) / own
        self.own_steps, self.compared_at, self.steps = own_steps, intervals, steps
