"""A push: the initiator alone streams, and the responder's COMMIT alone decides it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gossip.effects import Effect, Merge
from gossip.exchange.offer import Exchange
from gossip.exchange.session import INITIATOR, RESPONDER, Event, State, Transitions
from gossip.ids import PeerId
from gossip.wire.messages import Offer

__all__ = ["MAX_MASS", "Push"]

MAX_MASS = 2.0**32  # more than all members of the largest swarm together
PREPARING, OFFERED, STREAMING = State.PREPARING, State.OFFERED, State.STREAMING
DOUBT, DONE, DROPPED = State.DOUBT, State.DONE, State.DROPPED


@dataclass(slots=True, eq=False, kw_only=True)
class Push(Exchange):
    """See :mod:`gossip.exchange.session`. Where nothing is conserved (row-stochastic) there is no DOUBT: what may have
    arrived is forgotten."""

    MIXING: ClassVar[str] = "push"
    TRANSITIONS: ClassVar[Mapping[bool, Transitions]] = {
        INITIATOR: {
            PREPARING: {
                Event.SNAPSHOTTED: (OFFERED, DROPPED),
                Event.SPOILED: (DROPPED,),
                Event.REPLACED: (DROPPED,),
            },
            OFFERED: {
                Event.ACCEPT: (STREAMING, DROPPED),
                Event.BUSY: (OFFERED, DROPPED),
                Event.REFUSE: (OFFERED, DROPPED),
                Event.ABORT: (OFFERED, DROPPED),
                Event.OUTCOME: (DROPPED,),
                Event.FAILED: (OFFERED, DROPPED),
                Event.LATE: (OFFERED, DROPPED),
                Event.SPOILED: (DROPPED,),
                Event.REPLACED: (DROPPED,),
            },
            STREAMING: {
                Event.COMMIT: (DONE,),
                Event.ABORT: (DROPPED,),
                Event.OUTCOME: (DROPPED,),
                Event.FAILED: (DOUBT, DROPPED),
                Event.LATE: (STREAMING, DOUBT, DROPPED),
                Event.SPOILED: (DROPPED,),
                Event.REPLACED: (DROPPED,),
            },
            DOUBT: {
                Event.COMMIT: (DONE,),
                Event.ABORT: (DROPPED,),
                Event.OUTCOME: (DROPPED,),
                Event.SETTLED: (DONE, DROPPED),
                Event.LATE: (DOUBT, DROPPED),
                Event.GONE: (DROPPED,),
                Event.CROWDED: (DROPPED,),
                Event.SPOILED: (DROPPED,),
                Event.REPLACED: (DROPPED,),
            },
        },
        RESPONDER: {
            PREPARING: {
                Event.SNAPSHOTTED: (STREAMING,),
                Event.ABORT: (DROPPED,),
                Event.OUTCOME: (DROPPED,),
                Event.FAILED: (DROPPED,),
                Event.LATE: (DROPPED,),
                Event.SPOILED: (DROPPED,),
                Event.REPLACED: (DROPPED,),
            },
            STREAMING: {
                Event.STREAMED: (DONE, DROPPED),
                Event.ABORT: (DROPPED,),
                Event.OUTCOME: (DROPPED,),
                Event.FAILED: (DROPPED,),
                Event.LATE: (STREAMING, DROPPED),
                Event.SPOILED: (DROPPED,),
                Event.REPLACED: (DROPPED,),
            },
        },
    }

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
        if self.initiator and self.state is STREAMING and self.exchanges.config.conserves:
            return self.doubt(now)  # all of it may have arrived
        return Exchange.failed(self, code, now)

    def finish(self, now: float) -> list[Effect]:
        self.finished(now)
        if not self.initiator:
            return [Merge(self.session, self.mass), *self.end(DONE)]
        self.counted()
        return self.end(DONE)

    def drop(self) -> list[Effect]:
        """A mass that was to be given away comes back."""
        back = self.initiator and self.mass > 0 and self.exchanges.config.conserves
        ended = self.end(DROPPED)
        return [Merge(self.session, self.mass), *ended] if back else ended
