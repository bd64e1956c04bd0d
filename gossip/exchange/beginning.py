"""The beginning of pairs and pushes: offers of our own mix, and admission of offers from others."""

from __future__ import annotations

import math

from gossip.arithmetic.mixing import pair_weight
from gossip.arithmetic.subsets import ALL, Subset
from gossip.effects import Effect, Release, Rename, Send, Snapshot
from gossip.exchange.agreement import agreed_codec, refusal
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.offer import Exchange, strangers
from gossip.exchange.transitions import INITIATOR, RESPONDER, Event, State
from gossip.ids import PeerId
from gossip.wire.messages import Busy, Offer, Refuse

__all__ = ["TRIES", "admit", "start"]

TRIES = 4  # Partners asked for each one wanted. Four BUSY in a row mean that all members are mixing.


def start(kind: type[Exchange], exchanges: Exchanges[Exchange], now: float) -> list[Effect]:
    """Prepare the offers of a mix. The snapshot comes first, so that a partner's stream finds ours ready."""
    if exchanges.engaged:
        return []
    overlapping = exchanges.overlapping
    asked = {one.partner for one in exchanges.table.values() if one.parked or one.promised or overlapping}
    asked.discard(exchanges.me)
    partners = exchanges.partners
    if not room(exchanges, 1 + partners.incoming()):
        return []
    if partners.choose(asked, now) is None:
        if not asked or partners.choose(set(), now) is None:
            return []
        if exchanges.moving:
            return []  # All members mix with us already.
        asked = set()  # All others have been silent for long: ask them again, since our messages may be lost.
    wanted = partners.wanted()
    part = exchanges.draw_part()
    tries = len(asked) + TRIES * wanted
    effects: list[Effect] = []
    for place in range(wanted):
        one = kind(
            exchanges=exchanges, session=exchanges.new_session(), partner=exchanges.me, initiator=INITIATOR,
            since=now, deadline=math.inf, asked=asked, part=part, tries=tries,
        )  # fmt: skip
        one.steps = exchanges.local.steps
        exchanges.outgoing[one.session] = exchanges.table[one.session] = one
        effects.append(Snapshot(one.session, one.carries(wanted - place), part))
    return effects


def admit(
    kind: type[Exchange], exchanges: Exchanges[Exchange], sender: PeerId, offer: Offer, now: float
) -> list[Effect]:  # fmt: skip
    """Answer an offer: Refuse for good, Busy, or nothing until our snapshot is taken."""
    session, part, local, config = offer.session, Subset.parse(offer.part), exchanges.local, exchanges.config
    refused = refuses(kind, exchanges, offer, part)
    if refused is not None or part is None:
        return [Send(sender, Refuse(session, refused or "part"))]
    leaving, waiting = kind.standing(exchanges, sender)
    slots = sum([not own.idle for own in leaving])
    limit = incoming(exchanges, sender) + len(exchanges.outgoing) - slots
    late = [] if room(exchanges, limit, slots) else overdue(exchanges, leaving, now)
    full = not room(exchanges, limit - len(late), slots + len(late))
    if exchanges.partners.strange(sender):
        waiting = waiting or strangers(exchanges) or exchanges.partners.wary_until > now
    asleep = now - local.boundary_at > config.boundary_patience_s
    if full or asleep or waiting or session in exchanges.table:
        return [Send(sender, Busy(session))]
    if exchanges.partners.declines(sender, now):
        exchanges.misbehaviour.note(sender, "pestering", now)
        return [Send(sender, Busy(session))]
    for own in late:
        own.park(now)
    exchanges.gave_way = exchanges.gave_way or slots > 0
    ready = next((own for own in leaving if part is ALL and own.serves), None)
    dropped = [effect for own in leaving for effect in exchanges.tell(own, Event.YIELDED)]
    one = exchanges.table[session] = kind(
        exchanges=exchanges, session=session, partner=sender, initiator=RESPONDER, since=now,
        deadline=now + config.boundary_patience_s, theirs=offer.version, partner_claim=offer.progress,
        partner_trained=offer.trained,
        mass=offer.mass, part=part,
    )  # fmt: skip
    one.codec = agreed_codec(config.codec, exchanges.codec(sender, part), offer.codec)
    gap = local.version - offer.version
    one.weight = pair_weight(gap, config.staleness_exponent, cap=min(offer.weight, one.cap()))
    if ready is None:
        return [*dropped, Snapshot(session, part=part)]
    dropped.remove(Release(ready.session))
    return [*dropped, Rename(ready.session, session), *exchanges.tell(one, Event.SNAPSHOTTED, now, 0.0, ready)]


def refuses(kind: type[Exchange], exchanges: Exchanges[Exchange], offer: Offer, part: Subset | None) -> str | None:
    """Return the reason to refuse an offer whatever this node is doing at the moment, or None."""
    reason = refusal(exchanges.local, offer, offer.mixing == kind.MIXING, spread=True)
    if reason is not None:
        return reason
    if not 0 < offer.weight <= 0.5:
        return "weight"
    return kind.mismatch(offer) or (
        None if part is not None and part.elements(exchanges.local.elements) else "part"
    )  # fmt: skip


def room(exchanges: Exchanges[Exchange], limit: int, leaving: int = 0) -> bool:
    """Return True if another exchange may begin, apart from ``leaving`` ones that end for it.

    With outer momentum only one runs at a time, unless mixes overlap.
    """
    if exchanges.overlapping:
        limit = min(limit, exchanges.most)
    elif not exchanges.plain:
        limit = 1
    return exchanges.moving - leaving < limit


def incoming(exchanges: Exchanges[Exchange], sender: PeerId) -> int:
    """Return how many incoming exchanges may be in progress, an offer of this sender included.

    The last partner may not take the last slot, which is kept for others.
    """
    limit = exchanges.partners.incoming()
    return limit - 1 if exchanges.single and sender == exchanges.last_partner and limit > 1 else limit


def overdue(exchanges: Exchanges[Exchange], leaving: list[Exchange], now: float) -> list[Exchange]:
    """Return our offers that have waited longer than answers usually take, as many as may be parked.

    They wait on, but this is no reason to make others wait.
    """
    late = [
        own for own in exchanges.table.values()
        if own.state is State.OFFERED and not own.parked and own not in leaving
        and now - own.since >= exchanges.answer_waits.learned_limit_s
    ]  # fmt: skip
    return late[: max(0, exchanges.most_parked - exchanges.parked)]
