"""The samples behind a node's weights: one number for each node, averaged between nodes as the weights are.

A step adds the node's own samples times the members that hold the same run. A finished exchange brings the numbers of
both sides to their mean. An exchange conserves the sum, so the mean over the nodes follows the number of samples that
all of them trained, whatever their paces. A node that vanishes takes away only its own copy.

A partner may state any number. One exchange therefore moves a number by at most the smaller ``Claim.most`` of both
sides, so that one side gains what the other loses. A node limits one exchange to two of its mixes' intervals. It limits
all exchanges of one interval together to eight times a quartile, and to sixteen intervals. The quartile is the lower
one of the gaps to the last eight partners that it chose itself. Among nodes of one pace these gaps are small. The few
partners that state large numbers then gain little, and offering often gains them nothing. A slow node lies far below
nearly all of its partners, and follows. A node whose batches are smaller than all of its partners' takes over their
shortest interval. A node that trains nothing gets part of its limit back with each partner that it chose, so that nodes
which settle agree.
"""

from __future__ import annotations

import statistics
from collections import deque

from gossip.ids import MOST_SAMPLES, Claim, PeerId

__all__ = ["RunProgress"]

LAST_CLAIMS = 5  # Last partners whose member counts are used by a node without an address.
MAX_MEMBERS_RATIO = 16  # Largest member count that such a node takes from its partners, as a multiple of its own.
# An interval is the number of samples that a node adds between two mixes.
MAX_EXCHANGE_INTERVALS = 2  # Limit of one exchange, in intervals.
MIN_BUDGET_INTERVALS = 0.25  # Least budget of all exchanges between two mixes: numbers must be able to meet.
BUDGET_GAPS = 8  # Budget as a multiple of the lower quartile of the last gaps.
MAX_BUDGET_INTERVALS = 16  # Largest budget, in intervals.
MAX_INTERVAL_RATIO = 8  # Longest interval that a node takes over from its partners, as a multiple of its own.
LAST_EXCHANGES = 8  # Last exchanges whose gaps count, and over which a node averages its own interval.
MIN_CHOSEN_PARTNERS = 4  # Exchanges with partners that the node chose, from which on only their gaps count.
TIMED_MIX_STEPS = 16  # Assumed steps between two mixes if mixes are timed by the clock.


