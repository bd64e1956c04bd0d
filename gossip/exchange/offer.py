"""An exchange that one peer offers to one other: what pairs and pushes have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gossip.arithmetic.subsets import ALL, Subset
from gossip.effects import Effect, MemberState, Rename, Send, Transfer
from gossip.exchange.agreement import answers
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import AT_ONCE, Session
from gossip.exchange.session_table import DOUBT_RETRY_S
from gossip.exchange.transitions import Event, State
from gossip.ids import UNSTATED, Claim, PeerId
from gossip.wire.messages import Abort, Accept, Busy, Commit, Offer, Outcome, Settled

__all__ = ["Exchange"]

INNOCENT = ("replaced", "late", "overflow")  # Reasons for an abort that are not the partner's fault.


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange(Session):
    """One side of an exchange with one partner.

    ``theirs`` is the version that the partner states and ``partner_claim`` its progress. ``committed`` says that its
    COMMIT has arrived. ``asked`` holds the partners that were offered an exchange of the same mix. ``session`` changes
    for each partner that is asked.
    """

    MIXING: ClassVar[str]  # The name in an Offer.
    ANSWERED: ClassVar[bool] = True  # Its answer time counts in the statistics of answers.

    exchanges: Exchanges[Any] = field(repr=False)
    partner: PeerId
    weight: float = 0.5
    theirs: float = 0.0
    partner_claim: Claim = UNSTATED
    trained: float = 1.0  # Intervals from the last mix to the snapshot, ours and as the partner states it.
    partner_trained: float = 1.0
    taken: float = 1.0  # Share of the difference that the filter left.
    committed: bool = False
    codec: str = "fp32"
    asked: set[PeerId] = field(default_factory=set)
    mass: float = 0.0  # Push-sum mass that a push carries.
    part: Subset = ALL
    tries: int = 0  # Number of partners that may be asked.
    until: float = 0.0  # Time at which we stop waiting; at the earlier ``deadline`` the exchange is parked.
    answer_s: float = 0.0  # Time that the answer to our offer took.
    after: int = 0  # Number of exchanges that had finished when its snapshot was taken.
    blamed: bool = False  # The partner's silence has been noted already.

    @property
    def others(self) -> tuple[PeerId, ...]:
        return (self.partner,)

    @property
    def idle(self) -> bool:
        return self.parked or self.state is State.IN_DOUBT

    @property
    def promised(self) -> bool:
        """Return True if it was reserved ahead and its streams have not begun."""
        return False

    @staticmethod
    def most_doubts(exchanges: Exchanges[Any]) -> int:
        """Return the limit of exchanges in doubt.

        It equals the exchanges that can be in progress at once, because a cut between all of their COMMITs leaves no
        more in doubt. Members that sit out or are away at this moment do not lower it.
        """
        config = exchanges.config
        return config.incoming_limit + config.partners if config.partners else 2 * AT_ONCE

    @property
    def elements(self) -> int:
        return self.part.elements(self.exchanges.local.elements)

    def accepts_from(self, event: Event, sender: PeerId) -> bool:
        return sender == self.partner

    @classmethod
    def on_stray(cls, exchanges: Exchanges[Any], event: Event, sender: PeerId, session: int) -> list[Effect]:
        one = exchanges.table.get(session)
        if one is not None and one.partner == sender:
            return []  # The message is a duplicate or early; an Abort could follow our COMMIT.
        match event:
            case Event.ACCEPT | Event.JOINED:
                return [Send(sender, Abort(session, "late"))]
            case Event.OUTCOME:
                return [Send(sender, Settled(session, (sender, session) in exchanges.verdicts))]
        return []

    # -- the beginning -------------------------------------------------------------------------------------------
    def carries(self, partners: int) -> int:
        """Return the number of partners that share the mass of our snapshot, 0 if it gives none away."""
        return 0

    @classmethod
    def mismatch(cls, offer: Offer) -> str | None:
        """Return the reason why the offer does not fit this kind of exchange, or None."""
        return None

    @classmethod
    def standing(cls, exchanges: Exchanges[Any], sender: PeerId) -> tuple[list[Exchange], bool]:
        """Return our exchanges that give way to an offer of ``sender``, and whether the offer must wait."""
        return [], False

    def snapshotted(self, now: float, mass: float = 0.0, of: Exchange | None = None) -> list[Effect]:
        """Send the Offer or the Accept, now that the snapshot exists.

        ``of`` is an offer of ours that gave way to this exchange and left it its snapshot.
        """
        local = self.exchanges.local
        self.ours, self.steps, self.after = local.version, local.steps, self.exchanges.done
        self.claim, self.trained = local.progress.claim, self.exchanges.trained(local.steps)
        if self.initiator:
            self.mass = mass
            return self.offer(now)
        if of is not None:
            self.ours, self.steps, self.after, self.trained = of.ours, of.steps, of.after, of.trained
        self.state = State.STREAMING
        accept = Accept(self.session, self.ours, self.weight, self.codec, self.claim, self.trained)
        return [Send(self.partner, accept), self.transfer(now)]

    def spoiled(self) -> list[Effect]:
        """End the exchange, as nothing can be streamed: tell an initiator to ask another partner."""
        told: list[Effect] = [] if self.initiator else [Send(self.partner, Busy(self.session))]
        return [*told, *self.drop()]

    @property
    def serves(self) -> bool:
        """Return True if another exchange can use its snapshot.

        The snapshot must hold all weights, give no mass away, and include the differences of all finished exchanges.
        """
        current = self.after == self.exchanges.done
        return self.state is State.OFFERED and self.part is ALL and not self.mass and current

    # -- asking --------------------------------------------------------------------------------------------------
    def offer(self, now: float) -> list[Effect]:
        """Ask the next partner under a new session number; drop the snapshot if there is no partner left.

        A parked exchange only ends: another has taken its place already.
        """
        if self.parked:
            return self.drop()
        exchanges, asked = self.exchanges, self.asked
        again, crowded = self.state is State.OFFERED, strangers(exchanges, but=self)
        # Another exchange may have begun since this one was prepared. Overlapping mixes have different partners.
        mixing = [one.partner for one in exchanges.table.values() if not one.idle] if exchanges.overlapping else []
        excluded = asked.union(mixing)
        partner = exchanges.partners.choose(excluded, now, again, crowded) if len(asked) < self.tries else None
        if partner is None:
            exchanges.gave_up = True
            return self.drop()
        asked.add(partner)
        renamed = self.rename() if again else []
        self.partner, self.state = partner, State.OFFERED
        self.weight = self.cap()
        self.since, self.until = now, now + exchanges.config.reply_timeout_s
        self.deadline = min(now + exchanges.answer_waits.limit_s, self.until)
        local = exchanges.local
        message = Offer(
            self.session, local.fingerprint, local.run_id, self.ours, self.weight, exchanges.codec(partner, self.part),
            self.MIXING, self.mass, str(self.part), self.claim, self.trained,
        )  # fmt: skip
        return [*renamed, Send(partner, message)]

    def rename(self) -> list[Effect]:
        """Take a new session number, so that late messages of the last partner do not count as the next one's."""
        exchanges, old = self.exchanges, self.session
        new = self.session = exchanges.new_session()
        del exchanges.table[old], exchanges.outgoing[old]
        exchanges.table[new] = exchanges.outgoing[new] = self
        return [Rename(old, new)]

    def accept(self, sender: PeerId, accept: Accept, now: float) -> list[Effect]:
        agreed = answers(accept, self.part in self.exchanges.bounded) and 0 < accept.weight <= self.weight
        if not agreed:
            return [Send(sender, Abort(self.session, "terms")), *self.fail(now, "terms")]
        self.weight, self.theirs, self.answer_s = accept.weight, accept.version, now - self.since
        self.partner_claim, self.partner_trained = accept.progress, accept.trained
        self.codec, self.state = accept.codec, State.STREAMING
        return [self.transfer(now)]

    def cap(self) -> float:
        """Return the largest weight that we allow."""
        return self.exchanges.partners.cap(self.partner, self.exchanges.moving)

    def busy(self, sender: PeerId, now: float) -> list[Effect]:
        return self.offer(now)

    def refuse(self, sender: PeerId, now: float) -> list[Effect]:
        # Do not ask this partner for a while; it may still offer to us.
        self.exchanges.partners.failed(sender, now, silent=True)
        return self.offer(now)

    def unanswered(self, now: float, code: str) -> list[Effect]:
        """Record that an offer failed, and ask another partner."""
        self.exchanges.count(code)
        self.exchanges.partners.failed(self.partner, now, silent=True)
        return self.offer(now)

    # -- waiting -------------------------------------------------------------------------------------------------
    def park(self, now: float) -> None:
        """Free the slot of an exchange whose partner takes longer than usual.

        If no more exchanges may be parked, it keeps its slot until its time is up.
        """
        exchanges = self.exchanges
        if not self.parked and exchanges.parked < exchanges.most_parked:
            self.parked = exchanges.freed = True
            exchanges.partners.slow(self.partner, now)
            exchanges.outgoing.pop(self.session, None)

    def late(self, now: float) -> list[Effect]:
        exchanges, partner = self.exchanges, self.partner
        if now < self.until and self.state is not State.IN_DOUBT:
            self.park(now)
            self.deadline = self.until
            return []
        match self.state:
            case State.PREPARING:
                return [Send(partner, Busy(self.session)), *self.drop()]
            case State.OFFERED:
                exchanges.misbehaviour.note(partner, "wasted", now)
                told = Send(partner, Abort(self.session, "late"))
                return [told, *self.unanswered(now, "unanswered")]
            case State.STREAMING:
                return self.failed("deadline", now)
            case State.VERIFIED:
                exchanges.partners.failed(partner, now)  # Its link works, and yet it does not send COMMIT.
                exchanges.misbehaviour.note(partner, "wasted", now)
                self.blamed = True
                return self.doubt(now)
        if now - self.since < exchanges.config.internal.doubt_s:
            return self.doubt(now)
        if not self.blamed:
            exchanges.misbehaviour.note(partner, "wasted", now)
        return self.fail(now, "doubt")

    # -- streaming -----------------------------------------------------------------------------------------------
    def transfer(self, now: float) -> Transfer:
        exchanges = self.exchanges
        seconds = 4 * self.elements / (exchanges.config.slowest_rate_mb_s * 1e6) + exchanges.config.stall_s
        seconds += exchanges.durations.longest_s(self.partner)
        if self.initiator:
            seconds += now - self.since  # The time of the answer counts, because the round trip is part of it.
        self.since, self.until = now, now + seconds
        self.deadline = self.until if self.parked else min(now + exchanges.stream_waits.limit_s, self.until)
        exchanges.began = True
        sends, receives = self.ways
        return Transfer(self.session, self.partner, self.codec, self.part, sends, receives)

    @property
    def ways(self) -> tuple[bool, bool]:
        """Return two flags: we send our vector, and we receive the partner's."""
        return True, True

    def streamed(self, difference_sq: float, own_sq: float, now: float) -> list[Effect]:
        """Check the partner's complete vector and answer with COMMIT or ABORT."""
        exchanges, partner, elements = self.exchanges, self.partner, self.elements
        refused = exchanges.filter.judge(partner, difference_sq, own_sq, elements, exchanges.local.version)
        if refused is not None:
            exchanges.refusals.add(partner, refused)
            exchanges.misbehaviour.note(partner, "refused", now)
            return [Send(partner, Abort(self.session, refused)), *self.fail(now, refused)]
        whole = exchanges.local.elements / elements if self.part.kind != "all" else 1.0
        exchanges.seen.append((difference_sq * whole, own_sq * whole))
        here, at = exchanges.partners.here, exchanges.intervals(now)
        taken, why = exchanges.filter.take(partner, self.weight, difference_sq, elements, here, at)
        for code in why:
            exchanges.refusals.add(partner, code)
        if taken == 1.0:
            exchanges.misbehaviour.take_back(partner, "clipped")
        else:
            exchanges.misbehaviour.note(partner, "clipped", now)
            self.weight, self.taken = self.weight * taken, taken
            self.mass *= taken  # A push that counts for less moves its receiver less.
        return [Send(partner, Commit(self.session)), *self.committing(now)]

    def committing(self, now: float) -> list[Effect]:
        """Change the state, as our COMMIT is being sent."""
        raise NotImplementedError

    # -- faults --------------------------------------------------------------------------------------------------
    def failed(self, code: str, now: float) -> list[Effect]:
        """Handle streams that stalled, brought wrong bytes or lost their link ("broken")."""
        match self.state:
            case State.OFFERED:
                if code == "idle":  # The offer crossed the message that the link was not needed.
                    return self.offer(now)
                return self.unanswered(now, "unreached")
            case State.STREAMING:
                self.exchanges.misbehaviour.note(self.partner, "wasted", now)
                untold = code in ("broken", "idle")
                told: list[Effect] = [] if untold else [Send(self.partner, Abort(self.session, code))]
                return [*told, *self.fail(now, code)]
        return self.fail(now, code)

    def without(self, peer: PeerId, now: float) -> list[Effect]:
        return self.exchanges.tell(self, Event.FAILED, "broken", now) if peer == self.partner else []

    def lost(self, state: Callable[[PeerId], MemberState | None]) -> list[PeerId]:
        """Return the partner if our offer waits for it and it is no longer held ALIVE. The offer then goes to another
        at once."""
        waits = self.state is State.OFFERED and state(self.partner) is not MemberState.ALIVE
        return [self.partner] if waits else []

    def orphaned(self, state: Callable[[PeerId], MemberState | None]) -> bool:
        return state(self.partner) in (MemberState.DEAD, MemberState.LEFT)

    def abort(self, sender: PeerId, code: str, now: float) -> list[Effect]:
        if self.state is State.OFFERED:
            return self.offer(now)
        self.exchanges.misbehaviour.note(sender, "wasted", now)
        return self.fail(now, code)

    def outcome(self, sender: PeerId, now: float) -> list[Effect]:
        """Answer "aborted": the partner would not ask if it had our COMMIT, and we have not sent it."""
        return [*self.fail(now, "broken"), Send(sender, Settled(self.session, False))]

    def settled(self, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
        return self.finish(now) if settled.committed else self.fail(now, "aborted")

    def doubt(self, now: float) -> list[Effect]:
        """Ask the partner for the outcome of an exchange in doubt.

        Neither our own mix nor incoming offers wait for the answer. A partner that dies or stays silent therefore costs
        one exchange, and not ``doubt_s`` of them.
        """
        ended: list[Effect] = []
        if self.state is not State.IN_DOUBT:
            self.state, self.since = State.IN_DOUBT, now
            self.exchanges.freed = True
            self.exchanges.outgoing.pop(self.session, None)
            ended = self.exchanges.forget_doubts(now)
        self.deadline = now + DOUBT_RETRY_S
        return [*ended, Send(self.partner, Outcome(self.session))]

    def crowded(self, now: float) -> list[Effect]:
        return self.fail(now, "doubt")

    def gone(self, now: float) -> list[Effect]:
        return self.fail(now, "doubt")

    # -- endings -------------------------------------------------------------------------------------------------
    def finish(self, now: float) -> list[Effect]:
        """Apply the exchange: it has happened."""
        raise NotImplementedError

    def fail(self, now: float, code: str) -> list[Effect]:
        exchanges = self.exchanges
        exchanges.count(code)
        if code == "overflow":
            # The next exchange uses a codec without a bound and measures the distance anew.
            exchanges.bounded.discard(self.part)
            # The next exchange with this partner does the same: others may show a smaller distance.
            exchanges.apart[self.partner] = None
        if not self.blamed and not (code in INNOCENT and exchanges.excuses(self.partner)):
            exchanges.partners.failed(self.partner, now, silent=self.state is State.PREPARING)
        if self.initiator and not self.parked:
            exchanges.gave_up = True
        return self.drop()

    def drop(self) -> list[Effect]:
        """End the exchange without a result."""
        return self.end(State.DROPPED)

    def yielded(self) -> list[Effect]:
        return self.drop()

    def replaced(self) -> list[Effect]:
        told: list[Effect] = []
        if self.state in (State.OFFERED, State.STREAMING):
            told.append(Send(self.partner, Abort(self.session, "replaced")))
        elif self.state is State.PREPARING and not self.initiator:
            told.append(Send(self.partner, Busy(self.session)))
        self.mass = 0.0  # The mass belongs to weights that are being replaced.
        return [*told, *self.drop()]


def strangers(exchanges: Exchanges[Exchange], but: Exchange | None = None) -> bool:
    """Return True if an unverified peer has an exchange."""
    strange = exchanges.partners.strange
    return any(one is not but and strange(one.partner) for one in exchanges.table.values())
