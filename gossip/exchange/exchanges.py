"""All exchanges of one peer: those of its own mix, and ``partners.incoming()`` that others offered.

What happens in one is its own affair (:mod:`gossip.exchange.pair`, :mod:`gossip.exchange.ahead`,
:mod:`gossip.exchange.push`, :mod:`gossip.exchange.groups.group`); here it is found out whose session something is
about, how many there may be, and what is remembered of those that are over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from gossip.arithmetic.subsets import ALL, Subset, fragments_of, lasting_parts
from gossip.codecs import CODECS, Taken, needs_spread
from gossip.config import Config
from gossip.effects import Effect, MemberState
from gossip.exchange import ahead
from gossip.exchange.agreement import proposed_codec
from gossip.exchange.durations import Patience, median
from gossip.exchange.offer import Exchange
from gossip.exchange.session import Local, kind_of
from gossip.exchange.session_table import Ledger, One
from gossip.exchange.transitions import Event, State
from gossip.filters.registry import filter_of
from gossip.ids import Address, PeerId
from gossip.recent import Recent
from gossip.wire.messages import Accept, Begin, Invite, Joined, Offer, Settled

__all__ = ["Exchanges", "PartnerChoice"]

SHORT = 4.0  # times what answers take, the longest streams beside which others may begin
LARGEST = 1 << 24  # elements of a vector whose exchanges overlap: eight of 64 MiB, where larger ones need two
EXCUSED = 256  # partners remembered, as many as there may be links


class PartnerChoice(Protocol):
    """Whom to mix with: :class:`gossip.selection.partners.Partners`."""

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


class Exchanges(Ledger[One]):
    """Routes, limits and remembers."""

    def __init__(
        self, me: PeerId, local: Local, config: Config, new_session: Callable[[], int], partners: PartnerChoice
    ) -> None:
        super().__init__(me, local, config, new_session)
        self.partners = partners
        self.kind = kind_of(config)
        self.answers, self.streams = Patience(), Patience()  # to an Offer; from Accept to COMMIT
        self.excused = Recent[PeerId, None](EXCUSED)  # whose last exchange ended for an innocent reason
        self.single = not config.pushes and config.partners == 1  # an exchange is a mix, whoever asked for it
        self.plain = config.plain
        self.foresees = config.overlaps  # its exchanges overlap, or are agreed ahead where streams take the time
        self.small = local.elements <= LARGEST
        self.unkept = Recent[PeerId, None](EXCUSED)  # who did not keep what was agreed ahead, and has mixed not since
        self.filter = filter_of(config)
        self.fragments = fragments_of(config.part, local.elements)
        self.part = Subset.parse(config.part) or ALL
        if self.part.kind == "mask":
            self.part = self.part.drawn(new_session())
        self.gave_way = False  # our own mix has made way for another's since the last of ours was finished
        # Exchanges of these parts show how far apart the nodes are, as some codecs must know.
        self.learns = frozenset(lasting_parts(config.part, local.elements) if needs_spread(config.codec) else ())
        self.bounded: set[Subset] = set()  # of which an exchange has shown it
        self.apart = Recent[PeerId, None](EXCUSED)  # who was further away: the next with it needs no bound
        self.by_memory: set[PeerId] = set()  # who reads our vectors where they lie: as many as a driver has channels

    # -- our own initiative --------------------------------------------------------------------------------------
    def begin(self, now: float) -> list[Effect]:
        """A mix of our own is due: begin it, where there is room and somebody to ask."""
        return self.kind.start(self, now)

    def look_ahead(self, now: float) -> list[Effect]:
        """Streams have begun, and another mix will be due when they end: agree on it meanwhile."""
        return ahead.ask(self, now) if self.foresees else []

    def follow(self, now: float) -> list[Effect]:
        """What was agreed ahead begins, if nothing else is under way."""
        one = None if self.moving else self.upcoming
        return [] if one is None else self.tell(one, Event.FREED, now)

    @property
    def upcoming(self) -> One | None:
        """What is agreed ahead, or asked for."""
        return next((one for one in self.table.values() if one.state in (State.ASKED, State.AHEAD)), None)

    @property
    def next_part(self) -> Subset:
        """What the next mix of our own will be of: a driver may copy these elements before it begins."""
        if self.local.settling:
            return ALL  # to agree on everything
        return self.part if self.fragments is None else self.fragments.next()

    def draw_part(self) -> Subset:
        """The same, and another the next time."""
        part = self.next_part
        if part.kind == "mask":
            self.part = part.drawn(self.new_session())
        return part

    # -- routing -------------------------------------------------------------------------------------------------
    def said(self, event: Event, sender: PeerId, session: int, *what: Any) -> list[Effect]:
        """A member says something of a session."""
        one = self.table.get(session)
        if one is None or not one.hears(event, sender) or not one.allows(event):
            return self.kind.unheard(self, event, sender, session)
        return one.happens(event, sender, *what)

    def tell(self, one: One, event: Event, *what: Any) -> list[Effect]:
        """Something happened to a session that nobody said."""
        return one.happens(event, *what) if one.allows(event) else []

    def reported(self, event: Event, session: int, *what: Any) -> list[Effect]:
        """The same, by its number."""
        one = self.table.get(session)
        return [] if one is None else self.tell(one, event, *what)

    # -- messages ------------------------------------------------------------------------------------------------
    def on_offer(self, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        if self.foresees and offer.mixing == ahead.PairAhead.MIXING:
            return ahead.consent(self, sender, offer, now)
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
        """The snapshot of this session is not finite."""
        return self.reported(Event.SPOILED, session)

    def streamed(self, session: int, difference_sq: float, own_sq: float, now: float) -> list[Effect]:
        """All of theirs is here, with checksums right."""
        return self.reported(Event.STREAMED, session, difference_sq, own_sq, now)

    def gathered(
        self, session: int, difference_sq: float, own_sq: float, refused: Iterable[PeerId], now: float
    ) -> list[Effect]:
        """All slices are means: |mean - ours|^2, |ours|^2, and whose slices are left out of ours or are no means."""
        return self.reported(Event.GATHERED, session, difference_sq, own_sq, refused, now)

    def failed(self, session: int, code: str, now: float) -> list[Effect]:
        """The streams of this session stalled or brought wrong bytes, or the link it ran over broke ("broken")."""
        return self.reported(Event.FAILED, session, code, now)

    def linked(self, peer: PeerId, now: float) -> list[Effect]:
        """There is a link to ``peer``."""
        return [effect for one in self.table.values() for effect in self.tell(one, Event.LINKED, peer, now)]

    def unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        """No link to ``peer`` is left, and perhaps none can be made. ``orderly``: the last was not needed. What ran
        on it was told one by one, and an offer may be waiting for another link."""
        if orderly and not self.kind.MANY:
            return []
        return [effect for one in list(self.table.values()) for effect in one.without(peer, now)]

    # -- looking -------------------------------------------------------------------------------------------------
    def look_elsewhere(self, state: Callable[[PeerId], MemberState | None], now: float) -> list[Effect]:
        """Whoever is no longer held ALIVE is not waited for until the time is up; and a doubt ends when the only one
        who knows is gone."""
        lost = [(one, peer) for one in self.table.values() for peer in one.lost(state)]
        effects = [effect for one, peer in lost for effect in one.without(peer, now)]
        for one in [one for one in self.table.values() if one.state is State.DOUBT]:
            if one.orphaned(state):
                effects += self.tell(one, Event.GONE, now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        late = [one for one in self.table.values() if one.deadline <= now]
        return [effect for one in late for effect in self.tell(one, Event.LATE, now)]

    def abandon(self) -> list[Effect]:
        """Drop everything under way: the weights they began from are about to be replaced."""
        return [effect for one in list(self.table.values()) for effect in self.tell(one, Event.REPLACED)]

    # -- limits --------------------------------------------------------------------------------------------------
    @property
    def engaged(self) -> bool:
        """Whether no mix of our own may begin beside what is under way: that is a mix already, and a second one would
        share its bandwidth. Where mixes overlap, one of ours that still waits for its snapshot holds up the next: else
        a loop that stands would begin as many as there may be."""
        if self.overlapping:
            return self.moving >= self.most or any(one.state is State.PREPARING for one in self.outgoing.values())
        single = self.single
        return True in [not one.idle for one in self.table.values() if single or one.initiator]

    @property
    def overlapping(self) -> bool:
        """Whether mixes may overlap now: streams take so little of an exchange's time that a link would be idle. Where
        bytes take the time, exchanges that share a rate are no more in all, and bring older weights."""
        short = self.streams.median_s <= SHORT * self.answers.median_s < math.inf
        return short and self.foresees and self.small

    @property
    def most(self) -> int:
        """How many may be under way in all where mixes overlap: each holds two vectors, and the sum of what others add
        meanwhile."""
        return 1 + self.partners.incoming()

    @property
    def coming(self) -> int:
        """How many of those under way put off our next mix by an interval. Elsewhere they do so at their end."""
        return self.moving if self.overlapping else 0

    @property
    def most_doubts(self) -> int:
        """How many are asked after at once: each holds two vectors."""
        return self.kind.most_doubts(self)

    def forget_doubts(self, now: float) -> list[Effect]:
        """Another is in doubt: the one that has been for the longest makes way, where there are too many."""
        in_doubt = [one for one in self.table.values() if one.state is State.DOUBT]
        if len(in_doubt) <= self.most_doubts:
            return []
        return self.tell(min(in_doubt, key=lambda one: one.since), Event.CROWDED, now)

    @property
    def parked(self) -> int:
        return sum([one.parked and one.state is not State.DOUBT for one in self.table.values()])

    @property
    def most_parked(self) -> int:
        """As many as may take a slot: each holds two vectors. A round with all neighbours at once waits for each of
        them, and a training loop that is held for its mix, by definition."""
        waits = self.config.partners == 0 or self.config.max_version_gap is not None
        return 0 if waits else self.most_doubts

    # -- memory --------------------------------------------------------------------------------------------------
    def codec(self, partner: PeerId, part: Subset) -> str:
        """Return the codec that we offer this partner for this part now."""
        bounded = part in self.bounded and partner not in self.apart
        rate = math.inf if partner in self.by_memory else self.durations.rate(partner)
        return proposed_codec(self.config.codec, bounded, rate, self.local.machine)

    def finished(self, one: Exchange, now: float) -> None:
        """An exchange with one partner has happened."""
        partner = one.partner
        self.remember((partner, one.session), True)
        if one.state is not State.DOUBT:
            seconds = now - one.since
            sent_bytes = CODECS[one.codec].encoded_bytes(one.elements)
            self.durations.add(partner, seconds, sent_bytes)
            if one.initiator:
                self.taken[partner] = Taken(one.elements, one.codec, sent_bytes, one.answer_s + seconds)
            self.partners.heard(partner, seconds)
            self.streams.add(partner, seconds)
        if one.initiator and one.ANSWERED:
            self.answers.add(partner, one.answer_s)
        self.done += 1
        self.last_partner = partner
        self.conduct.excuse(partner, "wasted")
        self.excused.pop(partner, None)
        self.apart.pop(partner, None)
        self.unkept.pop(partner, None)
        self.partners.mixed(partner, now, one.initiator)

    def counted(self, one: Exchange) -> None:
        """It was of a mix for which the schedule waits. Not in doubt, or our own mix was given up for it, and it has
        earned no trust by it."""
        if one.state is not State.DOUBT:
            self.mixed_at.append(one.partner)
            self.own_mixed = self.own_mixed or one.initiator
            self.gave_way = self.gave_way and not one.initiator

    def trained(self, steps: int) -> float:
        """Return the intervals that the weights at this step count have been trained for since the last mix; 1 where
        nobody learns a correction from it."""
        every = self.local.every
        return 1.0 if every is None or not self.config.kappa else max(0, steps - self.local.mixed_steps) / every

    def usual(self) -> Taken | None:
        """Return what an exchange takes at present: medians over the last partners that this node chose itself, each of
        which counts once, so that few who are slow on purpose change nothing. None before the first."""
        taken = self.taken.values()
        if not taken:
            return None
        last = next(reversed(taken))
        sent = median([one.sent_bytes / one.elements for one in taken])
        seconds = median([one.seconds for one in taken])
        return Taken(last.elements, last.codec, round(sent * last.elements), seconds)

    def intervals(self, now: float) -> float:
        """Return the intervals that this node has had, by its own steps where it mixes by steps. Nothing that others
        do changes it."""
        every, every_s = self.config.interval_steps, self.config.mix_every_s
        return self.local.steps / every if every else now / (every_s or 1.0)

    def excuses(self, partner: PeerId) -> bool:
        """Whether an exchange that ended for an innocent reason costs its partner nothing. A reason is a claim, and who
        gives one again and again holds a slot as well as who gives none: it is believed once for each finished
        exchange."""
        if partner in self.excused:
            return False
        self.excused[partner] = None
        return True
