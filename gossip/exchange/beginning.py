"""The beginning of pairs and pushes: offers of our own mix, and admission of offers from others.

``kind`` is the class of the exchange, a pair or a push. :mod:`gossip.selection.partners` says which partners are
unproven and which are declined.
"""

import math

from gossip.arithmetic.subsets import ALL, Subset
from gossip.effects import Effect, Release, Rename, Send, Snapshot
from gossip.exchange.agreement import refusal
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.offer import MAX_WEIGHT, Exchange
from gossip.exchange.transitions import INITIATOR, RESPONDER, Event, State
from gossip.ids import PeerId
from gossip.wire.messages import Busy, Offer, Refuse

# Peers to ask for each partner of a mix. Four BUSY in a row suggest that all members are mixing.
OFFERS_PER_PARTNER = 4


def begin_mix(kind: type[Exchange], exchanges: Exchanges[Exchange], now: float) -> list[Effect]:
    """Prepare the offers of a mix. The snapshot comes first, so that a partner's stream finds ours ready."""
    if exchanges.is_engaged:
        return []
    is_overlapping = exchanges.is_overlapping
    # Peers with which an exchange goes on next to this mix count as asked.
    asked_peers = {
        other.partner for other in exchanges.table.values()
        if other.is_backgrounded or other.is_reserved or is_overlapping
    }  # fmt: skip
    asked_peers.discard(exchanges.me)  # The partner of an exchange that has asked no peer yet.
    partners = exchanges.partners
    if not has_room(exchanges, 1 + partners.max_incoming()):
        return []
    if partners.choose(asked_peers, now) is None:
        if not asked_peers or partners.choose(set(), now) is None:
            return []
        if exchanges.used_slots:
            return []  # All members mix with us already.
        asked_peers = set()  # All others have been silent for long: ask them again, since our messages may be lost.
    # With all neighbours at once none counts while all are in back-off, and yet one of them may be asked.
    partner_count = max(1, partners.count_own_mix())
    part = exchanges.draw_part()
    max_asked_peers = len(asked_peers) + OFFERS_PER_PARTNER * partner_count
    effects: list[Effect] = []
    for place in range(partner_count):
        exchange = kind(
            exchanges=exchanges, session=exchanges.new_session(), partner=exchanges.me, is_initiator=INITIATOR,
            phase_began_at=now, timer_at=math.inf, asked_peers=asked_peers, part=part, max_asked_peers=max_asked_peers,
        )  # fmt: skip
        exchange.snapshot_steps = exchanges.local.steps
        exchanges.table[exchange.session] = exchange
        # Each snapshot divides the mass that the earlier ones left among the remaining partners and ourselves.
        effects.append(Snapshot(exchange.session, exchange.mass_shares(partner_count - place), part))
    return effects


def answer_offer(
    kind: type[Exchange], exchanges: Exchanges[Exchange], sender: PeerId, offer: Offer, now: float
) -> list[Effect]:  # fmt: skip
    """Answer an offer: Refuse whatever we are doing, Busy for now, or nothing until our snapshot is taken."""
    session, part = offer.session, Subset.parse(offer.part)
    reason = offer_refusal(kind, exchanges, offer, part)
    if reason is not None or part is None:
        return [Send(sender, Refuse(session, reason or "part"))]
    yielding, must_wait = kind.precedence(exchanges, sender)
    yielding_slots = sum([exchange.has_slot for exchange in yielding])
    # Our own exchanges that go on take slots in addition to those for incoming ones.
    limit = incoming_limit(exchanges, sender) + len(exchanges.own_exchanges) - yielding_slots
    is_room_free = has_room(exchanges, limit, yielding_slots)
    overdue = [] if is_room_free else overdue_offers(exchanges, yielding, now)
    # An overdue offer would go on in the background. It frees its slot, and is no own exchange any more.
    is_full = not has_room(exchanges, limit - len(overdue), yielding_slots + len(overdue))
    if exchanges.partners.is_unproven(sender):
        must_wait = must_wait or exchanges.has_unproven() or exchanges.partners.wary_until > now
    is_loop_paused = now - exchanges.local.boundary_at > exchanges.config.boundary_patience_s
    is_prevented = is_full or is_loop_paused or must_wait or session in exchanges.table
    if is_prevented or exchanges.partners.is_crowding(sender, now):
        return [Send(sender, Busy(session))]
    if exchanges.partners.is_declined(sender, now):
        exchanges.misbehaviour.note(sender, "pestering", now)
        return [Send(sender, Busy(session))]
    for exchange in overdue:
        exchange.background(now)
    exchanges.has_given_way = exchanges.has_given_way or yielding_slots > 0
    return begin_response(kind, exchanges, sender, offer, part, yielding, now)


