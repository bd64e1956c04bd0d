"""How exchanges of a pair, and pushes, begin: offers and the answers to them, until both sides stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gossip.arithmetic.mixing import pair_weight
from gossip.arithmetic.subsets import ALL, Fragments, Subset
from gossip.codecs import AUTO, CODECS, fastest, leaner, needs_spread
from gossip.config import Config
from gossip.effects import Effect, Merge, Rename, Send, Snapshot, Transfer
from gossip.exchange.agreement import refusal
from gossip.exchange.patience import Patience
from gossip.exchange.session import AT_ONCE, Exchange, Local, State
from gossip.exchange.session_table import Ledger
from gossip.filters.registry import filter_of
from gossip.ids import PeerId
from gossip.wire.messages import Accept, Busy, Offer, Refuse

__all__ = ["MAX_MASS", "Offering", "PartnerChoice"]

TRIES = 4  # partners asked for each one wanted before waiting: four BUSY in a row mean that everybody is mixing already
MAX_MASS = 2.0**32  # of a push: more than all members of the largest swarm together
FALLBACK = "int8"  # in place of a codec that must know the distance to others, before that is known


class PartnerChoice(Protocol):
    """Whom to mix with: :class:`gossip.selection.partners.Partners`."""

    wary_until: float

    def choose(self, asked: set[PeerId], now: float, again: bool = False, crowded: bool = False) -> PeerId | None: ...
    def strange(self, peer: PeerId) -> bool: ...
    def slow(self, partner: PeerId, now: float) -> None: ...
    def declines(self, sender: PeerId, now: float) -> bool: ...
    def mixed(self, partner: PeerId, now: float, own: bool) -> None: ...
    def here(self, partner: PeerId) -> bool: ...
    def failed(self, partner: PeerId, now: float, silent: bool = False) -> None: ...
    def wanted(self) -> int: ...
    def incoming(self) -> int: ...
    def cap(self, partner: PeerId, others: int) -> float: ...
    def heard(self, partner: PeerId, seconds: float) -> None: ...


class Offering(Ledger[Exchange]):
    """What :class:`gossip.exchange.exchanges.Exchanges` does until an exchange streams."""

    def __init__(
        self, me: PeerId, local: Local, config: Config, new_session: Callable[[], int], partners: PartnerChoice
    ) -> None:
        super().__init__(me, local, config, new_session)
        self.partners = partners
        self.answers, self.streams = Patience(), Patience()  # to an Offer; from Accept to COMMIT
        self.excused: dict[PeerId, None] = {}  # whose last exchange ended for an innocent reason, oldest first
        self.push = config.pushes
        self.single = not self.push and config.partners == 1  # an exchange is a mix, whoever asked for it
        self.conserves = config.conserves
        self.filter = filter_of(config)
        self.fragments = fragments_of(config, local.elements)
        self.part = Subset.parse(config.part) or ALL
        if self.part.kind == "mask":
            self.part = self.part.drawn(new_session())
        self.gave_way = False  # our own mix has made way for another's since the last of ours was finished
        self.learns = needs_spread(config.codec)  # exchanges show how far apart the nodes are, as some codecs must know
        self.bounded = False  # one has shown it

    @property
    def next_part(self) -> Subset:
        """What the next mix of our own will be of: a driver may copy these elements before it begins."""
        if self.local.settling:
            return ALL  # to agree on everything
        return self.part if self.fragments is None else self.fragments.next()

    # -- our own initiative --------------------------------------------------------------------------------------
    def begin(self, now: float) -> list[Effect]:
        """Prepare the offers of a mix: the snapshot first, so that a partner's stream meets ours ready."""
        asked: set[PeerId] = set()
        for exchange in self.table.values():
            if not exchange.idle and (exchange.initiator or self.single):
                return []  # what is under way is a mix already; a second one would share its bandwidth
            if exchange.parked:
                asked.add(exchange.partner)
        if asked and self.partners.choose(asked, now) is None:
            asked = set()  # whoever there is has said nothing for long: perhaps none of it arrived
        if not self.room(1 + self.partners.incoming()) or self.partners.choose(asked, now) is None:
            return []
        wanted = self.partners.wanted()
        part = self.next_part
        if part.kind == "mask":
            self.part = part.drawn(self.new_session())
        self.overtake()
        effects: list[Effect] = []
        tries = len(asked) + TRIES * wanted
        for place in range(wanted):
            exchange = Exchange(self.new_session(), self.me, True, 0.5, now, float("inf"), asked=asked)
            exchange.push, exchange.part, exchange.tries = self.push, part, tries
            exchange.steps = self.local.steps
            self.outgoing[exchange.session] = self.table[exchange.session] = exchange
            effects.append(Snapshot(exchange.session, False, wanted - place if self.push else 0, part))
        return effects

    def snapshotted(self, session: int, now: float, mass: float = 0.0) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.state is not State.PREPARING:
            return []
        exchange.ours, exchange.steps = self.local.version, self.local.steps
        if exchange.initiator:
            exchange.mass = mass
            return self.offer(exchange, now)
        exchange.state = State.STREAMING
        accept = Accept(session, exchange.ours, exchange.weight, exchange.codec)
        return [Send(exchange.partner, accept), self.transfer(exchange, now)]

    def offer(self, exchange: Exchange, now: float) -> list[Effect]:
        """Ask the next partner, under a number that the one before does not know; with nobody left to ask the snapshot
        is forgotten. What was parked has been replaced already."""
        if exchange.parked:
            return self.drop(exchange)
        asked = exchange.asked
        strange, again = self.partners.strange, exchange.state is State.OFFERED
        crowded = any(one is not exchange and strange(one.partner) for one in self.table.values())
        partner = self.partners.choose(asked, now, again, crowded) if len(asked) < exchange.tries else None
        if partner is None:
            self.gave_up = True
            return self.drop(exchange)
        asked.add(partner)
        renamed = self.rename(exchange) if again else []
        exchange.partner, exchange.state = partner, State.OFFERED
        exchange.weight = self.partners.cap(partner, self.moving)
        exchange.since, exchange.until = now, now + self.config.reply_timeout_s
        exchange.deadline = min(now + self.answers.seconds, exchange.until)
        local = self.local
        message = Offer(
            exchange.session, local.fingerprint, local.genesis, exchange.ours, exchange.weight, self.codec(partner),
            "push" if self.push else "pair", exchange.mass, str(exchange.part),
        )  # fmt: skip
        return [*renamed, Send(partner, message)]

    def rename(self, exchange: Exchange) -> list[Effect]:
        """What the last partner said, or still sends, must not be taken for the next one's."""
        old, new = exchange.session, self.new_session()
        exchange.session = new
        del self.table[old], self.outgoing[old]
        self.table[new] = self.outgoing[new] = exchange
        return [Rename(old, new)]

    def incoming(self, sender: PeerId) -> int:
        """How many of others may be under way with one of this member's: a slot is kept for others than the last."""
        limit = self.partners.incoming()
        return limit - 1 if self.single and sender == self.last_partner and limit > 1 else limit

    def room(self, limit: int, leaving: int = 0) -> bool:
        """Whether one more may begin beside the others (but for ``leaving``, which end for it). With outer momentum one
        at a time in all: two concurrent outer steps would count the same local progress twice."""
        return self.moving - leaving < (limit if self.config.plain else 1)

    # -- waiting -------------------------------------------------------------------------------------------------
    def park(self, exchange: Exchange, now: float) -> bool:
        """It waits for its partner for longer than that takes: others go first from now on, where there is a place for
        it. Whose place is taken by others who say nothing keeps its slot until its time is up."""
        if exchange.parked or self.parked >= self.most_parked:
            return exchange.parked
        exchange.parked = True
        self.partners.slow(exchange.partner, now)
        self.outgoing.pop(exchange.session, None)
        return True

    @property
    def parked(self) -> int:
        return sum([one.parked and one.state is not State.DOUBT for one in self.table.values()])

    @property
    def most_parked(self) -> int:
        """As many as may take a slot: each holds two vectors. A round with all neighbours at once waits for each of
        them, and a training loop that is held for its mix, by definition."""
        config = self.config
        waits = config.partners == 0 or config.max_version_gap is not None
        return 0 if waits else config.incoming_limit + config.partners

    def overtake(self) -> None:
        """Another exchange begins: what takes no slot will be mixed after it."""
        for one in self.table.values():
            one.overtaken = one.overtaken or one.idle

    def overdue(self, leaving: list[Exchange], now: float) -> list[Exchange]:
        """Offers of ours that wait for longer than answers take, as many as may be parked. A little longer is still
        waited for, but that is no reason to have others wait."""
        late = [
            own for own in self.outgoing.values()
            if own.state is State.OFFERED and own not in leaving and now - own.since >= self.answers.usual_s
        ]  # fmt: skip
        return late[: max(0, self.most_parked - self.parked)]

    @property
    def most_doubts(self) -> int:
        """As many as may ever be under way at once: a cut between all of their COMMITs leaves no more. Who sits out, or
        is not there at this moment, is no reason to forget one."""
        config = self.config
        return config.incoming_limit + config.partners if config.partners else 2 * AT_ONCE

    def transfer(self, exchange: Exchange, now: float) -> Transfer:
        elements = self.elements(exchange)
        seconds = 4 * elements / (self.config.slowest_rate_mb_s * 1e6) + self.config.stall_s
        seconds += self.durations.allowance(exchange.partner)
        if exchange.initiator:
            seconds += now - exchange.since  # what the answer took: the way there and back is part of it
        exchange.since, exchange.until = now, now + seconds
        exchange.deadline = exchange.until if exchange.parked else min(now + self.streams.seconds, exchange.until)
        one_way, own = exchange.push, exchange.initiator
        return Transfer(
            exchange.session, exchange.partner, exchange.codec, seconds, exchange.part,
            own or not one_way, not own or not one_way,
        )  # fmt: skip

    def elements(self, exchange: Exchange) -> int:
        return exchange.part.elements(self.local.elements)

    # -- messages ------------------------------------------------------------------------------------------------
    def on_offer(self, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        session, part = offer.session, Subset.parse(offer.part)
        refused = self.refused(offer)
        senseless = part is None or not part.elements(self.local.elements) or (self.push and part.kind != "all")
        if refused is not None or part is None or senseless:
            return [Send(sender, Refuse(session, refused or "part"))]
        local, leaving = self.local, list[Exchange]()
        crossed = waiting = False
        for own in self.table.values() if not self.push else ():
            across = own.initiator and own.state is State.OFFERED and own.partner == sender and not own.parked
            crossed = crossed or across
            postponed = self.single and own.initiator and own.state is State.PREPARING and not self.gave_way
            if across or postponed:
                leaving.append(own)  # a mix is a mix, whoever asked first; but our next one waits for nobody
            waiting = waiting or (
                own.parked and own.partner == sender and own.state in (State.STREAMING, State.VERIFIED)
            )
        slots = sum([not own.idle for own in leaving])
        limit = self.incoming(sender) + len(self.outgoing) - slots
        overdue = [] if self.room(limit, slots) else self.overdue(leaving, now)
        full = not self.room(limit - len(overdue), slots + len(overdue))
        if self.partners.strange(sender):
            strangers = any(self.partners.strange(own.partner) for own in self.table.values())
            waiting = waiting or strangers or self.partners.wary_until > now
        asleep = now - local.boundary_at > self.config.boundary_patience_s
        if full or asleep or waiting or session in self.table or (crossed and self.me < sender):
            return [Send(sender, Busy(session))]  # of two offers that cross, the smaller id's is the exchange
        if self.partners.declines(sender, now):
            self.conduct.note(sender, "pestering", now)
            return [Send(sender, Busy(session))]
        for own in overdue:
            self.park(own, now)
        self.gave_way = self.gave_way or slots > 0
        self.overtake()
        dropped = [effect for own in leaving for effect in self.drop(own)]
        exchange = self.table[session] = Exchange(
            session, sender, False, 0.0, now, now + self.config.boundary_patience_s, theirs=offer.version
        )
        exchange.push, exchange.mass, exchange.part = offer.mixing == "push", offer.mass, part
        exchange.codec = self.leaner(sender, offer.codec)
        if CODECS[exchange.codec].needs_spread and part is not ALL:  # bounds are those of blocks of the whole vector
            exchange.codec = FALLBACK
        gap = local.version - offer.version
        cap = min(offer.weight, self.partners.cap(sender, self.moving))
        exchange.weight = pair_weight(gap, self.config.staleness_exponent, cap=cap)
        return [*dropped, Snapshot(session, False, part=part)]

    def refused(self, offer: Offer) -> str | None:
        """The reason to refuse whatever this node is doing at the moment."""
        alike = offer.mixing == ("push" if self.push else "pair")
        reason = refusal(self.local, offer, alike, spread=True)
        if reason is not None:
            return reason
        if not 0 < offer.weight <= 0.5:
            return "weight"
        if self.push and not 0 < offer.mass <= MAX_MASS:
            return "mass"
        return None

    def on_busy(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.partner != sender or exchange.state is not State.OFFERED:
            return []
        return self.offer(exchange, now)

    def on_refuse(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.partner != sender or exchange.state is not State.OFFERED:
            return []
        self.partners.failed(sender, now, silent=True)  # not with it; it may still come to us
        return self.offer(exchange, now)

    def withdraw(self, exchange: Exchange) -> list[Effect]:
        """Nothing will be streamed after all: an offer is not made, or the one who made it is told to ask another."""
        told: list[Effect] = [] if exchange.initiator else [Send(exchange.partner, Busy(exchange.session))]
        return [*told, *self.drop(exchange)]

    def drop(self, exchange: Exchange) -> list[Effect]:
        """Nothing came of it: a mass that was to be given away comes back."""
        back = exchange.initiator and exchange.mass > 0 and self.conserves
        ended = self.end(exchange)
        return [Merge(exchange.session, exchange.mass), *ended] if back else ended

    # -- codecs --------------------------------------------------------------------------------------------------
    def codec(self, partner: PeerId) -> str:
        """What we offer now: not one that must know the distance to others before that is known."""
        codec = self.config.codec
        if codec == AUTO:
            return fastest(self.durations.rate(partner))
        return codec if self.bounded or not CODECS[codec].needs_spread else FALLBACK

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
