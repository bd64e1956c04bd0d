"""Exchanges and joins: the snapshots, the streams between them, and what they come to.

The two sides of an exchange compute differences that are each other's exact negatives
(:mod:`gossip.arithmetic.mixing`), so the second side takes the first one's away instead of computing its own: bit for
bit the same. (Where filters may have them cut off more or less each multiplies it anew.) Streams arrive whole, with
their last byte; chunks are a matter of a real node's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.mixing import difference, finite
from gossip.codecs import ALIGN, CODECS, Codec, Overflow, Spread, get_codec, needs_spread
from gossip.codecs.base import peaks
from gossip.config import Config
from gossip.effects import (
    Adopt,
    Collect,
    Confirm,
    Effect,
    Gather,
    Merge,
    Mix,
    Recall,
    Release,
    Rename,
    Restore,
    Serve,
    Snapshot,
    Transfer,
)  # fmt: skip
from gossip.ids import PeerId
from sim.engine.events import Events
from sim.engine.flows import Flow, Flows
from sim.engine.gathers import GroupMeans
from sim.engine.host import Floats, Host
from sim.engine.links import VirtualLinks
from sim.engine.shifts import Difference, Merged, SubsetShift
from sim.engine.training import Training
from sim.world.network import NetworkModel

__all__ = ["Sessions"]

Positions = NDArray[np.int64]

STREAMED, COLLECTED = 212, 213  # in the log of events
TIMED = 65_536  # durations kept; beyond it every second one goes, and from then on half as many are added


class Pair:
    """What the side that has the other's vector first leaves for the other side."""

    __slots__ = ("by", "difference", "difference_sq", "peaks", "weight")

    def __init__(self, by: Host, difference: Floats, difference_sq: float) -> None:
        self.by, self.difference, self.difference_sq = by, difference, difference_sq
        self.weight = 0.0  # by which the difference was multiplied already
        self.peaks: Floats | None = None  # of the difference as it was before, where a codec learns from them

    def times(self, weight: float, apart: bool) -> Floats:
        """The difference, multiplied: one array for both sides, but where each may cut off more or less (``apart``)."""
        if apart:
            return self.difference * np.float32(weight)
        if self.weight == 0.0:
            self.difference *= np.float32(weight)
            self.weight = weight
        assert self.weight == weight, "the two sides agreed on one weight"
        return self.difference


class Session:
    """One host's side of an exchange, or of a piece given or taken."""

    __slots__ = (
        "codec", "collect", "difference", "encoded", "negative", "partner", "positions", "pushes", "since", "snapshot",
        "transfer", "values",
    )  # fmt: skip

    def __init__(self, since: float, pushes: int = 0, positions: Positions | None = None) -> None:
        self.since = since  # when a snapshot was wanted
        self.pushes = pushes  # to how many partners the snapshot goes, when nothing comes back
        self.snapshot: Floats | None = None  # of these positions alone
        self.values: Floats | None = None  # the same, as the partner decodes them
        self.encoded: bytearray | None = None  # and the bytes, where those depend on what the partner holds
        self.positions = positions  # which elements are mixed, ascending; None: all
        self.transfer: Transfer | None = None
        self.partner: PeerId | None = None  # whose stream is awaited
        self.codec: Codec | None = None
        self.difference: Pair | None = None
        self.negative = False  # the difference is to be taken away, not added
        self.collect: Collect | None = None


