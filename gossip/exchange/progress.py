"""The samples behind a node's weights: one number for each node, averaged between nodes as the weights are.

A step adds the node's own samples times the number of members that hold the same run. A finished exchange brings the
numbers of both sides to their mean. An exchange conserves the sum, so the mean over the nodes follows the number of
samples that all of them trained, whatever their paces. A node that vanishes takes away only its own copy.

A partner may state any number. Each side therefore states a limit too, ``Claim.most``. One exchange moves both numbers
by at most the smaller limit, so that one side gains what the other loses. Two rules set a node's limit. They count in
*intervals*: an interval is the number of samples that the node adds between two of its mixes.

- One exchange moves the number by at most two intervals.
- All exchanges of one interval share a *budget*. It is eight times the lower quartile of the *gaps* to the last eight
  partners that the node chose itself, and at most sixteen intervals. A gap is the difference of two nodes' numbers.

Among nodes of one pace the gaps are small. The few partners that state large numbers then gain little, and offering
often gains them nothing. A slow node lies far below nearly all of its partners, and follows. A node whose batches are
smaller than all of its partners' takes over their shortest interval. A node that trains nothing gets part of its budget
back with each partner that it chose, so that nodes which settle agree.
"""

import statistics
from collections import deque

from gossip.ids import MOST_SAMPLES, Claim, PeerId

LAST_CLAIMS = 5  # Last partners whose member counts are used by a node without an address.
MAX_MEMBERS_RATIO = 16  # Largest member count that such a node takes from its partners, as a multiple of its own.
MAX_EXCHANGE_INTERVALS = 2  # Limit of one exchange.
MIN_BUDGET_INTERVALS = 0.25  # Smallest budget: numbers must be able to meet.
BUDGET_GAPS = 8  # Budget as a multiple of the lower quartile of the last gaps.
MAX_BUDGET_INTERVALS = 16  # Largest budget.
MAX_INTERVAL_RATIO = 8  # Longest interval that a node takes over from its partners, as a multiple of its own.
LAST_EXCHANGES = 8  # Last exchanges whose gaps count, and over which a node averages its own interval.
MIN_CHOSEN_PARTNERS = 4  # Exchanges with partners that the node chose, from which on only their gaps count.
TIMED_MIX_STEPS = 16  # Assumed steps between two mixes if mixes are timed by the clock.


