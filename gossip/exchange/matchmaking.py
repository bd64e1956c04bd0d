"""Who takes part in a group mean: whom a member invites, in whose place another is asked, and what gives way to whom.

Drawn from everybody, a group asks another in the place of one that is busy; of a grid nobody else will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossip.config.selections import SELECTIONS
from gossip.effects import Effect, Send
from gossip.exchange.session import State
from gossip.ids import PeerId
from gossip.wire.messages import MAX_GROUP, Invite

if TYPE_CHECKING:
    from gossip.exchange.exchanges import Exchanges
    from gossip.exchange.group import Group

__all__ = ["candidates", "gives_way", "invitation", "substitute"]

TRIES = 4  # members asked for each seat of a group drawn from everybody: with three in four busy most seats are filled


def candidates(exchanges: Exchanges[Group], now: float) -> tuple[PeerId, ...]:
    """Whom to invite now."""
    group = [peer for peer in exchanges.partners.group(now) if peer != exchanges.me]
    return streamable(exchanges, group)[: MAX_GROUP - 1]


def streamable(exchanges: Exchanges[Group], peers: list[PeerId]) -> tuple[PeerId, ...]:
    """Of those that nobody can dial one at most, we among them: two could not stream to each other."""
    hidden = [peer for peer in (exchanges.me, *peers) if exchanges.partners.address(peer) is None]
    return tuple(peer for peer in peers if peer not in hidden[1:])


def invitation(group: Group) -> Invite:
    local = group.exchanges.local
    return Invite(group.session, local.fingerprint, local.genesis, group.ours, group.codec, group.candidates)


def substitute(group: Group, now: float) -> list[Effect]:
    """A seat is free: ask another, where anybody will do."""
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


def gives_way(exchanges: Exchanges[Group], sender: PeerId, invite: Invite) -> list[Group] | None:
    """What we leave for this invitation; None: we are busy. A mix is a mix, whoever asked, so that what we only prepare
    gives way. Of two inviters that invited each other it is the smaller id's group, and those whom both invited know
    that as well as they do."""
    left: list[Group] = []
    for one in exchanges.table.values():
        if one.state is State.DOUBT:
            continue
        if one.state not in (State.PREPARING, State.OFFERED):
            return None
        across = sender in one.candidates and one.inviter in (*invite.members, exchanges.me) and sender < one.inviter
        if not across and not (one.initiator and one.state is State.PREPARING):
            return None
        left.append(one)
    return left
