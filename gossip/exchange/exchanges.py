"""All exchanges of one peer: those of its own mix, and up to ``partners.max_incoming()`` that others offered.

The session classes decide what happens within one exchange: :mod:`gossip.exchange.pair`,
:mod:`gossip.exchange.reservation`, :mod:`gossip.exchange.push` and :mod:`gossip.exchange.groups.group`. This module
routes events to sessions, limits how many run at once, and remembers how they ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from gossip.arithmetic.subsets import ALL, Subset, fragments_of, lasting_parts
from gossip.codecs import ExchangeCost, needs_spread
from gossip.config import Config
from gossip.effects import Effect, MemberState, Send
from gossip.exchange.agreement import proposed_codec
from gossip.exchange.durations import Waits, median
from gossip.exchange.session import Local, Session, session_class, settlement_class
from gossip.exchange.session_table import AnySession, Ledger
from gossip.exchange.settling.convergence import Convergence
from gossip.exchange.transitions import Event, State
from gossip.filters.registry import filter_of
from gossip.filters.setbacks import Setbacks
from gossip.ids import Address, PeerId
from gossip.recent import Recent
from gossip.wire.messages import Busy, Invite, Offer

MAX_STREAM_RATIO = 4.0  # Mixes may overlap while streams take at most this many times as long as answers.
# Largest vector (64 MiB) whose exchanges overlap: they hold eight vectors instead of two.
MAX_OVERLAP_ELEMENTS = 1 << 24
MAX_PARTNERS = 256  # Partners to remember in each table: as many as there may be links.


class PartnerChoice(Protocol):
    """The choice of partners. :class:`gossip.selection.partners.Partners` implements it and documents the methods."""

    wary_until: float  # Until then unproven partners are neither asked nor accepted.
    mixes: int  # Our own mixes that have begun.

    def choose(
        self, asked: set[PeerId], now: float, is_retry: bool = False, is_unproven_busy: bool = False
    ) -> PeerId | None: ...  # fmt: skip
    def group(self, now: float) -> list[PeerId]: ...
    def is_unproven(self, peer: PeerId) -> bool: ...
    def note_slow(self, partner: PeerId, now: float) -> None: ...
    def is_crowding(self, sender: PeerId, now: float) -> bool: ...
    def note_request(self, asker: PeerId | None, now: float) -> None: ...
    def is_declined(self, sender: PeerId, now: float, forgives: bool = True) -> bool: ...
    def note_mix(self, partner: PeerId, now: float, own: bool) -> None: ...
    def present(self, partners: Iterable[PeerId]) -> list[PeerId]: ...
    def note_failure(self, partner: PeerId, now: float, silent: bool = False) -> None: ...
    def count_own_mix(self) -> int: ...
    def max_incoming(self) -> int: ...
    def max_weight(self, partner: PeerId, used_slots: int) -> float: ...
    def note_rate(self, partner: PeerId, seconds: float) -> None: ...
    def has_others(self, peers: Collection[PeerId]) -> bool: ...
    def address(self, peer: PeerId) -> Address | None: ...
    def is_linked(self, peer: PeerId) -> bool: ...


class Reservations(Protocol):
    """The reservation of exchanges, :mod:`gossip.exchange.reservation`."""

    MIXING: str  # The name in an Offer that asks for a reservation.

    def reserve(self, exchanges: Exchanges[Any], now: float) -> list[Effect]:
        """Reserve our next exchange."""

    def answer_reservation(self, exchanges: Exchanges[Any], sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        """Answer an offer that asks for a reservation."""


class Exchanges(Ledger[AnySession]):
    """The exchanges of one peer: routing, concurrency limits and memory of outcomes."""

    def __init__(
        self, me: PeerId, local: Local, config: Config, new_session: Callable[[], int], partners: PartnerChoice,
        reservations: Reservations,
    ) -> None:  # fmt: skip
        super().__init__(me, local, config, new_session)
        self.partners, self.reservations = partners, reservations
        self.session_class, self.settlement_class = session_class(config), settlement_class()
        self.convergence = Convergence()  # The differences since we began to settle.
        self.filter = filter_of(config)
        self.fragments = fragments_of(config.part, local.elements)
        self.part = Subset.parse(config.part) or ALL
        if self.part.kind == "mask":
            self.part = self.part.with_seed(new_session())
        self.is_plain = config.plain  # A mix is the plain mean, without outer momentum.
        self.can_overlap = config.overlaps  # Mixes may overlap. While streams dominate, the next is reserved instead.
        self.is_small = local.elements <= MAX_OVERLAP_ELEMENTS  # The vector is small enough for mixes to overlap.
        # The usual waits for the answer to an Offer, and for the streams from Accept to COMMIT.
        self.answer_waits, self.stream_waits = Waits(), Waits()
        self.has_given_way = False  # An exchange of ours has given way to another's since our last one finished.
        # Partners whose last exchange ended for a reason that is not their fault (INNOCENT_REASONS).
        self.withdrawals = Recent[PeerId, int](MAX_PARTNERS)  # Groups that an inviter ended before they began.
        self.excused_partners = Recent[PeerId, None](MAX_PARTNERS)
        # Partners that broke a reservation and have not finished an exchange since.
        self.unreliable_partners = Recent[PeerId, None](MAX_PARTNERS)
        # Some codecs need a bound on the distance between members. The first exchange of a part uses a codec without
        # one, and measures the distance. Only parts that come again are worth it.
        measures = needs_spread(config.codec_name)
        self.parts_to_measure = frozenset(lasting_parts(config.part, local.elements) if measures else ())
        self.measured_parts: set[Subset] = set()  # The parts whose bound is known.
        # Partners further away than the bound: the next exchange with them uses a codec without one.
        self.distant_partners = Recent[PeerId, None](MAX_PARTNERS)

    # -- our own mixes -------------------------------------------------------------------------------------------
    def begin_mix(self, now: float) -> list[Effect]:
        """Begin a mix of our own, if there is room and a partner to ask."""
        kind = self.settlement_class if self.local.settling else self.session_class
        return kind.begin_mix(self, now)

    def begin_settling(self) -> list[Effect]:
        """Begin to settle: withdraw from what has not begun to stream, because settlements come one at a time."""
        self.convergence, self.equal_since, self.setbacks = Convergence(), None, Setbacks()
        reserved = self.reserved_session
        effects: list[Effect] = [] if reserved is None else reserved.withdrawal("late")
        for session in list(self.table.values()):
            if session is reserved or session.IS_GROUP:
                effects += self.route_event(session, Event.YIELDED)
        return effects

    def reserve_next(self, now: float) -> list[Effect]:
        """Reserve the next exchange while streams run, because another mix will be due when they end."""
        return self.reservations.reserve(self, now) if self.can_overlap else []

    def begin_reserved(self, now: float) -> list[Effect]:
        """Begin the reserved exchange if no other takes a slot."""
        session = None if self.used_slots else self.reserved_session
        return [] if session is None else self.route_event(session, Event.FREED, now)

    @property
    def reserved_session(self) -> AnySession | None:
        """Return the exchange for which we hold or ask for a reservation, or None."""
        states = State.ASKED, State.RESERVED
        return next((session for session in self.table.values() if session.state in states), None)

    @property
    def next_part(self) -> Subset:
        """Return the elements that our next mix covers; a driver may copy them before the mix begins."""
        if self.local.settling:
            return ALL  # Members that settle must agree on all weights.
        return self.part if self.fragments is None else self.fragments.next_fragment()

    def draw_part(self) -> Subset:
        """Return :attr:`next_part`, and draw a new mask for the mix after it."""
        part = self.next_part
        if part.kind == "mask":
            self.part = part.with_seed(self.new_session())
        return part

    # -- routing -------------------------------------------------------------------------------------------------
    def route_message(self, event: Event, sender: PeerId, session: int, *arguments: Any) -> list[Effect]:
        """Pass the event of a member's message to the session with this number."""
        exchange = self.table.get(session)
        if exchange is None or not exchange.accepts_from(event, sender) or not exchange.allows(event):
            is_paired = (sender, session) in self.outcomes or (exchange is not None and not exchange.IS_GROUP)
            kind = self.settlement_class if is_paired else self.session_class
            return kind.on_stray(self, event, sender, session)
        return exchange.handle(event, sender, *arguments)

    def route_event(self, session: AnySession, event: Event, *arguments: Any) -> list[Effect]:
        """Pass on an event that no message brings, if the state of the session allows it."""
        return session.handle(event, *arguments) if session.allows(event) else []

    def route_report(self, event: Event, session: int, *arguments: Any) -> list[Effect]:
        """Pass an event that the driver reports to the session with this number."""
        exchange = self.table.get(session)
        return [] if exchange is None else self.route_event(exchange, event, *arguments)

    # -- offers --------------------------------------------------------------------------------------------------
    def on_offer(self, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        if self.local.paused:
            return [Send(sender, Busy(offer.session))]
        if self.can_overlap and offer.mixing == self.reservations.MIXING:
            return self.reservations.answer_reservation(self, sender, offer, now)
        if offer.mixing == self.settlement_class.MIXING:
            return self.settlement_class.answer_offer(self, sender, offer, now)
        # A mix with a member that trains would part us from the settling members.
        if self.local.settling and self.equal_since is not None:
            return [Send(sender, Busy(offer.session))]
        return self.session_class.answer_offer(self, sender, offer, now)

    def on_invite(self, sender: PeerId, invite: Invite, now: float) -> list[Effect]:
        if self.local.settling or self.local.paused:
            return [Send(sender, Busy(invite.session))]
        return self.session_class.answer_invitation(self, sender, invite, now)

    # -- links ---------------------------------------------------------------------------------------------------
    def on_linked(self, peer: PeerId, now: float) -> list[Effect]:
        """Tell all sessions that there is a link to ``peer``."""
        sessions = self.table.values()
        return [effect for session in sessions for effect in self.route_event(session, Event.LINKED, peer, now)]

    def on_unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        """Tell all sessions that no link to ``peer`` is left, or that a dial of it failed.

        After an orderly close (the link was not needed) pairs and pushes need no event. The driver has reported the
        sessions on that link, and an offer may be waiting for another link.
        """
        sessions = [session for session in self.table.values() if session.IS_GROUP or not orderly]
        return [effect for session in sessions for effect in session.on_link_lost(peer, now)]

    # -- polling -------------------------------------------------------------------------------------------------
    def leave_lost_members(self, state: Callable[[PeerId], MemberState | None], now: float) -> list[Effect]:
        """Stop waiting for members that are no longer held ALIVE.

        End an exchange IN_DOUBT if the only member that knows its outcome is gone.
        """
        lost = [(session, peer) for session in self.table.values() for peer in session.lost_peers(state)]
        effects = [effect for session, peer in lost for effect in session.on_link_lost(peer, now)]
        for session in [session for session in self.table.values() if session.state is State.IN_DOUBT]:
            if session.is_orphaned(state):
                effects += self.route_event(session, Event.GONE, now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Tell all sessions whose ``timer_at`` has come."""
        late = [session for session in self.table.values() if session.timer_at <= now]
        return [effect for session in late for effect in self.route_event(session, Event.LATE, now)]

    def abandon(self) -> list[Effect]:
        """Drop all exchanges in progress, because the weights that they began from are about to be replaced."""
        sessions = list(self.table.values())
        return [effect for session in sessions for effect in self.route_event(session, Event.REPLACED)]

    # -- limits --------------------------------------------------------------------------------------------------
    @property
    def is_engaged(self) -> bool:
        """Return True if no mix of our own may begin now.

        An exchange in progress already counts as our mix, and a second one would share its bandwidth. Where mixes
        overlap, an exchange of ours that waits for its snapshot blocks the next one. Otherwise a node with a paused
        training loop would begin as many as allowed.
        """
        if self.is_overlapping:
            if self.used_slots >= self.max_overlaps:
                return True
            return any(session.state is State.PREPARING for session in self.own_exchanges)
        counts_theirs = self.counts_both_ways
        return any([session.has_slot for session in self.table.values() if counts_theirs or session.is_initiator])

    @property
    def is_overlapping(self) -> bool:
        """Return True if mixes may overlap now.

        They overlap if streams take so little of an exchange's time that a link would be idle. Where streams dominate,
        overlapping exchanges share one rate: no more of them finish, and they bring older weights.
        """
        is_short = self.stream_waits.median_s <= MAX_STREAM_RATIO * self.answer_waits.median_s < math.inf
        return is_short and self.can_overlap and self.is_small and not self.local.settling

    @property
    def counts_both_ways(self) -> bool:
        """Return True if each exchange is a mix of both sides, whichever side asked for it: with one partner a mix."""
        return self.local.settling or (self.config.partners == 1 and not self.config.pushes)

    @property
    def max_overlaps(self) -> int:
        """Return the limit of exchanges in progress while mixes overlap: ours, and those that others offer.

        Each holds two vectors, and the sum of the differences that other exchanges add meanwhile.
        """
        return 1 + self.partners.max_incoming()

    @property
    def postponing_exchanges(self) -> int:
        """Return how many exchanges in progress postpone our next mix by an interval each.

        Exchanges that do not overlap postpone it when they end.
        """
        return self.used_slots if self.is_overlapping else 0

    @property
    def max_doubts(self) -> int:
        """Return how many exchanges may be in doubt at once: each holds two vectors."""
        return self.session_class.max_doubts(self)

    def drop_excess_doubt(self, now: float) -> list[Effect]:
        """Drop the exchange that has been in doubt for longest, if there are too many in doubt."""
        in_doubt = [session for session in self.table.values() if session.state is State.IN_DOUBT]
        if len(in_doubt) <= self.max_doubts:
            return []
        return self.route_event(min(in_doubt, key=lambda session: session.phase_began_at), Event.CROWDED, now)

    @property
    def backgrounded_count(self) -> int:
        """Return how many exchanges are backgrounded and not in doubt."""
        sessions = self.table.values()
        return sum([session.is_backgrounded and session.state is not State.IN_DOUBT for session in sessions])

    @property
    def max_backgrounded(self) -> int:
        """Return how many exchanges may be backgrounded: as many as may be in doubt, since each holds two vectors.

        None is backgrounded where the node must wait for its partners: in a round with all neighbours, or under
        ``max_version_gap``.
        """
        must_wait = self.config.partners == 0 or self.config.max_version_gap is not None
        return 0 if must_wait else self.max_doubts

    def has_unproven(self, excluded: Session | None = None) -> bool:
        """Return True if an exchange other than ``excluded`` is with an unproven partner."""
        others = [session for session in self.table.values() if session is not excluded]
        return any(self.partners.is_unproven(peer) for session in others for peer in session.counterparts)

    # -- memory --------------------------------------------------------------------------------------------------
    def offered_codec(self, partner: PeerId, part: Subset) -> str:
        """Return the codec that we offer this partner for this part now."""
        bounded = part in self.measured_parts and partner not in self.distant_partners
        return proposed_codec(self.config.codec_name, bounded, self.durations.rate(partner), self.local.machine)

    def forget_bound(self, part: Subset, partner: PeerId) -> None:
        """Forget the bound on the distance of this part, since the distance to this partner exceeded it.

        The next exchange of the part, with any partner, needs no bound and measures the distance anew. That partner may
        be nearer than this one. So the next exchange with this partner needs no bound either.
        """
        self.measured_parts.discard(part)
        self.distant_partners[partner] = None

    def trained_intervals(self, steps: int) -> float:
        """Return the mix intervals since the last mix, after ``steps`` local steps.

        Both sides compute from it how much :mod:`gossip.arithmetic.correction` learns. Without a correction (kappa 0)
        it is 1.
        """
        steps_per_mix = self.local.steps_per_mix
        if steps_per_mix is None or not self.config.kappa:
            return 1.0
        return max(0, steps - self.local.mixed_steps) / steps_per_mix

    def usual_cost(self) -> ExchangeCost | None:
        """Return the usual cost of an exchange (bytes and seconds), None before the first.

        The result is the median over the last partners that this node chose. Each partner counts once, so that a few
        slow attackers change nothing.
        """
        costs = self.last_costs.values()
        if not costs:
            return None
        last_cost = next(reversed(costs))
        bytes_per_element = median([cost.sent_bytes / cost.elements for cost in costs])
        seconds = median([cost.seconds for cost in costs])
        return ExchangeCost(last_cost.elements, last_cost.codec, round(bytes_per_element * last_cost.elements), seconds)

    def elapsed_intervals(self, now: float) -> float:
        """Return the number of mix intervals that have passed on this node: in its own steps, or else by time.

        No other peer can change it. A node without any interval counts seconds.
        """
        interval_steps, interval_s = self.config.interval_steps, self.config.mix_every_s
        return self.local.steps / interval_steps if interval_steps else now / (interval_s or 1.0)

    def excuse_once(self, partner: PeerId) -> bool:
        """Excuse a partner whose exchange ended for an innocent reason; return False if it was excused before.

        The reason is the partner's claim, and an attacker could repeat it to hold slots. So each partner is excused
        once, and again after it has finished an exchange.
        """
        if partner in self.excused_partners:
            return False
        self.excused_partners[partner] = None
        return True
