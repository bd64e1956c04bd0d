"""A pair that two peers reserve while each still streams with another.

It is their next exchange, so that neither looks for a partner, or waits for an answer, while its link is idle.

One peer asks (an Offer whose ``mixing`` is "ahead") and the other consents (Joined). Each has at most one reservation
in addition to its current exchange. The current exchange never waits for the reservation, so there is no deadlock. A
reservation takes no slot and no vector. A side with nothing else in progress takes its snapshot, which holds what the
last exchange brought, and sends Accept. A side starts streaming once it has both sent and received Accept.

A reservation binds like an offer that waits for its answer: it is parked after a while, and gives way to an offer from
the same partner. A peer that broke one gets no other until an exchange with it has finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from gossip.arithmetic.mixing import pair_weight
from gossip.arithmetic.subsets import ALL, Subset
from gossip.effects import Effect, MemberState, Release, Rename, Send, Snapshot, Transfer
from gossip.exchange.agreement import agreed_codec, answers
from gossip.exchange.beginning import TRIES, refuses
from gossip.exchange.durations import MIN_WAIT_LIMIT_S
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.offer import Exchange
from gossip.exchange.pair import Pair
from gossip.exchange.transitions import AHEAD, INITIATOR, RESPONDER, Event, State, Table
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Accept, Busy, Joined, Offer, Refuse

__all__ = ["MIXING", "PairAhead", "ask", "consent"]

MIXING = "ahead"

# States in which no peer has been given anything of ours.
EARLY = frozenset({State.ASKED, State.AHEAD, State.PREPARING})
ASKS = 32  # Limit of questions for one reservation: what each of four members asks during streams of a minute.
AGAIN_S = 0.05  # First pause before all are asked again; it doubles each time (exponential back-off).
UNDER_WAY = frozenset({State.STREAMING, State.VERIFIED})


@dataclass(slots=True, eq=False, kw_only=True)
class PairAhead(Pair):
    """A reserved pair. ``allowed`` is the largest weight that the partner's Accept allows, 0 before it arrives."""

    MIXING: ClassVar[str] = MIXING
    ANSWERED: ClassVar[bool] = False
    TRANSITIONS: ClassVar[Table] = AHEAD

    allowed: float = 0.0
    rest_s: float = AGAIN_S

    @property
    def idle(self) -> bool:
        return self.parked or self.state in (State.ASKED, State.AHEAD, State.IN_DOUBT)

    @property
    def promised(self) -> bool:
        return self.state in EARLY or self.state is State.OFFERED

    # -- asking --------------------------------------------------------------------------------------------------
    def ask(self, now: float) -> list[Effect]:
        """Ask the next peer for a reservation, under a new session number.

        When all have declined they are asked again after a back-off: their exchanges, or those of the peers that they
        reserved, may be over by then.
        """
        exchanges = self.exchanges
        before: list[Effect] = []
        if self.partner != exchanges.me:
            before = [Release(self.session)]
            del exchanges.table[self.session]
            self.session = exchanges.new_session()
            exchanges.table[self.session] = self
            self.partner = exchanges.me
        partner = whom(exchanges, self.asked, now) if self.tries else None
        if partner is None:
            # A free peer drops the question, and looks for another free one.
            if not (self.tries and self.asked and exchanges.moving):
                return [*before, *self.drop()]
            self.asked.clear()
            self.deadline, self.rest_s = now + self.rest_s, 2 * self.rest_s
            return before
        self.tries -= 1
        self.asked.add(partner)
        self.partner, self.codec = partner, exchanges.codec(partner, ALL)
        self.deadline = now + min(exchanges.answer_waits.limit_s, exchanges.config.reply_timeout_s)
        local = exchanges.local
        offer = Offer(
            self.session, local.fingerprint, local.run_id, local.version, self.cap(), self.codec, self.MIXING
        )  # fmt: skip
        return [*before, Send(partner, offer)]

    def joined(self, sender: PeerId, joined: Joined, now: float) -> list[Effect]:
        """Record that the partner consents."""
        if not answers(joined, ALL in self.exchanges.bounded):
            return [Send(sender, Abort(self.session, "terms")), *self.forsaken(now)]
        self.codec, self.state = joined.codec, State.AHEAD
        self.deadline = now + self.patience_s()
        return []

    def patience_s(self) -> float:
        """Return how long a free peer waits for its partner: the usual time of a stream.

        Two pairs that swap partners start at most this far apart, and keep in step from then on.
        """
        exchanges = self.exchanges
        usual_s = 0.75 * exchanges.stream_waits.learned_limit_s  # The usual time is at least twice the median.
        return min(max(MIN_WAIT_LIMIT_S, usual_s), exchanges.config.reply_timeout_s)

    def forsaken(self, now: float) -> list[Effect]:
        """End a reservation that failed before our snapshot existed."""
        exchanges = self.exchanges
        if self.state is State.ASKED:
            return self.ask(now)
        if self.state is State.PREPARING or not exchanges.moving:
            exchanges.unkept[self.partner] = None  # We waited for this partner.
        exchanges.gave_up = exchanges.gave_up or (self.initiator and self.state is State.PREPARING)
        return self.drop()

    # -- beginning -----------------------------------------------------------------------------------------------
    def freed(self, now: float) -> list[Effect]:
        """Begin the reserved pair, as no other exchange is in progress. Withdraw a question without an answer."""
        if self.state is State.ASKED:
            return [*self.withdrawal("late"), *self.drop()]
        exchanges = self.exchanges
        self.state, self.since, self.steps = State.PREPARING, now, exchanges.local.steps
        self.deadline = now + exchanges.config.boundary_patience_s
        if self.initiator:
            exchanges.outgoing[self.session] = self
        return [Snapshot(self.session)]

    def snapshotted(self, now: float, mass: float = 0.0, of: Exchange | None = None) -> list[Effect]:
        exchanges, local = self.exchanges, self.exchanges.local
        self.ours, self.steps, self.weight = local.version, local.steps, self.cap()
        self.trained = exchanges.trained(local.steps)
        self.claim = local.progress.claim
        accept = Send(self.partner, Accept(self.session, self.ours, self.weight, self.codec, self.claim, self.trained))
        self.since, self.until = now, now + exchanges.config.reply_timeout_s
        if self.allowed:
            return [accept, self.streams(now)]
        self.state, self.deadline = State.OFFERED, now + self.patience_s()
        return [accept]

    def accept(self, sender: PeerId, accept: Accept, now: float) -> list[Effect]:
        """Record that the partner's snapshot exists. Both sides compute the weight from the same four numbers."""
        agreed = (
            answers(accept, ALL in self.exchanges.bounded) and accept.codec == self.codec and 0 < accept.weight <= 0.5
        )
        if not agreed:
            return [Send(sender, Abort(self.session, "terms")), *self.fail(now, "terms")]
        self.theirs, self.allowed, self.partner_claim = accept.version, accept.weight, accept.progress
        self.partner_trained = accept.trained
        if self.state is State.OFFERED:
            return [self.streams(now)]
        return self.freed(now) if self.state is State.AHEAD and not self.exchanges.moving else []

    def streams(self, now: float) -> Transfer:
        exponent = self.exchanges.config.staleness_exponent
        self.weight = pair_weight(self.ours - self.theirs, exponent, cap=min(self.weight, self.allowed))
        self.state = State.STREAMING
        return self.transfer(now)

    def offer(self, now: float) -> list[Effect]:
        """Offer our snapshot to other peers, because the partner broke its reservation."""
        exchanges = self.exchanges
        exchanges.unkept[self.partner] = None
        if self.parked or not self.initiator:
            return self.drop()
        one = Pair(
            exchanges=exchanges, session=exchanges.new_session(), partner=exchanges.me, initiator=INITIATOR,
            since=now, deadline=math.inf, asked={self.partner}, tries=1 + TRIES,
        )  # fmt: skip
        self.end(State.DROPPED)
        exchanges.table[one.session] = exchanges.outgoing[one.session] = one
        return [Rename(self.session, one.session), *exchanges.tell(one, Event.SNAPSHOTTED, now)]

    # -- faults --------------------------------------------------------------------------------------------------
    def busy(self, sender: PeerId, now: float) -> list[Effect]:
        return self.forsaken(now) if self.state in EARLY else self.offer(now)

    def refuse(self, sender: PeerId, now: float) -> list[Effect]:
        """Ask a peer that refuses for no more reservations. It may not know them, which is no misbehaviour."""
        self.exchanges.unkept[sender] = None
        return self.busy(sender, now)

    def abort(self, sender: PeerId, code: str, now: float) -> list[Effect]:
        return self.forsaken(now) if self.state in EARLY else Pair.abort(self, sender, code, now)

    def failed(self, code: str, now: float) -> list[Effect]:
        return self.forsaken(now) if self.state in EARLY else Pair.failed(self, code, now)

    def late(self, now: float) -> list[Effect]:
        if self.state is State.AHEAD and self.exchanges.moving:  # We are still busy, so the partner is not late.
            self.deadline = now + self.patience_s()
            return []
        if self.state in (State.ASKED, State.OFFERED) and self.partner != self.exchanges.me:
            self.exchanges.unkept[self.partner] = None  # The partner does not answer or does not come.
        if self.state not in EARLY:
            return Pair.late(self, now)
        return [*self.withdrawal("late"), *self.forsaken(now)]

    def lost(self, state: Callable[[PeerId], MemberState | None]) -> list[PeerId]:
        waits = self.promised and self.partner != self.exchanges.me
        return [self.partner] if waits and state(self.partner) is not MemberState.ALIVE else []

    def spoiled(self) -> list[Effect]:
        return [Send(self.partner, Busy(self.session)), *self.drop()]

    def withdrawal(self, code: str) -> list[Effect]:
        return [Send(self.partner, Abort(self.session, code))] if self.partner != self.exchanges.me else []

    def drop(self) -> list[Effect]:
        if self.partner != self.exchanges.me:
            return Pair.drop(self)
        self.state = State.DROPPED  # No peer was asked, so no driver knows the number.
        del self.exchanges.table[self.session]
        return []

    def replaced(self) -> list[Effect]:
        return [*self.withdrawal("replaced"), *self.drop()] if self.state in EARLY else Pair.replaced(self)


