"""Exchanges and joins in virtual time: the streams between averagers.

The two sides of an exchange compute differences that are exact negatives of each other
(:mod:`gossip.arithmetic.mixing`). The second side therefore negates the first one's difference, which gives the same
bits. A stream arrives whole, with its last byte; only real nodes need chunks, to save memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gossip.averaging.pair import PairAverage
from gossip.codecs import get_codec
from gossip.config import Config
from gossip.effects import (
    Effect,
    Gather,
    Merge,
    Mix,
    ReceivePiece,
    Release,
    Rename,
    Serve,
    Snapshot,
    Transfer,
)  # fmt: skip
from sim.engine.events import Events
from sim.engine.flows import Flow
from sim.engine.gathers import GroupStreams
from sim.engine.host import Floats, Host
from sim.engine.links import VirtualLinks
from sim.scenario.adversaries import Sight
from sim.world.network import NetworkModel

__all__ = ["Sessions"]

STREAMED, COLLECTED = 212, 213  # codes in the event log
TIMED = 65_536  # durations kept; when full, every second one is dropped and the sampling rate is halved


class Sessions:
    """The sessions of all hosts: performs Snapshot, Transfer, Gather, Mix, Merge, Rename, Release, ReceivePiece, Serve.

    It reports their outcomes to the averagers and peers.
    """

    def __init__(
        self, events: Events, network: NetworkModel, config: Config, links: VirtualLinks,
        perform: Callable[[Host, list[Effect]], None],
    ) -> None:  # fmt: skip
        self.events, self.network, self.config = events, network, config
        self.links, self.perform = links, perform
        self.gathers = GroupStreams(events, links)
        self.streams: dict[tuple[Host, int], Flow] = {}  # keyed by sender and session
        self.raw = get_codec("fp32")
        self.first: dict[int, tuple[Host, PairAverage]] = {}  # the side that received first, by session
        self.failed = 0  # failed exchanges counted by peers that are gone
        self.mixes = 0  # mixes applied; each side of an exchange counts as one
        self.exchanges = 0.0  # exchanges applied; a pair, a push and a group count as one each
        self.durations_s: list[float] = []  # seconds from the request for a snapshot to the mix
        self.every = 1  # one mix in `every` has its duration kept

    # -- an exchange ---------------------------------------------------------------------------------------------
    def snapshot(self, host: Host, effect: Snapshot) -> None:
        host.since[effect.session] = self.events.now
        host.averager.snapshot(effect)
        host.offering = True

    def transfer(self, host: Host, effect: Transfer) -> None:
        linked = self.links.linked(host, effect.partner)
        pair = host.averager.transfer(effect) if linked else "broken"
        if isinstance(pair, str):
            host.averager.fail(effect.session, pair)
            return
        if host.timeline is not None:
            host.begun[effect.session] = self.events.now, (effect.partner,)
        if effect.sends:
            self.send(host, pair)

    def gather(self, host: Host, effect: Gather) -> None:
        group = host.averager.gather(effect)
        if isinstance(group, str):
            host.averager.fail(effect.session, group)
            return
        if host.timeline is not None:
            host.begun[effect.session] = self.events.now, tuple(one for one in group.members if one != host.id)
        self.gathers.gather(host, group)

    def send(self, host: Host, pair: PairAverage) -> None:
        """Stream the mixed part of the snapshot to the partner, as the partner will decode it."""
        if host.liar is None:
            values, encoded = pair.send(pair.ours)
            pair.values = values
        else:  # an attacker sends false values but computes with its true ones
            values, encoded = pair.send(host.liar.sends(pair.ours, pair.session, partial(self.sight, pair)))
        to, size_bytes = self.links.by_id[pair.partner], self.network.bytes_of(pair.codec.encoded_bytes(values.size))
        self.stream(host, to, pair.session, values, size_bytes, pair.receives, self.on_stream, encoded)

    def sight(self, pair: PairAverage) -> Sight:
        """Return the knowledge of attackers when one of them sends: the partner's snapshot and all honest models."""
        hosts, at = self.links.by_id.values(), slice(None) if pair.positions is None else pair.positions
        partner = self.links.by_id[pair.partner]
        snapshot = partner.averager.snapshots.get(pair.session)
        held = partner.vector[at] if snapshot is None else snapshot.array[: pair.elements]
        honest = [host.vector[at] for host in hosts if host.liar is None and host.ready and not host.gone]
        attackers = sum(host.liar is not None for host in hosts)
        return Sight(held, np.stack(honest or [held]), attackers)

    def stream(
        self, host: Host, to: Host, session: int, values: Floats, size_bytes: int, duplex: bool,
        handler: Callable[..., None], *more: object,
    ) -> None:  # fmt: skip
        sent = partial(self.on_sent, host, session, handler == self.on_piece)
        flow = self.links.carrier.stream(
            host, to, size_bytes, duplex, sent, self.on_stalled, session, handler, host, session, values, *more
        )  # fmt: skip
        if flow is not None:
            self.streams[host, session] = flow

    def on_sent(self, host: Host, session: int, served: bool) -> None:
        """Forget a stream whose last byte has been sent, and report it if it served a joining peer."""
        self.streams.pop((host, session), None)
        if served:
            self.events.push(self.events.now, self.on_served, host, session)

    def on_stream(
        self, host: Host, sender: Host, number: int, theirs: Floats, encoded: bytearray | None = None
    ) -> None:  # fmt: skip
        pair = None if host.gone else host.averager.pairs.get(number)
        if pair is None or pair.partner != sender.id:
            return
        if encoded is not None and not pair.decodes(encoded):
            host.averager.failed(number, "overflow")
            return
        honest = host.liar is None and sender.liar is None
        if host.liar is not None and sender.liar is not None:
            theirs = pair.ours  # attackers collude, so an exchange between two of them changes nothing
        by, other = self.first.pop(number, (None, None))
        if by is sender and honest:
            pair.take(theirs, other)
        else:
            pair.take(theirs)
            if pair.sends and honest:
                self.first[number] = host, pair
        self.events.note(host.index, sender.index, STREAMED)
        host.averager.streamed(pair)

    def on_stalled(self, host: Host, sender: Host, number: int) -> None:
        """Close the link over which a stream has stalled, as a node does."""
        if host.gone:
            return
        pair = host.averager.pairs.get(number)
        waiting = number in host.collecting or (pair is not None and pair.receives and not pair.whole)
        if waiting and self.links.linked(host, sender.id):
            self.links.close(host, sender.id)

    def mix(self, host: Host, effect: Mix) -> None:
        group = host.averager.groups.get(effect.session)
        sides = 2 if group is None else len(group.members)
        if host.averager.mix(effect):
            self.count(host, effect.session, 1 / sides)

    def merge(self, host: Host, effect: Merge) -> None:
        """Merge a vector that was pushed to this host, or its own that it could not push."""
        if host.averager.merge(effect):
            self.count(host, effect.session, 1.0)  # one exchange, because the pushing side mixes nothing

    def count(self, host: Host, session: int, share: float) -> None:
        """Count a mix, and keep the duration of one mix in ``every``."""
        self.mixes += 1
        self.exchanges += share
        if host.timeline is not None:
            self.record(host, session)
        if not self.mixes % self.every:
            self.remember(self.events.now - host.since[session])

    def record(self, host: Host, session: int, reason: str = "") -> None:
        """Write an exchange that has begun to the timeline; ``reason`` says why it failed, if it did."""
        begun = host.begun.pop(session, None)
        if begun is not None and host.timeline is not None:
            sides, now = [one.hex() for one in (host.id, *begun[1])], self.events.now
            host.timeline.exchanged(session, sides, host.since.get(session, begun[0]), begun[0], now, reason)

    def remember(self, seconds: float) -> None:
        self.durations_s.append(seconds)
        if len(self.durations_s) >= TIMED:
            del self.durations_s[::2]
            self.every *= 2

    def rename(self, host: Host, effect: Rename) -> None:
        """Reuse the snapshot with another partner under a new session; late data of the old session is ignored."""
        host.averager.rename(effect)
        host.since[effect.to] = host.since.pop(effect.session)

    def release(self, host: Host, effect: Release) -> None:
        number, host.released = effect.session, True
        if number in host.begun:
            self.record(host, number, "failed")
        if number in self.first:
            del self.first[number]
        if number in host.collecting:
            del host.collecting[number]
        host.since.pop(number, None)
        host.averager.release(number)
        if self.streams:
            self.end(host, number)
        if not self.gathers.idle:
            self.gathers.release(host, number)

    def end(self, host: Host, session: int) -> None:
        flow = self.streams.pop((host, session), None)
        if flow is not None:
            self.links.carrier.flows.stop(flow)

    def forget(self, host: Host) -> None:
        """Stop the streams of a host that died. Streams to it go on and are ignored on arrival."""
        self.failed += host.peer.exchanges.failures
        for session in list(host.begun):
            self.record(host, session, "gone")
        for key in [key for key in self.streams if key[0] is host]:
            self.end(*key)
        self.gathers.forget(host)

    # -- joining -------------------------------------------------------------------------------------------------
    def collect(self, host: Host, effect: ReceivePiece) -> None:
        host.averager.collect(effect)
        if self.links.linked(host, effect.partner):
            host.collecting[effect.session] = effect
        else:
            host.averager.fail(effect.session, "broken")

    def serve(self, host: Host, effect: Serve) -> None:
        snapshot = host.averager.serve(effect)
        if snapshot is None or not self.links.linked(host, effect.partner):
            host.averager.fail(effect.session, "broken")
            return
        piece = snapshot.piece(effect.start, effect.stop)
        to, size_bytes = self.links.by_id[effect.partner], self.network.bytes_of(self.raw.encoded_bytes(piece.size))
        self.stream(host, to, effect.session, piece, size_bytes, False, self.on_piece)

    def on_served(self, host: Host, session: int) -> None:
        if not host.gone:
            self.perform(host, host.peer.on_served(session, self.events.now))

    def on_piece(self, host: Host, sender: Host, session: int, piece: Floats) -> None:
        effect = host.collecting.get(session)
        if host.gone or effect is None or effect.partner != sender.id:
            return
        self.events.note(host.index, sender.index, COLLECTED)
        if not host.averager.take_piece(effect, piece) and self.links.linked(host, sender.id):
            self.links.close(host, sender.id)  # an invalid piece: a node closes the link too
