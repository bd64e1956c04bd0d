"""Whose weights a peer should have: begin a run, join one, or merge into a larger one; and whether anybody is there.

A run is told by its genesis. Where two share a swarm, the members of the one with fewer samples behind it take the
weights of the other: if that has as many members as theirs, or its weights prove themselves
(:mod:`gossip.state_transfer.trial`), or a person consents. A member leaves the run that it comes from alone for a
while. Where that decides nothing for long, the run with fewer members gives way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container
from typing import NamedTuple

from gossip.config import Config
from gossip.effects import Effect, Notice
from gossip.exchange.session import Local
from gossip.ids import MemberRecord, PeerId, quantity, short
from gossip.membership.members import Members
from gossip.state_transfer.joining import Joining, Phase
from gossip.state_transfer.trial import Judge

__all__ = ["Run", "Runs", "outranks"]

RIPE_S = 2.0  # how long nobody may be ready before the smallest id declares the run begun
HEARSAY_S = 6.0  # longer, where somebody with a smaller id is said to be there
CONSIDER_S = 1.0  # how often the runs are compared
STALEMATE_S = 120.0  # after which, of two runs that go on side by side, the one with fewer members gives way
MEND_S, MOST_MEND_S = 1.0, 256.0  # from spoiled weights to the fetching of others: doubled where they spoil again
SOUND_S = 60.0  # after which weights that spoil are not those that were fetched last
EQUAL_SHARE = 1 / 64  # of their samples, by which two runs may differ and count as equal


class Run(NamedTuple):
    samples: int
    genesis: bytes
    members: int = 0  # alive and ready


def outranks(theirs: Run, ours: Run) -> bool:
    """Whether the members of ``ours`` take the weights of ``theirs``: more samples, and of equals the larger genesis.

    Nearly equal counts as equal: what each side knows of the other is seconds old, and two runs of one pace would both
    hold themselves the larger for as long as they train.
    """
    if abs(theirs.samples - ours.samples) <= EQUAL_SHARE * max(theirs.samples, ours.samples):
        return theirs.genesis > ours.genesis
    return theirs.samples > ours.samples


class Runs:
    """``begin_run`` makes the peer ready with the weights it has; ``linked`` holds those with a link to us."""

    def __init__(
        self,
        local: Local,
        membership: Members,
        joining: Joining,
        linked: Container[PeerId],
        begin_run: Callable[[float, str], list[Effect]],
        judge: Judge,
        config: Config,
        rng: random.Random,
        now: float,
    ) -> None:
        self.local, self.membership, self.joining, self.linked = local, membership, joining, linked
        self.begin_run, self.judge, self.config, self.rng = begin_run, judge, config, rng
        self.join_by = now + config.join_timeout_s
        self.must_join = False  # it begins no run of its own for want of others
        self.wait_for: Callable[[], bool] = lambda: False  # whether a seed opens: then nobody begins alone
        self.ripe_at = math.inf
        self.next_at = now
        self.changes_seen = -1  # of the members, when we last found nothing to do
        self.divided_since = math.inf  # the first sight of another run
        self.met = b""  # the run that we last said we would merge into, or why we do not
        self.consented = b""  # the run that a person has us merge into
        self.alone = False
        self.alone_since = math.inf  # when this node was found alone, until people are told
        self.told_alone = False
        self.spoiled_at, self.mend_s = -math.inf, MEND_S

    def spoiled(self, now: float) -> None:
        """Our weights are no numbers any more. What spoiled them may spoil the next as well (a rate that is too high),
        and those who give theirs are not to be kept busy by it."""
        again = now - self.spoiled_at < self.mend_s + SOUND_S
        self.mend_s = min(2 * self.mend_s, MOST_MEND_S) if again else MEND_S
        self.spoiled_at, self.changes_seen = now, -1

    @property
    def deadline(self) -> float:
        """When :meth:`tick` has something to look at: never for one that is ready while nobody comes or goes."""
        membership = self.membership
        if self.local.ready and membership.changes == self.changes_seen and self.alone is not membership.company:
            return max(self.next_at, self.alone_since + self.config.join_timeout_s)
        return self.next_at

    def tick(self, now: float) -> list[Effect]:
        """Once a second: are we alone, is there a run to join, is there a larger one to merge into?"""
        if now < self.next_at:
            return []
        self.next_at = now + CONSIDER_S
        effects, ready, membership = self.company(now), self.local.ready, self.membership
        if self.joining.phase is not Phase.IDLE or (ready and membership.changes == self.changes_seen):
            return effects
        if not self.local.sound:
            return effects + self.mend(now)
        others = self.rivals()
        mine = self.ours() if others else Run(0, self.local.genesis)
        rivals = [rival for rival in others if self.joining.gives(rival.genesis, now)]
        # While two runs share the swarm their counts grow, and the answer may change without any change of members.
        self.changes_seen = -1 if others else membership.changes
        resumed = self.local.progress.resumed
        self.divided_since = min(self.divided_since, now) if others else math.inf
        if rivals:
            rival = self.best(rivals, mine, now, resumed)
            donors = [] if rival is None else self.donors(rival.genesis)
            if rival is not None and donors:
                if ready and self.met != rival.genesis:
                    self.met = rival.genesis
                    effects.append(merging(donors[0], rival, mine))
                return effects + self.joining.begin(rival.genesis, donors, now)
            if ready:
                return effects + self.divided(rivals, mine)
        return effects if ready else effects + self.start(bool(rivals) and resumed, now)

    def best(self, rivals: list[Run], mine: Run, now: float, resumed: bool) -> Run | None:
        """The run to take the weights of, if there is one. Who has none goes where most are: nobody's samples count for
        anything yet with one who has just come."""
        if not (self.local.ready or resumed):
            return max(rivals, key=lambda rival: (rival.members, rival.samples, rival.genesis))
        wanted = [rival for rival in rivals if self.wants(rival, mine, now)]
        return max(wanted, default=None)

    def wants(self, rival: Run, mine: Run, now: float) -> bool:
        """Whether a peer with weights of its own takes this run's."""
        if rival.genesis == self.consented:
            return True
        if self.config.merge != "auto":
            return False
        if outranks(rival, mine) and (rival.members >= mine.members or self.judge.sees):
            return True
        if now - self.divided_since <= STALEMATE_S:
            return False
        return rival.members > mine.members or (rival.members == mine.members and rival.genesis > mine.genesis)

    def divided(self, rivals: list[Run], mine: Run) -> list[Effect]:
        """Say once that there is another run which a person may decide about."""
        rival = max(rivals)
        if self.config.merge == "auto" or self.met == rival.genesis:
            return []
        self.met = rival.genesis
        return [
            Notice(
                "divided",
                f"Another run trains here, {rival.genesis.hex()} with {quantity(rival.samples, 'sample')} behind it "
                f"and {quantity(rival.members, 'member')} (ours has {mine.samples:,} and {mine.members:,}); merge is "
                f'set to "{self.config.merge}", and node.merge("{rival.genesis.hex()}") takes its weights.',
            )
        ]

    def start(self, ahead: bool, now: float) -> list[Effect]:
        """There is no other run to take. Take our own from those of the same one; or begin: ahead of every run here,
        as the smallest id among members who all wait for each other, or with nobody reachable when the time is up. A
        member that is ready waits for nobody, although it may have given nothing."""
        same = self.donors(self.local.genesis)
        if same and self.joining.gives(self.local.genesis, now):
            return self.joining.begin(self.local.genesis, same, now)
        if ahead:
            return self.begin_run(now, "The run of this node has more samples behind it than those it met: it goes on.")
        if self.must_join:
            return []
        others, mine = self.membership.met(), self.membership.me.id
        if others and not self.membership.runs():
            self.ripe_at = min(self.ripe_at, now + RIPE_S)
            # Whom we only heard of may be there as well, and the smallest of all: waited for, but not for ever.
            smallest = mine < min(others) and (mine < min(self.membership.alive()) or now >= self.ripe_at + HEARSAY_S)
            if now >= self.ripe_at and smallest:
                return self.begin_run(now, "Everybody here waits for weights: this node, whose id is smallest, begins.")
        if now >= self.join_by and (others or not self.wait_for()):
            text = "No member gave its weights" if others else "No member could be reached"
            text += ": this node starts alone, and merges when it meets others."
            return self.begin_run(now, text)
        return []

    def mend(self, now: float) -> list[Effect]:
        """Take the weights of our own run again, or else of any other; with nobody to give any nothing begins."""
        if now < self.spoiled_at + self.mend_s:
            return []
        for genesis in (self.local.genesis, *(rival.genesis for rival in sorted(self.rivals(), reverse=True))):
            donors = self.donors(genesis)
            if donors and self.joining.gives(genesis, now):
                return self.joining.begin(genesis, donors, now)
        return []

    def company(self, now: float) -> list[Effect]:
        """Tell people that this node is alone once that has lasted for as long as it waits for others at its start: the
        first node of a swarm is alone for a moment, and nothing is wrong with that."""
        alone = not self.membership.company
        if not self.local.ready:
            return []
        if alone != self.alone:
            self.alone, self.alone_since = alone, now if alone else math.inf
        if alone and now >= self.alone_since + self.config.join_timeout_s:
            self.alone_since, self.told_alone = math.inf, True
            return [Notice("alone", "This node is alone: it trains on, and looks for others.")]
        if not alone and self.told_alone:
            self.told_alone = False
            return [Notice("together", "This node is no longer alone.")]
        return []

    # -- questions ---------------------------------------------------------------------------------------------------
    def ours(self) -> Run:
        """As others see it: by what its members have signed."""
        return self.run(self.local.genesis)

    def rivals(self) -> list[Run]:
        """The other runs of ready, living members."""
        return [self.run(genesis) for genesis in self.membership.runs() if genesis != self.local.genesis]

    def run(self, genesis: bytes) -> Run:
        samples, members = self.membership.standing_of(genesis)
        return Run(samples, genesis, members)

    def donors(self, genesis: bytes) -> list[PeerId]:
        """Ready members of a run that we can reach, in random order."""
        sharing = self.membership.sharing(genesis)
        found = [record.id for record in sharing if record.address is not None or record.id in self.linked]
        self.rng.shuffle(found)
        return found

    def should_serve(self, record: MemberRecord | None, now: float) -> bool:
        """Whether to give this member our weights. If so, what we take ourselves is for the caller to stop."""
        joining = self.joining
        if record is None or not record.ready or record.genesis == self.local.genesis:
            return joining.phase is Phase.IDLE  # a newcomer wants weights that stay
        ours = self.ours()
        if joining.phase is Phase.ADOPTING:
            return False
        if joining.gives(record.genesis, now) and self.wants(self.run(record.genesis), ours, now):
            return ours.genesis > record.genesis  # each wants the other's: one must give way, or they would swap
        return joining.phase is Phase.IDLE or joining.genesis == record.genesis


def merging(donor: PeerId, theirs: Run, ours: Run) -> Notice:
    return Notice(
        "merging",
        f"Met run {theirs.genesis.hex()[:8]} with {quantity(theirs.samples, 'sample')} behind it and "
        f"{quantity(theirs.members, 'member')} (as {short(donor)}); ours has {ours.samples:,} and {ours.members:,}, so "
        "this node tries its weights.",
    )