def ask(exchanges: Exchanges[Any], now: float) -> list[Effect]:
    """Ask a peer to reserve the next exchange, while we stream or after we found no free peer."""
    taken = exchanges.upcoming is not None or exchanges.moving > 1 or exchanges.overlapping
    if taken or whom(exchanges, set(), now) is None:
        return []
    one = PairAhead(
        exchanges=exchanges, session=exchanges.new_session(), partner=exchanges.me, initiator=INITIATOR, since=now,
        deadline=now, tries=ASKS, state=State.ASKED,
    )  # fmt: skip
    exchanges.table[one.session] = one
    return one.ask(now)


def consent(exchanges: Exchanges[Any], sender: PeerId, offer: Offer, now: float) -> list[Effect]:
    """Answer a question for a reservation: consent if we stream too and have no reservation.

    If questions cross, the smaller id's wins; otherwise a ring of questions would make all decline.
    """
    session, partners, config = offer.session, exchanges.partners, exchanges.config
    refused = refuses(PairAhead, exchanges, offer, Subset.parse(offer.part))
    if refused is not None:
        return [Send(sender, Refuse(session, refused))]
    current = [one for one in exchanges.table.values() if not one.idle]
    streams = any(one.state in UNDER_WAY for one in current)
    again = any(one.partner == sender for one in current) and partners.beyond({sender})
    own = exchanges.upcoming
    promised = own is not None and (own.state is State.AHEAD or exchanges.me < sender)
    trusted = sender not in exchanges.unkept and not partners.strange(sender) and not exchanges.local.settling
    if not streams or again or promised or not trusted or session in exchanges.table or exchanges.overlapping:
        return [Send(sender, Busy(session))]
    if partners.declines(sender, now):
        exchanges.misbehaviour.note(sender, "pestering", now)
        return [Send(sender, Busy(session))]
    dropped = [] if own is None else [*own.withdrawal("late"), *exchanges.tell(own, Event.YIELDED)]
    one = exchanges.table[session] = PairAhead(
        exchanges=exchanges, session=session, partner=sender, initiator=RESPONDER, since=now, deadline=now,
        state=State.AHEAD,
    )  # fmt: skip
    one.deadline = now + one.patience_s()
    one.codec = agreed_codec(config.codec, exchanges.codec(sender, ALL), offer.codec)
    return [*dropped, Send(sender, Joined(session, exchanges.local.version, one.codec))]


def whom(exchanges: Exchanges[Any], asked: set[PeerId], now: float) -> PeerId | None:
    """Return a peer to ask: one that we do not stream with, unless there is no other."""
    current = {peer for one in exchanges.table.values() if not one.idle for peer in one.others}
    avoided = asked | set(exchanges.unkept)
    partners = exchanges.partners
    return partners.choose(avoided | current if partners.beyond(current) else avoided, now)
