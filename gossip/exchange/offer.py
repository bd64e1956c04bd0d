"""An exchange with one partner, which one of the two offers to the other: what pairs and pushes have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gossip.arithmetic.subsets import ALL, Subset
from gossip.effects import Effect, MemberState, Rename, Send, Transfer
from gossip.exchange.agreement import answers
from gossip.exchange.beginning import admit, start, strangers
from gossip.exchange.session import AT_ONCE, Session
from gossip.exchange.session_table import DOUBT_RETRY_S
from gossip.exchange.transitions import Event, State
from gossip.ids import UNSTATED, Claim, PeerId
from gossip.wire.messages import Abort, Accept, Busy, Commit, Offer, Outcome, Settled

if TYPE_CHECKING:
    from gossip.exchange.exchanges import Exchanges

__all__ = ["Exchange"]

INNOCENT = ("replaced", "late", "overflow")  # reasons for an abort that are nobody's fault


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange(Session):
    """``theirs`` is the version that the partner states, ``partner_claim`` its progress, ``committed`` whether its
    COMMIT is here, ``asked`` who was offered this or another exchange of the same mix. ``session`` is another number
    for each partner that is asked."""

    MIXING: ClassVar[str]  # as an Offer names it
    ANSWERED: ClassVar[bool] = True  # what its answer took says what answers take

    partner: PeerId
    weight: float = 0.5
    theirs: float = 0.0
    partner_claim: Claim = UNSTATED
    trained: float = 1.0  # intervals from the last mix to the snapshot, ours and as the partner states it
    partner_trained: float = 1.0
    taken: float = 1.0  # the share of the difference that the filter left
    committed: bool = False
    codec: str = "fp32"
    asked: set[PeerId] = field(default_factory=set)
    mass: float = 0.0  # that a push carries
    part: Subset = ALL
    tries: int = 0  # how many may be asked
    until: float = 0.0  # how long it is waited for; at ``deadline`` before that it is parked
    answer_s: float = 0.0  # what the answer to our offer took
    after: int = 0  # how many exchanges had been finished at its snapshot
    blamed: bool = False  # its partner has been, for what it did not say

    @property
    def others(self) -> tuple[PeerId, ...]:
        return (self.partner,)

    @property
    def idle(self) -> bool:
        return self.parked or self.state is State.DOUBT

    @property
    def promised(self) -> bool:
        """Whether it was agreed ahead, and its streams have not begun."""
        return False

    @staticmethod
    def most_doubts(exchanges: Exchanges[Any]) -> int:
        """As many as may ever be under way at once: a cut between all of their COMMITs leaves no more. Who sits out, or
        is not there at this moment, is no reason to forget one."""
        config = exchanges.config
        return config.incoming_limit + config.partners if config.partners else 2 * AT_ONCE

    @property
    def elements(self) -> int:
        return self.part.elements(self.exchanges.local.elements)

    def hears(self, event: Event, sender: PeerId) -> bool:
        return sender == self.partner

    @classmethod
    def unheard(cls, exchanges: Exchanges[Any], event: Event, sender: PeerId, session: int) -> list[Effect]:
        one = exchanges.table.get(session)
        if one is not None and one.partner == sender:
            return []  # said twice, or too early; an Abort could follow our COMMIT
        match event:
            case Event.ACCEPT | Event.JOINED:
                return [Send(sender, Abort(session, "late"))]
            case Event.OUTCOME:
                return [Send(sender, Settled(session, (sender, session) in exchanges.verdicts))]
        return []

    # -- the beginning -------------------------------------------------------------------------------------------
    @classmethod
    def start(cls, exchanges: Exchanges[Any], now: float) -> list[Effect]:
        return start(cls, exchanges, now)

    def carries(self, partners: int) -> int:
        """Among how many partners what our snapshot gives away is divided, 0 where it gives away nothing."""
        return 0

    @classmethod
    def answer(cls, exchanges: Exchanges[Any], sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        return admit(cls, exchanges, sender, offer, now)

    @classmethod
    def mismatch(cls, offer: Offer) -> str | None:
        """What of the offer is not of this kind of exchange."""
        return None

    @classmethod
    def standing(cls, exchanges: Exchanges[Any], sender: PeerId) -> tuple[list[Exchange], bool]:
        """What of ours makes way for an offer of this member, and whether the offer must wait for something else."""
        return [], False

    def snapshotted(self, now: float, mass: float = 0.0, of: Exchange | None = None) -> list[Effect]:
        """``of``: an offer of ours that made way for this exchange, and whose snapshot this one's is."""
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
        """Nothing will be streamed after all: an offer is not made, or the one who made it is told to ask another."""
        told: list[Effect] = [] if self.initiator else [Send(self.partner, Busy(self.session))]
        return [*told, *self.drop()]

    @property
    def serves(self) -> bool:
        """Whether its snapshot would be another exchange's as well: it is of all, gives nothing away, and lacks nothing
        that others brought since."""
        current = self.after == self.exchanges.done
        return self.state is State.OFFERED and self.part is ALL and not self.mass and current

    # -- asking --------------------------------------------------------------------------------------------------
    def offer(self, now: float) -> list[Effect]:
        """Ask the next partner, under a number that the one before does not know; with nobody left to ask the snapshot
        is forgotten. What was parked has been replaced already."""
        if self.parked:
            return self.drop()
        exchanges, asked = self.exchanges, self.asked
        again, crowded = self.state is State.OFFERED, strangers(exchanges, but=self)
        partner = exchanges.partners.choose(asked, now, again, crowded) if len(asked) < self.tries else None
        if partner is None:
            exchanges.gave_up = True
            return self.drop()
        asked.add(partner)
        renamed = self.rename() if again else []
        self.partner, self.state = partner, State.OFFERED
        self.weight = self.cap()
        self.since, self.until = now, now + exchanges.config.reply_timeout_s
        self.deadline = min(now + exchanges.answers.seconds, self.until)
        local = exchanges.local
        message = Offer(
            self.session, local.fingerprint, local.genesis, self.ours, self.weight, exchanges.codec(partner, self.part),
            self.MIXING, self.mass, str(self.part), self.claim, self.trained,
        )  # fmt: skip
        return [*renamed, Send(partner, message)]

    def rename(self) -> list[Effect]:
        """What the last partner said, or still sends, must not be taken for the next one's."""
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
        """The largest weight that we allow."""
        return self.exchanges.partners.cap(self.partner, self.exchanges.moving)

    def busy(self, sender: PeerId, now: float) -> list[Effect]:
        return self.offer(now)

    def refuse(self, sender: PeerId, now: float) -> list[Effect]:
        self.exchanges.partners.failed(sender, now, silent=True)  # not with it; it may still come to us
        return self.offer(now)

    def unanswered(self, now: float, code: str) -> list[Effect]:
        """Nothing came of an offer, and another partner is asked."""
        self.exchanges.count(code)
        self.exchanges.partners.failed(self.partner, now, silent=True)
        return self.offer(now)

    # -- waiting -------------------------------------------------------------------------------------------------
    def park(self, now: float) -> None:
        """It waits for its partner for longer than that takes: others go first from now on, where there is a place for
        it. Whose place is taken by others who say nothing keeps its slot until its time is up."""
        exchanges = self.exchanges
        if not self.parked and exchanges.parked < exchanges.most_parked:
            self.parked = exchanges.freed = True
            exchanges.partners.slow(self.partner, now)
            exchanges.outgoing.pop(self.session, None)

    def late(self, now: float) -> list[Effect]:
        exchanges, partner = self.exchanges, self.partner
        if now < self.until and self.state is not State.DOUBT:
            self.park(now)
            self.deadline = self.until
            return []
        match self.state:
            case State.PREPARING:
                return [Send(partner, Busy(self.session)), *self.drop()]
            case State.OFFERED:
                exchanges.conduct.note(partner, "wasted", now)
                told = Send(partner, Abort(self.session, "late"))
                return [told, *self.unanswered(now, "unanswered")]
            case State.STREAMING:
                return self.failed("deadline", now)
            case State.VERIFIED:
                exchanges.partners.failed(partner, now)  # whose link is whole, and who does not say COMMIT
                exchanges.conduct.note(partner, "wasted", now)
                self.blamed = True
                return self.doubt(now)
        if now - self.since < exchanges.config.doubt_s:
            return self.doubt(now)
        if not self.blamed:
            exchanges.conduct.note(partner, "wasted", now)
        return self.fail(now, "doubt")

    # -- streaming -----------------------------------------------------------------------------------------------
    def transfer(self, now: float) -> Transfer:
        exchanges = self.exchanges
        seconds = 4 * self.elements / (exchanges.config.slowest_rate_mb_s * 1e6) + exchanges.config.stall_s
        seconds += exchanges.durations.allowance(self.partner)
        if self.initiator:
            seconds += now - self.since  # what the answer took: the way there and back is part of it
        self.since, self.until = now, now + seconds
        self.deadline = self.until if self.parked else min(now + exchanges.streams.seconds, self.until)
        exchanges.began = True
        sends, receives = self.ways
        return Transfer(self.session, self.partner, self.codec, self.part, sends, receives)

    @property
    def ways(self) -> tuple[bool, bool]:
        """Whether we send our vector, and receive theirs."""
        return True, True

    def streamed(self, difference_sq: float, own_sq: float, now: float) -> list[Effect]:
        """All of theirs is here, with checksums right."""
        exchanges, partner, elements = self.exchanges, self.partner, self.elements
        refused = exchanges.filter.judge(partner, difference_sq, own_sq, elements, exchanges.local.version)
        if refused is not None:
            exchanges.refusals.add(partner, refused)
            exchanges.conduct.note(partner, "refused", now)
            return [Send(partner, Abort(self.session, refused)), *self.fail(now, refused)]
        whole = exchanges.local.elements / elements if self.part.kind != "all" else 1.0
        exchanges.seen.append((difference_sq * whole, own_sq * whole))
        here, at = exchanges.partners.here, exchanges.intervals(now)
        taken, why = exchanges.filter.take(partner, self.weight, difference_sq, elements, here, at)
        for code in why:
            exchanges.refusals.add(partner, code)
        if taken == 1.0:
            exchanges.conduct.excuse(partner, "clipped")
        else:
            exchanges.conduct.note(partner, "clipped", now)
            self.weight, self.taken = self.weight * taken, taken
            self.mass *= taken  # of a push: what counts for less moves its receiver less
        return [Send(partner, Commit(self.session)), *self.committing(now)]

    def committing(self, now: float) -> list[Effect]:
        """Our COMMIT is on its way."""
        raise NotImplementedError

    # -- faults --------------------------------------------------------------------------------------------------
    def failed(self, code: str, now: float) -> list[Effect]:
        """The streams of this session stalled or brought wrong bytes, or the link it ran over broke ("broken")."""
        match self.state:
            case State.OFFERED:
                if code == "idle":  # the offer crossed the word that the link was not needed
                    return self.offer(now)
                return self.unanswered(now, "unreached")
            case State.STREAMING:
                self.exchanges.conduct.note(self.partner, "wasted", now)
                untold = code in ("broken", "idle")
                told: list[Effect] = [] if untold else [Send(self.partner, Abort(self.session, code))]
                return [*told, *self.fail(now, code)]
        return self.fail(now, code)

    def without(self, peer: PeerId, now: float) -> list[Effect]:
        return self.exchanges.tell(self, Event.FAILED, "broken", now) if peer == self.partner else []

    def lost(self, state: Callable[[PeerId], MemberState | None]) -> list[PeerId]:
        """An offer goes to another before its time is up."""
        waits = self.state is State.OFFERED and state(self.partner) is not MemberState.ALIVE
        return [self.partner] if waits else []

    def orphaned(self, state: Callable[[PeerId], MemberState | None]) -> bool:
        return state(self.partner) in (MemberState.DEAD, MemberState.LEFT)

    def abort(self, sender: PeerId, code: str, now: float) -> list[Effect]:
        if self.state is State.OFFERED:
            return self.offer(now)
        self.exchanges.conduct.note(sender, "wasted", now)
        return self.fail(now, code)

    def outcome(self, sender: PeerId, now: float) -> list[Effect]:
        """They would not ask if they had our COMMIT, and we have not said it."""
        return [*self.fail(now, "broken"), Send(sender, Settled(self.session, False))]

    def settled(self, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
        return self.finish(now) if settled.committed else self.fail(now, "aborted")

    def doubt(self, now: float) -> list[Effect]:
        """Ask the partner how it ended. A partner that died at the worst moment, or will not say, costs one exchange
        and not doubt_s of them: neither our own mix nor anybody's offer waits for the answer."""
        ended: list[Effect] = []
        if self.state is not State.DOUBT:
            self.state, self.since = State.DOUBT, now
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
        """It has happened."""
        raise NotImplementedError

    def fail(self, now: float, code: str) -> list[Effect]:
        exchanges = self.exchanges
        exchanges.count(code)
        if code == "overflow":
            exchanges.bounded.discard(
                self.part
            )  # once more with a codec that needs no bound, which shows how wide it must be
            exchanges.apart[self.partner] = None  # with this one too, whoever was faster: others show less
        if not self.blamed and not (code in INNOCENT and exchanges.excuses(self.partner)):
            exchanges.partners.failed(self.partner, now, silent=self.state is State.PREPARING)
        if self.initiator and not self.parked:
            exchanges.gave_up = True
        return self.drop()

    def drop(self) -> list[Effect]:
        """Nothing came of it."""
        return self.end(State.DROPPED)

    def yielded(self) -> list[Effect]:
        return self.drop()

    def replaced(self) -> list[Effect]:
        told: list[Effect] = []
        if self.state in (State.OFFERED, State.STREAMING):
            told.append(Send(self.partner, Abort(self.session, "replaced")))
        elif self.state is State.PREPARING and not self.initiator:
            told.append(Send(self.partner, Busy(self.session)))
        self.mass = 0.0  # of weights that go
        return [*told, *self.drop()]
