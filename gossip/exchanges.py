"""All exchanges of one peer: those it offers, those it accepts, and how each of them ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from gossip.codecs import AUTO, CODECS, fastest, leaner
from gossip.config import Config
from gossip.durations import Durations
from gossip.effects import Effect, Merge, Mix, Release, Send, Snapshot, Transfer
from gossip.exchange import MAX_VERSION, Exchange, Local, State
from gossip.filters import Filter, Refusals, clip_factor
from gossip.ids import PeerId
from gossip.messages import Abort, Accept, Busy, Commit, Offer, Outcome, Refuse, Settled
from gossip.mixing import pair_weight
from gossip.parts import ALL, Fragments, Part

__all__ = ["Exchanges"]

VERDICTS = 4_096  # commits remembered, 100 B each: doubt_s of asking after them at 100 exchanges a second
TRIES = 4  # partners asked for each one wanted before waiting: four BUSY in a row mean that everybody is mixing already
MAX_MASS = 2.0**32  # of a push: more than all members of the largest swarm together
DOUBT_RETRY_S = 1.0
FALLBACK = "int8"  # in place of a codec that must know the distance to others, before that is known


class Partners(Protocol):
    """Whom to mix with: :class:`gossip.partners.Partners`."""

    def choose(self, asked: set[PeerId], now: float) -> PeerId | None: ...
    def failed(self, partner: PeerId, now: float) -> None: ...
    def wanted(self) -> int: ...
    def incoming(self) -> int: ...
    def cap(self, partner: PeerId, others: int) -> float: ...
    def heard(self, partner: PeerId, seconds: float) -> None: ...


class Exchanges:
    """All exchanges of one peer: those of its own mix, and ``partners.incoming()`` that others offered."""

    def __init__(
        self, me: PeerId, local: Local, config: Config, new_session: Callable[[], int], partners: Partners
    ) -> None:
        self.me, self.local, self.config = me, local, config
        self.new_session, self.partners = new_session, partners
        self.push = config.pushes
        self.single = not self.push and config.partners == 1  # an exchange is a mix, whoever asked for it
        self.conserves = config.conserves
        self.table: dict[int, Exchange] = {}
        self.outgoing: dict[int, Exchange] = {}  # those of our own mix: one, or as many as it has partners
        self.verdicts: dict[tuple[PeerId, int], None] = {}  # what committed; nothing else did. The oldest first
        self.durations = Durations()
        self.filter = Filter(config)
        self.refusals = Refusals()
        self.seen: deque[tuple[float, float]] = deque(maxlen=8)  # |theirs - ours|^2 and |ours|^2 of the last exchanges
        self.fragments = fragments_of(config, local.elements)
        self.part = Part.parse(config.part) or ALL
        self.bounded = False  # an exchange has shown how far apart the nodes are, as some codecs must know
        self.done = self.failures = 0
        self.last_partner: PeerId | None = None
        self.mixed_at: list[PeerId] = []  # partners of exchanges finished since Peer last looked
        self.gave_up = False  # the outgoing exchange ended without a partner since Peer last looked

    @property
    def deadline(self) -> float:
        return min([exchange.deadline for exchange in self.table.values()], default=float("inf"))

    # -- our own initiative --------------------------------------------------------------------------------------
    def begin(self, now: float) -> list[Effect]:
        """Prepare the offers of a mix: the snapshot first, so that a partner's stream meets ours ready."""
        for exchange in self.table.values():
            if exchange.state is not State.DOUBT and (exchange.initiator or self.single):
                return []  # what is under way is a mix already; a second one would share its bandwidth
        if not self.room(1 + self.partners.incoming()) or self.partners.choose(set(), now) is None:
            return []
        wanted = self.partners.wanted()
        keys = self.local.optimizer_keys if self.config.average_optimizer else ()
        part = self.part if self.fragments is None else self.fragments.next()
        part = ALL if self.local.settling else part  # to agree on everything
        asked: set[PeerId] = set()
        effects: list[Effect] = []
        for place in range(wanted):
            exchange = Exchange(self.new_session(), self.me, True, 0.5, keys, now, float("inf"), asked=asked)
            exchange.push, exchange.part, exchange.tries = self.push, part, TRIES * wanted
            exchange.steps = self.local.steps
            self.outgoing[exchange.session] = self.table[exchange.session] = exchange
            effects.append(Snapshot(exchange.session, bool(keys), wanted - place if self.push else 0))
        return effects

    def snapshotted(self, session: int, now: float, mass: float = 0.0) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.state is not State.PREPARING:
            return []
        exchange.ours, exchange.steps = self.local.version, self.local.steps
        if exchange.initiator:
            exchange.mass = mass
            return self.offer(exchange, now)
        mine = self.filter.radius(self.elements(exchange))  # of more than at the offer: how far we moved is known
        if mine > 0 and not 0 < exchange.radius <= mine:
            exchange.radius = mine
        exchange.state = State.STREAMING
        accept = Accept(
            session, exchange.ours, exchange.weight, exchange.optimizer_keys, exchange.codec, exchange.radius
        )
        return [Send(exchange.partner, accept), self.transfer(exchange, now)]

    def offer(self, exchange: Exchange, now: float) -> list[Effect]:
        """Ask the next partner; with nobody left to ask the snapshot is forgotten."""
        asked = exchange.asked
        partner = self.partners.choose(asked, now) if len(asked) < exchange.tries else None
        if partner is None:
            self.gave_up = True
            return self.drop(exchange)
        asked.add(partner)
        exchange.partner, exchange.state = partner, State.OFFERED
        exchange.weight = self.partners.cap(partner, len(self.table))
        exchange.deadline = now + self.config.reply_timeout_s
        local, part = self.local, exchange.part
        exchange.radius = 0.0 if self.push else self.filter.radius(part.elements(local.elements))
        message = Offer(
            exchange.session, local.fingerprint, local.genesis, exchange.ours, exchange.weight, self.codec(partner),
            exchange.optimizer_keys, "push" if self.push else "pair", exchange.mass, exchange.radius, str(part),
        )  # fmt: skip
        return [Send(partner, message)]

    def codec(self, partner: PeerId) -> str:
        """What we offer now: not one that must know the distance to others before that is known."""
        codec = self.config.codec
        if codec == AUTO:
            return fastest(self.durations.rate(partner))
        return codec if self.bounded or not CODECS[codec].needs_spread else FALLBACK

    def room(self, limit: int, leaving: int = 0) -> bool:
        """Whether one more may begin beside the others (but for ``leaving``, which end for it). With outer momentum one
        at a time in all: two concurrent outer steps would count the same local progress twice."""
        return len(self.table) - leaving < (limit if self.config.plain else 1)

    def transfer(self, exchange: Exchange, now: float) -> Transfer:
        elements = self.elements(exchange)
        seconds = 4 * elements / (self.config.slowest_rate_mb_s * 1e6) + 1.0
        seconds += self.durations.allowance(exchange.partner)
        exchange.since, exchange.deadline = now, now + seconds
        one_way, own = exchange.push, exchange.initiator
        return Transfer(
            exchange.session, exchange.partner, bool(exchange.optimizer_keys), exchange.codec, seconds, exchange.part,
            own or not one_way, not own or not one_way, own,
        )  # fmt: skip

    def elements(self, exchange: Exchange) -> int:
        return exchange.part.elements(self.local.size(len(exchange.optimizer_keys)))

    # -- messages ------------------------------------------------------------------------------------------------
    def on_offer(self, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        session, part = offer.session, Part.parse(offer.part)
        refused = self.refused(offer)
        senseless = part is None or not part.elements(self.local.elements) or (self.push and part.kind != "all")
        if refused is not None or part is None or senseless:
            return [Send(sender, Refuse(session, refused or "part"))]
        local, leaving = self.local, list[Exchange]()
        crossed = False
        if self.outgoing and not self.push:
            for own in self.outgoing.values():
                across = own.state is State.OFFERED and own.partner == sender
                crossed = crossed or across
                if across or (self.single and own.state is State.PREPARING):
                    leaving.append(own)  # a mix is a mix, whoever asked first
        beside = len(self.outgoing) - len(leaving)
        full = not self.room(self.partners.incoming() + beside, len(leaving))
        asleep = now - local.boundary_at > self.config.boundary_patience_s
        if full or asleep or session in self.table or (crossed and self.me < sender):
            return [Send(sender, Busy(session))]  # of two offers that cross, the smaller id's is the exchange
        dropped = [effect for own in leaving for effect in self.drop(own)]
        keys = local.optimizer_keys if offer.optimizer_keys == local.optimizer_keys else ()
        keys = keys if self.config.average_optimizer else ()
        exchange = self.table[session] = Exchange(
            session, sender, False, 0.0, keys, now, now + self.config.boundary_patience_s, theirs=offer.version
        )
        exchange.push, exchange.mass, exchange.part = offer.mixing == "push", offer.mass, part
        exchange.codec = self.leaner(sender, offer.codec)
        exchange.radius = self.filter.radius(self.elements(exchange))
        if offer.radius > 0:
            exchange.radius = min(exchange.radius, offer.radius) if exchange.radius > 0 else offer.radius
        gap = local.version - offer.version
        cap = min(offer.weight, self.partners.cap(sender, len(self.table)))
        weight = pair_weight(gap, self.config.staleness_exponent, cap=cap)
        exchange.weight = weight * CODECS[exchange.codec].gain
        return [*dropped, Snapshot(session, bool(keys))]

    def refused(self, offer: Offer) -> str | None:
        """The reason to refuse whatever this node is doing at the moment."""
        local = self.local
        if offer.fingerprint != local.fingerprint:
            return "layout"
        if offer.genesis != local.genesis or not local.ready:
            return "genesis"
        if offer.mixing != ("push" if self.push else "pair"):
            return "mixing"
        if offer.codec not in CODECS:
            return "codec"
        if not 0 <= offer.version < MAX_VERSION:
            return "version"
        if not 0 < offer.weight <= 0.5 or offer.radius < 0:
            return "weight"
        if self.push and not 0 < offer.mass <= MAX_MASS:
            return "mass"
        return None

    def on_accept(self, sender: PeerId, accept: Accept, now: float) -> list[Effect]:
        exchange = self.table.get(accept.session)
        if exchange is None or exchange.partner != sender:
            return [Send(sender, Abort(accept.session, "late"))]
        if exchange.state is not State.OFFERED:
            return []  # said twice; an Abort could follow our COMMIT
        agreed = (
            0 < accept.weight <= exchange.weight and 0 <= accept.version < MAX_VERSION
            and accept.codec in CODECS and (self.bounded or not CODECS[accept.codec].needs_spread)
            and (0 < accept.radius <= exchange.radius or (accept.radius >= 0 and exchange.radius == 0))
        )  # fmt: skip
        if not agreed or accept.optimizer_keys not in ((), exchange.optimizer_keys):
            return [Send(sender, Abort(accept.session, "terms")), *self.fail(exchange, now, "terms")]
        exchange.weight, exchange.theirs, exchange.radius = accept.weight, accept.version, accept.radius
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
        self.partners.failed(sender, now)
        return self.offer(exchange, now)

    def on_commit(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.partner != sender:
            return []
        if exchange.push:
            arrived = exchange.initiator and exchange.state in (State.STREAMING, State.DOUBT)
            return self.finish(exchange, now) if arrived else []
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
        """Their COMMIT is sent (or, of a push, their vector), or they would not ask; so the answer is whether ours
        is."""
        exchange = self.table.get(session)
        if exchange is not None and exchange.partner == sender:
            verified = not exchange.push and exchange.state in (State.VERIFIED, State.DOUBT)
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
        partner, elements = exchange.partner, self.elements(exchange)
        refused = self.filter.judge(difference_sq, own_sq, elements, self.local.version)
        if refused is not None:
            self.refusals.add(partner, refused)
            return [Send(partner, Abort(session, refused)), *self.fail(exchange, now, refused)]
        whole = self.local.elements / elements if exchange.part.kind != "all" else 1.0
        self.seen.append((difference_sq * whole, own_sq * whole))
        taken = clip_factor(difference_sq, exchange.radius)
        if taken < 1.0:
            self.refusals.add(partner, "clipped")
            exchange.weight *= taken
            exchange.mass *= taken  # of a push: what counts for less moves its receiver less
        commit = Send(partner, Commit(session))
        if exchange.committed or exchange.push:
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
                self.partners.failed(exchange.partner, now)
                return self.offer(exchange, now)
            case State.STREAMING if exchange.push and exchange.initiator and self.conserves:
                return self.doubt(exchange, now)  # all of it may have arrived
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
            # a partner that died at the worst moment costs one exchange, not doubt_s of them
            self.outgoing.pop(exchange.session, None)
        exchange.deadline = now + DOUBT_RETRY_S
        return [Send(exchange.partner, Outcome(exchange.session))]

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for exchange in [one for one in self.table.values() if one.deadline <= now]:
            if exchange.state is State.OFFERED:
                self.partners.failed(exchange.partner, now)
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
            exchange.mass = 0.0  # of weights that go
            effects += self.drop(exchange)
        return effects

    # -- endings -------------------------------------------------------------------------------------------------
    def finish(self, exchange: Exchange, now: float) -> list[Effect]:
        session, partner = exchange.session, exchange.partner
        self.verdicts[partner, session] = None
        if len(self.verdicts) > VERDICTS:
            del self.verdicts[next(iter(self.verdicts))]
        if exchange.state is not State.DOUBT:
            seconds = now - exchange.since
            self.durations.add(partner, seconds, CODECS[exchange.codec].encoded_bytes(self.elements(exchange)))
            self.partners.heard(partner, seconds)
        self.done += 1
        self.last_partner = partner
        if exchange.push:
            if not exchange.initiator:
                return [Merge(session, exchange.mass), *self.end(exchange)]
            self.mixed_at.append(partner)
            return self.end(exchange)
        self.bounded = True
        self.mixed_at.append(partner)
        if self.fragments is not None:
            self.fragments.mixed(exchange.part)
        # The weights' age is averaged exactly as the weights are: by the difference of what was exchanged.
        moved = exchange.weight if exchange.part is ALL else exchange.weight * exchange.part.share
        self.local.version += moved * (exchange.theirs - exchange.ours)
        return [Mix(session, exchange.weight), *self.end(exchange)]

    def fail(self, exchange: Exchange, now: float, code: str) -> list[Effect]:
        self.failures += 1
        if code == "overflow":
            self.bounded = False  # once more with a codec that needs no bound, which shows how wide it must be
        elif code not in ("replaced", "late", "leaving"):
            self.partners.failed(exchange.partner, now)
        if exchange.initiator:
            self.gave_up = True
        return self.drop(exchange)

    def drop(self, exchange: Exchange) -> list[Effect]:
        """Nothing came of it: a mass that was to be given away comes back."""
        back = exchange.initiator and exchange.mass > 0 and self.conserves
        ended = self.end(exchange)
        return [Merge(exchange.session, exchange.mass), *ended] if back else ended

    def end(self, exchange: Exchange) -> list[Effect]:
        self.table.pop(exchange.session, None)
        self.outgoing.pop(exchange.session, None)
        return [Release(exchange.session)]

    def leaner(self, sender: PeerId, offered: str) -> str:
        """Of their codec and ours the one with fewer bytes: whoever asked for few has a slow link, and the link is
        shared. One that must know the distance to others is taken where both keep such knowledge."""
        ours = self.config.codec
        if ours == AUTO:
            return offered if not CODECS[offered].needs_spread else FALLBACK
        if offered == ours:
            return self.codec(sender)
        pair = [name if not CODECS[name].needs_spread else FALLBACK for name in (offered, ours)]
        return leaner(*pair)


def fragments_of(config: Config, elements: int) -> Fragments | None:
    """The fragments of ``part = "fragments N"``, none of them without elements."""
    kind, _, count = config.part.partition(" ")
    return Fragments(min(int(count), elements)) if kind == "fragments" else None
