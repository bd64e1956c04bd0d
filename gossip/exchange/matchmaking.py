"""Who takes part in a group mean: invitations, and the answers to them, up to the beginning.

Drawn from everybody, a group asks another in the place of one that is busy; of a grid nobody else will do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from gossip.codecs import leaner
from gossip.config import Config
from gossip.config.selections import SELECTIONS
from gossip.effects import Effect, Send, Snapshot
from gossip.exchange.agreement import answers, refusal
from gossip.exchange.gathering import Gathering
from gossip.exchange.session import Local, State
from gossip.exchange.session_table import Ledger
from gossip.ids import Address, PeerId
from gossip.wire.messages import MAX_GROUP, Abort, Begin, Busy, Invite, Joined, Refuse

__all__ = ["Forming", "Mates"]

TRIES = 4  # members asked for each seat of a group drawn from everybody: with three in four busy most seats are filled


class Mates(Protocol):
    """Who may be in a group: :class:`gossip.selection.partners.Partners`."""

    mixes: int

    def group(self, now: float) -> list[PeerId]: ...
    def choose(self, asked: set[PeerId], now: float) -> PeerId | None: ...
    def declines(self, sender: PeerId, now: float) -> bool: ...
    def failed(self, partner: PeerId, now: float, silent: bool = False) -> None: ...
    def beyond(self, peers: Collection[PeerId]) -> bool: ...
    def address(self, peer: PeerId) -> Address | None: ...
    def linked(self, peer: PeerId) -> bool: ...


class Forming(Ledger[Gathering]):
    """What :class:`gossip.exchange.groups.Groups` does until a group begins."""

    def __init__(self, me: PeerId, local: Local, config: Config, new_session: Callable[[], int], mates: Mates) -> None:
        super().__init__(me, local, config, new_session)
        self.mates = mates

    def gather(self, one: Gathering, now: float) -> list[Effect]:
        """Who takes part is settled."""
        raise NotImplementedError

    # -- our own initiative --------------------------------------------------------------------------------------
    def begin(self, now: float) -> list[Effect]:
        if any(one.state is not State.DOUBT for one in self.table.values()):
            return []
        candidates = self.streamable([peer for peer in self.mates.group(now) if peer != self.me])[: MAX_GROUP - 1]
        if not candidates:
            return []
        one = Gathering(self.new_session(), self.me, True, self.config.codec, now, float("inf"))
        one.candidates, one.asked = candidates, set(candidates)
        self.table[one.session] = self.outgoing[one.session] = one
        return [Snapshot(one.session, False)]

    def streamable(self, peers: list[PeerId]) -> tuple[PeerId, ...]:
        """Of those that nobody can dial one at most, we among them: two could not stream to each other."""
        hidden = [peer for peer in (self.me, *peers) if self.mates.address(peer) is None]
        return tuple(peer for peer in peers if peer not in hidden[1:])

    def snapshotted(self, session: int, now: float, mass: float = 0.0) -> list[Effect]:
        one = self.table.get(session)
        if one is None or one.state is not State.PREPARING:
            return []
        local = self.local
        one.ours, one.steps, one.state = local.version, local.steps, State.OFFERED
        one.deadline = now + self.config.reply_timeout_s
        if not one.initiator:
            one.deadline += self.config.reply_timeout_s  # the inviter waits for others before it says Begin
            return [Send(one.inviter, Joined(session, one.ours, one.codec))]
        one.invited = dict.fromkeys(one.candidates)
        return [Send(peer, self.invite(one)) for peer in one.candidates]

    def invite(self, one: Gathering) -> Invite:
        local = self.local
        return Invite(one.session, local.fingerprint, local.genesis, one.ours, one.codec, one.candidates)

    def substitute(self, one: Gathering, now: float) -> list[Effect]:
        """A seat is free: ask another, where anybody will do."""
        size = self.config.group_size
        if not SELECTIONS[self.config.selection].free or not size or len(one.asked) >= TRIES * (size - 1):
            return []
        other = self.mates.choose(one.asked, now)
        if other is None:
            return []
        one.asked.add(other)
        kept = [peer for peer in one.candidates if peer in one.invited or peer in one.joined]
        if other not in self.streamable([*kept, other]):
            return []
        one.candidates = (*kept, other)
        one.invited[other] = None
        return [Send(other, self.invite(one))]

    def settle_members(self, one: Gathering, now: float) -> list[Effect]:
        """Everybody invited has answered, or time is up: those who joined begin."""
        late: list[Effect] = [Send(peer, Abort(one.session, "late")) for peer in one.invited]
        one.invited.clear()
        if not one.joined:
            self.gave_up = True
            return [*late, *self.end(one)]
        one.members = tuple(sorted((self.me, *one.joined)))
        one.mean = (one.ours + sum(one.joined.values())) / len(one.members)
        begin = Begin(one.session, one.members, one.mean, one.codec)
        return [*late, *[Send(peer, begin) for peer in one.joined], *self.gather(one, now)]

    # -- messages ------------------------------------------------------------------------------------------------
    def on_invite(self, sender: PeerId, invite: Invite, now: float) -> list[Effect]:
        local, session = self.local, invite.session
        refused = refusal(local, invite, alike=True, spread=False)
        if refused is not None:
            return [Send(sender, Refuse(session, refused))]
        asleep = now - local.boundary_at > self.config.boundary_patience_s
        left = None if asleep or session in self.table else self.gives_way(sender, invite)
        if left is None or self.mates.declines(sender, now):
            return [Send(sender, Busy(session))]
        dropped = [effect for one in left for effect in self.withdraw(one)]
        codec, patience_s = leaner(invite.codec, self.config.codec), self.config.boundary_patience_s
        one = self.table[session] = Gathering(session, sender, False, codec, now, now + patience_s)
        one.candidates = invite.members
        return [*dropped, Snapshot(session, False)]

    def gives_way(self, sender: PeerId, invite: Invite) -> list[Gathering] | None:
        """What we leave for this invitation; None: we are busy. A mix is a mix, whoever asked, so that what we only
        prepare gives way. Of two inviters that invited each other it is the smaller id's group, and those whom both
        invited know that as well as they do."""
        left: list[Gathering] = []
        for one in self.table.values():
            if one.state is State.DOUBT:
                continue
            if one.state not in (State.PREPARING, State.OFFERED):
                return None
            across = sender in one.candidates and one.inviter in (*invite.members, self.me) and sender < one.inviter
            if not across and not (one.initiator and one.state is State.PREPARING):
                return None
            left.append(one)
        return left

    def withdraw(self, one: Gathering) -> list[Effect]:
        """Leave a group that has not begun."""
        if one.initiator:
            told: list[Effect] = [Send(peer, Abort(one.session, "late")) for peer in (*one.invited, *one.joined)]
        elif one.state is State.PREPARING:
            told = [Send(one.inviter, Busy(one.session))]
        else:
            told = [Send(one.inviter, Abort(one.session, "late"))]
        return [*told, *self.end(one)]

    def on_joined(self, sender: PeerId, joined: Joined, now: float) -> list[Effect]:
        one = self.table.get(joined.session)
        if one is None or not one.initiator or one.state is not State.OFFERED or sender not in one.invited:
            return [Send(sender, Abort(joined.session, "late"))]
        one.invited.pop(sender, None)
        if not answers(joined, spread=False):
            told: list[Effect] = [Send(sender, Abort(one.session, "terms"))]
        else:
            told = []
            one.joined[sender] = joined.version
            one.codec = leaner(one.codec, joined.codec)
        return [*told, *(self.settle_members(one, now) if not one.invited else [])]

    def on_busy(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        one = self.table.get(session)
        if one is None or not one.initiator or one.state is not State.OFFERED or sender not in one.invited:
            return []
        return self.without(one, sender, now)

    def without(self, one: Gathering, peer: PeerId, now: float) -> list[Effect]:
        """It takes no part in what we invited it to."""
        one.invited.pop(peer, None)
        one.joined.pop(peer, None)
        asked = self.substitute(one, now)
        return [*asked, *(self.settle_members(one, now) if not one.invited else [])]

    def on_refuse(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        one = self.table.get(session)
        if one is not None and one.initiator and sender in one.invited:
            self.mates.failed(sender, now, silent=True)
        return self.on_busy(sender, session, now)
