"""A pair that two agree on while each still streams with another: their next exchange, so that neither looks for a
partner, or waits for an answer, on an empty link.

One of the two asks (an Offer whose ``mixing`` is "ahead"), the other consents (Joined). Each has at most one such
promise beside the exchange that goes on, and what goes on never waits for it, so that no chain of waiting closes. It
takes no slot and no vector. When a side has nothing else under way it takes its snapshot, which holds what the last
exchange brought, and says Accept. Who has said that and heard it streams: the later of the two at once, the other a
latency later.

A promise binds as an offer does that waits for its answer: it is parked after a while, and makes way for whoever offers
meanwhile. Who did not keep one is promised nothing more until an exchange with it was finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gossip.arithmetic.mixing import pair_weight
from gossip.arithmetic.subsets import ALL, Subset
from gossip.effects import Effect, MemberState, Release, Rename, Send, Snapshot, Transfer
from gossip.exchange.agreement import agreed_codec, answers
from gossip.exchange.beginning import TRIES, refuses
from gossip.exchange.durations import LEAST_S
from gossip.exchange.pair import Pair
from gossip.exchange.transitions import AHEAD, INITIATOR, RESPONDER, Event, State, Table
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Accept, Busy, Joined, Offer, Refuse

if TYPE_CHECKING:
    from gossip.exchange.exchanges import Exchanges
    from gossip.exchange.offer import Exchange

__all__ = ["PairAhead", "ask", "consent"]

EARLY = frozenset({State.ASKED, State.AHEAD, State.PREPARING})  # nothing of ours has been given to anybody
ASKS = 32  # questions for one promise: of four members each asks for as long as streams of a minute take
AGAIN_S = 0.05  # after which all are asked once more, and twice as long the next time
UNDER_WAY = frozenset({State.STREAMING, State.VERIFIED})


@dataclass(slots=True, eq=False, kw_only=True)
class PairAhead(Pair):
    """``allowed`` is the largest weight that the partner's Accept allows, 0 before it is here."""

    MIXING: ClassVar[str] = "ahead"
    ANSWERED: ClassVar[bool] = False
    TRANSITIONS: ClassVar[Table] = AHEAD

    allowed: float = 0.0
    rest_s: float = AGAIN_S

    @property
    def idle(self) -> bool:
        return self.parked or self.state in (State.ASKED, State.AHEAD, State.DOUBT)

    @property
    def promised(self) -> bool:
        return self.state in EARLY or self.state is State.OFFERED

    # -- asking --------------------------------------------------------------------------------------------------
    def ask(self, now: float) -> list[Effect]:
        """Ask the next one, under a number that the one before does not know. When all have said no they are asked once
        more a little later: what they were at may be over, or whom they promised themselves to another's."""
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
            if not (self.tries and self.asked and exchanges.moving):  # who is free goes on looking for who is free too
                return [*before, *self.drop()]
            self.asked.clear()
            self.deadline, self.rest_s = now + self.rest_s, 2 * self.rest_s
            return before
        self.tries -= 1
        self.asked.add(partner)
        self.partner, self.codec = partner, exchanges.codec(partner, ALL)
        self.deadline = now + min(exchanges.answers.seconds, exchanges.config.reply_timeout_s)
        local = exchanges.local
        offer = Offer(
            self.session, local.fingerprint, local.genesis, local.version, self.cap(), self.codec, self.MIXING
        )  # fmt: skip
        return [*before, Send(partner, offer)]

    def joined(self, sender: PeerId, joined: Joined, now: float) -> list[Effect]:
        """They consent."""
        if not answers(joined, ALL in self.exchanges.bounded):
            return [Send(sender, Abort(self.session, "terms")), *self.forsaken(now)]
        self.codec, self.state = joined.codec, State.AHEAD
        self.deadline = now + self.patience_s()
        return []

    def patience_s(self) -> float:
        """How long they are waited for by who has nothing else to do: what a stream usually takes. Two pairs that go on
        crosswise are so much apart at most, and keep step from then on."""
        exchanges = self.exchanges
        usual_s = 0.75 * exchanges.streams.usual_s  # which is twice the median at least
        return min(max(LEAST_S, usual_s), exchanges.config.reply_timeout_s)

    def forsaken(self, now: float) -> list[Effect]:
        """Nothing came of it before our snapshot was there."""
        exchanges = self.exchanges
        if self.state is State.ASKED:
            return self.ask(now)
        if self.state is State.PREPARING or not exchanges.moving:
            exchanges.unkept[self.partner] = None  # it was waited for
        exchanges.gave_up = exchanges.gave_up or (self.initiator and self.state is State.PREPARING)
        return self.drop()

    # -- beginning -----------------------------------------------------------------------------------------------
    def freed(self, now: float) -> list[Effect]:
        """Nothing else is under way: it begins. What was not answered until now is given up."""
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
        """Their snapshot is taken. Both compute the weight, from the same four numbers."""
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
        """They do not keep it: others are offered what we had for them."""
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
        """As who knows of no such promises does, which is nothing against it."""
        self.exchanges.unkept[sender] = None
        return self.busy(sender, now)

    def abort(self, sender: PeerId, code: str, now: float) -> list[Effect]:
        return self.forsaken(now) if self.state in EARLY else Pair.abort(self, sender, code, now)

    def failed(self, code: str, now: float) -> list[Effect]:
        return self.forsaken(now) if self.state in EARLY else Pair.failed(self, code, now)

    def late(self, now: float) -> list[Effect]:
        if self.state is State.AHEAD and self.exchanges.moving:  # it is not they who are late
            self.deadline = now + self.patience_s()
            return []
        if self.state in (State.ASKED, State.OFFERED) and self.partner != self.exchanges.me:
            self.exchanges.unkept[self.partner] = None  # it does not answer, or does not come
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
        self.state = State.DROPPED  # nobody was asked: no driver knows its number
        del self.exchanges.table[self.session]
        return []

    def replaced(self) -> list[Effect]:
        return [*self.withdrawal("replaced"), *self.drop()] if self.state in EARLY else Pair.replaced(self)


def ask(exchanges: Exchanges[Any], now: float) -> list[Effect]:
    """Ask somebody for the next exchange: who streams, and will want another by the end, or who found nobody free."""
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
    """What another's question is answered: who streams as well, and has promised itself to nobody, consents. Of
    questions that meet the smaller id's goes first, or a ring of them would have them all say no."""
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
        exchanges.conduct.note(sender, "pestering", now)
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
    """Anybody but those that we stream with, unless there is nobody else."""
    current = {peer for one in exchanges.table.values() if not one.idle for peer in one.others}
    avoided = asked | set(exchanges.unkept)
    partners = exchanges.partners
    return partners.choose(avoided | current if partners.beyond(current) else avoided, now)
