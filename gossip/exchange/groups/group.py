"""The mean of a group: an all-reduce after which all members mix or none.

Moshpit SGD (Ryabinin et al., NeurIPS 2021) averages in groups of up to M members. Each member owns one slice of the
vector. It receives this slice from every other member (reduce-scatter), and sends the mean of it to all (all-gather).
A member so sends and receives about two vectors, however large the group. The *inviter* is the member whose mix is due:
it invites the others and decides the outcome.

    inviter:  PREPARING --snapshotted--> OFFERED --joined by all--> STREAMING --gathered--> VERIFIED --commit--> DONE
                                          |   ^
    substitute:                           +---+
    busy, refuse, abort, unlinked
    invited:  PREPARING --snapshotted--> OFFERED -----begin-------> STREAMING --gathered--> VERIFIED --settled--> DONE
                                                                                               |                   ^
                                                                                 late, unlinked v                  |
                                                                                            IN_DOUBT --settled-----+

Every state also leads to DROPPED, which ends the group without a result. The inviter is never in doubt, since it alone
decides. The table and all events are in :mod:`gossip.exchange.transitions`; "unlinked" means that the last link to a
peer was lost, or that the peer died. If the table allows an event, ``Exchanges`` calls the handler ``on_<event>``,
which returns the effects to perform. An Abort with the code "late" says that its sender has given up, whatever the
cause.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any, ClassVar

from gossip.arithmetic.group_mean import norm_refusal
from gossip.arithmetic.mixing import stability_limit
from gossip.codecs import leaner
from gossip.effects import Dial, Effect, Gather, MemberState, Mix, Send
from gossip.exchange.agreement import is_acceptable, is_valid_begin
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.groups import matchmaking
from gossip.exchange.groups.matchmaking import invitation, invite_substitute
from gossip.exchange.session import Session, clamp_version, version_gap
from gossip.exchange.session_table import DOUBT_RETRY_S
from gossip.exchange.transitions import GROUP, Event, State, Table
from gossip.ids import UNSTATED, Claim, PeerId
from gossip.wire.messages import Abort, Begin, Busy, Commit, Joined, Outcome, Settled

__all__ = ["MAX_DOUBTS", "Group"]

# Groups in doubt (:mod:`gossip.exchange.session`) at once: the one that a network cut left, and the next.
MAX_DOUBTS = 2
PREPARING, OFFERED, STREAMING = State.PREPARING, State.OFFERED, State.STREAMING
VERIFIED, IN_DOUBT, DONE, DROPPED = State.VERIFIED, State.IN_DOUBT, State.DONE, State.DROPPED


@dataclass(slots=True, eq=False, kw_only=True)
class Group(Session):
    """One side of a group. A node takes part in one at a time, its own or another's.

    The inviter is the group's initiator. Until the group begins, it keeps a list of the peers to take part.
    """

    TRANSITIONS: ClassVar[Table] = GROUP
    # ``Exchanges`` calls these two on the class. They are part of matchmaking, before there is a group.
    begin_mix = classmethod(matchmaking.begin_mix)
    answer_invitation = classmethod(matchmaking.answer_invitation)
    IS_GROUP: ClassVar[bool] = True

    exchanges: Exchanges[Any] = field(repr=False)
    inviter: PeerId  # The peer that invited the others, perhaps ourselves.
    codec: str
    mean_version: float = 0.0  # Mean of the members' versions.
    # The claim of Begin: the mean of the samples, the upper median of the member counts, and the inviter's ``most``.
    mean_claim: Claim = UNSTATED
    invite_list: tuple[PeerId, ...] = ()  # The peers that the Invite names: they may become members.
    asked_peers: set[PeerId] = field(default_factory=set)  # All peers that we ever invited to this group.
    pending_peers: dict[PeerId, None] = field(default_factory=dict)  # Invited peers that have not answered yet.
    joined_versions: dict[PeerId, float] = field(default_factory=dict)  # Of the peers that answered Joined.
    joined_claims: dict[PeerId, Claim] = field(default_factory=dict)  # Of the same peers.
    members: tuple[PeerId, ...] = ()  # All members, sorted and us included, once the group has begun.
    committed_members: set[PeerId] = field(default_factory=set)

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

    # -- members -------------------------------------------------------------------------------------------------
    def on_snapshotted(self, now: float, mass: float = 0.0) -> list[Effect]:
        """Handle our snapshot in PREPARING: the inviter sends the invitations, an invited peer Joined."""
        local, reply_s = self.exchanges.local, self.exchanges.config.reply_timeout_s
        self.our_version, self.snapshot_steps, self.state = local.version, local.steps, OFFERED
        self.our_claim = local.progress.claim
        self.timer_at = now + reply_s
        if not self.is_initiator:
            self.timer_at += reply_s  # The inviter waits for others before it sends Begin.
            return [Send(self.inviter, Joined(self.session, self.our_version, self.codec, self.our_claim))]
        self.pending_peers = dict.fromkeys(self.invite_list)
        return [Send(peer, invitation(self)) for peer in self.invite_list]

    def on_joined(self, sender: PeerId, joined: Joined, now: float) -> list[Effect]:
        """Handle consent in OFFERED (inviter): note the peer as a member, and begin if all have answered."""
        del self.pending_peers[sender]
        abort: list[Effect] = []
        if is_acceptable(joined, bounded=False):
            self.joined_versions[sender], self.joined_claims[sender] = joined.version, joined.progress
            self.codec = leaner(self.codec, joined.codec)
        else:
            abort.append(Send(sender, Abort(self.session, "terms")))
        return [*abort, *self.begin_if_answered(now)]

    def on_busy(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle a peer that cannot take part, in OFFERED (inviter): invite a substitute, or begin without it.

        The handlers of Refuse, Abort and a lost link call it too.
        """
        self.pending_peers.pop(sender, None)
        self.joined_versions.pop(sender, None)
        self.joined_claims.pop(sender, None)
        invite = invite_substitute(self, now)
        return [*invite, *self.begin_if_answered(now)]

    def on_refuse(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle Refuse in OFFERED (inviter): do not ask this peer for a while, and go on as after Busy."""
        self.exchanges.partners.note_failure(sender, now, silent=True)
        return self.on_busy(sender, now)

    def begin_if_answered(self, now: float) -> list[Effect]:
        return [] if self.pending_peers else self.begin_group(now)

    def begin_group(self, now: float) -> list[Effect]:
        """Begin with the peers that joined, since all have answered or time is up. Without any drop the group."""
        aborts: list[Effect] = [Send(peer, Abort(self.session, "late")) for peer in self.pending_peers]
        self.pending_peers.clear()
        if not self.joined_versions:
            self.exchanges.has_given_up = True
            return [*aborts, *self.end(DROPPED)]
        self.members = tuple(sorted((self.exchanges.me, *self.joined_versions)))
        self.mean_version = (self.our_version + sum(self.joined_versions.values())) / len(self.members)
        claims = (self.our_claim, *self.joined_claims.values())
        mean_samples = sum(claim.samples for claim in claims) // len(claims)
        # One member of a group may have no address. It meets fewer others, so its own count of members is too small.
        # The upper median follows the others' counts.
        member_count = median_high(claim.members for claim in claims)
        self.mean_claim = dataclasses.replace(self.our_claim, samples=mean_samples, members=member_count)
        begin = Begin(self.session, self.members, self.mean_version, self.codec, self.mean_claim)
        return [*aborts, *[Send(peer, begin) for peer in self.joined_versions], *self.start_all_reduce(now)]

    def on_begin(self, sender: PeerId, begin: Begin, now: float) -> list[Effect]:
        """Handle the inviter's Begin in OFFERED (invited): start the all-reduce, or abort if it is not valid."""
        if not is_valid_begin(begin, self.exchanges.me, sender):
            return [Send(sender, Abort(self.session, "terms")), *self.fail("terms")]
        self.members, self.mean_version, self.codec = begin.members, begin.version, begin.codec
        self.mean_claim = begin.progress
        return self.start_all_reduce(now)

    def withdraw(self) -> list[Effect]:
        """Leave a group that has not begun."""
        abort = Abort(self.session, "late")
        if self.is_initiator:
            answer: list[Effect] = [Send(peer, abort) for peer in (*self.pending_peers, *self.joined_versions)]
        elif self.state is PREPARING:
            answer = [Send(self.inviter, Busy(self.session))]
        else:
            answer = [Send(self.inviter, abort)]
        return [*answer, *self.end(DROPPED)]

    def on_spoiled(self) -> list[Effect]:
        """Handle a snapshot that cannot be streamed, in any state: withdraw."""
        return self.withdraw()

    def on_yielded(self) -> list[Effect]:
        """Handle another group that takes the place of this one, in PREPARING or OFFERED: withdraw."""
        return self.withdraw()

    # -- the streams ---------------------------------------------------------------------------------------------
    def start_all_reduce(self, now: float) -> list[Effect]:
        """Start the all-reduce, as the list of members is final.

        The deadline allows 8 bytes per element at the slowest rate, since a member sends and receives two vectors of 4
        bytes per element; a pause of ``stall_s``, in which missing links are dialled; and the longest duration that
        exchanges with a member take. Groups that we invited count under our own id (:meth:`finish`).
        """
        exchanges = self.exchanges
        config = exchanges.config
        seconds = 8 * exchanges.local.elements / (config.slowest_rate_mb_s * 1e6) + config.stall_s
        seconds += max(exchanges.durations.longest_s(peer) for peer in self.members)
        self.state, self.phase_began_at, self.timer_at = STREAMING, now, now + seconds
        dials: list[Effect] = []
        for peer in self.other_members:
            if not exchanges.partners.is_linked(peer):
                address = exchanges.partners.address(peer)
                if address is not None:  # A peer without an address dials us.
                    dials.append(Dial(address, peer))
        return [*dials, self.gather_effect()]

    def gather_effect(self) -> Gather:
        place = self.members.index(self.exchanges.me)
        return Gather(self.session, self.members, place, self.codec)

    def on_linked(self, peer: PeerId, now: float) -> list[Effect]:
        """Handle a new link in STREAMING: repeat the Gather, which may have waited for a link to this member."""
        return [self.gather_effect()] if peer in self.members else []

    def on_gathered(self, difference_sq: float, own_sq: float, refused: Iterable[PeerId], now: float) -> list[Effect]:
        """Handle the complete mean of the group in STREAMING.

        An invited member sends COMMIT to the inviter. The inviter waits for these, or finishes if it has all. A mean
        that fails its check fails the group.

        Args:
            difference_sq: Squared distance between the mean of the members' vectors and our vector.
            own_sq: Squared norm of our vector.
            refused: Members whose values our slice leaves out, or whose slices are no valid means.
            now: Current time in seconds.
        """
        exchanges, member_count = self.exchanges, len(self.members)
        code = norm_refusal(difference_sq, own_sq, exchanges.local.elements, exchanges.config.internal.norm_bound)
        for peer in refused:
            exchanges.refusals.add(peer, code or "norm")  # The whole mean may pass although one slice does not.
            if code is not None:
                exchanges.partners.note_failure(peer, now)
        if code is not None:
            return self.on_failed(code, now)
        # Estimate a pair's distance: of m members, |x_i - x_j|^2 is 2 m / (m - 1) times |mean - x_i|^2 in expectation.
        pair_sq = difference_sq * 2 * member_count / (member_count - 1)
        exchanges.last_squares.append((pair_sq, own_sq))
        exchanges.filter.on_group(pair_sq, exchanges.local.elements)
        self.state = VERIFIED
        self.timer_at = now + max(exchanges.config.stall_s, self.timer_at - now)
        return self.finish_if_complete(now) if self.is_initiator else [Send(self.inviter, Commit(self.session))]

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
        """Tell all members to mix, and mix, once the inviter has all means and all COMMITs."""
        if self.state is not VERIFIED or len(self.committed_members) < len(self.members) - 1:
            return []
        return [*[Send(peer, Settled(self.session, True)) for peer in self.other_members], *self.finish(now)]

    def on_settled(self, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
        """Handle the inviter's decision in VERIFIED or IN_DOUBT (invited): finish or fail. Ignore other members."""
        if sender != self.inviter:  # A member that lies would make us mix alone.
            return []
        return self.finish(now) if settled.committed else self.fail("aborted")

    def on_abort(self, sender: PeerId, code: str, now: float) -> list[Effect]:
        """Handle Abort: the inviter goes on without the sender in OFFERED, else the group fails."""
        return self.on_busy(sender, now) if self.is_initiator and self.state is OFFERED else self.fail(code)

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

        In OFFERED the inviter invites a substitute. In STREAMING the group fails. In VERIFIED the inviter fails unless
        the peer has committed. An invited member that loses the inviter withdraws before STREAMING, and asks for the
        outcome in VERIFIED.
        """
        exchanges = self.exchanges
        match self.state:
            case State.OFFERED if self.is_initiator:
                exchanges.count_failure("unreached")
                exchanges.partners.note_failure(peer, now, silent=True)
                return self.on_busy(peer, now)
            case State.STREAMING:
                exchanges.partners.note_failure(peer, now)
                return self.on_failed("broken", now)
            case State.VERIFIED if self.is_initiator and peer not in self.committed_members:
                exchanges.partners.note_failure(peer, now)
                return self.fail("broken")
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

        In OFFERED the inviter begins with the peers that joined. An invited peer withdraws before STREAMING. In
        STREAMING the group fails, and so it does for the inviter in VERIFIED. An invited member asks for the outcome
        from VERIFIED on, and gives up after ``doubt_s`` of doubt.
        """
        if self.state is OFFERED and self.is_initiator:
            for peer in self.pending_peers:
                self.exchanges.count_failure("unanswered")
                self.exchanges.partners.note_failure(peer, now, silent=True)
            return self.begin_group(now)
        if self.state in (PREPARING, OFFERED):
            return self.withdraw()
        if self.state is STREAMING:
            return self.on_failed("deadline", now)
        if self.is_initiator:
            return self.fail("deadline")
        if self.state is VERIFIED or now - self.phase_began_at < self.exchanges.config.internal.doubt_s:
            return self.ask_outcome(now)
        return self.fail("doubt")

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
        """Handle too many groups in doubt, of which this IN_DOUBT one is the oldest: fail."""
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
        """Apply the mean: the group has happened."""
        exchanges = self.exchanges
        exchanges.remember_outcome(self.session, True)
        if self.state is not IN_DOUBT:
            exchanges.durations.add(self.inviter, now - self.phase_began_at)
        exchanges.done_count += 1
        exchanges.equal_since = None
        exchanges.partners.mixes += 1
        exchanges.last_partner = self.other_members[0]
        exchanges.mixed_partners += self.other_members
        exchanges.has_own_mixed = exchanges.has_own_mixed or self.is_initiator
        local = exchanges.local
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
