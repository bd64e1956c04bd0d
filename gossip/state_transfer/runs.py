"""The choice of a run: begin one, join one, or merge into a larger one. Also reports when this node is alone.

A run is identified by its run id. If two runs share a swarm, the members of the run with fewer samples
take the other's weights. They do so if the other has at least as many members, if its weights pass a trial
(:mod:`gossip.state_transfer.trial`), or if the user consents. A member avoids its former run for a while. If nothing is
decided for long, the run with fewer members gives way.
"""

import math
import random
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from gossip.effects import Effect, Notice
from gossip.ids import MemberRecord, PeerId, quantity, short
from gossip.membership.members import Members
from gossip.state_transfer.joining import Newcomer, Phase
from gossip.state_transfer.trial import TrialEvaluator

# Time without ready members before the smallest id begins the run, also where a seed may end one and begin the next.
ALL_WAIT_S, NEXT_WAIT_S = 2.0, 8.0
# Delay from the first link until a newcomer asks for weights. The table of members arrives within a round trip or two.
# Before that the newcomer knows one donor, which would be the majority.
FIRST_TABLE_S = 0.5
BUSY_TIMEOUTS = 3.0  # Multiple of ``join_timeout_s`` for which a seed that closes every connection may be only busy.
HEARSAY_S = 6.0  # Extra time while a smaller id is known by hearsay, without a link to its member.
CHECK_S = 1.0  # Interval between two comparisons of the runs.
# Two runs are in a stalemate while neither may take the other's weights. After this time the one with fewer members
# gives way. With as many members it is the one with the smaller id, and after twice this time either of them.
STALEMATE_S = 120.0
# Delay from the moment at which weights are not finite to the fetch of others. It doubles if these spoil again.
MEND_S, MAX_MEND_S = 1.0, 256.0
SOUND_S = 60.0  # Weights that spoil later than this are not blamed on the last transfer.
EQUAL_SHARE = 1 / 64  # Relative difference of samples up to which two runs count as equal.
NOTHING_SEEN = -1  # Value of ``RunChoice.changes_seen`` that makes the next tick check for other runs.


class Run(NamedTuple):
    """A run, by the records of its members. The one with more samples is the larger one, then the larger id."""

    samples: int  # Lower median of the members' progress.
    run_id: bytes
    members: int = 0  # Members that are ALIVE and ready.


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

    trial: TrialEvaluator

    def begin(self, now: float, reason: str) -> list[Effect]:
        """Make the peer ready with the weights that it has."""


