"""One side of an exchange, with a scripted choice of partners, for all tests of exchanges."""

from __future__ import annotations

import itertools

from gossip.config import Config
from gossip.effects import Send, Snapshot, Transfer
from gossip.exchange import reservation
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import Event, Local
from gossip.ids import PeerId
from gossip.wire.messages import Accept, Commit, Offer

A, B, C, D, E, F = (PeerId(bytes([65 + i]) * 16) for i in range(6))
ELEMENTS = 100


class PlayedExchanges(Exchanges):
    """Exchanges with a short call for each message and each report, as a Peer routes them."""

    def on_accept(self, sender, accept, now):
        return self.route_message(Event.ACCEPT, sender, accept.session, accept, now)

    def on_joined(self, sender, joined, now):
        return self.route_message(Event.JOINED, sender, joined.session, joined, now)

    def on_begin(self, sender, begin, now):
        return self.route_message(Event.BEGIN, sender, begin.session, begin, now)

    def on_settled(self, sender, settled, now):
        return self.route_message(Event.SETTLED, sender, settled.session, settled, now)

    def on_busy(self, sender, session, now):
        return self.route_message(Event.BUSY, sender, session, now)

    def on_refuse(self, sender, session, now):
        return self.route_message(Event.REFUSE, sender, session, now)

    def on_commit(self, sender, session, now):
        return self.route_message(Event.COMMIT, sender, session, now)

    def on_outcome(self, sender, session, now):
        return self.route_message(Event.OUTCOME, sender, session, now)

    def on_abort(self, sender, session, code, now):
        return self.route_message(Event.ABORT, sender, session, code, now)

    def on_snapshotted(self, session, now, mass=0.0):
        return self.route_report(Event.SNAPSHOTTED, session, now, mass)

    def on_spoiled(self, session):
        return self.route_report(Event.SPOILED, session)

    def on_streamed(self, session, difference_sq, own_sq, now):
        return self.route_report(Event.STREAMED, session, difference_sq, own_sq, now)

    def on_gathered(self, session, difference_sq, own_sq, refused, absent, now):
        return self.route_report(Event.GATHERED, session, difference_sq, own_sq, refused, absent, now)

    def on_failed(self, session, code, now):
        return self.route_report(Event.FAILED, session, code, now)


class Side:
    """Exchanges with a scripted choice of partners."""

    def __init__(self, me=A, partners=(B,), config=None, first_session=1, **local):
        self.me, self.partners = me, list(partners)
        self.config = config or Config()
        fields = {"run_id": b"g" * 16, "ready": True, "steps_per_mix": self.config.first_interval} | local
        self.local = Local("f", ELEMENTS, 10, **fields)
        self.sessions = itertools.count(first_session)
        self.benched, self.declined, self.mixes, self.gone, self.strangers = [], [], [], [], []

        def new_session():
            return next(self.sessions)

        self.exchanges = PlayedExchanges(me, self.local, self.config, new_session, self, reservation)

    wary_until = 0.0

    def note_slow(self, partner, now):
        """Do nothing: slowness makes no partner a stranger here."""

    def is_unproven(self, peer):
        return peer in self.strangers

    def choose(self, asked, now, is_retry=False, is_unproven_busy=False):
        return next((peer for peer in self.partners if peer not in asked), None)

    def note_failure(self, partner, now, silent=False):
        self.benched.append(partner)

    def is_crowding(self, sender, now):
        return False

    def note_request(self, asker, now):
        pass

    def is_declined(self, sender, now, forgives=True):
        return sender in self.declined

    def present(self, partners):
        return [partner for partner in partners if partner not in self.gone]

    def note_mix(self, partner, now, own):
        self.mixes.append((partner, now))

    def count_own_mix(self):
        return self.config.partners

    def max_incoming(self):
        return self.config.incoming_limit

    def has_others(self, peers):
        return any(peer not in peers for peer in self.partners)

    def note_rate(self, partner, seconds):
        """Do nothing: the selection learns nothing here."""

    def max_weight(self, partner, others):
        return 1 / (1 + max(others, 1)) if self.config.mixing == "pair" else 0.5

    @property
    def table(self):
        return self.exchanges.table


def offer(session=7, weight=0.5, version=0.0, fingerprint="f", run_id=b"g" * 16, codec="fp32"):
    return Offer(session, fingerprint, run_id, version, weight, codec)


def streaming(side=None, session=1, weight=0.5):
    """Return a side whose own exchange with B streams."""
    side = side or Side()
    side.exchanges.begin_mix(0.0)
    side.exchanges.on_snapshotted(session, 0.0)
    assert [type(e) for e in side.exchanges.on_accept(B, Accept(session, 0.0, weight, "fp32"), 0.0)] == [Transfer]
    return side


def verified(side=None):
    side = streaming(side)
    assert side.exchanges.on_streamed(1, 1.0, 1.0, 1.0) == [Send(B, Commit(1))]
    return side


def answering(side=None, session=7):
    """Return a side that streams an exchange which B offered."""
    side = side or Side()
    assert side.exchanges.on_offer(B, offer(session), 0.0) == [Snapshot(session)]
    side.exchanges.on_snapshotted(session, 0.0)
    return side
