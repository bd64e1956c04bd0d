"""A push: only the initiator streams, and the responder's COMMIT alone decides the outcome.

Every model has a *mass*, the weight with which it counts in means (push-sum). The initiator gives a share of its mass
away with the vector. The responder's new weights are the mean of both vectors, weighted by mass. Such mixing
*conserves* mass, and with it the swarm's mean. The alternative is row-stochastic mixing: every vector has mass 1, and
the sum is not conserved (:func:`gossip.arithmetic.mixing.push_mass`).
"""

from dataclasses import dataclass
from typing import ClassVar

from gossip.arithmetic.mixing import MAX_MASS
from gossip.effects import Effect, Merge
from gossip.exchange import beginning
from gossip.exchange.offer import Exchange
from gossip.exchange.transitions import PUSH, State, Table
from gossip.ids import PeerId
from gossip.wire.messages import Offer


@dataclass(slots=True, eq=False, kw_only=True)
class Push(Exchange):
    """A one-way exchange.

    If mass is not conserved, the initiator forgets a push that fails, and is never in doubt.
    """

    MIXING: ClassVar[str] = "push"
    TRANSITIONS: ClassVar[Table] = PUSH
    begin_mix = classmethod(beginning.begin_mix)
    answer_offer = classmethod(beginning.answer_offer)

    @classmethod
    def mismatch(cls, offer: Offer) -> str | None:
        if not 0 < offer.mass <= MAX_MASS:
            return "mass"
        return None if offer.part == "all" else "part"

    def mass_shares(self, partners: int) -> int:
        return partners

    @property
    def directions(self) -> tuple[bool, bool]:
        return self.is_initiator, not self.is_initiator

    def on_commit(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle the responder's COMMIT in STREAMING or IN_DOUBT: the push has happened, so the initiator finishes."""
        return self.finish(now)

    def note_own_commit(self, now: float) -> list[Effect]:
        """Finish, as the responder's COMMIT alone decides."""
        return self.finish(now)

    def on_failed(self, code: str, now: float) -> list[Effect]:
        """Handle a failed stream or link: the initiator of a push with mass asks for the outcome in STREAMING.

        All of the vector may have arrived, and the responder may have merged it.
        """
        if self.is_initiator and self.state is State.STREAMING and self.exchanges.config.conserves:
            return self.ask_outcome(now)
        return Exchange.on_failed(self, code, now)

    def finish(self, now: float) -> list[Effect]:
        """Apply the push: the responder has committed."""
        self.record_finished(now)
        # Both sides move their number of samples, although the weights go one way. If only the receiver's number moved,
        # the fast nodes, which push most, would lift the sum.
        self.exchanges.local.progress.mix(
            self.our_claim, self.partner_claim, self.partner, chosen=self.is_initiator
        )  # fmt: skip
        if not self.is_initiator:
            return [Merge(self.session, self.mass), *self.end(State.DONE)]
        self.count_mix()
        local = self.exchanges.local
        local.mixed_steps = max(local.mixed_steps, self.snapshot_steps)
        return self.end(State.DONE)

    def drop(self) -> list[Effect]:
        """End the push without a result, and take back the mass that it was to give away."""
        takes_back = self.is_initiator and self.mass > 0 and self.exchanges.config.conserves
        ended = self.end(State.DROPPED)
        return [Merge(self.session, self.mass), *ended] if takes_back else ended
