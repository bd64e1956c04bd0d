"""A push: only the initiator streams, and the responder's COMMIT alone decides the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gossip.effects import Effect, Merge
from gossip.exchange.beginning import admit, start
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.offer import Exchange
from gossip.exchange.session import State
from gossip.exchange.transitions import PUSH, Table
from gossip.ids import PeerId
from gossip.wire.messages import Offer

__all__ = ["MAX_MASS", "Push"]

MAX_MASS = 2.0**32  # The largest swarm holds less mass in all.


@dataclass(slots=True, eq=False, kw_only=True)
class Push(Exchange):
    """A one-way exchange.

    Without conservation of mass (row-stochastic weights) the initiator forgets a push, and is never in doubt.
    """

    MIXING: ClassVar[str] = "push"
    TRANSITIONS: ClassVar[Table] = PUSH

    @classmethod
    def start(cls, exchanges: Exchanges[Any], now: float) -> list[Effect]:
        return start(cls, exchanges, now)

    @classmethod
    def answer(cls, exchanges: Exchanges[Any], sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        return admit(cls, exchanges, sender, offer, now)

    @classmethod
    def mismatch(cls, offer: Offer) -> str | None:
        if not 0 < offer.mass <= MAX_MASS:
            return "mass"
        return None if offer.part == "all" else "part"

    def carries(self, partners: int) -> int:
        return partners

    @property
    def ways(self) -> tuple[bool, bool]:
        return self.initiator, not self.initiator

    def commit(self, sender: PeerId, now: float) -> list[Effect]:
        return self.finish(now)

    def committing(self, now: float) -> list[Effect]:
        return self.finish(now)

    def failed(self, code: str, now: float) -> list[Effect]:
        if self.initiator and self.state is State.STREAMING and self.exchanges.config.conserves:
            return self.doubt(now)  # All of the vector may have arrived.
        return Exchange.failed(self, code, now)

    def finish(self, now: float) -> list[Effect]:
        self.exchanges.finished(self, now)
        # Both sides move, although the weights go one way. If only the receiver's number moved, the fast nodes, which
        # push most, would lift the sum.
        self.exchanges.local.progress.mix(self.claim, self.partner_claim, self.partner, chosen=self.initiator)
        if not self.initiator:
            return [Merge(self.session, self.mass), *self.end(State.DONE)]
        self.exchanges.counted(self)
        return self.end(State.DONE)

    def drop(self) -> list[Effect]:
        """End the push without a result, and take back the mass that it was to give away."""
        back = self.initiator and self.mass > 0 and self.exchanges.config.conserves
        ended = self.end(State.DROPPED)
        return [Merge(self.session, self.mass), *ended] if back else ended
