"""All exchanges of one peer: those of its own mix, and up to ``partners.incoming()`` that others offered.

The session classes decide what happens within one exchange (:mod:`gossip.exchange.pair`, :mod:`gossip.exchange.ahead`,
:mod:`gossip.exchange.push`, :mod:`gossip.exchange.groups.group`). This module routes events to sessions, limits how
many run at once, and remembers how they ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar, Protocol

from gossip.arithmetic.subsets import ALL, Subset, fragments_of, lasting_parts
from gossip.codecs import CODECS, Taken, needs_spread
from gossip.config import Config
from gossip.effects import Effect, MemberState
from gossip.exchange.agreement import proposed_codec
from gossip.exchange.durations import Waits, median
from gossip.exchange.session import Local, kind_of
from gossip.exchange.session_table import Ledger, One
from gossip.exchange.transitions import Event, State
from gossip.filters.registry import filter_of
from gossip.ids import Address, PeerId
from gossip.recent import Recent
from gossip.wire.messages import Accept, Begin, Invite, Joined, Offer, Settled

__all__ = ["Exchanges", "PartnerChoice"]

SHORT = 4.0  # Mixes may overlap while streams take at most this many times as long as answers.
# Largest vector in elements (64 MiB) whose exchanges overlap: they hold eight vectors instead of two.
LARGEST = 1 << 24
EXCUSED = 256  # Partners to remember in each table: as many as there may be links.


class PartnerChoice(Protocol):
    """The choice of partners, as :class:`gossip.selection.partners.Partners` implements it."""

    wary_until: float
    mixes: int

    def choose(self, asked: set[PeerId], now: float, again: bool = False, crowded: bool = False) -> PeerId | None: ...
    def group(self, now: float) -> list[PeerId]: ...
    def strange(self, peer: PeerId) -> bool: ...
    def slow(self, partner: PeerId, now: float) -> None: ...
    def declines(self, sender: PeerId, now: float) -> bool: ...
    def mixed(self, partner: PeerId, now: float, own: bool) -> None: ...
    def here(self, partners: Iterable[PeerId]) -> list[PeerId]: ...
    def failed(self, partner: PeerId, now: float, silent: bool = False) -> None: ...
    def wanted(self) -> int: ...
    def incoming(self) -> int: ...
    def cap(self, partner: PeerId, others: int) -> float: ...
    def heard(self, partner: PeerId, seconds: float) -> None: ...
    def beyond(self, peers: Collection[PeerId]) -> bool: ...
    def address(self, peer: PeerId) -> Address | None: ...
    def linked(self, peer: PeerId) -> bool: ...


class Paired(Protocol):
    """An exchange with one partner, :class:`gossip.exchange.offer.Exchange`."""

    ANSWERED: ClassVar[bool]
    session: int
    partner: PeerId
    initiator: bool
    state: State
    since: float
    codec: str
    answer_s: float

    @property
    def elements(self) -> int: ...


class Reservations(Protocol):
    """The reservation of exchanges, :mod:`gossip.exchange.ahead`."""

    MIXING: str  # In the offers that ask for one.

    def ask(self, exchanges: Exchanges[Any], now: float) -> list[Effect]:
        """Reserve our next exchange."""

    def consent(self, exchanges: Exchanges[Any], sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        """Answer an offer that asks for a reservation."""


class Exchanges(Ledger[One]):
    """The exchanges of one peer: routing, concurrency limits and memory of outcomes."""

    def __init__(
        self, me: PeerId, local: Local, config: Config, new_session: Callable[[], int], partners: PartnerChoice,
        ahead: Reservations,
    ) -> None:  # fmt: skip
        super().__init__(me, local, config, new_session)
        self.partners, self.ahead = partners, ahead
        self.kind = kind_of(config)
        # Waits for answers to an Offer, and for streams from Accept to COMMIT.
        self.answer_waits, self.stream_waits = Waits(), Waits()
        self.excused = Recent[PeerId, None](EXCUSED)  # Partners whose last exchange ended for an innocent reason.
        self.single = not config.pushes and config.partners == 1  # Each exchange is a mix, whichever side asked for it.
        self.plain = config.plain
        self.foresees = config.overlaps  # Mixes may overlap; while streams dominate, the next is reserved ahead.
        self.small = local.elements <= LARGEST
        # Partners that broke a reservation and have not finished an exchange since.
        self.unkept = Recent[PeerId, None](EXCUSED)
        self.filter = filter_of(config)
        self.fragments = fragments_of(config.part, local.elements)
        self.part = Subset.parse(config.part) or ALL
        if self.part.kind == "mask":
            self.part = self.part.drawn(new_session())
        self.gave_way = False  # An exchange of ours has given way to another's since our last one finished.
        # Exchanges of these parts measure the distance between members, which some codecs need.
        self.learns = frozenset(lasting_parts(config.part, local.elements) if needs_spread(config.codec) else ())
        self.bounded: set[Subset] = set()  # Parts whose distance has been measured.
        # Partners further away than the bound: the next exchange uses a codec without one.
        self.apart = Recent[PeerId, None](EXCUSED)

    # -- our own mixes -------------------------------------------------------------------------------------------
    def begin(self, now: float) -> list[Effect]:
        """Begin a mix of our own, if there is room and a partner to ask."""
        return self.kind.start(self, now)

    def look_ahead(self, now: float) -> list[Effect]:
        """Reserve the next exchange while streams run, because another mix will be due when they end."""
        return self.ahead.ask(self, now) if self.foresees else []

    def follow(self, now: float) -> list[Effect]:
        """Begin the exchange that was reserved ahead, if no other is in progress."""
        one = None if self.moving else self.upcoming
        return [] if one is None else self.tell(one, Event.FREED, now)

    @property
    def upcoming(self) -> One | None:
        """Return the exchange that is reserved ahead or asked for, or None."""
        return next((one for one in self.table.values() if one.state in (State.ASKED, State.AHEAD)), None)

    @property
    def next_part(self) -> Subset:
        """Return the elements that our next mix covers; a driver may copy them before the mix begins."""
        if self.local.settling:
            return ALL  # Members that settle must agree on all weights.
        return self.part if self.fragments is None else self.fragments.next()

    def draw_part(self) -> Subset:
        """Return :attr:`next_part`, and draw a new mask for the mix after it."""
        part = self.next_part
        if part.kind == "mask":
            self.part = part.drawn(self.new_session())
        return part

    # -- routing -------------------------------------------------------------------------------------------------
    def said(self, event: Event, sender: PeerId, session: int, *what: Any) -> list[Effect]:
        """Handle an event that a member's message reports about a session."""
        one = self.table.get(session)
        if one is None or not one.accepts_from(event, sender) or not one.allows(event):
            return self.kind.on_stray(self, event, sender, session)
        return one.happens(event, sender, *what)

    def tell(self, one: One, event: Event, *what: Any) -> list[Effect]:
        """Handle an event of a session that no message reports, if its state allows the event."""
        return one.happens(event, *what) if one.allows(event) else []

    def reported(self, event: Event, session: int, *what: Any) -> list[Effect]:
        """Handle an event that the driver reports for a session number."""
        one = self.table.get(session)
        return [] if one is None else self.tell(one, event, *what)

    # -- messages ------------------------------------------------------------------------------------------------
    def on_offer(self, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        if self.foresees and offer.mixing == self.ahead.MIXING:
            return self.ahead.consent(self, sender, offer, now)
        return self.kind.answer(self, sender, offer, now)

    def on_invite(self, sender: PeerId, invite: Invite, now: float) -> list[Effect]:
        return self.kind.invite(self, sender, invite, now)

    def on_accept(self, sender: PeerId, accept: Accept, now: float) -> list[Effect]:
        return self.said(Event.ACCEPT, sender, accept.session, accept, now)

    def on_joined(self, sender: PeerId, joined: Joined, now: float) -> list[Effect]:
        return self.said(Event.JOINED, sender, joined.session, joined, now)

    def on_begin(self, sender: PeerId, begin: Begin, now: float) -> list[Effect]:
        return self.said(Event.BEGIN, sender, begin.session, begin, now)

    def on_busy(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        return self.said(Event.BUSY, sender, session, now)

    def on_refuse(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        return self.said(Event.REFUSE, sender, session, now)

    def on_commit(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        return self.said(Event.COMMIT, sender, session, now)

    def on_abort(self, sender: PeerId, session: int, code: str, now: float) -> list[Effect]:
        return self.said(Event.ABORT, sender, session, code, now)

    def on_outcome(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        return self.said(Event.OUTCOME, sender, session, now)

    def on_settled(self, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
        return self.said(Event.SETTLED, sender, settled.session, settled, now)

    # -- reports of the driver -----------------------------------------------------------------------------------
    def snapshotted(self, session: int, now: float, mass: float = 0.0) -> list[Effect]:
        return self.reported(Event.SNAPSHOTTED, session, now, mass)

    def spoiled(self, session: int) -> list[Effect]:
        """End the session: its snapshot is not finite."""
        return self.reported(Event.SPOILED, session)

    def streamed(self, session: int, difference_sq: float, own_sq: float, now: float) -> list[Effect]:
        """Handle the partner's complete vector, whose checksums are valid."""
        return self.reported(Event.STREAMED, session, difference_sq, own_sq, now)

    def gathered(
        self, session: int, difference_sq: float, own_sq: float, refused: Iterable[PeerId], now: float
    ) -> list[Effect]:
        """Handle a group's means, which have all arrived.

        Args:
            session: Session of the group.
            difference_sq: ``|mean - ours|^2``.
            own_sq: ``|ours|^2``.
            refused: Members whose values our mean leaves out, or whose slices are no valid means.
            now: Current time in seconds.
        """
        return self.reported(Event.GATHERED, session, difference_sq, own_sq, refused, now)

    def failed(self, session: int, code: str, now: float) -> list[Effect]:
        """End a session whose streams stalled, brought wrong bytes or lost their link ("broken")."""
        return self.reported(Event.FAILED, session, code, now)

    def linked(self, peer: PeerId, now: float) -> list[Effect]:
        """Tell all sessions that there is a link to ``peer``."""
        return [effect for one in self.table.values() for effect in self.tell(one, Event.LINKED, peer, now)]

    def unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        """Tell all sessions that no link to ``peer`` is left, and that perhaps none can be made.

        After an orderly close (the link was not needed) pairs and pushes need no event. The driver has reported the
        sessions on that link, and an offer may be waiting for another link.
        """
        if orderly and not self.kind.MANY:
            return []
        return [effect for one in list(self.table.values()) for effect in one.without(peer, now)]

    # -- polling -------------------------------------------------------------------------------------------------
    def look_elsewhere(self, state: Callable[[PeerId], MemberState | None], now: float) -> list[Effect]:
        """Stop waiting for members that are no longer held ALIVE.

        End an exchange IN_DOUBT if the only member that knows its outcome is gone.
        """
        lost = [(one, peer) for one in self.table.values() for peer in one.lost(state)]
        effects = [effect for one, peer in lost for effect in one.without(peer, now)]
        for one in [one for one in self.table.values() if one.state is State.IN_DOUBT]:
            if one.orphaned(state):
                effects += self.tell(one, Event.GONE, now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        late = [one for one in self.table.values() if one.deadline <= now]
        return [effect for one in late for effect in self.tell(one, Event.LATE, now)]

    def abandon(self) -> list[Effect]:
        """Drop all exchanges in progress, because the weights that they began from are about to be replaced."""
        return [effect for one in list(self.table.values()) for effect in self.tell(one, Event.REPLACED)]

    # -- limits --------------------------------------------------------------------------------------------------
    @property
    def engaged(self) -> bool:
        """Return True if no mix of our own may begin now.

        An exchange in progress already counts as our mix, and a second one would share its bandwidth. Where mixes
        overlap, an exchange of ours that waits for its snapshot blocks the next one. Otherwise a node with a paused
        training loop would begin as many as allowed.
        """
        if self.overlapping:
            return self.moving >= self.most or any(one.state is State.PREPARING for one in self.outgoing.values())
        single = self.single
        return True in [not one.idle for one in self.table.values() if single or one.initiator]

    @property
    def overlapping(self) -> bool:
        """Return True if mixes may overlap now.

        They overlap if streams take so little of an exchange's time that a link would be idle. Where streams dominate,
        overlapping exchanges share one rate: no more of them finish, and they bring older weights.
        """
        short = self.stream_waits.median_s <= SHORT * self.answer_waits.median_s < math.inf
        return short and self.foresees and self.small

    @property
    def most(self) -> int:
        """Return the limit of exchanges in progress while mixes overlap: ours, and those that others offer.

        Each holds two vectors, and the sum of the differences that other exchanges add meanwhile.
        """
        return 1 + self.partners.incoming()

    @property
    def coming(self) -> int:
        """Return how many exchanges in progress postpone our next mix by an interval.

        Exchanges that do not overlap postpone it when they end.
        """
        return self.moving if self.overlapping else 0

    @property
    def most_doubts(self) -> int:
        """Return how many exchanges may be in doubt at once: each holds two vectors."""
        return self.kind.most_doubts(self)

    def forget_doubts(self, now: float) -> list[Effect]:
        """Drop the exchange that has been in doubt for longest, if there are too many in doubt."""
        in_doubt = [one for one in self.table.values() if one.state is State.IN_DOUBT]
        if len(in_doubt) <= self.most_doubts:
            return []
        return self.tell(min(in_doubt, key=lambda one: one.since), Event.CROWDED, now)

    @property
    def parked(self) -> int:
        return sum([one.parked and one.state is not State.IN_DOUBT for one in self.table.values()])

    @property
    def most_parked(self) -> int:
        """Return how many exchanges may be parked: as many as may be in doubt, since each holds two vectors.

        None is parked where the node must wait for its partners: in a round with all neighbours, or under
        ``max_version_gap``.
        """
        waits = self.config.partners == 0 or self.config.max_version_gap is not None
        return 0 if waits else self.most_doubts

    # -- memory --------------------------------------------------------------------------------------------------
    def codec(self, partner: PeerId, part: Subset) -> str:
        """Return the codec that we offer this partner for this part now."""
        bounded = part in self.bounded and partner not in self.apart
        return proposed_codec(self.config.codec, bounded, self.durations.rate(partner), self.local.machine)

    def finished(self, one: Paired, now: float) -> None:
        """Record that an exchange with one partner has happened."""
        partner = one.partner
        self.remember((partner, one.session), True)
        if one.state is not State.IN_DOUBT:
            seconds = now - one.since
            sent_bytes = CODECS[one.codec].encoded_bytes(one.elements)
            self.durations.add(partner, seconds, sent_bytes)
            if one.initiator:
                self.taken[partner] = Taken(one.elements, one.codec, sent_bytes, one.answer_s + seconds)
            self.partners.heard(partner, seconds)
            self.stream_waits.add(partner, seconds)
        if one.initiator and one.ANSWERED:
            self.answer_waits.add(partner, one.answer_s)
        self.done += 1
        self.last_partner = partner
        self.misbehaviour.take_back(partner, "wasted")
        self.excused.pop(partner, None)
        self.apart.pop(partner, None)
        self.unkept.pop(partner, None)
        self.partners.mixed(partner, now, one.initiator)

    def counted(self, one: Paired) -> None:
        """Count an exchange towards the mix that the schedule waits for.

        Skip exchanges that were resolved from IN_DOUBT: our own mix has moved on, and the partner has earned no trust.
        """
        if one.state is not State.IN_DOUBT:
            self.mixed_at.append(one.partner)
            self.own_mixed = self.own_mixed or one.initiator
            self.gave_way = self.gave_way and not one.initiator

    def trained(self, steps: int) -> float:
        """Return the intervals that the weights have been trained since the last mix, at this number of steps.

        It is 1 if no correction is learned.
        """
        every = self.local.every
        return 1.0 if every is None or not self.config.kappa else max(0, steps - self.local.mixed_steps) / every

    def usual(self) -> Taken | None:
        """Return the usual cost of an exchange (bytes and seconds), None before the first.

        The result is the median over the last partners that this node chose. Each partner counts once, so that a few
        slow attackers change nothing.
        """
        taken = self.taken.values()
        if not taken:
            return None
        last = next(reversed(taken))
        sent = median([one.sent_bytes / one.elements for one in taken])
        seconds = median([one.seconds for one in taken])
        return Taken(last.elements, last.codec, round(sent * last.elements), seconds)

    def intervals(self, now: float) -> float:
        """Return the number of mix intervals that have passed on this node: in its own steps, or else by time.

        No other peer can change it.
        """
        every, every_s = self.config.interval_steps, self.config.mix_every_s
        return self.local.steps / every if every else now / (every_s or 1.0)

    def excuses(self, partner: PeerId) -> bool:
        """Return True if an exchange that ended for an innocent reason is not held against its partner.

        The reason is the partner's claim, and an attacker could repeat it to hold slots. So each partner is excused
        once, and again after it has finished an exchange.
        """
        if partner in self.excused:
            return False
        self.excused[partner] = None
        return True
