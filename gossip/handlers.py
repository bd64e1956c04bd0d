"""The message handlers of a Peer, by message type.

Messages of the membership protocol are absent: a Peer passes them to its member list.
"""

from collections.abc import Callable
from typing import Any, Protocol

from gossip.discovery.meetings import Meetings
from gossip.discovery.reachability import Reachability
from gossip.effects import Effect, Send
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import Local
from gossip.exchange.transitions import Event
from gossip.ids import PeerId
from gossip.membership.members import Members
from gossip.state_transfer.donating import Donor
from gossip.state_transfer.joining import Newcomer, Phase
from gossip.state_transfer.moments import MomentMixing
from gossip.state_transfer.runs import RunChoice
from gossip.wire.messages import (
    Abort,
    Accept,
    Begin,
    Busy,
    Commit,
    Fetch,
    Invite,
    Joined,
    Meet,
    Offer,
    Outcome,
    Reach,
    Reached,
    Refuse,
    Serving,
    Settled,
)  # fmt: skip


class PeerParts(Protocol):
    """The parts of a :class:`gossip.peer.Peer` that answer messages."""

    local: Local
    membership: Members
    exchanges: Exchanges[Any]
    joining: Newcomer
    donating: Donor
    moments: MomentMixing
    reach: Reachability
    meetings: Meetings
    run_choice: RunChoice


def on_offer(peer: PeerParts, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
    if must_decline(peer, offer.session):
        return [Send(sender, Busy(offer.session))]
    return peer.exchanges.on_offer(sender, offer, now)


def on_invite(peer: PeerParts, sender: PeerId, invite: Invite, now: float) -> list[Effect]:
    if must_decline(peer, invite.session):
        return [Send(sender, Busy(invite.session))]
    return peer.exchanges.on_invite(sender, invite, now)


def must_decline(peer: PeerParts, session: int) -> bool:
    """Return True if no exchange may begin: a snapshot during an adoption would hold another run's weights."""
    return peer.local.left or is_session_taken(peer, session) or peer.joining.phase is Phase.ADOPTING


def on_answer(peer: PeerParts, sender: PeerId, answer: Accept | Joined | Begin | Settled, now: float) -> list[Effect]:
    """Pass an answer on to the exchange that it is about, which reads its terms."""
    return peer.exchanges.route_message(EVENTS[type(answer)], sender, answer.session, answer, now)


def on_decision(peer: PeerParts, sender: PeerId, message: Commit | Outcome, now: float) -> list[Effect]:
    """Pass a COMMIT, or the question for one, on to the exchange that it is about."""
    return peer.exchanges.route_message(EVENTS[type(message)], sender, message.session, now)


def on_refusal(peer: PeerParts, sender: PeerId, message: Busy | Refuse | Abort, now: float) -> list[Effect]:
    """Pass a refusal on to the exchange, the served piece or the transfer that it is about."""
    session = message.session
    if session in peer.exchanges.table:
        reason = (message.code,) if isinstance(message, Abort) else ()  # An exchange needs only the reason of an Abort.
        return peer.exchanges.route_message(EVENTS[type(message)], sender, session, *reason, now)
    served = peer.donating.table.get(session)
    if served is not None and served.newcomer == sender:
        return peer.donating.end(session)
    code = "" if isinstance(message, Busy) else message.code
    if peer.moments.member_of(session) is not None:
        return peer.moments.on_refused(sender, session, code)
    return peer.joining.on_refused(sender, session, now, code)


def on_fetch(peer: PeerParts, sender: PeerId, fetch: Fetch, now: float) -> list[Effect]:
    if peer.local.left or is_session_taken(peer, fetch.session):
        return [Send(sender, Busy(fetch.session))]
    record = peer.membership.record(sender)  # None for a reader, which gets no moments.
    if fetch.moments and record is not None:
        return peer.moments.on_fetch(sender, fetch, now)
    if peer.local.ready:
        if not peer.run_choice.should_serve(record, now):
            return [Send(sender, Refuse(fetch.session, "joining"))]
        stopped = peer.joining.stop()  # If two runs want each other's weights, ours is the larger one here.
        swarm_samples = peer.local.progress.samples
        return [*stopped, *peer.donating.on_fetch(sender, fetch, now, swarm_samples, is_reader=record is None)]
    return peer.donating.on_fetch(sender, fetch, now)


def on_serving(peer: PeerParts, sender: PeerId, serving: Serving, now: float) -> list[Effect]:
    if peer.moments.member_of(serving.session) is not None:
        return peer.moments.on_serving(sender, serving)
    return peer.joining.on_serving(sender, serving, now)


def on_reached(peer: PeerParts, sender: PeerId, reached: Reached, now: float) -> list[Effect]:
    peer.reach.on_reached(sender, reached.ok, now)
    return []


def on_meet(peer: PeerParts, sender: PeerId, meet: Meet, now: float) -> list[Effect]:
    return [] if peer.local.left else peer.meetings.on_meet(sender, meet, now)


def is_session_taken(peer: PeerParts, session: int) -> bool:
    """Return True if this session number is taken. The driver stores buffers by it, so no two sessions may share it."""
    joining = peer.joining
    return (
        session in peer.exchanges.table or session in peer.donating.table
        or session in joining.pieces or session in joining.surveys or session in joining.check.comparisons
        or peer.moments.member_of(session) is not None
    )  # fmt: skip


EVENTS: dict[type, Event] = {  # The event of an exchange that each message brings.
    Accept: Event.ACCEPT, Joined: Event.JOINED, Begin: Event.BEGIN, Settled: Event.SETTLED, Commit: Event.COMMIT,
    Outcome: Event.OUTCOME, Busy: Event.BUSY, Refuse: Event.REFUSE, Abort: Event.ABORT,
}  # fmt: skip
HANDLERS: dict[type, Callable[[PeerParts, PeerId, Any, float], list[Effect]]] = {
    Offer: on_offer,
    Invite: on_invite,
    Accept: on_answer,
    Joined: on_answer,
    Begin: on_answer,
    Settled: on_answer,
    Commit: on_decision,
    Outcome: on_decision,
    Busy: on_refusal,
    Refuse: on_refusal,
    Abort: on_refusal,
    Fetch: on_fetch,
    Serving: on_serving,
    Reach: lambda peer, sender, _reach, now: peer.reach.answer(sender, now),
    Reached: on_reached,
    Meet: on_meet,
}