def begin_response(
    kind: type[Exchange], exchanges: Exchanges[Exchange], sender: PeerId, offer: Offer, part: Subset,
    yielding: list[Exchange], now: float,
) -> list[Effect]:  # fmt: skip
    """Begin our side of an acceptable offer, in place of the exchanges that give way to it.

    The snapshot of one of these is used again if possible. Otherwise ours is taken at the next step boundary.
    """
    session, config = offer.session, exchanges.config
    reusable = next((exchange for exchange in yielding if part is ALL and exchange.has_reusable_snapshot), None)
    dropped = [effect for exchange in yielding for effect in exchanges.route_event(exchange, Event.YIELDED)]
    exchange = exchanges.table[session] = kind(
        exchanges=exchanges, session=session, partner=sender, is_initiator=RESPONDER, phase_began_at=now,
        timer_at=now + config.boundary_patience_s, partner_version=offer.version, partner_claim=offer.progress,
        partner_trained_intervals=offer.trained, mass=offer.mass, part=part,
    )  # fmt: skip
    exchange.set_terms(offer)
    if reusable is None:
        return [*dropped, Snapshot(session, part=part)]
    dropped.remove(Release(reusable.session))  # The snapshot moves to the new exchange.
    begun = exchanges.route_event(exchange, Event.SNAPSHOTTED, now, 0.0, reusable)
    return [*dropped, Rename(reusable.session, session), *begun]


def offer_refusal(
    kind: type[Exchange], exchanges: Exchanges[Exchange], offer: Offer, part: Subset | None
) -> str | None:  # fmt: skip
    """Return the reason to refuse an offer whatever this node is doing at the moment, or None."""
    reason = refusal(exchanges.local, offer, offer.mixing == kind.MIXING, bounded=True)
    if reason is not None:
        return reason
    if not 0 < offer.weight <= MAX_WEIGHT:
        return "weight"
    is_part_known = part is not None and part.elements(exchanges.local.elements)
    return kind.mismatch(offer) or (None if is_part_known else "part")


def has_room(exchanges: Exchanges[Exchange], limit: int, yielding_slots: int = 0) -> bool:
    """Return True if another exchange may begin once those that give way to it have freed ``yielding_slots``.

    With outer momentum only one runs at a time, unless mixes overlap, and so does a settlement.
    """
    if exchanges.is_overlapping:
        limit = min(limit, exchanges.max_overlaps)
    elif exchanges.local.settling or not exchanges.is_plain:
        limit = 1
    return exchanges.used_slots - yielding_slots < limit


def incoming_limit(exchanges: Exchanges[Exchange], sender: PeerId) -> int:
    """Return how many incoming exchanges may be in progress, an offer of this sender included.

    The last partner may not take the last slot, which is kept for others.
    """
    limit = exchanges.partners.max_incoming()
    is_kept = exchanges.counts_both_ways and sender == exchanges.last_partner and limit > 1
    return limit - 1 if is_kept else limit


def overdue_offers(exchanges: Exchanges[Exchange], yielding: list[Exchange], now: float) -> list[Exchange]:
    """Return our offers that have waited longer than answers usually take, as many as may be backgrounded.

    They wait on in the background. A partner that lets us wait is no reason to let the sender of a new offer wait too.
    """
    overdue = [
        exchange for exchange in exchanges.table.values()
        if exchange.state is State.OFFERED and not exchange.is_backgrounded and exchange not in yielding
        and now - exchange.phase_began_at >= exchanges.answer_waits.learned_limit_s
    ]  # fmt: skip
    return overdue[: max(0, exchanges.max_backgrounded - exchanges.backgrounded_count)]
