"""The mean of a group: an all-reduce after which all members mix or none.

Moshpit SGD (Ryabinin et al., NeurIPS 2021) averages in groups of up to M members. Each member sends every other member
that member's slice, and then the mean of its own slice to all. This takes about twice the vector in all, however large
the group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gossip.arithmetic.group_mean import norm_accepts
from gossip.arithmetic.mixing import stability_limit
from gossip.codecs import leaner
from gossip.effects import Dial, Effect, Gather, MemberState, Mix, Send
from gossip.exchange.agreement import answers, begins
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.groups.matchmaking import invitation, join, start, substitute
from gossip.exchange.session import Session, version_gap, within
from gossip.exchange.session_table import DOUBT_RETRY_S
from gossip.exchange.transitions import GROUP, Event, State, Table
from gossip.ids import UNSTATED, Claim, PeerId
from gossip.wire.messages import Abort, Begin, Busy, Commit, Invite, Joined, Outcome, Settled

__all__ = ["DOUBTS", "Group"]

DOUBTS = 2  # Groups in doubt at once: the one that a network cut left, and the next. Each holds two vectors.
PREPARING, OFFERED, STREAMING = State.PREPARING, State.OFFERED, State.STREAMING
VERIFIED, IN_DOUBT, DONE, DROPPED = State.VERIFIED, State.IN_DOUBT, State.DONE, State.DROPPED


@dataclass(slots=True, eq=False, kw_only=True)
class Group(Session):
    """One side of a group. A node takes part in one at a time, its own or another's.

    ``invited`` holds the peers that have not answered yet. ``versions`` and ``claims`` hold the answers of those that
    take part. ``members`` holds all members, sorted and us included, once they are settled.
    """

    TRANSITIONS: ClassVar[Table] = GROUP
    MANY: ClassVar[bool] = True

    exchanges: Exchanges[Any] = field(repr=False)
    inviter: PeerId
    codec: str
    mean: float = 0.0  # Mean of the versions.
    settled_claim: Claim = UNSTATED  # Its samples are the mean of the claims.
    candidates: tuple[PeerId, ...] = ()  # All peers that the inviter invited.
    asked: set[PeerId] = field(default_factory=set)  # Peers that were invited, busy ones included.
    invited: dict[PeerId, None] = field(default_factory=dict)
    versions: dict[PeerId, float] = field(default_factory=dict)
    claims: dict[PeerId, Claim] = field(default_factory=dict)
    members: tuple[PeerId, ...] = ()
    committed: set[PeerId] = field(default_factory=set)

    @property
    def others(self) -> tuple[PeerId, ...]:
        if self.initiator and not self.members:
            return (*self.invited, *self.versions)
        return self.members or (self.inviter,)

    @property
    def mates(self) -> list[PeerId]:
        """Return the other members, once they are settled."""
        return [peer for peer in self.members if peer != self.exchanges.me]

    @staticmethod
    def most_doubts(exchanges: Exchanges[Any]) -> int:
        return DOUBTS

    def accepts_from(self, event: Event, sender: PeerId) -> bool:
        match event:
            case Event.JOINED | Event.BUSY | Event.REFUSE:
                return sender in self.invited
            case Event.ABORT if self.initiator:
                return sender in self.others and sender not in self.committed
            case Event.ABORT | Event.BEGIN:
                return sender == self.inviter
        return sender in self.members

    @classmethod
    def on_stray(cls, exchanges: Exchanges[Any], event: Event, sender: PeerId, session: int) -> list[Effect]:
        """Answer a message that our group does not allow, or that is about no group of ours.

        Do not answer a question for the outcome without a record: an inviter that restarted has none, which proves
        nothing about the outcome.
        """
        match event:
            case Event.JOINED | Event.BEGIN | Event.ACCEPT:
                return [Send(sender, Abort(session, "late"))]
            case Event.OUTCOME if session not in exchanges.table:
                known = exchanges.verdicts.get(session)
                return [] if known is None else [Send(sender, Settled(session, known))]
        return []

    # -- members -------------------------------------------------------------------------------------------------
    @classmethod
    def start(cls, exchanges: Exchanges[Any], now: float) -> list[Effect]:
        return start(cls, exchanges, now)

    @classmethod
    def invite(cls, exchanges: Exchanges[Any], sender: PeerId, invite: Invite, now: float) -> list[Effect]:
        return join(cls, exchanges, sender, invite, now)

    def snapshotted(self, now: float, mass: float = 0.0) -> list[Effect]:
        local, reply_s = self.exchanges.local, self.exchanges.config.reply_timeout_s
        self.ours, self.steps, self.state = local.version, local.steps, OFFERED
        self.claim = local.progress.claim
        self.deadline = now + reply_s
        if not self.initiator:
            self.deadline += reply_s  # The inviter waits for others before it sends Begin.
            return [Send(self.inviter, Joined(self.session, self.ours, self.codec, self.claim))]
        self.invited = dict.fromkeys(self.candidates)
        return [Send(peer, invitation(self)) for peer in self.candidates]

    def joined(self, sender: PeerId, joined: Joined, now: float) -> list[Effect]:
        del self.invited[sender]
        told: list[Effect] = []
        if answers(joined, spread=False):
            self.versions[sender], self.claims[sender] = joined.version, joined.progress
            self.codec = leaner(self.codec, joined.codec)
        else:
            told.append(Send(sender, Abort(self.session, "terms")))
        return [*told, *(self.settle_members(now) if not self.invited else [])]

    def busy(self, sender: PeerId, now: float) -> list[Effect]:
        """Remove a member that does not take part in our group, and invite another."""
        self.invited.pop(sender, None)
        self.versions.pop(sender, None)
        self.claims.pop(sender, None)
        asked = substitute(self, now)
        return [*asked, *(self.settle_members(now) if not self.invited else [])]

    def refuse(self, sender: PeerId, now: float) -> list[Effect]:
        self.exchanges.partners.failed(sender, now, silent=True)
        return self.busy(sender, now)

    def settle_members(self, now: float) -> list[Effect]:
        """Begin with the members that joined, since all have answered or time is up."""
        late: list[Effect] = [Send(peer, Abort(self.session, "late")) for peer in self.invited]
        self.invited.clear()
        if not self.versions:
            self.exchanges.gave_up = True
            return [*late, *self.end(DROPPED)]
        self.members = tuple(sorted((self.exchanges.me, *self.versions)))
        self.mean = (self.ours + sum(self.versions.values())) / len(self.members)
        claims = (self.claim, *self.claims.values())
        mean = sum(claim.samples for claim in claims) // len(claims)
        self.settled_claim = dataclasses.replace(self.claim, samples=mean)
        begin = Begin(self.session, self.members, self.mean, self.codec, self.settled_claim)
        return [*late, *[Send(peer, begin) for peer in self.versions], *self.gather(now)]

    def begin(self, sender: PeerId, begin: Begin, now: float) -> list[Effect]:
        if not begins(begin, self.exchanges.me, sender):
            return [Send(sender, Abort(self.session, "terms")), *self.fail("terms")]
        self.members, self.mean, self.codec = begin.members, begin.version, begin.codec
        self.settled_claim = begin.progress
        return self.gather(now)

    def withdraw(self) -> list[Effect]:
        """Leave a group that has not begun."""
        if self.initiator:
            late = Abort(self.session, "late")
            told: list[Effect] = [Send(peer, late) for peer in (*self.invited, *self.versions)]
        elif self.state is PREPARING:
            told = [Send(self.inviter, Busy(self.session))]
        else:
            told = [Send(self.inviter, Abort(self.session, "late"))]
        return [*told, *self.end(DROPPED)]

    def spoiled(self) -> list[Effect]:
        return self.withdraw()

    def yielded(self) -> list[Effect]:
        return self.withdraw()

    # -- the streams ---------------------------------------------------------------------------------------------
    def gather(self, now: float) -> list[Effect]:
        """Start the all-reduce, as the members are settled."""
        exchanges = self.exchanges
        config = exchanges.config
        seconds = 8 * exchanges.local.elements / (config.slowest_rate_mb_s * 1e6) + config.stall_s
        seconds += max(exchanges.durations.longest_s(peer) for peer in self.members)
        self.state, self.since, self.deadline = STREAMING, now, now + seconds
        dials: list[Effect] = []
        for peer in self.mates:
            if not exchanges.partners.linked(peer):
                address = exchanges.partners.address(peer)
                if address is not None:  # A peer without an address dials us.
                    dials.append(Dial(address, peer))
        return [*dials, self.streams()]

    def streams(self) -> Gather:
        place = self.members.index(self.exchanges.me)
        return Gather(self.session, self.members, place, self.codec)

    def linked(self, peer: PeerId, now: float) -> list[Effect]:
        """Repeat the Gather: the group may have waited for this link."""
        return [self.streams()] if peer in self.members else []

    def gathered(self, difference_sq: float, own_sq: float, refused: Iterable[PeerId], now: float) -> list[Effect]:
        """Check the means of all slices, and commit.

        Args:
            difference_sq: ``|mean - ours|^2``.
            own_sq: ``|ours|^2``.
            refused: Members whose values our mean leaves out, or whose slices are no valid means.
            now: Current time in seconds.
        """
        exchanges, members = self.exchanges, len(self.members)
        code = norm_accepts(difference_sq, own_sq, exchanges.local.elements, exchanges.config.internal.norm_bound)
        for peer in refused:
            exchanges.refusals.add(peer, code or "norm")
            exchanges.misbehaviour.note(peer, "refused", now)
            if code is not None:
                exchanges.partners.failed(peer, now)
        if code is not None:
            return self.failed(code, now)
        # Estimate a pair's distance: |x_i - x_j|^2 is 2 m / (m - 1) times |mean - x_i|^2 in expectation.
        exchanges.seen.append((difference_sq * 2 * members / (members - 1), own_sq))
        self.state = VERIFIED
        self.deadline = now + max(exchanges.config.stall_s, self.deadline - now)
        return self.finish_all(now) if self.initiator else [Send(self.inviter, Commit(self.session))]

    # -- outcome -------------------------------------------------------------------------------------------------
    def commit(self, sender: PeerId, now: float) -> list[Effect]:
        """Record that a member has all means; when all have, the inviter settles the group."""
        self.committed.add(sender)
        return self.finish_all(now)

    def outcome(self, sender: PeerId, now: float) -> list[Effect]:
        """Treat the question as a COMMIT, since only a member that has committed asks.

        Only the inviter decides; another member knows only what it was told.
        """
        return self.commit(sender, now)

    def finish_all(self, now: float) -> list[Effect]:
        if self.state is not VERIFIED or len(self.committed) < len(self.members) - 1:
            return []
        return [*[Send(peer, Settled(self.session, True)) for peer in self.mates], *self.finish(now)]

    def settled(self, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
        if sender != self.inviter:  # A member that lies would make us mix alone.
            return []
        return self.finish(now) if settled.committed else self.fail("aborted")

    def abort(self, sender: PeerId, code: str, now: float) -> list[Effect]:
        return self.busy(sender, now) if self.initiator and self.state is OFFERED else self.fail(code)

    def failed(self, code: str, now: float) -> list[Effect]:
        """End the group: a stream stalled, brought wrong bytes, or lost its link ("broken")."""
        told: list[Effect] = [] if self.initiator else [Send(self.inviter, Abort(self.session, code))]
        return [*told, *self.fail(code)]

    def without(self, peer: PeerId, now: float) -> list[Effect]:
        return self.exchanges.tell(self, Event.UNLINKED, peer, now) if peer in self.others else []

    def unlinked(self, peer: PeerId, now: float) -> list[Effect]:
        exchanges = self.exchanges
        match self.state:
            case State.OFFERED if self.initiator:
                exchanges.count("unreached")
                exchanges.partners.failed(peer, now, silent=True)
                return self.busy(peer, now)
            case State.STREAMING:
                exchanges.partners.failed(peer, now)
                return self.failed("broken", now)
            case State.VERIFIED if self.initiator and peer not in self.committed:
                exchanges.partners.failed(peer, now)
                return self.fail("broken")
            case State.VERIFIED:
                return self.doubt(now) if peer == self.inviter else []
        return self.end(DROPPED)

    def lost(self, state: Callable[[PeerId], MemberState | None]) -> list[PeerId]:
        """Return the members that the group waits for in vain.

        A streaming member must be DEAD or LEFT, since a SUSPECT one may refute the suspicion.
        """
        if self.initiator and self.state is OFFERED:
            return [peer for peer in self.invited if state(peer) is not MemberState.ALIVE]
        if self.state is not STREAMING:
            return []
        return [peer for peer in self.mates if state(peer) in (MemberState.DEAD, MemberState.LEFT)]

    def late(self, now: float) -> list[Effect]:
        if self.state is OFFERED and self.initiator:
            for peer in self.invited:
                self.exchanges.count("unanswered")
                self.exchanges.partners.failed(peer, now, silent=True)
            return self.settle_members(now)
        if self.state in (PREPARING, OFFERED):
            return self.withdraw()
        if self.state is STREAMING:
            return self.failed("deadline", now)
        if self.initiator:
            return self.fail("deadline")
        if self.state is VERIFIED or now - self.since < self.exchanges.config.internal.doubt_s:
            return self.doubt(now)
        return self.fail("doubt")

    def doubt(self, now: float) -> list[Effect]:
        """Ask the inviter, which alone decides, for the outcome of a group in doubt."""
        ended: list[Effect] = []
        if self.state is not IN_DOUBT:
            self.state, self.since = IN_DOUBT, max(now, self.deadline)  # The inviter has decided by then.
            ended = self.exchanges.forget_doubts(now)
        self.deadline = now + DOUBT_RETRY_S
        return [*ended, Send(self.inviter, Outcome(self.session))]

    def crowded(self, now: float) -> list[Effect]:
        return self.fail("doubt")

    def replaced(self) -> list[Effect]:
        if self.state in (PREPARING, OFFERED):
            return self.withdraw()
        if self.initiator:
            return self.fail("replaced")
        told: list[Effect] = []
        if self.state is STREAMING:
            told.append(Send(self.inviter, Abort(self.session, "replaced")))
        # After our COMMIT the others decide without us: our weights are being replaced.
        return [*told, *self.end(DROPPED)]

    def finish(self, now: float) -> list[Effect]:
        exchanges = self.exchanges
        exchanges.remember(self.session, True)
        if self.state is not IN_DOUBT:
            exchanges.durations.add(self.inviter, now - self.since)
        exchanges.done += 1
        exchanges.partners.mixes += 1
        exchanges.last_partner = self.mates[0]
        exchanges.mixed_at += self.mates
        exchanges.own_mixed = exchanges.own_mixed or self.initiator
        local = exchanges.local
        local.version = within(local.version + version_gap(self.mean, self.ours))
        local.progress.approach(self.claim, self.settled_claim, self.inviter, chosen=self.initiator)
        return [Mix(self.session, 1.0, plain=local.settling or self.diverges()), *self.end(DONE)]

    def diverges(self) -> bool:
        """Return True if the outer step would drive groups of this size apart.

        The stability limit of its rate is lower for smaller groups, and a group may begin with two. If a group holds
        all members, it converges at any rate that a Config allows.
        """
        config = self.exchanges.config
        if config.plain or config.outer[1] < stability_limit(config.outer[0], len(self.members)):
            return False
        return self.exchanges.partners.beyond(self.members)

    def fail(self, code: str) -> list[Effect]:
        """End the group without a result. A group that had not begun does not count as a failure."""
        exchanges = self.exchanges
        told: list[Effect] = []
        if self.initiator:
            exchanges.remember(self.session, False)
            told = [Send(peer, Abort(self.session, code)) for peer in self.others if peer != exchanges.me]
            exchanges.gave_up = True
        if self.state not in (PREPARING, OFFERED):
            exchanges.count(code)
        return [*told, *self.end(DROPPED)]
