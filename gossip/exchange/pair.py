"""A pair: both sides stream their vectors, and both apply the difference once both have sent COMMIT."""

from dataclasses import dataclass
from typing import Any, ClassVar

from gossip.arithmetic.correction import credit
from gossip.arithmetic.subsets import ALL
from gossip.effects import Effect, Mix, Send
from gossip.exchange import beginning
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.offer import Exchange
from gossip.exchange.session import clamp_version, version_gap
from gossip.exchange.transitions import PAIR, State, Table
from gossip.ids import PeerId
from gossip.misbehaviour import IMPOSSIBLE_COUNT
from gossip.wire.messages import Settled

PREPARING, OFFERED, STREAMING = State.PREPARING, State.OFFERED, State.STREAMING
VERIFIED, IN_DOUBT, DONE = State.VERIFIED, State.IN_DOUBT, State.DONE


@dataclass(slots=True, eq=False, kw_only=True)
class Pair(Exchange):
    """An exchange whose two sides follow the same transitions from the Accept on."""

    MIXING: ClassVar[str] = "pair"
    TRANSITIONS: ClassVar[Table] = PAIR
    begin_mix = classmethod(beginning.begin_mix)
    answer_offer = classmethod(beginning.answer_offer)

    joins: bool = False  # Both sides take the vector of one, as in :mod:`gossip.exchange.settling.convergence`.

    @classmethod
    def precedence(cls, exchanges: Exchanges[Any], sender: PeerId) -> tuple[list[Exchange], bool]:
        """Return our exchanges that give way to an offer of ``sender``, and whether the offer must wait.

        With one partner a mix, an exchange counts as our mix whichever side offered it. So an exchange of ours that is
        still PREPARING gives way to an offer, but only once until a mix of ours finishes. If two offers cross, the
        initiator with the smaller id wins. While a backgrounded or overlapping exchange streams, its partner may not
        begin another.
        """
        yielding: list[Exchange] = []
        must_wait = False
        for exchange in exchanges.table.values():
            if exchange.IS_GROUP:
                continue  # A settlement waits until a group has ended.
            is_response = exchange.state is PREPARING and not exchange.is_initiator
            has_begun = is_response or exchange.state in (STREAMING, VERIFIED)
            if exchange.partner == sender and has_begun and (exchange.is_backgrounded or exchanges.is_overlapping):
                must_wait = True
            elif exchange.is_backgrounded:
                continue  # It takes no slot that another could use.
            elif exchange.is_reserved:  # The partner offers instead of keeping its reservation.
                yielding += [exchange] if exchange.partner == sender else []
            elif exchange.is_initiator and exchange.state is OFFERED and exchange.partner == sender:  # Offers crossed.
                yielding.append(exchange)
                must_wait = must_wait or exchanges.me < sender
            elif (
                exchange.is_initiator and exchange.state is PREPARING
                and exchanges.counts_both_ways and not exchanges.has_given_way
            ):  # fmt: skip
                yielding.append(exchange)
        return yielding, must_wait

    def on_commit(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle COMMIT: finish in VERIFIED and IN_DOUBT; in STREAMING note it, since we have not committed yet."""
        self.has_partner_committed = True
        return self.finish(now) if self.state is not STREAMING else []

    def note_own_commit(self, now: float) -> list[Effect]:
        """Finish if the partner has committed too, else wait for its COMMIT in VERIFIED."""
        if self.has_partner_committed:
            return self.finish(now)
        self.state = VERIFIED
        self.final_deadline = now + max(self.exchanges.config.stall_s, self.final_deadline - now)
        if self.is_backgrounded:
            self.timer_at = self.final_deadline
        return []

    def on_outcome(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle Outcome: in VERIFIED and IN_DOUBT answer that the exchange has happened, and finish.

        A partner asks only after its own COMMIT, so both sides have committed. In other states we have not.
        """
        if self.state not in (VERIFIED, IN_DOUBT):
            return Exchange.on_outcome(self, sender, now)
        return [*self.finish(now), Send(sender, Settled(self.session, True))]

    def on_failed(self, code: str, now: float) -> list[Effect]:
        """Handle a failed stream or link: in VERIFIED ask for the outcome, since the partner may have our COMMIT."""
        return self.ask_outcome(now) if self.state is VERIFIED else Exchange.on_failed(self, code, now)

    def finish(self, now: float) -> list[Effect]:
        """Apply the difference: both sides have committed."""
        exchanges, partner, part = self.exchanges, self.partner, self.part
        self.record_finished(now)
        self.count_mix()
        if part in exchanges.parts_to_measure:
            exchanges.measured_parts.add(part)
        if exchanges.fragments is not None:
            exchanges.fragments.on_mixed(part)
        if self.partner_version > IMPOSSIBLE_COUNT > self.our_version:  # No run reaches so many rounds.
            exchanges.misbehaviour.note(partner, "claims", now)
        # The version (the weights' age) is averaged as the weights are: by the exchanged difference.
        moved_share = self.weight if part is ALL else self.weight * part.share
        local = exchanges.local
        local.version = clamp_version(local.version + moved_share * version_gap(self.partner_version, self.our_version))
        local.progress.mix(
            self.our_claim, self.partner_claim, partner, chosen=self.is_initiator, joins=self.joins
        )  # fmt: skip
        local.mixed_steps = max(local.mixed_steps, self.snapshot_steps)
        mix_credit = 0.0  # How much the correction for our own data learns from this mix; 0 without a correction.
        if exchanges.config.kappa:
            mix_credit = float(credit(self.trained_intervals, self.partner_trained_intervals, self.accepted_share))
        interval_steps = 0  # The correction keeps its interval.
        if exchanges.config.auto_interval:
            interval_steps = local.steps_per_mix or 0
        is_plain = local.settling or self.IS_PLAIN
        mix = Mix(self.session, self.weight, is_plain, mix_credit, interval_steps, self.joins)
        return [mix, *self.end(DONE)]
