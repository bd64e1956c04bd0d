"""The mean of a group: an all-reduce that goes on without the members that are late.

Moshpit SGD (Ryabinin et al., NeurIPS 2021) averages in groups of up to M members. Each member owns one slice of the
vector. It receives this slice from every other member (reduce-scatter), and sends the mean of it to all (all-gather).
A member so sends and receives about two vectors, however large the group. The *inviter* is the member whose mix is due:
it invites the others and decides the outcome.

No wait for a member is long: each ends after some four times its usual duration (:func:`patience_s`). The inviter then
begins with the peers that have joined, means are computed without the values that are missing, weights stay as they are
where a mean is missing, and the inviter settles with the members that have committed. A late member is charged with the
wait. A member that stops at any step therefore costs a few short waits, after which it is not asked for a while.

    inviter:  PREPARING --snapshotted--> OFFERED --joined by all--> STREAMING --gathered--> VERIFIED --commit--> DONE
                                          |   ^
    substitute:                           +---+      late: without those whose values or means are missing
    busy, refuse, abort, unlinked
    invited:  PREPARING --snapshotted--> OFFERED -----begin-------> STREAMING --gathered--> VERIFIED --settled--> DONE
                                                                                               |                   ^
                                                                                 late, unlinked v                  |
                                                                                            IN_DOUBT --settled-----+

Every state also leads to DROPPED, which ends the group without a result. The inviter is never in doubt, since it alone
decides. A member that has not committed by then hears the outcome when it asks. The table and all events are in
:mod:`gossip.exchange.transitions`; "unlinked" means that the last link to a peer was lost, or that the peer died. If
the table allows an event, ``Exchanges`` calls the handler ``on_<event>``, which returns the effects to perform. An
Abort with the code "late" says that its sender has given up, whatever the cause.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gossip.arithmetic.outer_step import stability_limit
from gossip.effects import Dial, Effect, Gather, LeaveOut, MemberState, Mix, Send
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.groups import matchmaking
from gossip.exchange.groups.forming import Forming, patience_s
from gossip.exchange.session import clamp_version, version_gap
from gossip.exchange.session_table import DOUBT_RETRY_S, INNOCENT_REASONS, REFUSALS
from gossip.exchange.transitions import GROUP, Event, State, Table
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Commit, Outcome, Settled

# Groups in doubt (:mod:`gossip.exchange.session`) at once: the one that a network cut left, and the next.
MAX_DOUBTS = 2
# The inviter waits for COMMITs as long as for three streams, since another member may wait twice for a late one. The
# others wait for the outcome one such wait longer.
COMMIT_PATIENCE = 3
MAX_WITHDRAWALS = 8  # Invitations that one peer takes back between two groups that it finishes.
DIAL_S = 1.0  # Further seconds for members that are dialled first: four round trips on a long line.
PREPARING, OFFERED, STREAMING = State.PREPARING, State.OFFERED, State.STREAMING
VERIFIED, IN_DOUBT, DONE, DROPPED = State.VERIFIED, State.IN_DOUBT, State.DONE, State.DROPPED


@dataclass(slots=True, eq=False, kw_only=True)
class Group(Forming):
    """One side of a group. A node takes part in one at a time, its own or another's."""

    TRANSITIONS: ClassVar[Table] = GROUP
    # ``Exchanges`` calls these two on the class. They are part of matchmaking, before there is a group.
    begin_mix = classmethod(matchmaking.begin_mix)
    answer_invitation = classmethod(matchmaking.answer_invitation)
    IS_GROUP: ClassVar[bool] = True

    committed_members: set[PeerId] = field(default_factory=set)
    absent: set[PeerId] = field(default_factory=set)  # Members that this group goes on without, refused ones included.
    stream_patience_s: float = 0.0
    hurries: int = 0  # Waits for values, then for means, that have ended.

    @property
    def counterparts(self) -> tuple[PeerId, ...]:
        if self.is_initiator and not self.members:
            return (*self.pending_peers, *self.joined_versions)
        return self.members or (self.inviter,)

    @property
    def other_members(self) -> list[PeerId]:
        """Return the members without us, once the group has begun."""
        return [peer for peer in self.members if peer != self.exchanges.me]

    @staticmethod
    def max_doubts(exchanges: Exchanges[Any]) -> int:
        return MAX_DOUBTS

    def accepts_from(self, event: Event, sender: PeerId) -> bool:
        match event:
            case Event.JOINED | Event.BUSY | Event.REFUSE:
                return sender in self.pending_peers
            case Event.ABORT if self.is_initiator:
                return sender in self.counterparts and sender not in self.committed_members
            case Event.ABORT | Event.BEGIN:
                return sender == self.inviter
        return sender in self.members

    @classmethod
    def on_stray(cls, exchanges: Exchanges[Any], event: Event, sender: PeerId, session: int) -> list[Effect]:
        """Answer a message that our group does not allow, or that is about no group of ours.

        A question for the outcome is answered only from a remembered outcome. An inviter that restarted remembers none,
        but may have told other members before that the group has happened. If it answered "no", this member would drop
        what they have mixed.
        """
        match event:
            case Event.JOINED | Event.BEGIN | Event.ACCEPT:
                return [Send(sender, Abort(session, "late"))]
            case Event.OUTCOME if session not in exchanges.table:
                outcome = exchanges.outcomes.get(session)
                return [] if outcome is None else [Send(sender, Settled(session, outcome))]
        return []

    # -- the streams ---------------------------------------------------------------------------------------------
    def start_all_reduce(self, now: float) -> list[Effect]:
        """Start the all-reduce, as the list of members is final.

        The longest wait allows 8 bytes per element at the slowest rate, since a member sends and receives two vectors
        of 4 bytes per element; a pause of ``stall_s``, in which missing links are dialled; and the longest duration
        that exchanges with a member take. Groups that we invited count under our own id (:meth:`finish`).
        """
        exchanges = self.exchanges
        config = exchanges.config
        seconds = 8 * exchanges.local.elements / (config.slowest_rate_mb_s * 1e6) + config.stall_s
        seconds += max(exchanges.durations.longest_s(peer) for peer in self.members)
        self.stream_patience_s = patience_s(exchanges.stream_waits, seconds)
        self.state, self.phase_began_at, self.timer_at = STREAMING, now, now + self.stream_patience_s
        dials: list[Effect] = []
        for peer in self.other_members:
            if not exchanges.partners.is_linked(peer):
                address = exchanges.partners.address(peer)
                if address is not None:  # A peer without an address dials us.
                    dials.append(Dial(address, peer))
        if dials:
            self.timer_at += DIAL_S
        return [*dials, self.gather_effect()]

    def gather_effect(self) -> Gather:
        place = self.members.index(self.exchanges.me)
        return Gather(self.session, self.members, place, self.codec)

    def on_linked(self, peer: PeerId, now: float) -> list[Effect]:
        """Handle a new link in STREAMING: repeat the Gather, which may have waited for a link to this member."""
        return [self.gather_effect()] if peer in self.members else []

    def on_gathered(
        self, difference_sq: float, own_sq: float, refused: Mapping[PeerId, str], absent: Iterable[PeerId], now: float
    ) -> list[Effect]:
        """Handle the complete mean of the group in STREAMING.

        An invited member sends COMMIT to the inviter. The inviter waits for these, or finishes if it has all.

        Args:
            difference_sq: Squared distance between the mean of the members' vectors and our vector.
            own_sq: Squared norm of our vector.
            refused: Why our slice leaves values of members out, or their slices are no valid means.
            absent: Members whose values or means have not come.
            now: Current time in seconds.
        """
        exchanges, member_count = self.exchanges, len(self.members)
        for peer, refusal in refused.items():
            exchanges.refusals.add(peer, refusal)
            exchanges.partners.note_failure(peer, now)
            self.absent.add(peer)
            if refusal == "not-finite":
                exchanges.misbehaviour.note(peer, "refused", now)
        for peer in absent:
            self.note_absence(peer, now)
        if len(self.absent) == member_count - 1:  # A refusal says more of a group, and charges nobody for us.
            return self.on_failed(next(iter(refused.values()), "deadline"), now)
        # Estimate a pair's distance: of m members, |x_i - x_j|^2 is 2 m / (m - 1) times |mean - x_i|^2 in expectation.
        pair_sq = difference_sq * 2 * member_count / (member_count - 1)
        exchanges.last_squares.append((pair_sq, own_sq))
        exchanges.filter.on_group(pair_sq, exchanges.local.elements)
        self.state = VERIFIED
        self.timer_at = now + self.stream_patience_s * (COMMIT_PATIENCE + (not self.is_initiator))
        return self.finish_if_complete(now) if self.is_initiator else [Send(self.inviter, Commit(self.session))]

    # -- members that are late or gone ---------------------------------------------------------------------------
    def note_absence(self, peer: PeerId, now: float) -> None:
        """Continue without a late member, and charge it once.

        The member is not asked for a while, but may still invite, so that a slow member takes part by its own groups.
        An inviter that does not stream is declined from the second time on.
        """
        if peer not in self.absent:
            self.absent.add(peer)
            self.charge(peer, now, silent=peer != self.inviter or self.exchanges.excuse_once(peer))

    def charge(self, peer: PeerId, now: float, silent: bool = False) -> None:
        """Charge a member whose part the group waited for in vain; ``silent`` is as for ``note_failure``."""
        self.exchanges.partners.note_failure(peer, now, silent)
        self.exchanges.misbehaviour.note(peer, "wasted", now)

    def leave_out(self, peer: PeerId, now: float) -> list[Effect]:
        """Continue without a member that cannot take part any more, in STREAMING or VERIFIED."""
        self.absent.add(peer)
        if len(self.absent) == len(self.members) - 1:
            return self.on_failed("broken", now)
        if self.state is STREAMING:
            return [LeaveOut(self.session, (peer,), means=True)]
        return self.finish_if_complete(now)

    def hurry(self, now: float) -> list[Effect]:
        """Handle a wait in STREAMING that has ended: leave out missing values, then missing means, and at last fail."""
        self.hurries += 1
        if self.hurries > 2:
            return self.on_failed("deadline", now)
        self.timer_at = now + self.stream_patience_s
        return [LeaveOut(self.session, None, means=self.hurries == 2)]

    # -- outcome -------------------------------------------------------------------------------------------------
    def on_commit(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle COMMIT in STREAMING or VERIFIED (inviter): note it, and finish if it is the last one."""
        self.committed_members.add(sender)
        return self.finish_if_complete(now)

    def on_outcome(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle Outcome in STREAMING or VERIFIED (inviter) as a COMMIT, since only a committed member asks.

        An invited member does not answer this question (``accepts_from`` and the table), because it knows only what the
        inviter has told it.
        """
        return self.on_commit(sender, now)

    def finish_if_complete(self, now: float) -> list[Effect]:
        """Tell all members to mix, and mix, once the inviter has all means and the COMMIT of each who is not absent."""
        awaited = set(self.other_members) - self.committed_members - self.absent
        if self.state is not VERIFIED or awaited:
            return []
        if not self.committed_members:
            return self.fail("deadline")
        return [*[Send(peer, Settled(self.session, True)) for peer in self.other_members], *self.finish(now)]

    def on_settled(self, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
        """Handle the inviter's decision in VERIFIED or IN_DOUBT (invited): finish or fail. Ignore other members."""
        if sender != self.inviter:  # A member that lies would make us mix alone.
            return []
        return self.finish(now) if settled.committed else self.fail("aborted")

    def on_abort(self, sender: PeerId, code: str, now: float) -> list[Effect]:
        """Handle Abort: the inviter continues without the sender; for an invited member the group fails.

        After the group's beginning the sender is charged, unless it refuses our values or gives its first innocent
        reason. Before it, an inviter withdraws whenever invitations cross, and is charged only if that repeats.
        """
        if self.is_initiator and self.state is OFFERED:
            return self.on_busy(sender, now)
        exchanges = self.exchanges
        if self.state in (PREPARING, OFFERED):
            count = exchanges.withdrawals[sender] = exchanges.withdrawals.get(sender, 0) + 1
            is_charged = count > MAX_WITHDRAWALS
        else:
            is_innocent = code in INNOCENT_REASONS and exchanges.excuse_once(sender)
            is_charged = code not in REFUSALS and not is_innocent
        if is_charged:
            self.charge(sender, now)
        return self.leave_out(sender, now) if self.is_initiator else self.fail(code)

    def on_failed(self, code: str, now: float) -> list[Effect]:
        """Handle a failed stream in STREAMING: tell the inviter, and fail. The inviter's ``fail`` tells all others.

        Args:
            code: "broken" if a link broke, else what was wrong with a stream.
            now: Current time in seconds.
        """
        abort: list[Effect] = [] if self.is_initiator else [Send(self.inviter, Abort(self.session, code))]
        return [*abort, *self.fail(code)]

    def on_link_lost(self, peer: PeerId, now: float) -> list[Effect]:
        is_known = peer in self.counterparts
        return self.exchanges.route_event(self, Event.UNLINKED, peer, now) if is_known else []

    def on_unlinked(self, peer: PeerId, now: float) -> list[Effect]:
        """Handle the loss of all links to a peer of the group, or its death.

        In OFFERED the inviter invites a substitute. From STREAMING on the group goes on without the peer. An invited
        member that loses the inviter withdraws before STREAMING, fails in it, and asks for the outcome in VERIFIED.
        """
        exchanges = self.exchanges
        match self.state:
            case State.OFFERED if self.is_initiator:
                exchanges.count_failure("unreached")
                exchanges.partners.note_failure(peer, now, silent=True)
                return self.on_busy(peer, now)
            case State.STREAMING:
                exchanges.partners.note_failure(peer, now)
                return self.on_failed("broken", now) if peer == self.inviter else self.leave_out(peer, now)
            case State.VERIFIED if self.is_initiator and peer not in self.committed_members:
                exchanges.partners.note_failure(peer, now)
                return self.leave_out(peer, now)
            case State.VERIFIED:
                return self.ask_outcome(now) if peer == self.inviter else []
        return self.end(DROPPED)  # We are invited, and the group has not begun.

    def lost_peers(self, state: Callable[[PeerId], MemberState | None]) -> list[PeerId]:
        """Return the peers that the group waits for in vain.

        A streaming member must be DEAD or LEFT, since a SUSPECT one may refute the suspicion.
        """
        if self.is_initiator and self.state is OFFERED:
            return [peer for peer in self.pending_peers if state(peer) is not MemberState.ALIVE]
        if self.state is not STREAMING:
            return []
        return [peer for peer in self.other_members if state(peer) in (MemberState.DEAD, MemberState.LEFT)]

    def on_late(self, now: float) -> list[Effect]:
        """Handle ``timer_at``, which has come, in any state.

        In OFFERED the inviter begins with the peers that joined. An invited peer withdraws before STREAMING. From there
        on the group goes on without the members that are late. An invited member asks for the outcome from VERIFIED on,
        and gives up after ``doubt_s`` of doubt.
        """
        exchanges = self.exchanges
        if self.state is OFFERED and self.is_initiator:
            patience = self.timer_at - self.phase_began_at
            for peer, invited_at in self.pending_peers.items():
                exchanges.count_failure("unanswered")
                if now - invited_at >= patience:  # A substitute may have been invited just now.
                    self.charge(peer, now, silent=True)
            return self.begin_group(now)
        if self.state in (PREPARING, OFFERED):
            if self.state is OFFERED:  # No Begin came.
                self.charge(self.inviter, now, silent=exchanges.excuse_once(self.inviter))
            return self.withdraw()
        if self.state is STREAMING:
            return self.hurry(now)
        if self.is_initiator:
            for peer in self.other_members:
                if peer not in self.committed_members:
                    self.note_absence(peer, now)
            return self.finish_if_complete(now)
        if self.state is VERIFIED or now - self.phase_began_at < exchanges.config.internal.doubt_s:
            return self.ask_outcome(now)
        return self.on_crowded(now)

    def ask_outcome(self, now: float) -> list[Effect]:
        """Ask the inviter, which alone decides, for the outcome of a group in doubt.

        The time of doubt begins at our deadline. The inviter's is about the same, and it decides then at the latest.
        """
        ended: list[Effect] = []
        if self.state is not IN_DOUBT:
            self.state, self.phase_began_at = IN_DOUBT, max(now, self.timer_at)
            ended = self.exchanges.drop_excess_doubt(now)
        self.timer_at = now + DOUBT_RETRY_S
        return [*ended, Send(self.inviter, Outcome(self.session))]

    def on_crowded(self, now: float) -> list[Effect]:
        """Handle too many groups in doubt, of which this IN_DOUBT one is the oldest: fail, and charge the inviter."""
        self.charge(self.inviter, now)
        return self.fail("doubt")

    def on_replaced(self) -> list[Effect]:
        """Handle weights that are about to be replaced, in any state: withdraw, or fail the group if we still can.

        An invited member that has sent COMMIT only leaves, and sends no Abort. The inviter counts its COMMIT and may
        have told others to mix already. They can mix without it, since its own mean goes with its weights.
        """
        if self.state in (PREPARING, OFFERED):
            return self.withdraw()
        if self.is_initiator:
            return self.fail("replaced")
        abort: list[Effect] = []
        if self.state is STREAMING:
            abort.append(Send(self.inviter, Abort(self.session, "replaced")))
        return [*abort, *self.end(DROPPED)]

    # -- endings -------------------------------------------------------------------------------------------------
    def finish(self, now: float) -> list[Effect]:
        """Apply the mean: the group has happened. Waits count only for members that have kept their part."""
        exchanges = self.exchanges
        exchanges.remember_outcome(self.session, True)
        present = [peer for peer in self.other_members if peer not in self.absent]
        if self.state is not IN_DOUBT:
            exchanges.durations.add(self.inviter, now - self.phase_began_at)
            if not self.absent:
                exchanges.stream_waits.add(self.inviter, now - self.phase_began_at)
        for peer in present:
            exchanges.misbehaviour.take_back(peer, "wasted")
            exchanges.excused_partners.pop(peer, None)
            exchanges.withdrawals.pop(peer, None)
            if peer in self.answer_waits_s:
                exchanges.answer_waits.add(peer, self.answer_waits_s[peer])
        exchanges.done_count += 1
        exchanges.equal_since = None
        exchanges.partners.mixes += 1
        exchanges.partners.note_request(None if self.is_initiator else self.inviter, now)
        exchanges.last_partner = (present or self.other_members)[0]
        if self.state is not IN_DOUBT:  # Its mix is late, and the next one is due by the schedule.
            exchanges.mixed_partners += present or self.other_members
            exchanges.has_own_mixed = exchanges.has_own_mixed or self.is_initiator
        local = exchanges.local
        local.mixed_steps = max(local.mixed_steps, self.snapshot_steps)
        local.version = clamp_version(local.version + version_gap(self.mean_version, self.our_version))
        local.progress.mix_group(self.our_claim, self.mean_claim, self.inviter, chosen=self.is_initiator)
        return [Mix(self.session, 1.0, plain=local.settling or self.is_outer_step_unstable()), *self.end(DONE)]

    def is_outer_step_unstable(self) -> bool:
        """Return True if the outer step would drive groups of this size apart.

        The stability limit of its rate is lower for smaller groups, and a group may begin with two. If a group holds
        all members, it converges at any rate that a Config allows.
        """
        config = self.exchanges.config
        if config.plain or config.outer[1] < stability_limit(config.outer[0], len(self.members)):
            return False
        return self.exchanges.partners.has_others(self.members)

    def fail(self, code: str) -> list[Effect]:
        """End the group without a result; the inviter tells all others. It counts as a failure if it had begun."""
        exchanges = self.exchanges
        aborts: list[Effect] = []
        if self.is_initiator:
            exchanges.remember_outcome(self.session, False)
            aborts = [Send(peer, Abort(self.session, code)) for peer in self.counterparts if peer != exchanges.me]
            exchanges.has_given_up = True
        if self.state not in (PREPARING, OFFERED):
            exchanges.count_failure(code)
        return [*aborts, *self.end(DROPPED)]
