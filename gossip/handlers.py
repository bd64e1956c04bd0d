"""What a Peer does with each message: a table from the message's type to a function.

Messages of the membership protocol are not here: a Peer hands them to whoever knows the members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from gossip.discovery import TRY_EVERY_S, Reachability, answer_reach
from gossip.effects import Effect, Send
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.groups import Groups
from gossip.exchange.session import Local
from gossip.ids import PeerId
from gossip.members import Members
from gossip.state_transfer.joining import Donating, Joining, Phase
from gossip.state_transfer.runs import Runs
from gossip.wire.messages import (
    Abort,
    Accept,
    Begin,
    Busy,
    Commit,
    Fetch,
    Invite,
    Joined,
    Message,
    Offer,
    Outcome,
    Reach,
    Reached,
    Refuse,
    Serving,
    Settled,
)  # fmt: skip

__all__ = ["HANDLERS", "is_with", "meant"]


class Recipient(Protocol):
    """What a message may concern of a :class:`gossip.peer.Peer`."""

    left: bool
    local: Local
    exchanges: Exchanges | Groups
    joining: Joining
    donating: Donating
    runs: Runs
    membership: Members
    reach: Reachability
    linked_peers: dict[PeerId, float]
    optimizer_scalars: tuple[tuple[str, float], ...]


def on_offer(peer: Recipient, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
    if peer.left or holds(peer, offer.session) or peer.joining.phase is Phase.ADOPTING:
        return [Send(sender, Busy(offer.session))]  # adopting, its snapshot would be of another run's weights
    return peer.exchanges.on_offer(sender, offer, now)


def on_accept(peer: Recipient, sender: PeerId, accept: Accept, now: float) -> list[Effect]:
    return peer.exchanges.on_accept(sender, accept, now)


def on_commit(peer: Recipient, sender: PeerId, commit: Commit, now: float) -> list[Effect]:
    return peer.exchanges.on_commit(sender, commit.session, now)


def on_outcome(peer: Recipient, sender: PeerId, outcome: Outcome, now: float) -> list[Effect]:
    return peer.exchanges.on_outcome(sender, outcome.session, now)


def on_settled(peer: Recipient, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
    return peer.exchanges.on_settled(sender, settled, now)


def on_invite(peer: Recipient, sender: PeerId, invite: Invite, now: float) -> list[Effect]:
    exchanges = peer.exchanges
    if peer.left or holds(peer, invite.session) or peer.joining.phase is Phase.ADOPTING:
        return [Send(sender, Busy(invite.session))]
    if not isinstance(exchanges, Groups):
        return [Send(sender, Refuse(invite.session, "mixing"))]
    return exchanges.on_invite(sender, invite, now)


def on_joined(peer: Recipient, sender: PeerId, joined: Joined, now: float) -> list[Effect]:
    return peer.exchanges.on_joined(sender, joined, now) if isinstance(peer.exchanges, Groups) else []


def on_begin(peer: Recipient, sender: PeerId, begin: Begin, now: float) -> list[Effect]:
    return peer.exchanges.on_begin(sender, begin, now) if isinstance(peer.exchanges, Groups) else []


def on_refusal(peer: Recipient, sender: PeerId, message: Busy | Refuse | Abort, now: float) -> list[Effect]:
    session = message.session
    if session in peer.exchanges.table:
        match message:
            case Busy():
                return peer.exchanges.on_busy(sender, session, now)
            case Refuse():
                return peer.exchanges.on_refuse(sender, session, now)
            case Abort():
                return peer.exchanges.on_abort(sender, session, message.code, now)
    entry = peer.donating.table.get(session)
    if entry is not None and entry[0] == sender:
        return peer.donating.end(session)
    return peer.joining.on_refused(sender, session, now, "" if isinstance(message, Busy) else message.code)


def on_fetch(peer: Recipient, sender: PeerId, fetch: Fetch, now: float) -> list[Effect]:
    if peer.left or holds(peer, fetch.session):
        return [Send(sender, Busy(fetch.session))]
    if peer.local.ready:
        if not peer.runs.should_serve(peer.membership.record(sender), now):
            return [Send(sender, Refuse(fetch.session, "joining"))]
        stopped = peer.joining.stop()  # of two runs that would take each other's weights, ours is the larger
        counted = peer.membership.swarm_samples
        return [*stopped, *peer.donating.on_fetch(sender, fetch, peer.optimizer_scalars, now, counted)]
    return peer.donating.on_fetch(sender, fetch, peer.optimizer_scalars, now)


def on_serving(peer: Recipient, sender: PeerId, serving: Serving, now: float) -> list[Effect]:
    return peer.joining.on_serving(sender, serving, now)


def on_reach(peer: Recipient, sender: PeerId, _reach: Reach, now: float) -> list[Effect]:
    if now < peer.linked_peers.get(sender, now) + TRY_EVERY_S:
        return []
    peer.linked_peers[sender] = now
    return answer_reach(sender, peer.membership.record(sender))


def on_reached(peer: Recipient, sender: PeerId, reached: Reached, now: float) -> list[Effect]:
    peer.reach.on_reached(sender, reached.ok, peer.membership.me.incarnation, now)
    return []


def holds(peer: Recipient, session: int) -> bool:
    """Whether this number is taken: buffers are kept by it."""
    joining = peer.joining
    return (
        session in peer.exchanges.table or session in peer.donating.table
        or session in joining.pieces or session in joining.surveys or session in joining.comparisons
    )  # fmt: skip


def is_with(peer: Recipient, session: int, partner: PeerId) -> bool:
    """Whether this is under way, an exchange or a piece served, and the partner takes part in it."""
    one = peer.exchanges.table.get(session)
    if one is not None:
        return partner in one.others
    served = peer.donating.table.get(session)
    return served is not None and served[0] == partner


def meant(peer: Recipient, to: PeerId, message: Message) -> bool:
    """Whether a message that waited for a link is still to be sent: not one that would begin a session which is over,
    or somebody else's by now. An answer to it would bind the link to nothing."""
    if not isinstance(message, Offer | Invite | Fetch):
        return True
    joining = peer.joining
    piece = joining.pieces.get(message.session)
    asked = joining.surveys.get(message.session) if piece is None else piece.donor
    return asked == to or is_with(peer, message.session, to)


HANDLERS: dict[type, Callable[[Recipient, PeerId, Any, float], list[Effect]]] = {
    Offer: on_offer, Accept: on_accept, Commit: on_commit, Outcome: on_outcome, Settled: on_settled,
    Invite: on_invite, Joined: on_joined, Begin: on_begin,
    Busy: on_refusal, Refuse: on_refusal, Abort: on_refusal,
    Fetch: on_fetch, Serving: on_serving, Reach: on_reach, Reached: on_reached,
}  # fmt: skip
