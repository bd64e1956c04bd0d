"""Exchanges and joins: the snapshots, the streams between them, and what they come to.

The two sides of an exchange compute differences that are each other's exact negatives (:mod:`gossip.mixing`), so the
second side takes the first one's away instead of computing its own: bit for bit the same. Streams arrive whole, with
their last byte; chunks are a matter of a real node's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gossip.codecs import CODECS, Codec, get_codec
from gossip.config import Config
from gossip.effects import Adopt, Collect, Effect, Mix, Release, Serve, Snapshot, Transfer
from gossip.ids import PeerId
from gossip.mixing import difference
from sim.events import Events
from sim.flows import Flow, Flows
from sim.host import Floats, Host
from sim.links import Links
from sim.network import Network
from sim.training import Training

__all__ = ["Sessions"]

STREAMED, COLLECTED = 212, 213  # in the log of events
TIMED = 65_536  # durations kept; beyond it every second one goes, and from then on half as many are added


class Pair:
    """What the side that has the other's vector first leaves for the other side."""

    __slots__ = ("by", "difference", "difference_sq", "weight")

    def __init__(self, by: Host, difference: Floats, difference_sq: float) -> None:
        self.by, self.difference, self.difference_sq = by, difference, difference_sq
        self.weight = 0.0  # by which the difference was multiplied already


class Session:
    """One host's side of an exchange, or of a piece given or taken."""

    __slots__ = ("codec", "collect", "difference", "negative", "partner", "since", "snapshot")

    def __init__(self, since: float) -> None:
        self.since = since  # when a snapshot was wanted
        self.snapshot: Floats | None = None
        self.partner: PeerId | None = None  # whose stream is awaited
        self.codec: Codec | None = None
        self.difference: Pair | None = None
        self.negative = False  # the difference is to be taken away, not added
        self.collect: Collect | None = None


