"""One side of an exchange, with a scripted choice of partners, for all tests of exchanges."""

import dataclasses
import itertools
from functools import partialmethod

from gossip.config import Config
from gossip.effects import Send, Transfer
from gossip.exchange import reservation
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import Event, Local
from gossip.handlers import EVENTS
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Accept, Begin, Commit, Joined, Offer, Settled

A, B, C, D, E, F = (PeerId(bytes([65 + i]) * 16) for i in range(6))
ELEMENTS = 100
OUTER = Config(outer_momentum=0.5, outer_rate=0.7)


class PlayedExchanges(Exchanges):
    """Exchanges with a short call for each message and each report, as a Peer routes them."""

    on_busy = partialmethod(Exchanges.route_message, Event.BUSY)
    on_refuse = partialmethod(Exchanges.route_message, Event.REFUSE)
    on_commit = partialmethod(Exchanges.route_message, Event.COMMIT)
    on_outcome = partialmethod(Exchanges.route_message, Event.OUTCOME)
    on_abort = partialmethod(Exchanges.route_message, Event.ABORT)
    on_snapshotted = partialmethod(Exchanges.route_report, Event.SNAPSHOTTED)
    on_spoiled = partialmethod(Exchanges.route_report, Event.SPOILED)
    on_streamed = partialmethod(Exchanges.route_report, Event.STREAMED)
    on_gathered = partialmethod(Exchanges.route_report, Event.GATHERED)
    on_failed = partialmethod(Exchanges.route_report, Event.FAILED)

    def receive(self, sender, message, now):
        match message:
            case Offer():
                return self.on_offer(sender, message, now)
            case Accept() | Joined() | Begin() | Settled():
                arguments = (message,)
            case Abort():
                arguments = (message.code,)
            case _:
                arguments = ()
        return self.route_message(EVENTS[type(message)], sender, message.session, *arguments, now)

    on_accept = on_joined = on_begin = on_settled = receive


class Side:
    """Exchanges with a scripted choice of partners."""

    wary_until = 0.0

    def __init__(self, me=A, partners=(B,), config=None, first_session=1, **local):
        self.me, self.partners = me, list(partners)
        self.config = config or Config()
        fields = {"run_id": b"g" * 16, "ready": True, "steps_per_mix": self.config.first_interval} | local
        self.local = Local("f", ELEMENTS, 10, **fields)
        self.sessions = itertools.count(first_session)
        self.benched, self.declined, self.strangers = [], [], []

        def new_session():
            return next(self.sessions)

        self.exchanges = PlayedExchanges(me, self.local, self.config, new_session, self, reservation)

    @property
    def table(self):
        return self.exchanges.table

    # -- exchanges that pass through several states
    def offer_mix(self, now=0.0):
        """Begin our own mix, and return the effects of its offer."""
        [snapshot] = self.exchanges.begin_mix(now)
        return self.exchanges.on_snapshotted(snapshot.session, now)

    def stream_mix(self, now=0.0, **terms):
        """Begin our own mix up to its streams, and return its session."""
        [sent] = self.offer_mix(now)
        session = sent.message.session
        [transfer] = self.exchanges.on_accept(sent.to, accept(session, **terms), now)
        assert type(transfer) is Transfer
        return session

    def answer(self, partner=B, session=7, now=0.0, **terms):
        """Take an offer of ``partner`` up to its streams, and return the effects of our answer."""
        self.exchanges.on_offer(partner, offer(session, **terms), now)
        return self.exchanges.on_snapshotted(session, now)

    def complete(self, partner=B, session=1, now=0.0, difference_sq=1.0, own_sq=1.0):
        """Let both sides of an exchange commit, and return the effects."""
        streamed = self.exchanges.on_streamed(session, difference_sq, own_sq, now)
        return [*streamed, *self.exchanges.on_commit(partner, session, now)]

    # -- the choice of partners
    def choose(self, asked, now, is_retry=False, is_unproven_busy=False):
        return next((peer for peer in self.partners if peer not in asked), None)

    def note_failure(self, partner, now, silent=False):
        self.benched.append(partner)

    def is_unproven(self, peer):
        return peer in self.strangers

    def is_crowding(self, sender, now):
        return False

    def is_declined(self, sender, now, forgives=True):
        return sender in self.declined

    def present(self, partners):
        return list(partners)

    def has_others(self, peers):
        return any(peer not in peers for peer in self.partners)

    def count_own_mix(self):
        return self.config.partners

    def max_incoming(self):
        return self.config.incoming_limit

    def max_weight(self, partner, others):
        return 1 / (1 + max(others, 1)) if self.config.mixing == "pair" else 0.5

    def ignore(self, *arguments):
        """Do nothing: this choice learns nothing from mixes, requests, rates and slow partners."""

    note_mix = note_request = note_rate = note_slow = ignore


def offer(session=7, **changes):
    return dataclasses.replace(Offer(session, "f", b"g" * 16, 0.0, 0.5, "fp32"), **changes)


def accept(session=1, **changes):
    return dataclasses.replace(Accept(session, 0.0, 0.5, "fp32"), **changes)


def streaming(side=None):
    """Return a side whose own exchange with B streams."""
    side = side or Side()
    side.stream_mix()
    return side


def verified(side=None):
    side = streaming(side)
    assert side.exchanges.on_streamed(1, 1.0, 1.0, 1.0) == [Send(B, Commit(1))]
    return side


def replay(make, path):
    """Play the choices with these numbers, from the beginning that ``make`` returns."""
    played = make()
    for number in path:
        played.take(played.choices()[number])
    return played


def paths(make, depth=99, path=()):
    """Yield every state that can be passed through, as the numbers of the choices that lead to it."""
    choices = replay(make, path).choices()
    yield path
    if len(path) < depth:
        for number in range(len(choices)):
            yield from paths(make, depth, (*path, number))


def used_to(side, answer_s, stream_s=None):
    """Teach the side how long answers and streams take; return it."""
    for partner in (B, C, D, E):
        side.exchanges.answer_waits.add(partner, answer_s)
        side.exchanges.stream_waits.add(partner, answer_s if stream_s is None else stream_s)
    return side
