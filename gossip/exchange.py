"""One exchange from offer to commit, and the table of those under way.

    initiator   PREPARING -> OFFERED -> STREAMING -> VERIFIED -> mixed
    responder   PREPARING ------------> STREAMING -> VERIFIED -> mixed
                                                        |
                                                      DOUBT -> mixed | dropped

Each side says COMMIT when all of the other's vector arrived and passed every check; the exchange happens exactly when
both did. That is a function of two facts which never change afterwards, so a link that breaks between the two COMMITs
leaves no guess to make: the sides ask each other after it (Outcome, Settled) and come to the same answer. Only a
partner that stays unreachable for ``doubt_s`` ends in a one-sided drop, which moves the mean by at most that one
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from gossip.codecs import CODECS
from gossip.config import Config
from gossip.effects import Effect, Mix, Release, Send, Snapshot, Transfer
from gossip.filters import norm_accepts
from gossip.ids import PeerId
from gossip.messages import Abort, Accept, Busy, Commit, Offer, Outcome, Refuse, Settled
from gossip.mixing import pair_weight

__all__ = ["Exchange", "Exchanges", "Local", "State"]

VERDICTS = 4_096  # commits remembered, 100 B each: doubt_s of asking after them at 100 exchanges a second
TIMED = 256  # partners whose durations are remembered,
KEPT = 8  # of the last exchanges
TRIES = 4  # partners asked in one mix before waiting: four BUSY in a row mean that everybody is mixing already
MAX_VERSION = 2**53  # what a record may hold: a mean with more would make our own record unacceptable to everybody
DOUBT_RETRY_S = 1.0


class State(Enum):
    PREPARING = auto()  # our snapshot is not taken yet
    OFFERED = auto()
    STREAMING = auto()
    VERIFIED = auto()  # our COMMIT is sent, theirs is not here
    DOUBT = auto()  # the same, and the link broke


@dataclass(slots=True)
class Exchange:
    """One side's view. ``ours`` and ``theirs`` are the versions that the Offer and the Accept state, ``committed``
    whether their COMMIT is here."""

    session: int
    partner: PeerId
    initiator: bool
    weight: float
    optimizer_keys: tuple[str, ...]
    since: float
    deadline: float
    state: State = State.PREPARING
    ours: float = 0.0
    theirs: float = 0.0
    committed: bool = False
    codec: str = "fp32"
    asked: set[PeerId] = field(default_factory=set)


@dataclass(slots=True)
class Local:
    """What the exchanges need to know of their own node at the moment; owned and updated by Peer."""

    fingerprint: str
    elements: int  # of the weights
    trained_elements: int  # of one optimizer key
    genesis: bytes = b""
    version: float = 0.0
    ready: bool = False
    optimizer_keys: tuple[str, ...] = ()
    settling: bool = False
    boundary_at: float = 0.0  # when the training loop was last seen at a step boundary


class Exchanges:
    """All exchanges of one peer: at most one outgoing, and ``config.incoming_limit`` incoming."""

    def __init__(
        self,
        me: PeerId,
        local: Local,
        config: Config,
        new_session: Callable[[], int],
        choose: Callable[[set[PeerId], float], PeerId | None],
        benched: Callable[[PeerId, float], None],
    ) -> None:
        self.me, self.local, self.config = me, local, config
        self.new_session, self.choose, self.benched = new_session, choose, benched
        self.table: dict[int, Exchange] = {}
        self.outgoing: Exchange | None = None
        self.verdicts: dict[tuple[PeerId, int], None] = {}  # what committed; nothing else did. The oldest first
        self.durations: dict[PeerId, list[float]] = {}  # of the last exchanges; the partner of longest ago first
        self.done = self.failures = self.refused = 0
        self.last_partner: PeerId | None = None
        self.mixed_at: list[PeerId] = []  # partners of exchanges finished since Peer last looked
        self.gave_up = False  # the outgoing exchange ended without a partner since Peer last looked

    @property
    def deadline(self) -> float:
        return min([exchange.deadline for exchange in self.table.values()], default=float("inf"))

    # -- our own initiative --------------------------------------------------------------------------------------
    def begin(self, now: float) -> list[Effect]:
        """Prepare an offer: the snapshot first, so that the partner's stream meets ours ready."""
        for exchange in self.table.values():
            if exchange.state is not State.DOUBT:
                return []  # what is under way is a mix already; a second one would share its bandwidth
        if not self.room(1 + self.config.incoming_limit):
            return []
        keys = self.local.optimizer_keys if self.config.average_optimizer else ()
        exchange = Exchange(self.new_session(), self.me, True, 0.5, keys, now, float("inf"))
        self.outgoing = self.table[exchange.session] = exchange
        return [Snapshot(exchange.session, bool(keys))]

    def snapshotted(self, session: int, now: float) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.state is not State.PREPARING:
            return []
        exchange.ours = self.local.version
        if exchange.initiator:
            return self.offer(exchange, now)
        exchange.state = State.STREAMING
        accept = Accept(session, exchange.ours, exchange.weight, exchange.optimizer_keys, exchange.codec)
        return [Send(exchange.partner, accept), self.transfer(exchange, now)]

    def offer(self, exchange: Exchange, now: float) -> list[Effect]:
        """Ask the next partner; with nobody left to ask the snapshot is forgotten."""
        partner = self.choose(exchange.asked, now) if len(exchange.asked) < TRIES else None
        if partner is None:
            self.gave_up = True
            return self.drop(exchange)
        exchange.asked.add(partner)
        exchange.partner, exchange.state = partner, State.OFFERED
        exchange.weight = self.weight_cap()
        exchange.deadline = now + self.config.reply_timeout_s
        local = self.local
        message = Offer(
            exchange.session, local.fingerprint, local.genesis, exchange.ours, exchange.weight, self.config.codec,
            exchange.optimizer_keys,
        )  # fmt: skip
        return [Send(partner, message)]

    def room(self, limit: int, leaving: int = 0) -> bool:
        """Whether one more may begin beside the others (but for ``leaving``, which end for it). With outer momentum one
        at a time in all: two concurrent outer steps would count the same local progress twice."""
        return len(self.table) - leaving < (limit if self.config.plain else 1)

    def weight_cap(self) -> float:
        """1/2 for one exchange, 1/3 for the second at the same time, 1/4 for the third: what concurrent differences
        take from one vector stays below about one, so that nobody overshoots."""
        return 1 / (1 + len(self.table))

    def transfer(self, exchange: Exchange, now: float) -> Transfer:
        local = self.local
        elements = local.elements + len(exchange.optimizer_keys) * local.trained_elements
        seconds = 4 * elements / (self.config.slowest_rate_mb_s * 1e6) + 1.0
        past = self.durations.get(exchange.partner)
        if past:
            middle = median(past)
            seconds += middle + 6 * median([abs(value - middle) for value in past])
        exchange.since, exchange.deadline = now, now + seconds
        return Transfer(exchange.session, exchange.partner, bool(exchange.optimizer_keys), exchange.codec, seconds)

    # -- messages ------------------------------------------------------------------------------------------------
    def on_offer(self, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        local, session = self.local, offer.session
        if offer.fingerprint != local.fingerprint:
            return [Send(sender, Refuse(session, "layout"))]
        if offer.genesis != local.genesis or not local.ready:
            return [Send(sender, Refuse(session, "genesis"))]
        if offer.codec not in CODECS:
            return [Send(sender, Refuse(session, "codec"))]
        if not 0 <= offer.version < MAX_VERSION:
            return [Send(sender, Refuse(session, "version"))]
        own = self.outgoing
        crossed = own is not None and own.state is State.OFFERED and own.partner == sender
        yields = own is not None and (crossed or own.state is State.PREPARING)  # a mix is a mix, whoever asked first
        beside = own is not None and not yields
        full = not self.room(self.config.incoming_limit + beside, yields)
        asleep = now - local.boundary_at > self.config.boundary_patience_s
        if full or asleep or session in self.table or not 0 < offer.weight <= 0.5 or (crossed and self.me < sender):
            return [Send(sender, Busy(session))]  # of two offers that cross, the smaller id's is the exchange
        dropped = self.drop(own) if own is not None and yields else []
        keys = local.optimizer_keys if offer.optimizer_keys == local.optimizer_keys else ()
        keys = keys if self.config.average_optimizer else ()
        exchange = self.table[session] = Exchange(
            session, sender, False, 0.0, keys, now, now + self.config.boundary_patience_s, theirs=offer.version
        )
        exchange.codec = leaner(offer.codec, self.config.codec)
        gap = local.version - offer.version
        cap = min(offer.weight, self.weight_cap())
        exchange.weight = pair_weight(gap, self.config.staleness_exponent, cap=cap)
        return [*dropped, Snapshot(session, bool(keys))]

    def on_accept(self, sender: PeerId, accept: Accept, now: float) -> list[Effect]:
        exchange = self.table.get(accept.session)
        if exchange is None or exchange.partner != sender:
            return [Send(sender, Abort(accept.session, "late"))]
        if exchange.state is not State.OFFERED:
            return []  # said twice; an Abort could follow our COMMIT
        agreed = 0 < accept.weight <= exchange.weight and accept.codec in CODECS and 0 <= accept.version < MAX_VERSION
        if not agreed or accept.optimizer_keys not in ((), exchange.optimizer_keys):
            return [Send(sender, Abort(accept.session, "terms")), *self.fail(exchange, now, "terms")]
        exchange.weight, exchange.theirs = accept.weight, accept.version
        exchange.optimizer_keys, exchange.codec = accept.optimizer_keys, accept.codec
        exchange.state = State.STREAMING
        return [self.transfer(exchange, now)]

    def on_busy(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.partner != sender or exchange.state is not State.OFFERED:
            return []
        return self.offer(exchange, now)

    def on_refuse(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.partner != sender or exchange.state is not State.OFFERED:
            return []
        self.benched(sender, now)
        return self.offer(exchange, now)

    def on_commit(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.partner != sender:
            return []
        exchange.committed = True
        return self.finish(exchange, now) if exchange.state in (State.VERIFIED, State.DOUBT) else []

    def on_abort(self, sender: PeerId, session: int, code: str, now: float) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.partner != sender:
            return []
        if exchange.state is State.OFFERED:
            return self.offer(exchange, now)
        return self.fail(exchange, now, code)

    def on_outcome(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        """Their COMMIT is sent, or they would not ask; so the answer is whether ours is."""
        exchange = self.table.get(session)
        if exchange is not None and exchange.partner == sender:
            verified = exchange.state in (State.VERIFIED, State.DOUBT)
            ended = self.finish(exchange, now) if verified else self.fail(exchange, now, "broken")
            return [*ended, Send(sender, Settled(session, verified))]
        return [Send(sender, Settled(session, (sender, session) in self.verdicts))]

    def on_settled(self, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
        exchange = self.table.get(settled.session)
        if exchange is None or exchange.partner != sender or exchange.state is not State.DOUBT:
            return []
        return self.finish(exchange, now) if settled.committed else self.fail(exchange, now, "aborted")

    # -- reports of the driver -----------------------------------------------------------------------------------
    def streamed(self, session: int, difference_sq: float, own_sq: float, now: float) -> list[Effect]:
        """All of theirs is here, with checksums right,"""
        exchange = self.table.get(session)
        if exchange is None or exchange.state is not State.STREAMING:
            return []
        elements = self.local.elements + len(exchange.optimizer_keys) * self.local.trained_elements
        refused = norm_accepts(difference_sq, own_sq, elements, self.config.norm_bound)
        if refused is not None:
            self.refused += 1
            return [Send(exchange.partner, Abort(session, refused)), *self.fail(exchange, now, refused)]
        commit = Send(exchange.partner, Commit(session))
        if exchange.committed:
            return [commit, *self.finish(exchange, now)]
        exchange.state = State.VERIFIED
        exchange.deadline = now + max(self.config.stall_s, exchange.deadline - now)
        return [commit]

    def failed(self, session: int, code: str, now: float) -> list[Effect]:
        """The streams of this session stalled or brought wrong bytes, or the link it ran over broke ("broken")."""
        exchange = self.table.get(session)
        if exchange is None:
            return []
        match exchange.state:
            case State.VERIFIED:
                return self.doubt(exchange, now)
            case State.OFFERED:
                self.benched(exchange.partner, now)
                return self.offer(exchange, now)
            case State.STREAMING:
                told: list[Effect] = [] if code == "broken" else [Send(exchange.partner, Abort(session, code))]
                return [*told, *self.fail(exchange, now, code)]
            case State.PREPARING if not exchange.initiator:
                return self.fail(exchange, now, code)
        return []

    def unlinked(self, peer: PeerId, now: float) -> list[Effect]:
        """No link to ``peer`` is left, and perhaps none can be made."""
        sessions = [one.session for one in self.table.values() if one.partner == peer and one.state is not State.DOUBT]
        return [effect for session in sessions for effect in self.failed(session, "broken", now)]

    def doubt(self, exchange: Exchange, now: float) -> list[Effect]:
        if exchange.state is not State.DOUBT:
            exchange.state, exchange.since = State.DOUBT, now
            if exchange is self.outgoing:
                self.outgoing = None  # a partner that died at the worst moment costs one exchange, not doubt_s of them
        exchange.deadline = now + DOUBT_RETRY_S
        return [Send(exchange.partner, Outcome(exchange.session))]

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for exchange in [one for one in self.table.values() if one.deadline <= now]:
            if exchange.state is State.OFFERED:
                self.benched(exchange.partner, now)
                effects += [Send(exchange.partner, Abort(exchange.session, "late")), *self.offer(exchange, now)]
            elif exchange.state is State.PREPARING:
                effects += [Send(exchange.partner, Busy(exchange.session)), *self.drop(exchange)]
            elif exchange.state is State.STREAMING:
                effects += self.failed(exchange.session, "deadline", now)
            elif exchange.state is State.VERIFIED or now - exchange.since < self.config.doubt_s:
                effects += self.doubt(exchange, now)
            else:
                effects += self.fail(exchange, now, "doubt")
        return effects

    def abandon(self) -> list[Effect]:
        """Drop everything under way: the weights they began from are about to be replaced."""
        effects: list[Effect] = []
        for exchange in list(self.table.values()):
            if exchange.state in (State.OFFERED, State.STREAMING):
                effects.append(Send(exchange.partner, Abort(exchange.session, "replaced")))
            elif exchange.state is State.PREPARING and not exchange.initiator:
                effects.append(Send(exchange.partner, Busy(exchange.session)))
            effects += self.drop(exchange)
        return effects

    # -- endings -------------------------------------------------------------------------------------------------
    def finish(self, exchange: Exchange, now: float) -> list[Effect]:
        self.verdicts[exchange.partner, exchange.session] = None
        if len(self.verdicts) > VERDICTS:
            del self.verdicts[next(iter(self.verdicts))]
        if exchange.state is not State.DOUBT:
            past = self.durations.pop(exchange.partner, [])[-KEPT + 1 :]
            self.durations[exchange.partner] = [*past, now - exchange.since]
            if len(self.durations) > TIMED:
                del self.durations[next(iter(self.durations))]
        self.done += 1
        self.last_partner = exchange.partner
        self.mixed_at.append(exchange.partner)
        # The weights' age is averaged exactly as the weights are: by the difference of what was exchanged.
        self.local.version += exchange.weight * (exchange.theirs - exchange.ours)
        return [Mix(exchange.session, exchange.weight), *self.drop(exchange)]

    def fail(self, exchange: Exchange, now: float, code: str) -> list[Effect]:
        self.failures += 1
        if code not in ("replaced", "late", "leaving"):
            self.benched(exchange.partner, now)
        if exchange is self.outgoing:
            self.gave_up = True
        return self.drop(exchange)

    def drop(self, exchange: Exchange) -> list[Effect]:
        self.table.pop(exchange.session, None)
        if exchange is self.outgoing:
            self.outgoing = None
        return [Release(exchange.session)]


def median(values: Collection[float]) -> float:
    """Of a few (statistics.median takes ten times as long over eight)."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def leaner(offered: str, ours: str) -> str:
    """Of two codecs the one with fewer bytes: whoever asked for few has a slow link, and the link is shared."""
    return ours if offered == ours else min(offered, ours, key=lambda name: CODECS[name].encoded_bytes(1 << 16))