class Sessions:
    """Performs Snapshot, Transfer, Mix, Release, Collect, Serve and Adopt, and reports what becomes of them."""

    def __init__(
        self, events: Events, network: Network, config: Config, links: Links, training: Training,
        perform: Callable[[Host, list[Effect]], None],
    ) -> None:  # fmt: skip
        self.events, self.network, self.config = events, network, config
        self.links, self.training, self.perform = links, training, perform
        self.flows = Flows(events, network)
        self.streams: dict[tuple[Host, int], Flow] = {}  # by who sends, and the session
        self.raw = get_codec("fp32")
        self.pairs: dict[int, Pair] = {}  # by session
        self.failed = 0  # exchanges, as counted by peers that are gone
        self.mixes = 0  # applied, each side of an exchange counting
        self.stream_bytes = 0  # sent
        self.durations_s: list[float] = []  # from the wish for a snapshot to the mix
        self.every = 1  # how many mixes one of these stands for

    # -- an exchange ---------------------------------------------------------------------------------------------
    def snapshot(self, host: Host, effect: Snapshot) -> None:
        assert not effect.full, "simulated peers have no optimizer state to share"
        host.sessions[effect.session] = Session(self.events.now)
        host.requests.append(effect.session)
        host.offering = host.peer.exchanges.outgoing is not None
        self.training.wish(host)

    def transfer(self, host: Host, effect: Transfer) -> None:
        number, partner = effect.session, effect.partner
        session = host.sessions.get(number)
        if session is None or session.snapshot is None or not self.links.linked(host, partner):
            self.events.push(self.events.now, self.on_failed, host, number, "broken")
            return
        codec = session.codec = CODECS[effect.codec]
        session.partner = partner
        size_bytes = codec.encoded_bytes(session.snapshot.size)
        self.stream(host, self.links.by_id[partner], number, session.snapshot, size_bytes, self.on_stream)

    def stream(
        self, host: Host, to: Host, session: int, values: Floats, size_bytes: int, handler: Callable[..., None]
    ) -> None:
        self.stream_bytes += size_bytes
        done = partial(self.on_sent, host, to, session, values, handler)
        flow = self.flows.start(host.index, to.index, size_bytes, done)
        if flow is not None:
            self.streams[host, session] = flow

    def on_sent(self, host: Host, to: Host, session: int, values: Floats, handler: Callable[..., None]) -> None:
        """The last byte is on its way."""
        self.streams.pop((host, session), None)
        if host.gone:
            return
        if self.links.cut(host, to) or self.network.loses(host.rng):
            self.events.push(self.events.now + self.config.stall_s, self.on_stalled, to, host, session)
        else:
            self.events.push_bulk(self.links.after(host, to), handler, to, host, session, values)
        if handler == self.on_piece:
            self.events.push(self.events.now, self.on_served, host, session)

    def on_stream(self, host: Host, sender: Host, number: int, theirs: Floats) -> None:
        session = host.sessions.get(number)
        if session is None or session.partner != sender.id or host.gone:
            return
        ours, codec = session.snapshot, session.codec
        assert ours is not None
        assert codec is not None
        if not codec.raw:
            quantised = np.empty_like(ours)
            codec.quantised(ours, quantised)
            ours = quantised
        pair = self.pairs.pop(number, None)
        if pair is not None and pair.by is sender:
            session.negative = True
        else:
            out = np.empty_like(theirs)
            if not codec.raw:
                codec.quantised(theirs, out)
                theirs = out
            pair = self.pairs[number] = Pair(host, out, difference(theirs, ours, out))
        session.difference = pair
        self.events.note(host.index, sender.index, STREAMED)
        own_sq = float(ours.dot(ours))
        self.perform(host, host.peer.streamed(number, pair.difference_sq, own_sq, self.events.now))

    def on_stalled(self, host: Host, sender: Host, number: int) -> None:
        """Nothing has moved for too long, and a node closes the link."""
        session = host.sessions.get(number)
        if session is None or host.gone:
            return
        waiting = session.collect is not None or (session.partner is not None and session.difference is None)
        if waiting and self.links.linked(host, sender.id):
            self.links.close(host, sender.id)

    def on_failed(self, host: Host, session: int, code: str) -> None:
        if not host.gone:
            self.perform(host, host.peer.failed(session, code, self.events.now))

    def mix(self, host: Host, effect: Mix) -> None:
        session, weight = host.sessions.get(effect.session), effect.weight
        if session is None or session.difference is None:
            return
        pair, session.difference = session.difference, None
        self.mixes += 1
        if not self.mixes % self.every:
            self.remember(self.events.now - session.since)
        if host.outer.plain:
            if pair.weight == 0.0:
                pair.difference *= np.float32(weight)
                pair.weight = weight
            assert pair.weight == weight, "the two sides agreed on one weight"
            host.shifts.append((pair.difference, session.negative))
        else:
            own = -pair.difference if session.negative else pair.difference.copy()
            assert session.snapshot is not None
            host.shifts.append((host.outer.shift(session.snapshot, own, weight), False))
        self.training.wish(host)

    def remember(self, seconds: float) -> None:
        self.durations_s.append(seconds)
        if len(self.durations_s) >= TIMED:
            del self.durations_s[::2]
            self.every *= 2

    def release(self, host: Host, effect: Release) -> None:
        number = effect.session
        session = host.sessions.pop(number, None)
        if session is None:
            return
        if session.difference is not None:
            self.pairs.pop(number, None)
        if number in host.requests:
            host.requests.remove(number)
            host.wanted = bool(host.requests or host.shifts or host.adopting)
        if self.streams:
            self.end(host, number)

    def end(self, host: Host, session: int) -> None:
        flow = self.streams.pop((host, session), None)
        if flow is not None:
            self.flows.stop(flow)

    def forget(self, host: Host) -> None:
        """It died: what it was sending ends in the middle, and what it was sent goes nowhere."""
        self.failed += host.peer.exchanges.failures
        for key in [key for key in self.streams if key[0] is host]:
            self.end(*key)

    # -- joining -------------------------------------------------------------------------------------------------
    def collect(self, host: Host, effect: Collect) -> None:
        if host.joining_vector is None:
            host.joining_vector = np.zeros(effect.size, np.float32)
        if self.links.linked(host, effect.partner):
            session = host.sessions[effect.session] = Session(self.events.now)
            session.collect = effect
        else:
            self.events.push(self.events.now, self.on_failed, host, effect.session, "broken")

    def serve(self, host: Host, effect: Serve) -> None:
        session = host.sessions.get(effect.session)
        if session is None or session.snapshot is None or not self.links.linked(host, effect.partner):
            self.events.push(self.events.now, self.on_failed, host, effect.session, "broken")
            return
        piece = session.snapshot[effect.start : effect.stop]
        to, size_bytes = self.links.by_id[effect.partner], self.raw.encoded_bytes(piece.size)
        self.stream(host, to, effect.session, piece, size_bytes, self.on_piece)

    def on_served(self, host: Host, session: int) -> None:
        if not host.gone:
            self.perform(host, host.peer.served(session, self.events.now))

    def on_piece(self, host: Host, sender: Host, session: int, piece: Floats) -> None:
        own = host.sessions.get(session)
        effect = None if own is None else own.collect
        if host.gone or effect is None or effect.partner != sender.id:
            return
        assert host.joining_vector is not None
        host.joining_vector[effect.start : effect.stop] = piece
        self.events.note(host.index, sender.index, COLLECTED)
        self.perform(host, host.peer.collected(session, effect.stop, self.events.now))

    def adopt(self, host: Host, effect: Adopt) -> None:
        host.adopting = True
        host.shifts.clear()  # they belong to the weights that go
        self.training.wish(host)
