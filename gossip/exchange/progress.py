"""The samples behind a node's weights: one number for each node, averaged between nodes as the weights are.

A step adds the node's own samples times the members that hold the same run. A finished exchange brings the numbers of
both sides to their mean. An exchange conserves the sum, so the mean over the nodes follows the number of samples that
all of them trained, whatever their paces. A node that vanishes takes away only its own copy.

A partner may state any number. One exchange therefore moves a number by at most the smaller ``Claim.most`` of both
sides, so that what one side gains the other loses. A node limits itself to what it adds in two of its mixes' intervals,
and within that to four times the lower quartile of the gaps to its last eight partners. Among nodes of one pace the
gaps are small, and the few partners that state large ones gain little. A slow node lies far below nearly all of its
partners, and follows them.
"""

from __future__ import annotations

import statistics
from collections import deque

from gossip.ids import MOST_SAMPLES, Claim

__all__ = ["RunProgress"]

PARTNERS = 5  # the last partners whose counts of members a node without an address uses
BEYOND = 16  # times its own count of members, the largest count that such a node takes from its partners
INTERVALS = 2  # an exchange moves a number by at most what the node itself adds in so many of its mixes' intervals
LEAST_INTERVALS = 0.25  # and is never limited to less than this: numbers that lie apart must be able to meet
QUARTILES = 4  # in between, it moves a number by at most so many times the lower quartile of the last gaps
EXCHANGES = 8  # the last exchanges whose gaps count, and over which a node averages what it adds between two of them
STEPS = 16  # steps between two mixes where the configuration gives seconds instead


class RunProgress:
    """The progress of one node.

    Attributes:
        samples: The node's number, which exchanges average.
        shown: The number for people and training loops: the largest ``samples`` since the node took its run.
        met: Members of the node's run that it is in contact with, the node included.
        members: The members by which a sample of the node counts at present.
        resumed: Whether ``samples`` comes from a checkpoint of a run that this node has not joined or begun since.
    """

    def __init__(self, mix_every_steps: int | None = None) -> None:
        self.samples = self.shown = 0
        self.met = self.members = 1
        self.resumed = False
        self._every = mix_every_steps or STEPS
        self._step = 0  # samples that one step of the node adds
        self._added = 0  # by steps of the node since it took its run
        self._marks = deque([0], EXCHANGES)  # ``_added`` at the last exchanges
        self._partners: deque[Claim] = deque(maxlen=PARTNERS)
        self._gaps: deque[int] = deque(maxlen=EXCHANGES)  # between the node's number and its last partners'

    def trained(self, samples: int, steps: int, met: int, *, dialable: bool, arrears: int = 0) -> None:
        """Add what the node trained since the last call.

        Args:
            samples: Samples of its own.
            steps: Steps in which it trained them.
            met: Members of its run that it is in contact with, itself included.
            dialable: Whether others can dial it. A node that nobody can dial meets few members, so it uses the lower
                median of what its last partners count.
            arrears: Samples of its own that count for members which it heard of before it met them.
        """
        self.met = self.members = met
        if not dialable and self._partners:
            told = statistics.median_low(claim.members for claim in self._partners)
            self.members = max(1, min(told, BEYOND * met))
        more = min(max(samples, 0) * self.members, MOST_SAMPLES)
        if more and steps > 0:
            self._step = -(-more // steps)
        self._added += more
        self._move(more + (arrears if dialable else 0))

    @property
    def claim(self) -> Claim:
        """What the node states in an exchange that begins now. A node that has not trained takes over the limit that
        its last partners state."""
        interval = max(self._step * self._every, (self._added - self._marks[0]) // len(self._marks))
        most = INTERVALS * interval
        if not most and self._partners:
            most = statistics.median_low(claim.most for claim in self._partners)
        elif len(self._gaps) == EXCHANGES:
            quartile = sorted(self._gaps)[EXCHANGES // 4]
            most = min(most, max(int(LEAST_INTERVALS * interval), QUARTILES * quartile))
        return Claim(self.samples, min(most, MOST_SAMPLES), self.met)

    def mix(self, ours: Claim, theirs: Claim) -> None:
        """Go to the mean of both numbers, as the partner does: the sum stays the same to the last sample."""
        gap = theirs.samples - ours.samples
        half = min(abs(gap) // 2, ours.most, theirs.most)
        self._move(half if gap > 0 else -half)
        self._gaps.append(abs(gap))
        self.exchanged(theirs)

    def approach(self, ours: Claim, group: Claim) -> None:
        """Go to the mean of a group's numbers, which its inviter states with its own limit and count of members."""
        most, gap = min(ours.most, group.most), group.samples - ours.samples
        self._move(max(-most, min(gap, most)))
        self._gaps.append(abs(gap))
        self.exchanged(group)

    def exchanged(self, theirs: Claim) -> None:
        """Remember an exchange with the node that stated this."""
        self._marks.append(self._added)
        self._partners.append(theirs)

    def begin(self, samples: int, *, resumed: bool = False) -> None:
        """The node's weights are another run's, or a checkpoint's, with so many samples behind them."""
        self.samples = self.shown = max(0, min(samples, MOST_SAMPLES))
        self.resumed = resumed
        self._added = 0
        self._marks = deque([0], EXCHANGES)

    def _move(self, more: int) -> None:
        self.samples = max(0, min(self.samples + more, MOST_SAMPLES))
        self.shown = max(self.shown, self.samples)
