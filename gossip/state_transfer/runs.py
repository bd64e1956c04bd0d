"""The choice of a run: begin one, join one, or merge into a larger one. Also reports when this node is alone.

A run is identified by its run id. If two runs share a swarm, the members of the run with fewer samples
take the other's weights. They do so if the other has at least as many members, if its weights pass a trial
(:mod:`gossip.state_transfer.trial`), or if the user consents. A member avoids its former run for a while. If nothing is
decided for long, the run with fewer members gives way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container
from typing import NamedTuple, Protocol

from gossip.effects import Effect, Notice
from gossip.ids import MemberRecord, PeerId, quantity, short
from gossip.membership.members import Members
from gossip.state_transfer.joining import Joining, Phase
from gossip.state_transfer.trial import TrialEvaluator

__all__ = ["Run", "Runs", "outranks"]

RIPE_S = 2.0  # time without ready members before the smallest id begins the run
HEARSAY_S = 6.0  # extra time while a smaller id is known by hearsay
CONSIDER_S = 1.0  # interval between two comparisons of the runs
STALEMATE_S = 120.0  # time after which, of two runs in a stalemate, the one with fewer members gives way
MEND_S, MOST_MEND_S = 1.0, 256.0  # delay from spoiled weights to fetching others; doubles if these spoil again
SOUND_S = 60.0  # weights that spoil later than this are not blamed on the last transfer
EQUAL_SHARE = 1 / 64  # relative difference of samples up to which two runs count as equal


class Run(NamedTuple):
    """A run, by the records of its members."""

    samples: int  # lower median of the members' progress
    run_id: bytes
    members: int = 0  # ALIVE and ready


def outranks(theirs: Run, ours: Run) -> bool:
    """Return True if ``theirs`` has more samples, or as many and the larger run id.

    Nearly equal counts as equal. Each side's knowledge of the other is seconds old. Two runs of one speed would both
    consider themselves the larger one for as long as they train.
    """
    if abs(theirs.samples - ours.samples) <= EQUAL_SHARE * max(theirs.samples, ours.samples):
        return theirs.run_id > ours.run_id
    return theirs.samples > ours.samples


class Starter(Protocol):
    """The part of a peer that starts a run, :class:`gossip.state_transfer.own_run.OwnRun`."""

    judge: TrialEvaluator

    def begin(self, now: float, why: str) -> list[Effect]:
        """Make the peer ready with the weights that it has."""


class Runs:
    """The choice of the run whose weights this peer holds. ``linked`` holds the peers with a link to us."""

    def __init__(
        self, joining: Joining, membership: Members, linked: Container[PeerId], own: Starter, rng: random.Random,
        now: float,
    ) -> None:  # fmt: skip
        self.joining, self.membership, self.linked, self.own, self.rng = joining, membership, linked, own, rng
        self.local, self.config = joining.local, joining.config
        self.join_by = now + self.config.join_timeout_s
        self.must_join = False  # do not begin a run only because no member offers one
        self.wait_for: Callable[[], bool] = lambda: False  # true if a seed answers; then no peer begins alone
        self.ripe_at = math.inf
        self.next_at = now
        self.changes_seen = -1  # changes of the membership when we last found nothing to do
        self.divided_since = math.inf  # when we first saw another run
        self.noticed = b""  # the run that the latest notice was about
        self.alone: bool = False
        self.alone_since = math.inf  # when this node became alone; infinite once that is reported
        self.told_alone = False
        self.spoiled_at, self.mend_s = -math.inf, MEND_S

    def spoiled(self, now: float) -> None:
        """Note that our weights are not finite any more.

        The delay doubles if fetched weights spoil as well, for example by a high learning rate. This spares the donors.
        """
        again = now - self.spoiled_at < self.mend_s + SOUND_S
        self.mend_s = min(2 * self.mend_s, MOST_MEND_S) if again else MEND_S
        self.spoiled_at, self.changes_seen = now, -1

    def consent(self, run_id: bytes, now: float) -> None:
        """Merge into this run because the user wants it, whatever its samples."""
        self.joining.consented, self.noticed = run_id, b""
        self.changes_seen, self.next_at = -1, now
        self.joining.left_alone.pop(run_id, None)

    @property
    def deadline(self) -> float:
        """Return the time to call :meth:`tick`; infinity for a ready node while no member comes or goes."""
        membership = self.membership
        if self.local.ready and membership.changes == self.changes_seen and self.alone is not membership.has_company:
            return max(self.next_at, self.alone_since + self.config.join_timeout_s)
        return self.next_at

    def tick(self, now: float) -> list[Effect]:
        """Check once a second if this node is alone, has a run to join, or a larger run to merge into."""
        if now < self.next_at:
            return []
        self.next_at = now + CONSIDER_S
        effects, ready, membership = self.report_company(now), self.local.ready, self.membership
        if self.joining.phase is not Phase.IDLE or (ready and membership.changes == self.changes_seen):
            return effects
        if not self.local.sound:
            return effects + self.mend(now)
        others = self.rivals()
        mine = self.ours() if others else Run(0, self.local.run_id)
        rivals = [rival for rival in others if self.joining.gives(rival.run_id, now)]
        # The sample counts of two runs grow, so the answer may change without a change of members.
        self.changes_seen = -1 if others else membership.changes
        resumed = self.local.progress.resumed
        self.divided_since = min(self.divided_since, now) if others else math.inf
        if rivals:
            rival = self.best(rivals, mine, now, resumed)
            donors = [] if rival is None else self.donors(rival.run_id)
            if rival is not None and donors:
                if ready and self.noticed != rival.run_id:
                    self.noticed = rival.run_id
                    effects.append(merging(donors[0], rival, mine))
                return effects + self.joining.begin(rival.run_id, donors, now)
            if ready:
                return effects + self.divided(rivals, mine)
        return effects if ready else effects + self.start(bool(rivals) and resumed, now)

    def best(self, rivals: list[Run], mine: Run, now: float, resumed: bool) -> Run | None:
        """Return the run whose weights to take, if any. A peer without weights joins the run with most members."""
        if not (self.local.ready or resumed):
            return max(rivals, key=lambda rival: (rival.members, rival.samples, rival.run_id))
        wanted = [rival for rival in rivals if self.wants(rival, mine, now)]
        return max(wanted, default=None)

    def wants(self, rival: Run, mine: Run, now: float) -> bool:
        """Return True if a peer with weights of its own takes this run's."""
        if rival.run_id == self.joining.consented:
            return True
        if self.config.merge != "auto":
            return False
        if outranks(rival, mine) and (rival.members >= mine.members or self.own.judge.sees):
            return True
        if now - self.divided_since <= STALEMATE_S:
            return False
        return rival.members > mine.members or (rival.members == mine.members and rival.run_id > mine.run_id)

    def divided(self, rivals: list[Run], mine: Run) -> list[Effect]:
        """Report once that another run exists, so that the user can decide."""
        rival = max(rivals)
        if self.config.merge == "auto" or self.noticed == rival.run_id:
            return []
        self.noticed = rival.run_id
        return [
            Notice(
                "divided",
                f"Another run trains here, {rival.run_id.hex()} with {quantity(rival.samples, 'sample')} behind it "
                f"and {quantity(rival.members, 'member')} (ours has {mine.samples:,} and {mine.members:,}); merge is "
                f'set to "{self.config.merge}", and node.merge("{rival.run_id.hex()}") takes its weights.',
            )
        ]

    def start(self, ahead: bool, now: float) -> list[Effect]:
        """Start without another run: take our own run's weights from its members, or begin.

        A node begins if it is ahead of every run that it sees. It also begins if all members wait and its id is the
        smallest. At the time-out it begins if no member is reachable, or if members gave it no weights.
        """
        same = self.donors(self.local.run_id)
        if same and self.joining.gives(self.local.run_id, now):
            return self.joining.begin(self.local.run_id, same, now)
        if ahead:
            return self.own.begin(now, "The run of this node has more samples behind it than those it met: it goes on.")
        if self.must_join:
            return []
        others, mine = self.membership.contacted(), self.membership.me.id
        if others and not self.membership.runs():
            self.ripe_at = min(self.ripe_at, now + RIPE_S)
            # A smaller id that we know by hearsay may exist: wait for it, but not for ever.
            smallest = mine < min(others) and (mine < min(self.membership.alive()) or now >= self.ripe_at + HEARSAY_S)
            if now >= self.ripe_at and smallest:
                return self.own.begin(now, "All members wait for weights: this node, whose id is smallest, begins.")
        if now >= self.join_by and (others or not self.wait_for()):
            text = "No member gave its weights" if others else "No member could be reached"
            text += ": this node starts alone, and merges when it meets others."
            return self.own.begin(now, text)
        return []

    def mend(self, now: float) -> list[Effect]:
        """Replace spoiled weights by those of our own run, or else of any other. Without donors nothing begins."""
        if now < self.spoiled_at + self.mend_s:
            return []
        for run_id in (self.local.run_id, *(rival.run_id for rival in sorted(self.rivals(), reverse=True))):
            donors = self.donors(run_id)
            if donors and self.joining.gives(run_id, now):
                return self.joining.begin(run_id, donors, now)
        return []

    def report_company(self, now: float) -> list[Effect]:
        """Report that this node is alone once that lasts as long as the start-up wait.

        The first node of a swarm is alone for a moment, which is normal.
        """
        alone = not self.membership.has_company
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
        """Return our run as others see it, by the signed records."""
        return self.run(self.local.run_id)

    def rivals(self) -> list[Run]:
        """Return the other runs of ready, ALIVE members."""
        return [self.run(run_id) for run_id in self.membership.runs() if run_id != self.local.run_id]

    def run(self, run_id: bytes) -> Run:
        samples, members = self.membership.run_standing(run_id)
        return Run(samples, run_id, members)

    def donors(self, run_id: bytes) -> list[PeerId]:
        """Return the reachable, ready members of a run in random order."""
        sharing = self.membership.run_members(run_id)
        found = [record.id for record in sharing if record.address is not None or record.id in self.linked]
        self.rng.shuffle(found)
        return found

    def should_serve(self, record: MemberRecord | None, now: float) -> bool:
        """Return True if this member gets our weights. If so, the caller stops our own transfer."""
        joining = self.joining
        if record is None or not record.ready or record.run_id == self.local.run_id:
            return joining.phase is Phase.IDLE  # a newcomer wants weights that stay
        ours = self.ours()
        if joining.phase is Phase.ADOPTING:
            return False
        if joining.gives(record.run_id, now) and self.wants(self.run(record.run_id), ours, now):
            # If each wants the other's weights, one must give way, or they would swap.
            return ours.run_id > record.run_id
        return joining.phase is Phase.IDLE or joining.run_id == record.run_id


def merging(donor: PeerId, theirs: Run, ours: Run) -> Notice:
    return Notice(
        "merging",
        f"Met run {theirs.run_id.hex()[:8]} with {quantity(theirs.samples, 'sample')} behind it and "
        f"{quantity(theirs.members, 'member')} (as {short(donor)}); ours has {ours.samples:,} and {ours.members:,}, so "
        "this node tries its weights.",
    )