class Sessions:
    """Performs Snapshot, Transfer, Mix, Merge, Rename, Release, Collect, Serve, Adopt; reports what becomes of them."""

    def __init__(
        self, events: Events, network: NetworkModel, config: Config, links: VirtualLinks, training: Training,
        perform: Callable[[Host, list[Effect]], None],
    ) -> None:  # fmt: skip
        self.events, self.network, self.config = events, network, config
        self.links, self.training, self.perform = links, training, perform
        self.flows = Flows(events, network)
        self.gathers = GroupMeans(events, network, config, links, self.flows, perform, self.sent)
        self.streams: dict[tuple[Host, int], Flow] = {}  # by who sends, and the session
        self.raw = get_codec("fp32")
        self.needs_spread = needs_spread(config.codec)
        self.clips = config.cuts_off
        self.pairs: dict[int, Pair] = {}  # by session
        self.failed = 0  # exchanges, as counted by peers that are gone
        self.mixes = 0  # applied, each side of an exchange counting
        self.exchanges = 0.0  # the same, each side counting for its share: a pair, a push and a group are one each
        self.stream_bytes = 0  # sent
        self.durations_s: list[float] = []  # from the wish for a snapshot to the mix
        self.every = 1  # how many mixes one of these stands for

    # -- an exchange ---------------------------------------------------------------------------------------------
    def snapshot(self, host: Host, effect: Snapshot) -> None:
        assert not effect.full, "simulated peers have no optimizer state to share"
        positions = effect.part.positions(host.vector.size, effect.session)
        host.sessions[effect.session] = Session(self.events.now, effect.pushes, positions)
        host.requests.append(effect.session)
        host.offering = host.peer.offering
        self.training.wish(host)

    def recall(self, host: Host, effect: Recall) -> None:
        """A long step is under way. The model still holds what it held at the last boundary, but where the step was
        computed already: then the next boundary is waited for."""
        self.training.seen(host)
        if host.taken > host.steps:
            if effect.session not in host.sessions:
                self.snapshot(host, Snapshot(effect.session, False))
            return
        self.training.catch_up(host)
        if effect.session in host.requests:
            host.requests.remove(effect.session)
        session = host.sessions.setdefault(effect.session, Session(self.events.now))
        session.snapshot = host.vector.copy()
        self.events.push(self.events.now, self.on_recalled, host, effect.session)

    def on_recalled(self, host: Host, session: int) -> None:
        own = host.sessions.get(session)
        if own is None or own.snapshot is None or host.gone:
            return
        report = host.peer.recalled if finite(own.snapshot) else host.peer.spoiled
        self.perform(host, report(session, self.events.now))

    def transfer(self, host: Host, effect: Transfer) -> None:
        number, partner = effect.session, effect.partner
        session = host.sessions.get(number)
        if session is None or session.snapshot is None or not self.links.linked(host, partner):
            self.events.push(self.events.now, self.on_failed, host, number, "broken")
            return
        session.codec, session.partner, session.transfer = CODECS[effect.codec], partner, effect
        session.values = session.snapshot
        if effect.sends:
            self.send(host, number, session)

    def gather(self, host: Host, effect: Gather) -> None:
        session = host.sessions.get(effect.session)
        if session is None or session.snapshot is None:
            self.events.push(self.events.now, self.on_failed, host, effect.session, "broken")
            return
        self.gathers.gather(host, effect, session.snapshot)

    def sent(self, size_bytes: int) -> None:
        self.stream_bytes += size_bytes

    def send(self, host: Host, number: int, session: Session) -> None:
        """What of the snapshot is mixed goes to the partner as the partner will decode it."""
        values, codec, transfer = session.values, session.codec, session.transfer
        assert values is not None
        if host.liar is not None:
            values = host.liar.sends(values, number)
        assert codec is not None
        assert transfer is not None
        size_bytes = codec.encoded_bytes(values.size)
        if codec.needs_spread:
            spread = self.spread(host)
            if session.positions is not None or not spread.known:  # as no bound would do
                self.events.push(self.events.now, self.on_failed, host, number, "overflow")
                return
            codec = session.codec = codec.bound(spread)
            session.encoded = bytearray(size_bytes)
            codec.encode(values, session.encoded, number)
        if not codec.raw:
            decoded = np.empty_like(values)
            codec.quantised(values, decoded, number)
            values = decoded
        if host.liar is None:
            session.values = values  # else it computes with what it holds
        to = self.links.by_id[transfer.partner]
        self.stream(host, to, number, values, size_bytes, self.on_stream, session.encoded)

    def spread(self, host: Host) -> Spread:
        if host.spread is None:
            host.spread = Spread(host.vector.size)
        return host.spread

    def stream(
        self, host: Host, to: Host, session: int, values: Floats, size_bytes: int, handler: Callable[..., None],
        *more: object,
    ) -> None:  # fmt: skip
        self.stream_bytes += size_bytes
        done = partial(self.on_sent, host, to, session, values, handler, *more)
        flow = self.flows.start(host.index, to.index, size_bytes, done)
        if flow is not None:
            self.streams[host, session] = flow

    def on_sent(
        self, host: Host, to: Host, session: int, values: Floats, handler: Callable[..., None], *more: object
    ) -> None:
        """The last byte is on its way."""
        self.streams.pop((host, session), None)
        if host.gone:
            return
        if self.links.cut(host, to) or self.network.loses(host.rng):
            self.events.push(self.events.now + self.config.stall_s, self.on_stalled, to, host, session)
        else:
            self.events.push_bulk(self.links.after(host, to), handler, to, host, session, values, *more)
        if handler == self.on_piece:
            self.events.push(self.events.now, self.on_served, host, session)

    def on_stream(
        self, host: Host, sender: Host, number: int, theirs: Floats, encoded: bytearray | None = None
    ) -> None:  # fmt: skip
        session = host.sessions.get(number)
        if session is None or session.partner != sender.id or host.gone:
            return
        transfer = session.transfer
        assert transfer is not None
        if encoded is not None and not self.decodes(session, encoded, number):
            self.perform(host, host.peer.failed(number, "overflow", self.events.now))
            return
        ours = session.values
        assert ours is not None
        if host.liar is not None and sender.liar is not None:
            theirs = ours  # attackers know each other
        pair = self.pairs.pop(number, None)
        if pair is not None and pair.by is sender and host.liar is None:
            session.negative = True
        else:
            out = np.empty_like(theirs)
            pair = Pair(host, out, difference(theirs, ours, out))
            if transfer.sends and host.liar is None and sender.liar is None:
                self.pairs[number] = pair
        session.difference = pair
        self.events.note(host.index, sender.index, STREAMED)
        own_sq = float(ours.dot(ours))
        self.perform(host, host.peer.streamed(number, pair.difference_sq, own_sq, self.events.now))

    @staticmethod
    def decodes(session: Session, encoded: bytearray, number: int) -> bool:
        """Whether the bound that the sender's bytes rely on held."""
        near, codec = session.snapshot, session.codec
        assert near is not None
        assert codec is not None
        try:
            codec.decode(encoded, np.empty_like(near), near, number)
        except Overflow:
            return False
        return True

    def on_stalled(self, host: Host, sender: Host, number: int) -> None:
        """Nothing has moved for too long, and a node closes the link."""
        session = host.sessions.get(number)
        if session is None or host.gone:
            return
        receives = session.transfer is not None and session.transfer.receives
        waiting = session.collect is not None or (receives and session.difference is None)
        if waiting and self.links.linked(host, sender.id):
            self.links.close(host, sender.id)

    def on_failed(self, host: Host, session: int, code: str) -> None:
        if not host.gone:
            self.perform(host, host.peer.failed(session, code, self.events.now))

    def mix(self, host: Host, effect: Mix) -> None:
        session, weight = host.sessions.get(effect.session), effect.weight
        if session is None:
            return
        together = self.gathers.take(host, effect.session)
        sides = 2
        if together is not None:  # a group's: nobody shares it, and so nobody takes it away
            apart, sides = together
            session.difference = Pair(host, apart, 0.0)
        if session.difference is None:
            return
        pair, session.difference = session.difference, None
        self.mixes += 1
        self.exchanges += 1 / sides
        if not self.mixes % self.every:
            self.remember(self.events.now - session.since)
        positions = session.positions
        if self.needs_spread and positions is None:
            assert session.codec is not None
            assert session.snapshot is not None
            if pair.peaks is None:
                pair.peaks = peaks(pair.difference, ALIGN)
            self.spread(host).learn(pair.peaks, session.codec.errors(session.snapshot))
        if host.outer.plain:
            values, negative = pair.times(weight, self.clips), session.negative
        else:
            own = -pair.difference if session.negative else pair.difference.copy()
            assert session.snapshot is not None
            values, negative = host.outer.shift(
                session.snapshot, own, weight, positions, effect.late, effect.plain
            ), False  # fmt: skip
        host.shifts.append(
            Difference(values, negative) if positions is None else SubsetShift(values, negative, positions)
        )
        if host.progress is not None:
            host.progress.added(values, positions, -1.0 if negative else 1.0)
        self.training.wish(host)

    def merge(self, host: Host, effect: Merge) -> None:
        """What was pushed to this host, or what it could not push and takes back."""
        session = host.sessions.get(effect.session)
        if session is None or session.snapshot is None:
            return
        values = session.snapshot
        if session.difference is not None:
            values = values + session.difference.difference
            self.mixes += 1
            self.exchanges += 1  # who pushed mixes nothing
            if not self.mixes % self.every:
                self.remember(self.events.now - session.since)
        host.shifts.append(Merged(values, effect.mass))
        self.training.wish(host)

    def remember(self, seconds: float) -> None:
        self.durations_s.append(seconds)
        if len(self.durations_s) >= TIMED:
            del self.durations_s[::2]
            self.every *= 2

    def rename(self, host: Host, effect: Rename) -> None:
        """Another partner is asked with the same snapshot, under a number of its own."""
        host.sessions[effect.to] = host.sessions.pop(effect.session)

    def release(self, host: Host, effect: Release) -> None:
        number = effect.session
        session = host.sessions.pop(number, None)
        if session is None:
            return
        if session.difference is not None:
            self.pairs.pop(number, None)
        if number in host.requests:
            host.requests.remove(number)
            host.wanted = bool(host.requests or host.shifts or host.adopting or host.restoring)
        if self.streams:
            self.end(host, number)
        if not self.gathers.idle:
            self.gathers.release(host, number)

    def end(self, host: Host, session: int) -> None:
        flow = self.streams.pop((host, session), None)
        if flow is not None:
            self.flows.stop(flow)

    def forget(self, host: Host) -> None:
        """It died: what it was sending ends in the middle, and what it was sent goes nowhere."""
        self.failed += host.peer.failures
        for key in [key for key in self.streams if key[0] is host]:
            self.end(*key)
        self.gathers.forget(host)

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
        held = host.joining_vector[effect.start : effect.stop]
        if effect.compare:
            apart_sq = difference(piece, held, np.empty_like(held))
            self.events.note(host.index, sender.index, COLLECTED)
            self.perform(host, host.peer.compared(session, apart_sq, float(held.dot(held)), self.events.now))
            return
        held[:] = piece
        self.events.note(host.index, sender.index, COLLECTED)
        self.perform(host, host.peer.collected(session, effect.stop, self.events.now))

    def adopt(self, host: Host, effect: Adopt) -> None:
        host.adopting, host.trial = True, effect.trial
        if not effect.trial:
            host.shifts.clear()  # they belong to the weights that go, which do not come back
        self.training.wish(host)

    def confirm(self, host: Host, effect: Confirm) -> None:
        host.kept = None

    def restore(self, host: Host, effect: Restore) -> None:
        host.restoring = True
        self.training.wish(host)
