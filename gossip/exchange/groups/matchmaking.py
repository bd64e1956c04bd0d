"""Matchmaking for group means: the peers to invite, substitutes for busy ones, and precedence between groups.

A group that is drawn at random invites a substitute for a busy peer. A group of a grid cannot, since the grid fixes its
members.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from gossip.codecs import leaner
from gossip.config.selections import SELECTIONS
from gossip.effects import Effect, Send, Snapshot
from gossip.exchange.agreement import refusal
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.transitions import INITIATOR, RESPONDER, Event, State
from gossip.ids import PeerId
from gossip.wire.messages import MAX_GROUP, Busy, Invite, Refuse

__all__ = ["invitation", "join", "start", "substitute"]

TRIES = 4  # Peers to ask for each seat of a random group: even if three in four are busy, most seats are filled.


class Invitable(Protocol):
    """A group that may still be changed, :class:`gossip.exchange.groups.group.Group`."""

    exchanges: Exchanges[Any]
    session: int
    ours: float
    codec: str
    candidates: tuple[PeerId, ...]
    asked: set[PeerId]
    invited: dict[PeerId, None]
    versions: dict[PeerId, float]


def start(kind: Callable[..., Any], exchanges: Exchanges[Any], now: float) -> list[Effect]:
    """Begin a mix of our own: take the snapshot, after which the candidates are invited."""
    if any(one.state is not State.IN_DOUBT for one in exchanges.table.values()):
        return []
    invited = candidates(exchanges, now)
    if not invited:
        return []
    one = kind(
        exchanges=exchanges, session=exchanges.new_session(), inviter=exchanges.me, initiator=INITIATOR,
        codec=exchanges.config.codec, since=now, deadline=math.inf, candidates=invited, asked=set(invited),
    )  # fmt: skip
    exchanges.table[one.session] = exchanges.outgoing[one.session] = one
    return [Snapshot(one.session)]


def join(
    kind: Callable[..., Any], exchanges: Exchanges[Any], sender: PeerId, invite: Invite, now: float
) -> list[Effect]:  # fmt: skip
    """Answer an invitation with Refuse or Busy, or take our snapshot, after which we answer Joined."""
    local, session, patience_s = exchanges.local, invite.session, exchanges.config.boundary_patience_s
    refused = refusal(local, invite, alike=True, spread=False)
    if refused is not None:
        return [Send(sender, Refuse(session, refused))]
    asleep = now - local.boundary_at > patience_s
    left = None if asleep or session in exchanges.table else gives_way(exchanges, sender, invite)
    if left is None or exchanges.partners.declines(sender, now):
        return [Send(sender, Busy(session))]
    dropped = [effect for one in left for effect in exchanges.tell(one, Event.YIELDED)]
    exchanges.table[session] = kind(
        exchanges=exchanges, session=session, inviter=sender, initiator=RESPONDER, since=now,
        deadline=now + patience_s, codec=leaner(invite.codec, exchanges.config.codec), candidates=invite.members,
    )  # fmt: skip
    return [*dropped, Snapshot(session)]


def candidates(exchanges: Exchanges[Any], now: float) -> tuple[PeerId, ...]:
    """Return the peers to invite now."""
    group = [peer for peer in exchanges.partners.group(now) if peer != exchanges.me]
    return streamable(exchanges, group)[: MAX_GROUP - 1]


def streamable(exchanges: Exchanges[Any], peers: list[PeerId]) -> tuple[PeerId, ...]:
    """Drop ``peers`` so that at most one member, us included, has no address: two could not stream to each other."""
    undialable = [peer for peer in (exchanges.me, *peers) if exchanges.partners.address(peer) is None]
    return tuple(peer for peer in peers if peer not in undialable[1:])


def invitation(group: Invitable) -> Invite:
    local = group.exchanges.local
    return Invite(group.session, local.fingerprint, local.run_id, group.ours, group.codec, group.candidates)


def substitute(group: Invitable, now: float) -> list[Effect]:
    """Invite another peer to a free seat, if the selection allows any peer."""
    exchanges = group.exchanges
    config = exchanges.config
    size = config.group_size
    if not SELECTIONS[config.selection].free or not size or len(group.asked) >= TRIES * (size - 1):
        return []
    other = exchanges.partners.choose(group.asked, now)
    if other is None:
        return []
    group.asked.add(other)
    kept = [peer for peer in group.candidates if peer in group.invited or peer in group.versions]
    if other not in streamable(exchanges, [*kept, other]):
        return []
    group.candidates = (*kept, other)
    group.invited[other] = None
    return [Send(other, invitation(group))]


def gives_way(exchanges: Exchanges[Any], sender: PeerId, invite: Invite) -> list[Invitable] | None:
    """Return our sessions that give way to this invitation, or None if we are busy.

    Any group counts as our mix, so a group of ours that is still PREPARING gives way. If two inviters have invited each
    other, the group of the smaller id goes first. A member that both have invited follows the same rule.
    """
    left: list[Invitable] = []
    for one in exchanges.table.values():
        if one.state is State.IN_DOUBT:
            continue
        if one.state not in (State.PREPARING, State.OFFERED):
            return None
        crossed = sender in one.candidates and one.inviter in (*invite.members, exchanges.me) and sender < one.inviter
        if not crossed and not (one.initiator and one.state is State.PREPARING):
            return None
        left.append(one)
    return left