class RunChoice:
    """The choice of the run whose weights this peer holds. ``linked`` holds the peers with a link to us."""

    def __init__(
        self, joining: Newcomer, membership: Members, linked: Collection[PeerId], own_run: Starter, rng: random.Random,
        now: float,
    ) -> None:  # fmt: skip
        self.joining, self.membership, self.linked, self.own_run, self.rng = joining, membership, linked, own_run, rng
        self.local, self.config = joining.local, joining.config
        # The start of a peer without weights.
        self.join_by = now + self.config.join_timeout_s
        self.must_join = False  # Do not begin a run only because no member offers one.
        self.is_seed_busy: Callable[[], bool] = lambda: False  # Set by the peer.
        self.may_begin_at = math.inf  # Time from which the smallest id begins; infinite until all members wait.
        # The check for other runs.
        self.next_check_at = now
        self.changes_seen = NOTHING_SEEN  # The membership's count of changes when we last found nothing to do.
        self.divided_since = math.inf  # Time at which we first saw another run.
        self.noticed_run_id = b""  # The run that the latest notice was about.
        # Company.
        self.is_alone: bool = False
        self.alone_since = math.inf  # Infinite with company, and once it is reported that this node is alone.
        self.has_reported_alone = False
        # Weights that are not finite.
        self.spoiled_at, self.mend_delay_s = -math.inf, MEND_S

    def begin(self, must_join: bool, wait_until: float, completed: Iterable[bytes]) -> None:
        """Take over the terms of the start (:class:`gossip.discovery.seeds.Bootstrap`)."""
        self.must_join, self.join_by = must_join, max(self.join_by, wait_until)
        for run_id in completed:
            self.joining.avoid_run(run_id, math.inf)

    @property
    def deadline(self) -> float:
        """Return the time to call :meth:`tick`; infinity for a ready node while no member comes or goes."""
        membership = self.membership
        is_alone_known = self.is_alone is not membership.has_company
        # The last check found nothing to do, and no member has come or gone since.
        if self.local.ready and membership.changes == self.changes_seen and is_alone_known:
            return max(self.next_check_at, self.alone_since + self.config.join_timeout_s)
        return self.next_check_at

    def tick(self, now: float) -> list[Effect]:
        """Check once a second if this node is alone, has a run to join, or a larger run to merge into."""
        if now < self.next_check_at:
            return []
        self.next_check_at = now + CHECK_S
        effects, is_ready, membership = self.report_company(now), self.local.ready, self.membership
        if self.joining.phase is not Phase.IDLE or (is_ready and membership.changes == self.changes_seen):
            return effects
        if not self.local.sound:
            return effects + self.replace_spoiled(now)
        others = self.other_runs()
        ours = self.our_run() if others else Run(0, self.local.run_id)
        candidates = [run for run in others if self.joining.may_ask(run.run_id, now)]
        # The sample counts of two runs grow, so the answer may change without a change of members.
        self.changes_seen = NOTHING_SEEN if others else membership.changes
        has_checkpoint = self.local.progress.resumed
        self.divided_since = min(self.divided_since, now) if others else math.inf
        if candidates:
            chosen = self.choose(candidates, ours, now, has_weights=is_ready or has_checkpoint)
            donors = [] if chosen is None else self.donors(chosen.run_id)
            if chosen is not None and donors:
                if is_ready and self.noticed_run_id != chosen.run_id:
                    self.noticed_run_id = chosen.run_id
                    effects.append(merging_notice(donors[0], chosen, ours))
                return effects + self.joining.begin(chosen.run_id, donors, now)
            if is_ready:
                return effects + self.report_division(candidates, ours)
        return effects if is_ready else effects + self.start(bool(candidates) and has_checkpoint, now)

    def check_again(self) -> None:
        """Check for other runs at the next tick even if no member has come or gone."""
        self.changes_seen = NOTHING_SEEN

    def on_linked(self, now: float) -> None:
        """Handle a new link: a lonely node looks for runs at once, a newcomer with its first link soon."""
        if self.is_alone:
            self.next_check_at = now
        elif not self.local.ready and len(self.linked) == 1:
            self.next_check_at = now + FIRST_TABLE_S

    # -- which run -----------------------------------------------------------------------------------------------
    def choose(self, candidates: list[Run], ours: Run, now: float, has_weights: bool) -> Run | None:
        """Return the run whose weights to take, if any. A peer without weights joins the run with most members."""
        if not has_weights:
            return max(candidates, key=lambda run: (run.members, run.samples, run.run_id))
        return max((run for run in candidates if self.should_take(run, ours, now)), default=None)

    def should_take(self, theirs: Run, ours: Run, now: float) -> bool:
        """Return True if a peer with weights of its own takes this run's."""
        if theirs.run_id == self.joining.consented_run_id:
            return True
        if self.config.merge != "auto":
            return False
        if outranks(theirs, ours) and (theirs.members >= ours.members or self.own_run.trial.can_judge):
            return True
        waited_s = now - self.divided_since
        if waited_s <= STALEMATE_S:
            return False
        if theirs.members != ours.members:
            return theirs.members > ours.members
        # The others may count more members of theirs than we have met, and would wait for us for ever.
        return theirs.run_id > ours.run_id or waited_s > 2 * STALEMATE_S

    def should_serve(self, record: MemberRecord | None, now: float) -> bool:
        """Return True if this member gets our weights. If so, the caller stops our own transfer."""
        joining = self.joining
        if record is None or not record.ready or record.run_id == self.local.run_id:
            return joining.phase is Phase.IDLE  # A newcomer wants weights that stay.
        if joining.phase is Phase.ADOPTING:
            return False
        ours = self.our_run()
        if joining.may_ask(record.run_id, now) and self.should_take(self.run(record.run_id), ours, now):
            # If each wants the other's weights, one must give way, or they would swap.
            return ours.run_id > record.run_id
        return joining.phase is Phase.IDLE or joining.run_id == record.run_id

    def consent(self, run_id: bytes, now: float) -> None:
        """Merge into this run because the user wants it, whatever its samples."""
        self.joining.consented_run_id, self.noticed_run_id = run_id, b""
        self.next_check_at = now
        self.check_again()
        self.joining.avoided_runs.pop(run_id, None)

    # -- without another run -------------------------------------------------------------------------------------
    def start(self, is_ahead: bool, now: float) -> list[Effect]:
        """Start without another run: take our own run's weights from its members, or begin.

        A node begins if it is ahead of every run that it sees. It also begins if all members wait and its id is the
        smallest. At the time-out it begins if no member is reachable, or if members gave it no weights.
        """
        donors = self.donors(self.local.run_id)
        if donors and self.joining.may_ask(self.local.run_id, now):
            return self.joining.begin(self.local.run_id, donors, now)
        if is_ahead:
            text = "The run of this node has more samples behind it than those it met: it goes on."
            return self.own_run.begin(now, text)
        if self.must_join:
            return []
        others, my_id = self.membership.contacted(), self.membership.me.id
        if others and not self.membership.runs():
            self.may_begin_at = min(self.may_begin_at, now + (NEXT_WAIT_S if self.joining.avoided_runs else ALL_WAIT_S))
            # A smaller id that we know by hearsay may exist: wait for it, but not for ever.
            has_waited = now >= self.may_begin_at + HEARSAY_S
            is_smallest = my_id < min(others) and (my_id < min(self.membership.alive()) or has_waited)
            if now >= self.may_begin_at and is_smallest:
                return self.own_run.begin(now, "All members wait for weights: this node, whose id is smallest, begins.")
        busy_until = self.join_by + (BUSY_TIMEOUTS - 1) * self.config.join_timeout_s
        if now >= self.join_by and (others or now >= busy_until or not self.is_seed_busy()):
            text = "No member gave its weights" if others else "No member could be reached"
            text += ": this node starts alone, and merges when it meets others."
            return self.own_run.begin(now, text)
        return []

    # -- weights that are not finite -----------------------------------------------------------------------------
    def on_spoiled(self, now: float) -> None:
        """Handle weights of ours that are not finite any more.

        The delay doubles if fetched weights spoil as well, for example by a high learning rate. This spares the donors.
        """
        is_repeated = now - self.spoiled_at < self.mend_delay_s + SOUND_S
        self.mend_delay_s = min(2 * self.mend_delay_s, MAX_MEND_S) if is_repeated else MEND_S
        self.spoiled_at = now
        self.check_again()

    def replace_spoiled(self, now: float) -> list[Effect]:
        """Replace spoiled weights by those of our own run, or else of any other. Without donors nothing begins."""
        if now < self.spoiled_at + self.mend_delay_s:
            return []
        for run_id in (self.local.run_id, *(run.run_id for run in sorted(self.other_runs(), reverse=True))):
            donors = self.donors(run_id)
            if donors and self.joining.may_ask(run_id, now):
                return self.joining.begin(run_id, donors, now)
        return []

    # -- reports -------------------------------------------------------------------------------------------------
    def report_company(self, now: float) -> list[Effect]:
        """Report that this node is alone once that lasts as long as the start-up wait.

        The first node of a swarm is alone for a moment, which is normal.
        """
        alone = not self.membership.has_company
        if not self.local.ready:
            return []
        if alone != self.is_alone:
            self.is_alone, self.alone_since = alone, now if alone else math.inf
        if alone and now >= self.alone_since + self.config.join_timeout_s:
            self.alone_since, self.has_reported_alone = math.inf, True
            return [Notice("alone", "This node is alone: it trains on, and looks for others.")]
        if not alone and self.has_reported_alone:
            self.has_reported_alone = False
            return [Notice("together", "This node is no longer alone.")]
        return []

    def report_division(self, candidates: list[Run], ours: Run) -> list[Effect]:
        """Report once that another run exists, so that the user can decide."""
        other = max(candidates)
        if self.config.merge == "auto" or self.noticed_run_id == other.run_id:
            return []
        self.noticed_run_id = other.run_id
        text = (
            f"Another run trains here, {other.run_id.hex()} with {quantity(other.samples, 'sample')} behind it "
            f"and {quantity(other.members, 'member')} (ours has {ours.samples:,} and {ours.members:,}); merge is "
            f'set to "{self.config.merge}", and node.merge("{other.run_id.hex()}") takes its weights.'
        )
        return [Notice("divided", text)]

    # -- queries -------------------------------------------------------------------------------------------------
    def our_run(self) -> Run:
        """Return our run as others see it, by the signed records."""
        return self.run(self.local.run_id)

    def other_runs(self) -> list[Run]:
        """Return the other runs of ready, ALIVE members."""
        return [self.run(run_id) for run_id in self.membership.runs() if run_id != self.local.run_id]

    def run(self, run_id: bytes) -> Run:
        samples, members = self.membership.run_standing(run_id)
        return Run(samples, run_id, members)

    def donors(self, run_id: bytes) -> list[PeerId]:
        """Return the reachable, ready members of a run in random order."""
        records = self.membership.run_members(run_id)
        donors = [record.id for record in records if record.address is not None or record.id in self.linked]
        self.rng.shuffle(donors)
        return donors


def merging_notice(donor: PeerId, theirs: Run, ours: Run) -> Notice:
    text = (
        f"Met run {theirs.run_id.hex()[:8]} with {quantity(theirs.samples, 'sample')} behind it and "
        f"{quantity(theirs.members, 'member')} (as {short(donor)}); ours has {ours.samples:,} and {ours.members:,}, so "
        "this node tries its weights."
    )
    return Notice("merging", text)
