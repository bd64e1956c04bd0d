"""Matchmaking for group means: the peers to invite, substitutes for busy ones, and precedence between groups.

A group that is drawn at random invites a substitute for a busy peer. A group of a grid cannot, since the grid fixes its
members.
"""

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

# Peers to invite for each seat of a random group: even if three in four are busy, most seats are filled.
INVITATIONS_PER_SEAT = 4


class Invitable(Protocol):
    """A group that has not begun, :class:`gossip.exchange.groups.group.Group`."""

    exchanges: Exchanges[Any]
    session: int
    our_version: float
    codec: str
    invite_list: tuple[PeerId, ...]
    asked_peers: set[PeerId]
    pending_peers: dict[PeerId, float]
    joined_versions: dict[PeerId, float]


def begin_mix(kind: Callable[..., Any], exchanges: Exchanges[Any], now: float) -> list[Effect]:
    """Begin a mix of our own: take the snapshot, after which the peers of the invite list are invited."""
    if any(session.state is not State.IN_DOUBT for session in exchanges.table.values()):
        return []
    invite_list = connectable_peers(exchanges, exchanges.partners.group(now))[: MAX_GROUP - 1]
    if not invite_list:
        return []
    group = kind(
        exchanges=exchanges, session=exchanges.new_session(), inviter=exchanges.me, is_initiator=INITIATOR,
        codec=exchanges.config.codec_name, phase_began_at=now, timer_at=math.inf, invite_list=invite_list,
        asked_peers=set(invite_list),
    )  # fmt: skip
    exchanges.table[group.session] = group
    return [Snapshot(group.session)]


def answer_invitation(
    kind: Callable[..., Any], exchanges: Exchanges[Any], sender: PeerId, invite: Invite, now: float
) -> list[Effect]:  # fmt: skip
    """Answer an invitation with Refuse or Busy, or take our snapshot, after which we answer Joined."""
    local, session, patience_s = exchanges.local, invite.session, exchanges.config.boundary_patience_s
    reason = refusal(local, invite, same_mixing=True, bounded=False)
    if reason is not None:
        return [Send(sender, Refuse(session, reason))]
    is_loop_paused = now - local.boundary_at > patience_s
    is_busy = is_loop_paused or session in exchanges.table or exchanges.partners.is_crowding(sender, now)
    yielding = None if is_busy else yielding_groups(exchanges, sender, invite)
    if yielding is None or exchanges.partners.is_declined(sender, now, forgives=False):
        return [Send(sender, Busy(session))]
    dropped = [effect for group in yielding for effect in exchanges.route_event(group, Event.YIELDED)]
    exchanges.table[session] = kind(
        exchanges=exchanges, session=session, inviter=sender, is_initiator=RESPONDER, phase_began_at=now,
        timer_at=now + patience_s, codec=leaner(invite.codec, exchanges.config.codec_name), invite_list=invite.members,
    )  # fmt: skip
    return [*dropped, Snapshot(session)]


def connectable_peers(exchanges: Exchanges[Any], peers: list[PeerId]) -> tuple[PeerId, ...]:
    """Drop ``peers`` so that at most one member, us included, has no address: two could not stream to each other."""
    undialable = [peer for peer in (exchanges.me, *peers) if exchanges.partners.address(peer) is None]
    return tuple(peer for peer in peers if peer not in undialable[1:])


def invitation(group: Invitable) -> Invite:
    local = group.exchanges.local
    return Invite(group.session, local.fingerprint, local.run_id, group.our_version, group.codec, group.invite_list)


def invite_substitute(group: Invitable, now: float) -> list[Effect]:
    """Invite another peer to a free seat, if the selection allows any peer."""
    exchanges = group.exchanges
    config = exchanges.config
    size = config.group_size
    max_asked_peers = INVITATIONS_PER_SEAT * (size - 1)
    if not SELECTIONS[config.selection].free or not size or len(group.asked_peers) >= max_asked_peers:
        return []
    substitute = exchanges.partners.choose(group.asked_peers, now)
    if substitute is None:
        return []
    group.asked_peers.add(substitute)
    remaining = [peer for peer in group.invite_list if peer in group.pending_peers or peer in group.joined_versions]
    if substitute not in connectable_peers(exchanges, [*remaining, substitute]):
        return []
    group.invite_list = (*remaining, substitute)
    group.pending_peers[substitute] = now
    return [Send(substitute, invitation(group))]


def yielding_groups(exchanges: Exchanges[Any], sender: PeerId, invite: Invite) -> list[Invitable] | None:
    """Return our groups that give way to this invitation, or None if we are busy.

    Any group counts as our mix, so a group of ours that is still PREPARING gives way. If two inviters have invited each
    other, the group of the smaller id goes first. A member that both have invited follows the same rule.
    """
    yielding: list[Invitable] = []
    for group in exchanges.table.values():
        if group.state is State.IN_DOUBT:
            continue
        if group.state not in (State.PREPARING, State.OFFERED) or not group.IS_GROUP:
            return None
        have_crossed = sender in group.invite_list and group.inviter in (*invite.members, exchanges.me)
        goes_first = have_crossed and sender < group.inviter
        if not goes_first and not (group.is_initiator and group.state is State.PREPARING):
            return None
        yielding.append(group)
    return yielding