class RunProgress:
    """The progress of one node.

    Attributes:
        samples: The node's number, which exchanges average.
        contacted: Members of the node's run that it is in contact with, the node included.
        members: The factor by which each sample of the node counts at present, a number of members.
        resumed: True if ``samples`` comes from a checkpoint and the node has not joined or begun a run since.
    """

    def __init__(self, mix_every_steps: int | None = None) -> None:
        self.samples = 0
        self.contacted = self.members = 1
        self.resumed = False
        self._steps_per_mix = mix_every_steps or TIMED_MIX_STEPS
        self._samples_per_step = 0  # Samples that the last step added, rounded up; 0 for a node that trains nothing.
        self._added = 0  # Samples that the node's own steps added since it took its run.
        self._added_at_exchanges = deque([0], LAST_EXCHANGES)  # Values of ``_added`` at the last exchanges.
        self._last_claims: deque[Claim] = deque(maxlen=LAST_CLAIMS)  # What the last partners stated.
        # Each entry is the gap to a partner's number and the interval that the partner stated. The first table holds
        # the partners that the node chose itself, which an attacker cannot crowd out. The second one holds all
        # partners, each once, for a node that seldom gets to choose.
        self._chosen_gaps: deque[tuple[int, int]] = deque(maxlen=LAST_EXCHANGES)
        self._partner_gaps: dict[PeerId, tuple[int, int]] = {}
        self._spent = 0  # The used part of the budget at the last exchange, in samples.
        self._spent_at = 0  # Value of ``_added`` at that exchange.

    def set_interval(self, mix_every_steps: int | None) -> None:
        """Set the interval to this many steps from now on."""
        self._steps_per_mix = mix_every_steps or TIMED_MIX_STEPS

    def add_samples(self, samples: int, steps: int, contacted: int, *, dialable: bool, arrears: int = 0) -> None:
        """Add the samples that the node trained since the last call.

        Args:
            samples: Samples of its own.
            steps: Steps in which it trained them.
            contacted: Members of its run that it is in contact with, itself included.
            dialable: True if others can dial it. Other nodes meet few members, so they use the lower median of the
                counts of their last partners.
            arrears: Earlier samples of its own that count for members met since (:mod:`gossip.membership.arrears`).
        """
        self.contacted = self.members = contacted
        if not dialable and self._last_claims:
            stated_members = statistics.median_low(claim.members for claim in self._last_claims)
            self.members = max(1, min(stated_members, MAX_MEMBERS_RATIO * contacted))
        added = min(max(samples, 0) * self.members, MOST_SAMPLES)
        if added and steps > 0:
            self._samples_per_step = -(-added // steps)
        self._added += added
        self._move(added + (arrears if dialable else 0))

    @property
    def claim(self) -> Claim:
        """Return the claim for an exchange that begins now.

        A node that trains nothing takes over the smallest limit of its last partners, once it had enough of them.
        """
        if not self._samples_per_step:
            limit = min(claim.most for claim in self._last_claims) if len(self._last_claims) == LAST_CLAIMS else 0
            return Claim(self.samples, min(limit, MOST_SAMPLES), self.contacted)
        own_interval, interval, budget = self._limits()
        limit = min(MAX_EXCHANGE_INTERVALS * interval, budget - self._spent_now(interval, budget), MOST_SAMPLES)
        return Claim(self.samples, max(0, limit), self.contacted, min(own_interval, MOST_SAMPLES))

    def _limits(self) -> tuple[int, int, int]:
        """Return the samples of three limits.

        Returns:
            The node's own interval: what it adds between two of its mixes, at least 1.
            The interval that limits exchanges: its own, or its partners' shortest where that is longer.
            The budget of all exchanges of one interval together.
        """
        added_per_exchange = (self._added - self._added_at_exchanges[0]) // len(self._added_at_exchanges)
        own_interval = interval = max(1, self._samples_per_step * self._steps_per_mix, added_per_exchange)
        gap = interval
        has_enough_chosen = len(self._chosen_gaps) >= MIN_CHOSEN_PARTNERS
        gaps_and_intervals = self._chosen_gaps if has_enough_chosen else self._partner_gaps.values()
        if gaps_and_intervals:
            gaps, intervals = zip(*gaps_and_intervals, strict=True)
            gap = sorted(gaps)[len(gaps) // 4]  # The lower quartile.
            interval = max(own_interval, min(*intervals, MAX_INTERVAL_RATIO * own_interval))
        budget = max(int(MIN_BUDGET_INTERVALS * interval), BUDGET_GAPS * gap)
        return own_interval, interval, min(budget, MAX_BUDGET_INTERVALS * interval)

    def _spent_now(self, interval: int, budget: int) -> int:
        """Return the used part of the budget, which comes back evenly while the node trains one interval."""
        return max(0, self._spent - budget * (self._added - self._spent_at) // interval)

    def mix(self, ours: Claim, theirs: Claim, partner: PeerId, *, chosen: bool, joins: bool = False) -> None:
        """Move to the mean of both numbers, as the partner does: the sum stays the same to the last sample.

        Args:
            ours: Claim that this node stated when the exchange began.
            theirs: Claim that the partner stated.
            partner: Id of the partner.
            chosen: True if this node chose the partner.
            joins: True to move the lower side to the higher number instead, so that nodes which settle end with one.
        """
        gap = theirs.samples - ours.samples
        change = min(abs(gap) if joins else abs(gap) // 2, ours.most, theirs.most)
        lowered = 0 if joins else -change
        self._record_exchange(change if gap > 0 else lowered, abs(gap), theirs, partner, chosen)

    def mix_group(self, ours: Claim, group: Claim, inviter: PeerId, *, chosen: bool) -> None:
        """Move to the mean of a group's numbers, which the inviter states with its own limit and the group's count."""
        limit, gap = min(ours.most, group.most), group.samples - ours.samples
        self._record_exchange(max(-limit, min(gap, limit)), abs(gap), group, inviter, chosen)

    def _record_exchange(self, change: int, gap: int, theirs: Claim, partner: PeerId, chosen: bool) -> None:
        """Change the number, take the change from the budget, and remember the gap."""
        self._move(change)
        _, interval, budget = self._limits()
        spent = self._spent_now(interval, budget)
        if chosen and self._added == self._spent_at:  # The node trains nothing at present, so time gives nothing back.
            spent = max(0, spent - budget // LAST_EXCHANGES)
        self._spent, self._spent_at = min(spent + abs(change), MOST_SAMPLES), self._added
        if chosen:
            self._chosen_gaps.append((gap, theirs.interval))
        self._partner_gaps.pop(partner, None)
        self._partner_gaps[partner] = gap, theirs.interval
        if len(self._partner_gaps) > LAST_EXCHANGES:
            del self._partner_gaps[next(iter(self._partner_gaps))]  # The partner of the oldest exchange.
        self._added_at_exchanges.append(self._added)
        self._last_claims.append(theirs)

    def begin(self, samples: int, *, resumed: bool = False) -> None:
        """Set the number for a run that the node begins, joins or loads, with ``samples`` behind its weights."""
        self.samples = max(0, min(samples, MOST_SAMPLES))
        self.resumed = resumed
        self._added = 0
        self._spent = self._spent_at = 0
        self._added_at_exchanges = deque([0], LAST_EXCHANGES)

    def _move(self, change: int) -> None:
        self.samples = max(0, min(self.samples + change, MOST_SAMPLES))
