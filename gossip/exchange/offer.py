"""An exchange that one peer offers to one other: what pairs and pushes have in common.

    initiator:  PREPARING --snapshotted--> OFFERED --accept--> STREAMING --streamed--> VERIFIED --commit--> DONE
                                            |   ^                  ^                      |
    next partner:                           +---+                  |                      | failed, late
    busy, refuse, abort, failed, late                              |                      v
    responder:  PREPARING ------------snapshotted------------------+                  IN_DOUBT --settled--> DONE

Every state also leads to DROPPED, which ends the exchange without a result. In a push only the initiator streams. It
has no VERIFIED, since only one side sends COMMIT; its initiator comes into doubt from STREAMING. Tables and all events
are in :mod:`gossip.exchange.transitions`. If a table allows an event, ``Exchanges`` calls the handler ``on_<event>``,
which returns the effects to perform. Outcome asks whether an exchange has happened, and Settled answers.
:mod:`gossip.exchange.session` defines slots, versions and doubt; :class:`gossip.ids.Claim` is the progress that a side
states. Codes of failures are those of ``REASONS`` in :mod:`gossip.exchange.session_table`, kinds of misbehaviour those
of ``KINDS`` in :mod:`gossip.misbehaviour`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gossip.arithmetic.mixing import pair_weight
from gossip.arithmetic.sketch import Floats
from gossip.arithmetic.subsets import ALL, Subset
from gossip.codecs import CODECS, ExchangeCost
from gossip.effects import Effect, MemberState, Rename, Send, Transfer
from gossip.exchange.agreement import agreed_codec, is_acceptable
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import MAX_NEIGHBOURS, Session
from gossip.exchange.session_table import DOUBT_RETRY_S, INNOCENT_REASONS, REFUSALS
from gossip.exchange.transitions import Event, State
from gossip.filters.setbacks import is_cut_short
from gossip.ids import UNSTATED, Claim, PeerId
from gossip.wire.messages import Abort, Accept, Busy, Commit, Offer, Outcome, Settled

MAX_WEIGHT = 0.5  # Largest weight of a pair: with it both sides move to their mean.


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange(Session):
    """One side of an exchange with one partner. ``session`` changes for each partner that is asked."""

    IS_PLAIN: ClassVar[bool] = False  # True if it takes no outer momentum, even after the node has settled.
    COUNTS_ANSWER: ClassVar[bool] = True  # ``answer_s`` is a usual wait. A reserved pair measures none.

    exchanges: Exchanges[Any] = field(repr=False)
    partner: PeerId  # Our own id until a peer is asked, so that it equals no other member's.
    weight: float = MAX_WEIGHT  # Share of the partner's difference by which the exchange moves us.
    partner_version: float = 0.0  # As the partner states it, like the next two.
    partner_claim: Claim = UNSTATED
    partner_trained_intervals: float = 1.0
    trained_intervals: float = 1.0  # Intervals that this node trained from its last mix to the snapshot.
    accepted_share: float = 1.0  # Share of the partner's difference that our filter accepted.
    has_partner_committed: bool = False
    codec: str = "fp32"
    part: Subset = ALL  # The elements that are exchanged.
    asked_peers: set[PeerId] = field(default_factory=set)  # Peers not to ask, one set for all exchanges of a mix.
    max_asked_peers: int = 0  # Once ``asked_peers`` has this size, no further peer is asked.
    mass: float = 0.0  # Push-sum mass that a push carries, see :mod:`gossip.exchange.push`; 0 for a pair.
    final_deadline: float = 0.0  # Time at which the wait for the partner ends; ``timer_at`` may come earlier.
    answer_s: float = 0.0  # Time that the answer to our Offer took.
    done_count_at_snapshot: int = 0  # Number of exchanges that had finished when the snapshot was taken.
    is_partner_blamed: bool = False  # The partner's silence has been counted as misbehaviour already.

    @property
    def counterparts(self) -> tuple[PeerId, ...]:
        return (self.partner,)

    @property
    def has_slot(self) -> bool:
        return not (self.is_backgrounded or self.state is State.IN_DOUBT)

    @staticmethod
    def max_doubts(exchanges: Exchanges[Any]) -> int:
        """Return the limit of exchanges in doubt: as many as can be in progress at once.

        A network cut can hit each exchange in progress between its two COMMITs, and brings no others into doubt. The
        limit follows from the configuration and not from the partners that are present. A partner that is in back-off
        or away now may have been in an exchange that is in doubt.
        """
        config = exchanges.config
        return config.incoming_limit + config.partners if config.partners else 2 * MAX_NEIGHBOURS

    @property
    def elements(self) -> int:
        return self.part.elements(self.exchanges.local.elements)

    def accepts_from(self, event: Event, sender: PeerId) -> bool:
        return sender == self.partner

    @classmethod
    def on_stray(cls, exchanges: Exchanges[Any], event: Event, sender: PeerId, session: int) -> list[Effect]:
        exchange = exchanges.table.get(session)
        if exchange is not None and exchange.partner == sender:
            return []  # The message is a duplicate or early. An Abort in answer to it could contradict our COMMIT.
        match event:
            case Event.ACCEPT | Event.JOINED:
                return [Send(sender, Abort(session, "late"))]
            case Event.OUTCOME:
                return [Send(sender, Settled(session, (sender, session) in exchanges.outcomes))]
        return []

    # -- the beginning -------------------------------------------------------------------------------------------
    def mass_shares(self, partners: int) -> int:
        """Return the number of partners among which our snapshot divides its mass, 0 if it gives none away."""
        return 0

    @classmethod
    def mismatch(cls, offer: Offer) -> str | None:
        """Return the reason why the offer does not fit this kind of exchange, or None."""
        return None

    @classmethod
    def precedence(cls, exchanges: Exchanges[Any], sender: PeerId) -> tuple[list[Exchange], bool]:
        """Return our exchanges that give way to an offer of ``sender``, and whether the offer must wait."""
        return [], False

    def on_snapshotted(self, now: float, mass: float = 0.0, yielded_offer: Exchange | None = None) -> list[Effect]:
        """Handle our snapshot in PREPARING: the initiator sends the Offer; the responder Accept, and streams begin.

        Args:
            now: Current time in seconds.
            mass: Push-sum mass that the snapshot took from the model.
            yielded_offer: An offer of ours that gave way to this exchange and left it its snapshot.
        """
        local = self.exchanges.local
        self.our_version, self.snapshot_steps = local.version, local.steps
        self.done_count_at_snapshot = self.exchanges.done_count
        self.our_claim, self.trained_intervals = local.progress.claim, self.exchanges.trained_intervals(local.steps)
        if self.is_initiator:
            self.mass = mass
            return self.ask_next_partner(now)
        if yielded_offer is not None:
            self.our_version, self.snapshot_steps = yielded_offer.our_version, yielded_offer.snapshot_steps
            self.done_count_at_snapshot = yielded_offer.done_count_at_snapshot
            self.trained_intervals = yielded_offer.trained_intervals
        self.state = State.STREAMING
        accept = Accept(
            self.session, self.our_version, self.weight, self.codec, self.our_claim, self.trained_intervals
        )  # fmt: skip
        return [Send(self.partner, accept), self.start_streams(now)]

    def on_spoiled(self) -> list[Effect]:
        """Handle a snapshot that cannot be streamed, in any state: drop the exchange.

        A responder answers Busy, so that the initiator asks another partner.
        """
        answer: list[Effect] = [] if self.is_initiator else [Send(self.partner, Busy(self.session))]
        return [*answer, *self.drop()]

    @property
    def has_reusable_snapshot(self) -> bool:
        """Return True if another exchange can use the snapshot of this offer.

        The snapshot must hold all weights, give no mass away, and include the differences of all finished exchanges.
        """
        is_current = self.done_count_at_snapshot == self.exchanges.done_count
        return self.state is State.OFFERED and self.part is ALL and not self.mass and is_current

    def offered_codec(self) -> str:
        """Return the codec that we offer the partner."""
        return self.exchanges.offered_codec(self.partner, self.part)

    def set_terms(self, offer: Offer) -> None:
        """Set the codec and the weight of our answer to this offer."""
        config = self.exchanges.config
        self.codec = agreed_codec(config.codec_name, self.offered_codec(), offer.codec)
        cap = min(offer.weight, self.max_weight())
        self.weight = pair_weight(self.exchanges.local.version - offer.version, config.staleness_exponent, cap=cap)

    # -- asking --------------------------------------------------------------------------------------------------
    def ask_next_partner(self, now: float) -> list[Effect]:
        """Send the Offer to the next partner, under a new session number. Without a partner drop the exchange.

        A backgrounded offer has freed its slot, which a newer exchange may have taken. So it asks no other partner.
        """
        if self.is_backgrounded:
            return self.drop()
        exchanges, asked = self.exchanges, self.asked_peers
        excluded = asked
        is_retry = self.state is State.OFFERED  # Another partner was asked for this mix.
        if exchanges.is_overlapping:
            # Overlapping mixes have different partners, and another may have begun since this one was prepared.
            others = [other for other in exchanges.table.values() if other is not self and other.has_slot]
            excluded = asked.union(other.partner for other in others)
        partner = None
        if len(asked) < self.max_asked_peers:
            is_unproven_busy = exchanges.has_unproven(excluded=self)  # See ``Partners.is_unproven``.
            partner = exchanges.partners.choose(excluded, now, is_retry, is_unproven_busy)
        if partner is None:
            exchanges.has_given_up = True
            return self.drop()
        asked.add(partner)
        renamed = self.renew_session() if is_retry else []
        self.partner, self.state = partner, State.OFFERED
        self.weight = self.max_weight()
        self.phase_began_at, self.final_deadline = now, now + exchanges.config.reply_timeout_s
        self.timer_at = min(now + exchanges.answer_waits.limit_s, self.final_deadline)
        local = exchanges.local
        offer = Offer(
            self.session, local.fingerprint, local.run_id, self.our_version, self.weight,
            self.offered_codec(), self.MIXING, self.mass, str(self.part), self.our_claim,
            self.trained_intervals,
        )  # fmt: skip
        return [*renamed, Send(partner, offer)]

    def renew_session(self) -> list[Effect]:
        """Take a new session number, so that late messages of the last partner do not count as the next one's."""
        exchanges, old_session = self.exchanges, self.session
        new_session = self.session = exchanges.new_session()
        del exchanges.table[old_session]
        exchanges.table[new_session] = self
        return [Rename(old_session, new_session)]

    def max_weight(self) -> float:
        """Return the largest weight that we allow."""
        return self.exchanges.partners.max_weight(self.partner, self.exchanges.used_slots)

    def on_accept(self, sender: PeerId, accept: Accept, now: float) -> list[Effect]:
        """Handle Accept in OFFERED: start the streams, or abort if it changes what we offered."""
        bounded = self.part in self.exchanges.measured_parts  # Some codecs need a bound on the distance.
        if not (is_acceptable(accept, bounded) and 0 < accept.weight <= self.weight):
            return [Send(sender, Abort(self.session, "terms")), *self.fail("terms", now)]
        self.weight, self.partner_version, self.answer_s = accept.weight, accept.version, now - self.phase_began_at
        self.partner_claim, self.partner_trained_intervals = accept.progress, accept.trained
        self.codec, self.state = accept.codec, State.STREAMING
        return [self.start_streams(now)]

    def on_busy(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle Busy in OFFERED: ask the next partner."""
        return self.ask_next_partner(now)

    def on_refuse(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle Refuse in OFFERED: ask the next partner, and this one not for a while. It may still offer to us."""
        self.exchanges.partners.note_failure(sender, now, silent=True)
        return self.ask_next_partner(now)

    def leave_silent_partner(self, code: str, now: float) -> list[Effect]:
        """Count an offer without an answer as failed, and ask the next partner."""
        self.exchanges.count_failure(code)
        self.exchanges.own_results.add(failed=True)
        self.exchanges.partners.note_failure(self.partner, now, silent=True)
        return self.ask_next_partner(now)

    # -- waiting -------------------------------------------------------------------------------------------------
    def background(self, now: float) -> None:
        """Free the slot of an exchange whose partner takes longer than usual.

        If no more exchanges may be backgrounded, it keeps its slot until its final deadline.
        """
        exchanges = self.exchanges
        if not self.is_backgrounded and exchanges.backgrounded_count < exchanges.max_backgrounded:
            self.is_backgrounded = exchanges.has_freed_slot = True
            exchanges.partners.note_slow(self.partner, now)

    def on_late(self, now: float) -> list[Effect]:
        """Handle ``timer_at``, which has come, in any state.

        Before the final deadline the partner only takes longer than usual: background the exchange. A mix for which the
        loop waits cannot be backgrounded, and waits so long for streams alone. At the final deadline end the wait: ask
        the next partner, fail, or ask for the outcome. In IN_DOUBT ask again, and give up after ``doubt_s``.
        """
        exchanges, partner = self.exchanges, self.partner
        is_silent = self.state in (State.OFFERED, State.VERIFIED) and not exchanges.max_backgrounded
        if now < self.final_deadline and self.state is not State.IN_DOUBT and not is_silent:
            self.background(now)
            self.timer_at = self.final_deadline
            return []
        match self.state:
            case State.PREPARING:
                return [Send(partner, Busy(self.session)), *self.drop()]
            case State.OFFERED:
                exchanges.misbehaviour.note(partner, "wasted", now)
                abort = Send(partner, Abort(self.session, "late"))
                return [abort, *self.leave_silent_partner("unanswered", now)]
            case State.STREAMING:
                return self.on_failed("deadline", now)
            case State.VERIFIED:
                exchanges.partners.note_failure(partner, now)  # Its link works, and yet it does not send COMMIT.
                exchanges.misbehaviour.note(partner, "wasted", now)
                self.is_partner_blamed = True
                return self.ask_outcome(now)
        if now - self.phase_began_at < exchanges.config.internal.doubt_s:  # The state is IN_DOUBT.
            return self.ask_outcome(now)
        if not self.is_partner_blamed:
            exchanges.misbehaviour.note(partner, "wasted", now)
        return self.fail("doubt", now)

    # -- streaming -----------------------------------------------------------------------------------------------
    def start_streams(self, now: float) -> Transfer:
        """Return the Transfer, and set its deadlines.

        The final deadline allows 4 bytes per element at the slowest rate (both vectors travel at once), a pause of
        ``stall_s``, and the longest duration that exchanges with this partner take. The initiator adds the time that
        the answer took, which tells how long a round trip is. At ``timer_at`` the streams take longer than usual.
        """
        exchanges = self.exchanges
        seconds = 4 * self.elements / (exchanges.config.slowest_rate_mb_s * 1e6) + exchanges.config.stall_s
        seconds += exchanges.durations.longest_s(self.partner)
        if self.is_initiator:
            seconds += now - self.phase_began_at
        self.phase_began_at, self.final_deadline = now, now + seconds
        self.timer_at = self.final_deadline
        if not self.is_backgrounded:
            self.timer_at = min(now + exchanges.stream_waits.limit_s, self.final_deadline)
        exchanges.is_reservation_due = True  # While these streams run, the next pair may be reserved.
        return Transfer(self.session, self.partner, self.codec, self.part, *self.directions, not self.IS_PLAIN)

    @property
    def directions(self) -> tuple[bool, bool]:
        """Return two flags: we send our vector, and we receive the partner's."""
        return True, True

    def on_streamed(
        self, difference_sq: float, own_sq: float, now: float, sketch: Floats | None = None
    ) -> list[Effect]:  # fmt: skip
        """Handle the partner's complete vector in STREAMING: send COMMIT, or ABORT if a check fails.

        Args:
            difference_sq: Squared distance between the partner's vector and ours.
            own_sq: Squared norm of our vector.
            now: Current time in seconds.
            sketch: The sketch of the difference, float32 (WIDTH,); None if it has none.
        """
        exchanges, partner, elements = self.exchanges, self.partner, self.elements
        refusal = exchanges.filter.refusal(partner, difference_sq, own_sq, elements, exchanges.local.version)
        if refusal is not None:
            exchanges.refusals.add(partner, refusal)
            if math.isnan(difference_sq):  # A node checks its own vector. One that is far away may only have diverged.
                exchanges.misbehaviour.note(partner, "refused", now)
            told = exchanges.note_setback(self.session, partner, True, now)
            return [*told, Send(partner, Abort(self.session, refusal)), *self.fail(refusal, now)]
        # Squares of a part are scaled up to all elements.
        scale = exchanges.local.elements / elements if self.part.kind != "all" else 1.0
        exchanges.last_squares.append((difference_sq * scale, own_sq * scale))
        share, reasons = self.take_share(difference_sq, now, sketch)
        for reason in reasons:
            exchanges.refusals.add(partner, reason)
        if share < 1.0:
            self.weight, self.accepted_share = self.weight * share, share
            self.mass *= share  # A push that counts for less moves its receiver less.
        told = exchanges.note_setback(self.session, partner, is_cut_short(share, difference_sq, own_sq), now)
        return [*told, Send(partner, Commit(self.session)), *self.note_own_commit(now)]

    def take_share(self, difference_sq: float, now: float, sketch: Floats | None) -> tuple[float, tuple[str, ...]]:
        """Return the share of the partner's difference that our filter takes, and the reasons if it is below 1."""
        exchanges = self.exchanges
        return exchanges.filter.take_share(
            self.partner, self.weight, difference_sq, self.elements, exchanges.partners.present,
            exchanges.elapsed_intervals(now), sketch,
        )  # fmt: skip

    def note_own_commit(self, now: float) -> list[Effect]:
        """Change the state, as our COMMIT is being sent."""
        raise NotImplementedError

    # -- faults --------------------------------------------------------------------------------------------------
    def on_failed(self, code: str, now: float) -> list[Effect]:
        """Handle a failed stream or link: ask the next partner in OFFERED, else fail.

        Args:
            code: "broken" if the link broke, "idle" if it was closed as not needed, else what was wrong with a stream.
            now: Current time in seconds.
        """
        match self.state:
            case State.OFFERED:
                if code == "idle":  # The partner closed the link before our Offer arrived. That is no fault.
                    return self.ask_next_partner(now)
                return self.leave_silent_partner("unreached", now)
            case State.STREAMING:
                self.exchanges.misbehaviour.note(self.partner, "wasted", now)
                is_link_gone = code in ("broken", "idle")
                abort: list[Effect] = [] if is_link_gone else [Send(self.partner, Abort(self.session, code))]
                return [*abort, *self.fail(code, now)]
        return self.fail(code, now)

    def on_link_lost(self, peer: PeerId, now: float) -> list[Effect]:
        return self.exchanges.route_event(self, Event.FAILED, "broken", now) if peer == self.partner else []

    def lost_peers(self, state: Callable[[PeerId], MemberState | None]) -> list[PeerId]:
        """Return the partner if our offer waits for it and it is no longer ALIVE: ask the next partner at once."""
        waits = self.state is State.OFFERED and state(self.partner) is not MemberState.ALIVE
        return [self.partner] if waits else []

    def is_orphaned(self, state: Callable[[PeerId], MemberState | None]) -> bool:
        return state(self.partner) in (MemberState.DEAD, MemberState.LEFT)

    def on_abort(self, sender: PeerId, code: str, now: float) -> list[Effect]:
        """Handle Abort: ask the next partner in OFFERED, else fail. In any state the partner has not committed."""
        if self.state is State.OFFERED:
            return self.ask_next_partner(now)
        exchanges, told = self.exchanges, list[Effect]()
        if code in REFUSALS:  # Our vector was refused, which is no fault of the partner.
            told = exchanges.note_setback(self.session, sender, True, now)
        elif code not in INNOCENT_REASONS or sender in exchanges.excused_partners:
            exchanges.misbehaviour.note(sender, "wasted", now)
        return [*told, *self.fail(code, now)]

    def on_outcome(self, sender: PeerId, now: float) -> list[Effect]:
        """Handle Outcome before our COMMIT (up to STREAMING): answer that the exchange has not happened, and fail.

        The partner asks because it has committed and lost its link before a COMMIT of ours arrived. We have sent none,
        and must send none after this answer.
        """
        return [*self.fail("broken", now), Send(sender, Settled(self.session, False))]

    def on_settled(self, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
        """Handle the answer to our Outcome in IN_DOUBT: finish or fail, as the partner did."""
        return self.finish(now) if settled.committed else self.fail("aborted", now)

    def ask_outcome(self, now: float) -> list[Effect]:
        """Ask the partner for the outcome of an exchange in doubt, and free its slot.

        Neither our own mix nor incoming offers wait for the answer. A partner that dies or stays silent therefore costs
        the time of one exchange, and not ``doubt_s``, in which many others can be made.
        """
        ended: list[Effect] = []
        if self.state is not State.IN_DOUBT:
            self.state, self.phase_began_at = State.IN_DOUBT, now
            self.exchanges.has_freed_slot = True
            ended = self.exchanges.drop_excess_doubt(now)
        self.timer_at = now + DOUBT_RETRY_S
        return [*ended, Send(self.partner, Outcome(self.session))]

    def on_crowded(self, now: float) -> list[Effect]:
        """Handle too many exchanges in doubt, of which this IN_DOUBT one is the oldest: fail."""
        return self.fail("doubt", now)

    def on_gone(self, now: float) -> list[Effect]:
        """Handle a partner that is DEAD or LEFT, in IN_DOUBT: fail, as no other member knows the outcome."""
        return self.fail("doubt", now)

    # -- endings -------------------------------------------------------------------------------------------------
    def finish(self, now: float) -> list[Effect]:
        """Apply the exchange: it has happened."""
        raise NotImplementedError

    def record_finished(self, now: float) -> None:
        """Record that the exchange has happened."""
        exchanges, partner = self.exchanges, self.partner
        exchanges.remember_outcome((partner, self.session), True)
        if self.state is not State.IN_DOUBT:
            seconds = now - self.phase_began_at
            sent_bytes = CODECS[self.codec].encoded_bytes(self.elements)
            exchanges.durations.add(partner, seconds, sent_bytes)
            if self.is_initiator:
                exchanges.own_results.add(failed=False)
                cost_s = self.answer_s + seconds
                exchanges.last_costs[partner] = ExchangeCost(self.elements, self.codec, sent_bytes, cost_s)
            exchanges.partners.note_rate(partner, seconds)
            exchanges.stream_waits.add(partner, seconds)
        if self.is_initiator and self.COUNTS_ANSWER:
            exchanges.answer_waits.add(partner, self.answer_s)
        exchanges.done_count += 1
        exchanges.equal_since = None
        exchanges.last_partner = partner
        exchanges.misbehaviour.take_back(partner, "wasted")
        exchanges.excused_partners.pop(partner, None)
        exchanges.distant_partners.pop(partner, None)
        exchanges.unreliable_partners.pop(partner, None)
        exchanges.partners.note_mix(partner, now, self.is_initiator)

    def count_mix(self) -> None:
        """Count the exchange towards the mix that the schedule waits for.

        Skip exchanges that were resolved from IN_DOUBT: our own mix has moved on, and the partner has earned no trust.
        """
        exchanges = self.exchanges
        if self.state is not State.IN_DOUBT:
            exchanges.mixed_partners.append(self.partner)
            exchanges.has_own_mixed = exchanges.has_own_mixed or self.is_initiator
            exchanges.has_given_way = exchanges.has_given_way and not self.is_initiator

    def fail(self, code: str, now: float) -> list[Effect]:
        """Count the failure for this reason, hold it against the partner unless it is excused, and drop.

        It is excused if the reason is innocent and the partner's one excuse is unused (``excuse_once``). A partner that
        this exchange has blamed before is not blamed again.
        """
        exchanges = self.exchanges
        exchanges.count_failure(code)
        if self.is_initiator:
            exchanges.own_results.add(failed=True)
        if code == "overflow":
            exchanges.forget_bound(self.part, self.partner)
        is_excused = code in INNOCENT_REASONS and not self.is_partner_blamed and exchanges.excuse_once(self.partner)
        if not self.is_partner_blamed and not is_excused:
            # In PREPARING the partner has cost us no stream, so its failure counts as mere silence.
            exchanges.partners.note_failure(self.partner, now, silent=self.state is State.PREPARING)
        if self.is_initiator and not self.is_backgrounded:
            exchanges.has_given_up = True
        return self.drop()

    def drop(self) -> list[Effect]:
        """End the exchange without a result."""
        return self.end(State.DROPPED)

    def on_yielded(self) -> list[Effect]:
        """Handle another member's offer that takes the place of ours, before STREAMING: drop ours."""
        return self.drop()

    def on_replaced(self) -> list[Effect]:
        """Handle weights that are about to be replaced, in any state: tell a partner that waits, and drop."""
        answer: list[Effect] = []
        if self.state in (State.OFFERED, State.STREAMING):
            answer.append(Send(self.partner, Abort(self.session, "replaced")))
        elif self.state is State.PREPARING and not self.is_initiator:
            answer.append(Send(self.partner, Busy(self.session)))
        self.mass = 0.0  # The mass belongs to weights that are being replaced.
        return [*answer, *self.drop()]