class RunProgress:
    """The progress of one node.

    Attributes:
        samples: The node's number, which exchanges average.
        contacted: Members of the node's run that it is in contact with, the node included.
        members: The number of members by which a sample of the node counts at present.
        resumed: True if ``samples`` comes from a checkpoint and the node has not joined or begun a run since.
    """

    def __init__(self, mix_every_steps: int | None = None) -> None:
        self.samples = 0
        self.contacted = self.members = 1
        self.resumed = False
        self._every = mix_every_steps or TIMED_MIX_STEPS
        self._step = 0  # Samples that one step of the node adds.
        self._added = 0  # Samples that the node's own steps added since it took its run.
        self._marks = deque([0], LAST_EXCHANGES)  # Values of ``_added`` at the last exchanges.
        self._partners: deque[Claim] = deque(maxlen=LAST_CLAIMS)
        # Each entry is the gap to a partner's number and the interval that it stated. Partners that the node chose
        # itself cannot be crowded out by an attacker. The last different partners serve a node that seldom gets to
        # choose.
        self._chosen: deque[tuple[int, int]] = deque(maxlen=LAST_EXCHANGES)
        self._others: dict[PeerId, tuple[int, int]] = {}
        self._spent = 0  # Samples by which exchanges moved the number since the last refill.
        self._spent_at = 0  # Value of ``_added`` at that time.

    def set_interval(self, mix_every_steps: int | None) -> None:
        """Set the interval to this many steps from now on."""
        self._every = mix_every_steps or TIMED_MIX_STEPS

    def add_samples(self, samples: int, steps: int, contacted: int, *, dialable: bool, arrears: int = 0) -> None:
        """Add the samples that the node trained since the last call.

        Args:
            samples: Samples of its own.
            steps: Steps in which it trained them.
            contacted: Members of its run that it is in contact with, itself included.
            dialable: True if others can dial it. Other nodes meet few members, so they use the lower median of the
                counts of their last partners.
            arrears: Samples of its own that count for members which it heard of before it met them.
        """
        self.contacted = self.members = contacted
        if not dialable and self._partners:
            told = statistics.median_low(claim.members for claim in self._partners)
            self.members = max(1, min(told, MAX_MEMBERS_RATIO * contacted))
        more = min(max(samples, 0) * self.members, MOST_SAMPLES)
        if more and steps > 0:
            self._step = -(-more // steps)
        self._added += more
        self._move(more + (arrears if dialable else 0))

    @property
    def claim(self) -> Claim:
        """Return the claim for an exchange that begins now.

        A node that trains nothing takes over the smallest limit of its last partners.
        """
        if not self._step:
            most = min(claim.most for claim in self._partners) if len(self._partners) == LAST_CLAIMS else 0
            return Claim(self.samples, min(most, MOST_SAMPLES), self.contacted)
        own, interval, budget = self._limits()
        most = min(MAX_EXCHANGE_INTERVALS * interval, budget - self._spent_now(interval, budget), MOST_SAMPLES)
        return Claim(self.samples, max(0, most), self.contacted, min(own, MOST_SAMPLES))

    def _limits(self) -> tuple[int, int, int]:
        """Return the samples of three limits.

        Returns:
            The node's own interval: what it adds between two of its mixes, at least 1.
            The interval that limits exchanges: its own, or its partners' shortest where that is longer.
            The budget of all exchanges of one interval together.
        """
        own = interval = max(1, self._step * self._every, (self._added - self._marks[0]) // len(self._marks))
        gap = interval
        # The gaps and intervals of the last partners, of the chosen ones alone if they are enough.
        last = self._chosen if len(self._chosen) >= MIN_CHOSEN_PARTNERS else self._others.values()
        if last:
            gaps, intervals = zip(*last, strict=True)
            gap = sorted(gaps)[len(gaps) // 4]
            interval = max(own, min(*intervals, MAX_INTERVAL_RATIO * own))
        budget = max(int(MIN_BUDGET_INTERVALS * interval), BUDGET_GAPS * gap)
        return own, interval, min(budget, MAX_BUDGET_INTERVALS * interval)

    def _spent_now(self, interval: int, budget: int) -> int:
        """Return the used part of the budget, which comes back evenly while the node trains one interval."""
        return max(0, self._spent - budget * (self._added - self._spent_at) // interval)

    def mix(self, ours: Claim, theirs: Claim, partner: PeerId, *, chosen: bool) -> None:
        """Move to the mean of both numbers, as the partner does: the sum stays the same to the last sample.

        Args:
            ours: Claim that this node stated when the exchange began.
            theirs: Claim that the partner stated.
            partner: Id of the partner.
            chosen: True if this node chose the partner.
        """
        gap = theirs.samples - ours.samples
        half = min(abs(gap) // 2, ours.most, theirs.most)
        self._exchange(half if gap > 0 else -half, abs(gap), theirs, partner, chosen)

    def mix_group(self, ours: Claim, group: Claim, inviter: PeerId, *, chosen: bool) -> None:
        """Move to the mean of a group's numbers, which the inviter states with its own limit and the group's count."""
        most, gap = min(ours.most, group.most), group.samples - ours.samples
        self._exchange(max(-most, min(gap, most)), abs(gap), group, inviter, chosen)

    def _exchange(self, by: int, gap: int, theirs: Claim, partner: PeerId, chosen: bool) -> None:
        self._move(by)
        _, interval, budget = self._limits()
        spent = self._spent_now(interval, budget)
        if chosen and self._added == self._spent_at:  # A node that trains nothing at present settles.
            spent = max(0, spent - budget // LAST_EXCHANGES)
        self._spent, self._spent_at = min(spent + abs(by), MOST_SAMPLES), self._added
        if chosen:
            self._chosen.append((gap, theirs.interval))
        self._others.pop(partner, None)
        self._others[partner] = gap, theirs.interval
        if len(self._others) > LAST_EXCHANGES:
            del self._others[next(iter(self._others))]
        self._marks.append(self._added)
        self._partners.append(theirs)

    def begin(self, samples: int, *, resumed: bool = False) -> None:
        """Set the number for a run that the node begins, joins or loads, with ``samples`` behind its weights."""
        self.samples = max(0, min(samples, MOST_SAMPLES))
        self.resumed = resumed
        self._added = 0
        self._spent = self._spent_at = 0
        self._marks = deque([0], LAST_EXCHANGES)

    def _move(self, more: int) -> None:
        self.samples = max(0, min(self.samples + more, MOST_SAMPLES))
