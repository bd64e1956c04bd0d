"""A pair: both sides stream their vectors, and both apply the difference once both have sent COMMIT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gossip.arithmetic.correction import credit
from gossip.arithmetic.subsets import ALL
from gossip.effects import Effect, Mix, Send
from gossip.exchange.beginning import admit, start
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.offer import Exchange
from gossip.exchange.session import State, version_gap, within
from gossip.exchange.transitions import PAIR, Table
from gossip.ids import PeerId
from gossip.misbehaviour import NEVER
from gossip.wire.messages import Offer, Settled

__all__ = ["Pair"]

PREPARING, OFFERED, STREAMING = State.PREPARING, State.OFFERED, State.STREAMING
VERIFIED, IN_DOUBT, DONE = State.VERIFIED, State.IN_DOUBT, State.DONE


@dataclass(slots=True, eq=False, kw_only=True)
class Pair(Exchange):
    """An exchange whose two sides follow the same transitions from the Accept on."""

    MIXING: ClassVar[str] = "pair"
    TRANSITIONS: ClassVar[Table] = PAIR

    @classmethod
    def start(cls, exchanges: Exchanges[Any], now: float) -> list[Effect]:
        return start(cls, exchanges, now)

    @classmethod
    def answer(cls, exchanges: Exchanges[Any], sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        return admit(cls, exchanges, sender, offer, now)

    @classmethod
    def standing(cls, exchanges: Exchanges[Any], sender: PeerId) -> tuple[list[Exchange], bool]:
        """Return our exchanges that give way to an offer of ``sender``, and whether the offer must wait.

        With one partner a mix, an exchange counts as our mix whichever side offered it. So an exchange of ours that is
        still PREPARING gives way to an offer, but only once until a mix of ours finishes. If two offers cross, the
        initiator with the smaller id wins. While a parked or overlapping exchange streams, its partner may not begin
        another.
        """
        leaving: list[Exchange] = []
        waiting = False
        for own in exchanges.table.values():
            begun = own.state in (STREAMING, VERIFIED) or (own.state is PREPARING and not own.initiator)
            if own.partner == sender and begun and (own.parked or exchanges.overlapping):
                waiting = True
            elif own.parked:
                continue
            elif own.promised:  # The partner offers instead of keeping its reservation.
                leaving += [own] if own.partner == sender else []
            elif own.initiator and own.state is OFFERED and own.partner == sender:
                leaving.append(own)
                waiting = waiting or exchanges.me < sender
            elif own.initiator and own.state is PREPARING and exchanges.single and not exchanges.gave_way:
                leaving.append(own)
        return leaving, waiting

    def commit(self, sender: PeerId, now: float) -> list[Effect]:
        self.committed = True
        return self.finish(now) if self.state is not STREAMING else []

    def committing(self, now: float) -> list[Effect]:
        if self.committed:
            return self.finish(now)
        self.state = VERIFIED
        self.until = now + max(self.exchanges.config.stall_s, self.until - now)
        if self.parked:
            self.deadline = self.until
        return []

    def outcome(self, sender: PeerId, now: float) -> list[Effect]:
        """Confirm the exchange if our COMMIT is sent: the partner would not ask unless its own was."""
        if self.state not in (VERIFIED, IN_DOUBT):
            return Exchange.outcome(self, sender, now)
        return [*self.finish(now), Send(sender, Settled(self.session, True))]

    def failed(self, code: str, now: float) -> list[Effect]:
        return self.doubt(now) if self.state is VERIFIED else Exchange.failed(self, code, now)

    def finish(self, now: float) -> list[Effect]:
        exchanges, partner, part = self.exchanges, self.partner, self.part
        exchanges.finished(self, now)
        exchanges.counted(self)
        if part in exchanges.learns:
            exchanges.bounded.add(part)
        if exchanges.fragments is not None:
            exchanges.fragments.mixed(part)
        if self.theirs > NEVER > self.ours:  # No run reaches so many rounds.
            exchanges.misbehaviour.note(partner, "claims", now)
        # The version (the weights' age) is averaged as the weights are: by the exchanged difference.
        moved = self.weight if part is ALL else self.weight * part.share
        local = exchanges.local
        local.version = within(local.version + moved * version_gap(self.theirs, self.ours))
        local.progress.mix(self.claim, self.partner_claim, self.partner, chosen=self.initiator)
        local.mixed_steps = max(local.mixed_steps, self.steps)
        counts = 0.0
        if exchanges.config.kappa:
            counts = float(credit(self.trained, self.partner_trained, self.taken))
        every = (local.every or 0) if exchanges.config.auto_interval else 0
        return [Mix(self.session, self.weight, local.settling, counts, every), *self.end(DONE)]
