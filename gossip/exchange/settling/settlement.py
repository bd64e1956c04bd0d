"""A settlement: a pair of two members that settle, whatever their configuration mixes otherwise.

It carries the whole vector in fp32, one at a time, and both sides take the plain mean or join
(:mod:`gossip.exchange.settling.convergence`). A member that does not settle answers its Offer with Busy.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from gossip.arithmetic.sketch import Floats
from gossip.effects import Effect, Send
from gossip.exchange.beginning import answer_offer
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.offer import MAX_WEIGHT
from gossip.exchange.pair import Pair
from gossip.ids import PeerId
from gossip.wire.messages import Busy, Offer


@dataclass(slots=True, eq=False, kw_only=True)
class Settlement(Pair):
    """One side of a settlement."""

    MIXING: ClassVar[str] = "settle"
    IS_PLAIN: ClassVar[bool] = True

    is_equal: bool = False  # Both vectors had the same values.

    @classmethod
    def answer_offer(cls, exchanges: Exchanges[Any], sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        """Answer a member that settles."""
        if exchanges.local.settling:
            return answer_offer(cls, exchanges, sender, offer, now)
        return [Send(sender, Busy(offer.session))]

    def offered_codec(self) -> str:
        return "fp32"  # Exact, even if this node has stopped settling meanwhile.

    def set_terms(self, offer: Offer) -> None:
        """Take the plain mean, however old the weights of both sides are."""
        self.codec, self.weight = self.offered_codec(), min(offer.weight, MAX_WEIGHT)

    def take_share(self, difference_sq: float, now: float, sketch: Floats | None) -> tuple[float, tuple[str, ...]]:
        """Return the share that our filter takes, and decide whether to join."""
        exchanges, convergence = self.exchanges, self.exchanges.convergence
        is_near = convergence.is_near(difference_sq)
        share, reasons = exchanges.filter.take_settling_share(
            self.partner, 1.0 if is_near else self.weight, difference_sq, self.elements, exchanges.partners.present,
            exchanges.elapsed_intervals(now),
        )  # fmt: skip
        if share == 1.0:
            convergence.note(difference_sq)
        self.is_equal, self.joins = difference_sq == 0.0, is_near and share == 1.0
        return share, reasons

    def finish(self, now: float) -> list[Effect]:
        """Apply the difference, and note whether there was any."""
        exchanges, earlier = self.exchanges, self.exchanges.equal_since
        effects = Pair.finish(self, now)
        if self.is_equal:
            exchanges.equal_since = exchanges.done_count if earlier is None else earlier
        return effects
