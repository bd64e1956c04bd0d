"""A group that forms: its inviter collects the peers that join, until the group begins with them.

The inviter is the group's initiator. It begins once all have answered, or once a wait is over (:func:`patience_s`).
"""

import dataclasses
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any

from gossip.codecs import leaner
from gossip.effects import Effect, Send
from gossip.exchange.agreement import is_acceptable, is_valid_begin
from gossip.exchange.durations import Waits
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.groups.matchmaking import invitation, invite_substitute
from gossip.exchange.session import Session
from gossip.exchange.transitions import State
from gossip.ids import UNSTATED, Claim, PeerId
from gossip.wire.messages import Abort, Begin, Busy, Joined

# A wait ends after PATIENCE times the limit within which nearly all such waits end, since members differ in speed. It
# lasts at least MIN_PATIENCE_S, for which a scheduler may stop any process.
PATIENCE, MIN_PATIENCE_S = 2.0, 0.1
INVITED_PATIENCE = 3  # An invited member waits this many times as long, because its inviter waits for others too.
PREPARING, OFFERED, DROPPED = State.PREPARING, State.OFFERED, State.DROPPED


@dataclass(slots=True, eq=False, kw_only=True)
class Forming(Session):
    """One side of a group that forms, in PREPARING and OFFERED. The inviter keeps a list of the peers to take part."""

    exchanges: Exchanges[Any] = field(repr=False)
    inviter: PeerId  # The peer that invited the others, perhaps ourselves.
    codec: str
    mean_version: float = 0.0  # Mean of the members' versions.
    # The claim of Begin: the mean of the samples, the upper median of the member counts, and the inviter's ``most``.
    mean_claim: Claim = UNSTATED
    invite_list: tuple[PeerId, ...] = ()  # The peers that the Invite names: they may become members.
    asked_peers: set[PeerId] = field(default_factory=set)  # All peers that we ever invited to this group.
    # The invited peers that have not answered yet, and when each was invited.
    pending_peers: dict[PeerId, float] = field(default_factory=dict)
    joined_versions: dict[PeerId, float] = field(default_factory=dict)  # Of the peers that answered Joined.
    joined_claims: dict[PeerId, Claim] = field(default_factory=dict)  # Of the same peers.
    answer_waits_s: dict[PeerId, float] = field(default_factory=dict)  # Seconds until they answered Joined.
    members: tuple[PeerId, ...] = ()  # All members, sorted and us included, once the group has begun.

    def start_all_reduce(self, now: float) -> list[Effect]:
        """Start the all-reduce, as the list of members is final."""
        raise NotImplementedError

    def fail(self, code: str) -> list[Effect]:
        """End the group without a result; the inviter tells all others."""
        raise NotImplementedError

    # -- members -------------------------------------------------------------------------------------------------
    def on_snapshotted(self, now: float, mass: float = 0.0) -> list[Effect]:
        """Handle our snapshot in PREPARING: the inviter sends the invitations, an invited peer Joined."""
        local, reply_s = self.exchanges.local, self.exchanges.config.reply_timeout_s
        self.our_version, self.snapshot_steps, self.state = local.version, local.steps, OFFERED
        self.our_claim, self.phase_began_at = local.progress.claim, now
        self.timer_at = now + patience_s(self.exchanges.answer_waits, reply_s)
        if not self.is_initiator:  # The inviter waits for others before it sends Begin, perhaps for longer than we do.
            self.timer_at = now + INVITED_PATIENCE * (self.timer_at - now)
            return [Send(self.inviter, Joined(self.session, self.our_version, self.codec, self.our_claim))]
        self.pending_peers = dict.fromkeys(self.invite_list, now)
        return [Send(peer, invitation(self)) for peer in self.invite_list]

    def on_joined(self, sender: PeerId, joined: Joined, now: float) -> list[Effect]:
        """Handle consent in OFFERED (inviter): note the peer as a member, and begin if all have answered."""
        if not is_acceptable(joined, bounded=False):
            self.exchanges.partners.note_failure(sender, now)
            return [Send(sender, Abort(self.session, "terms")), *self.on_busy(sender, now)]
        self.joined_versions[sender], self.joined_claims[sender] = joined.version, joined.progress
        self.answer_waits_s[sender] = now - self.pending_peers.pop(sender)
        self.codec = leaner(self.codec, joined.codec)
        return self.begin_if_answered(now)

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


def patience_s(waits: Waits, longest_s: float) -> float:
    """Return the seconds after which a group goes on without a member: at first, and at most, ``longest_s``."""
    return min(max(PATIENCE * waits.learned_limit_s, MIN_PATIENCE_S), longest_s)
