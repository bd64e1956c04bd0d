"""A pair that two peers reserve while each still streams with another.

It is their next exchange, reserved *ahead*, so that neither looks for a partner or waits for an answer while its link
is idle.

    asks:      ASKED --joined--> RESERVED --freed--> PREPARING --snapshotted--> OFFERED --accept--> STREAMING
    consents:                    RESERVED, and from then on the same

One peer asks (an Offer whose ``mixing`` is "ahead") and the other consents (Joined). Each has at most one reservation
in addition to its current exchange. The current exchange never waits for the reservation, so there is no deadlock. A
reservation takes no slot and no vector. A side with nothing else in progress takes its snapshot, which holds what the
last exchange brought, and sends Accept. A side starts streaming once it has both sent and received Accept.

A reservation binds like an offer that waits for its answer: it is backgrounded after a while, and gives way to an offer
from the same partner. A peer that broke a reservation gets no other until an exchange with it has finished.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from gossip.arithmetic.mixing import pair_weight
from gossip.arithmetic.subsets import ALL, Subset
from gossip.effects import Effect, MemberState, Release, Rename, Send, Snapshot, Transfer
from gossip.exchange.agreement import agreed_codec, is_acceptable
from gossip.exchange.beginning import OFFERS_PER_PARTNER, offer_refusal
from gossip.exchange.durations import MIN_WAIT_LIMIT_S
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.offer import MAX_WEIGHT, Exchange
from gossip.exchange.pair import Pair
from gossip.exchange.transitions import INITIATOR, RESERVED_PAIR, RESPONDER, Event, State, Table
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Accept, Busy, Joined, Offer, Refuse

MIXING = "ahead"  # The name in an Offer that asks for a reservation.

EARLY_STATES = frozenset({State.ASKED, State.RESERVED, State.PREPARING})  # The partner has nothing of ours yet.
STREAM_STATES = frozenset({State.STREAMING, State.VERIFIED})
# Maximum number of questions for one reservation. A member of a swarm of four asks the three others ten times during
# streams of a minute.
MAX_QUESTIONS = 32
FIRST_PAUSE_S = 0.05  # First pause before all are asked again; it doubles each time (exponential back-off).


@dataclass(slots=True, eq=False, kw_only=True)
class ReservedPair(Pair):
    """A reserved pair."""

    MIXING: ClassVar[str] = MIXING
    COUNTS_ANSWER: ClassVar[bool] = False
    TRANSITIONS: ClassVar[Table] = RESERVED_PAIR

    partner_max_weight: float = 0.0  # The largest weight that the partner's Accept allows, 0 before it arrives.
    questions_left: int = 0
    pause_s: float = FIRST_PAUSE_S

    @property
    def has_slot(self) -> bool:
        return not (self.is_backgrounded or self.state in (State.ASKED, State.RESERVED, State.IN_DOUBT))

    @property
    def is_reserved(self) -> bool:
        return self.state in EARLY_STATES or self.state is State.OFFERED

    @property
    def has_partner(self) -> bool:
        """Return True if a peer is asked or has consented. Until then ``partner`` is our own id."""
        return self.partner != self.exchanges.me

    # -- asking --------------------------------------------------------------------------------------------------
    def ask_next_peer(self, now: float) -> list[Effect]:
        """Ask the next peer for a reservation, under a new session number.

        When all have declined they are asked again after a back-off. Their exchanges, or those of the peers that they
        reserved, may have ended by then.
        """
        exchanges = self.exchanges
        released: list[Effect] = []
        if self.has_partner:
            released = [Release(self.session)]
            del exchanges.table[self.session]
            self.session = exchanges.new_session()
            exchanges.table[self.session] = self
            self.partner = exchanges.me
        partner = next_peer(exchanges, self.asked_peers, now) if self.questions_left else None
        if partner is None:
            # A free peer drops the question. It looks for another free peer instead, with an ordinary offer.
            if not (self.questions_left and self.asked_peers and exchanges.used_slots):
                return [*released, *self.drop()]
            self.asked_peers.clear()
            self.timer_at, self.pause_s = now + self.pause_s, 2 * self.pause_s
            return released
        self.questions_left -= 1
        self.asked_peers.add(partner)
        self.partner, self.codec = partner, exchanges.offered_codec(partner, ALL)
        self.timer_at = now + min(exchanges.answer_waits.limit_s, exchanges.config.reply_timeout_s)
        local = exchanges.local
        offer = Offer(
            self.session, local.fingerprint, local.run_id, local.version, self.max_weight(), self.codec, self.MIXING
        )  # fmt: skip
        return [*released, Send(partner, offer)]

    def on_joined(self, sender: PeerId, joined: Joined, now: float) -> list[Effect]:
        """Handle the partner's consent in ASKED: the pair is RESERVED. Abort and ask the next peer for other terms."""
        if not is_acceptable(joined, ALL in self.exchanges.measured_parts):
            return [Send(sender, Abort(self.session, "terms")), *self.end_reservation(now)]
        self.codec, self.state = joined.codec, State.RESERVED
        self.timer_at = now + self.partner_wait_s()
        return []

    def partner_wait_s(self) -> float:
        """Return how long a free peer waits for its partner: one and a half times the usual time of a stream.

        The partner comes when its own stream ends. If two pairs swap partners, one of them may end up to a stream's
        time after the other. Once the earlier pair has waited for the later one, both new pairs begin together, and
        later swaps need no wait.
        """
        exchanges = self.exchanges
        # The learned limit is at least twice the median, so that this is at least one and a half times the median.
        wait_s = 0.75 * exchanges.stream_waits.learned_limit_s
        return min(max(MIN_WAIT_LIMIT_S, wait_s), exchanges.config.reply_timeout_s)

    def end_reservation(self, now: float) -> list[Effect]:
        """End a reservation that failed before our snapshot existed: ask the next peer in ASKED, else drop."""
        exchanges = self.exchanges
        if self.state is State.ASKED:
            return self.ask_next_peer(now)
        if self.state is State.PREPARING or not exchanges.used_slots:
            exchanges.unreliable_partners[self.partner] = None  # We waited for this partner.
        is_mix_lost = self.is_initiator and self.state is State.PREPARING
        exchanges.has_given_up = exchanges.has_given_up or is_mix_lost
        return self.drop()

    # -- beginning -----------------------------------------------------------------------------------------------
    def on_freed(self, now: float) -> list[Effect]:
        """Handle that no other exchange takes a slot: in RESERVED take our snapshot.

        In ASKED withdraw the question, which has no answer yet, since a free peer does not wait for a busy one.
        """
        if self.state is State.ASKED:
            return [*self.withdrawal("late"), *self.drop()]
        return self.prepare(now)

    def prepare(self, now: float) -> list[Effect]:
        """Begin the reserved pair: take our snapshot."""
        exchanges = self.exchanges
        self.state, self.phase_began_at, self.snapshot_steps = State.PREPARING, now, exchanges.local.steps
        self.timer_at = now + exchanges.config.boundary_patience_s
        return [Snapshot(self.session)]

    def on_snapshotted(self, now: float, mass: float = 0.0, yielded_offer: Exchange | None = None) -> list[Effect]:
        """Handle our snapshot in PREPARING: send Accept, and start the streams if the partner's has arrived."""
        exchanges, local = self.exchanges, self.exchanges.local
        self.our_version, self.snapshot_steps, self.weight = local.version, local.steps, self.max_weight()
        self.trained_intervals = exchanges.trained_intervals(local.steps)
        self.our_claim = local.progress.claim
        accept = Accept(
            self.session, self.our_version, self.weight, self.codec, self.our_claim, self.trained_intervals
        )  # fmt: skip
        self.phase_began_at, self.final_deadline = now, now + exchanges.config.reply_timeout_s
        if self.partner_max_weight:
            return [Send(self.partner, accept), self.start_agreed_streams(now)]
        self.state, self.timer_at = State.OFFERED, now + self.partner_wait_s()
        return [Send(self.partner, accept)]

    def on_accept(self, sender: PeerId, accept: Accept, now: float) -> list[Effect]:
        """Handle the partner's Accept, which says that its snapshot exists.

        In OFFERED start the streams. In RESERVED take our snapshot if we are free. Else only note the terms. With
        other terms than agreed, abort.
        """
        is_agreed = (
            is_acceptable(accept, ALL in self.exchanges.measured_parts)
            and accept.codec == self.codec and 0 < accept.weight <= MAX_WEIGHT
        )  # fmt: skip
        if not is_agreed:
            return [Send(sender, Abort(self.session, "terms")), *self.fail("terms", now)]
        self.partner_version, self.partner_max_weight = accept.version, accept.weight
        self.partner_claim, self.partner_trained_intervals = accept.progress, accept.trained
        if self.state is State.OFFERED:
            return [self.start_agreed_streams(now)]
        return self.prepare(now) if self.state is State.RESERVED and not self.exchanges.used_slots else []

    def start_agreed_streams(self, now: float) -> Transfer:
        """Start the streams with the weight that both sides compute from both versions and both largest weights."""
        exponent = self.exchanges.config.staleness_exponent
        cap = min(self.weight, self.partner_max_weight)
        self.weight = pair_weight(self.our_version - self.partner_version, exponent, cap=cap)
        self.state = State.STREAMING
        return self.start_streams(now)

    def ask_next_partner(self, now: float) -> list[Effect]:
        """Offer our snapshot to other peers as an ordinary pair, because the partner broke its reservation.

        Only the side that asked does so. For the other side the pair was a mix of its partner.
        """
        exchanges = self.exchanges
        exchanges.unreliable_partners[self.partner] = None
        if self.is_backgrounded or not self.is_initiator:
            return self.drop()
        pair = Pair(
            exchanges=exchanges, session=exchanges.new_session(), partner=exchanges.me, is_initiator=INITIATOR,
            phase_began_at=now, timer_at=math.inf, asked_peers={self.partner}, max_asked_peers=1 + OFFERS_PER_PARTNER,
        )  # fmt: skip
        self.end(State.DROPPED)
        exchanges.table[pair.session] = pair
        return [Rename(self.session, pair.session), *exchanges.route_event(pair, Event.SNAPSHOTTED, now)]

    # -- faults --------------------------------------------------------------------------------------------------
    def on_busy(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle Busy: end the reservation up to PREPARING; in OFFERED offer our snapshot to others."""
        return self.end_reservation(now) if self.state in EARLY_STATES else self.ask_next_partner(now)

    def on_refuse(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle Refuse as Busy, and ask this peer for no more reservations.

        It may be of a version that does not know them, which is no misbehaviour.
        """
        self.exchanges.unreliable_partners[sender] = None
        return self.on_busy(sender, now)

    def on_abort(self, sender: PeerId, code: str, now: float) -> list[Effect]:
        """Handle Abort: end the reservation up to PREPARING, else as a pair does."""
        return self.end_reservation(now) if self.state in EARLY_STATES else Pair.on_abort(self, sender, code, now)

    def on_failed(self, code: str, now: float) -> list[Effect]:
        """Handle a failed stream or link: end the reservation up to PREPARING, else as a pair does."""
        return self.end_reservation(now) if self.state in EARLY_STATES else Pair.on_failed(self, code, now)

    def on_late(self, now: float) -> list[Effect]:
        """Handle ``timer_at``, which has come.

        In RESERVED wait on while we are busy ourselves, since the partner is then not late. In ASKED ask the next
        peer. In PREPARING, and in RESERVED if we are free, withdraw. Later states do as a pair does.
        """
        if self.state is State.RESERVED and self.exchanges.used_slots:
            self.timer_at = now + self.partner_wait_s()
            return []
        if self.state in (State.ASKED, State.OFFERED) and self.has_partner:
            self.exchanges.unreliable_partners[self.partner] = None  # The partner does not answer or does not come.
        if self.state not in EARLY_STATES:
            return Pair.on_late(self, now)
        return [*self.withdrawal("late"), *self.end_reservation(now)]

    def lost_peers(self, state: Callable[[PeerId], MemberState | None]) -> list[PeerId]:
        waits = self.is_reserved and self.has_partner
        return [self.partner] if waits and state(self.partner) is not MemberState.ALIVE else []

    def on_spoiled(self) -> list[Effect]:
        """Handle a snapshot that cannot be streamed, in any state: answer Busy, and drop."""
        return [Send(self.partner, Busy(self.session)), *self.drop()]

    def withdrawal(self, code: str) -> list[Effect]:
        """Return the Abort for the partner, or nothing if no peer is asked."""
        return [Send(self.partner, Abort(self.session, code))] if self.has_partner else []

    def drop(self) -> list[Effect]:
        if self.has_partner:
            return Pair.drop(self)
        self.state = State.DROPPED  # No peer was asked, so no driver knows the session number.
        del self.exchanges.table[self.session]
        return []

    def on_replaced(self) -> list[Effect]:
        """Handle weights that are about to be replaced, in any state: withdraw up to PREPARING, else as a pair."""
        return [*self.withdrawal("replaced"), *self.drop()] if self.state in EARLY_STATES else Pair.on_replaced(self)


def reserve(exchanges: Exchanges[Any], now: float) -> list[Effect]:
    """Ask a peer to reserve the next exchange, while we stream or after we found no free peer."""
    is_needless = exchanges.reserved_session is not None or exchanges.used_slots > 1 or exchanges.is_overlapping
    if is_needless or next_peer(exchanges, set(), now) is None:
        return []
    pair = ReservedPair(
        exchanges=exchanges, session=exchanges.new_session(), partner=exchanges.me, is_initiator=INITIATOR,
        phase_began_at=now, timer_at=now, questions_left=MAX_QUESTIONS, state=State.ASKED,
    )  # fmt: skip
    exchanges.table[pair.session] = pair
    return pair.ask_next_peer(now)


def answer_reservation(exchanges: Exchanges[Any], sender: PeerId, offer: Offer, now: float) -> list[Effect]:
    """Answer a question for a reservation: consent if we stream too and have no reservation.

    If our question and the sender's cross, the smaller id's question stays. Without this rule each peer of a ring, in
    which everyone has asked the next one, would decline because it has asked another.
    """
    session, partners, config = offer.session, exchanges.partners, exchanges.config
    reason = offer_refusal(ReservedPair, exchanges, offer, Subset.parse(offer.part))
    if reason is not None:
        return [Send(sender, Refuse(session, reason))]
    in_progress = [other for other in exchanges.table.values() if other.has_slot]
    is_streaming = any(other.state in STREAM_STATES for other in in_progress)
    # We stream with the sender already, and should mix with other members too.
    is_repeated = any(other.partner == sender for other in in_progress) and partners.has_others({sender})
    earlier = exchanges.reserved_session  # Our own question, or a reservation that we hold.
    earlier_stays = earlier is not None and (earlier.state is State.RESERVED or exchanges.me < sender)
    is_unreliable = sender in exchanges.unreliable_partners or partners.is_unproven(sender)
    is_prevented = is_repeated or earlier_stays or is_unreliable or exchanges.local.settling or exchanges.is_overlapping
    if not is_streaming or is_prevented or session in exchanges.table or partners.is_crowding(sender, now):
        return [Send(sender, Busy(session))]
    if partners.is_declined(sender, now):
        exchanges.misbehaviour.note(sender, "pestering", now)
        return [Send(sender, Busy(session))]
    dropped: list[Effect] = []
    if earlier is not None:
        dropped = [*earlier.withdrawal("late"), *exchanges.route_event(earlier, Event.YIELDED)]
    pair = exchanges.table[session] = ReservedPair(
        exchanges=exchanges, session=session, partner=sender, is_initiator=RESPONDER, phase_began_at=now,
        timer_at=now, state=State.RESERVED,
    )  # fmt: skip
    pair.timer_at = now + pair.partner_wait_s()
    pair.codec = agreed_codec(config.codec_name, exchanges.offered_codec(sender, ALL), offer.codec)
    return [*dropped, Send(sender, Joined(session, exchanges.local.version, pair.codec))]


def next_peer(exchanges: Exchanges[Any], asked_peers: set[PeerId], now: float) -> PeerId | None:
    """Return a peer to ask for a reservation: one that we do not stream with, unless there is no other."""
    in_progress = {peer for other in exchanges.table.values() if other.has_slot for peer in other.counterparts}
    excluded = asked_peers | set(exchanges.unreliable_partners)
    partners = exchanges.partners
    if partners.has_others(in_progress):
        excluded |= in_progress
    return partners.choose(excluded, now)
