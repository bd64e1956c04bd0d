"""Exchanges and joins in virtual time: the streams between averagers. One exchange or join is a *session*.

The two sides of an exchange compute differences that are exact negatives of each other
(:mod:`gossip.arithmetic.mixing`). The second side therefore negates the first one's difference, which gives the same
bits. A stream arrives whole, with its last byte; only real nodes need chunks, to save memory.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from gossip.averaging.pair import PairAverage
from gossip.codecs import get_codec
from gossip.config import Config
from gossip.effects import (
    Effect,
    Gather,
    LeaveOut,
    Merge,
    Mix,
    ReceiveMoments,
    ReceivePiece,
    Release,
    SendMoments,
    SendPiece,
    Snapshot,
    Transfer,
)
from sim.engine.carrier import StreamCallbacks
from sim.engine.events import Events
from sim.engine.gathers import GroupStreams
from sim.engine.host import Floats, FlowTransfer, Host
from sim.engine.links import VirtualLinks
from sim.level import DurationSample
from sim.scenario.adversaries import Sight
from sim.world.network import NetworkModel

# Codes in the event log: a pair's stream, a newcomer's piece or a partner's moments have arrived.
STREAMED, COLLECTED, MOMENTS = 212, 213, 214


class Sessions:
    """The sessions of all hosts.

    It performs Snapshot, Transfer, Gather, LeaveOut, Mix, Merge, Release, ReceivePiece and SendPiece, and
    reports their outcomes to the averagers and peers.
    """

    def __init__(
        self, events: Events, network: NetworkModel, config: Config, links: VirtualLinks,
        perform: Callable[[Host, list[Effect]], None],
    ) -> None:  # fmt: skip
        self.events, self.network, self.config = events, network, config
        self.links, self.perform = links, perform
        self.groups = GroupStreams(events, links)
        self.piece_codec = get_codec("fp32")
        self.failures_of_gone = 0  # Failed exchanges counted by peers that are gone.
        self.durations = DurationSample()  # Of the mixes applied; each side of an exchange counts as one.
        self.exchanges = 0.0  # Exchanges applied; a pair, a push and a group count as one each.

    # -- an exchange ---------------------------------------------------------------------------------------------
    def snapshot(self, host: Host, effect: Snapshot) -> None:
        host.averager.request_snapshot(effect)
        host.is_offering = True

    def transfer(self, host: Host, effect: Transfer) -> None:
        linked, transfer = self.links.is_linked(host, effect.partner), host.averager.open(effect.session)
        pair = host.averager.begin_pair(effect) if linked else "broken"
        if isinstance(pair, str):  # The reason why there is no pair.
            host.averager.report_failed_soon(effect.session, pair)
            return
        transfer.began_at, transfer.partners = self.events.now, (effect.partner,)
        if effect.sends:
            self.send_snapshot(host, transfer, pair)

    def gather(self, host: Host, effect: Gather) -> None:
        group, transfer = host.averager.begin_group(effect), host.averager.open(effect.session)
        if isinstance(group, str):
            host.averager.report_failed_soon(effect.session, group)
            return
        transfer.began_at = self.events.now
        transfer.partners = tuple(member for member in group.members if member != host.id)
        self.groups.gather(host, transfer, group)

    def leave_out(self, host: Host, effect: LeaveOut) -> None:
        group, transfer = host.averager.leave_out(effect), host.averager.transfers.get(effect.session)
        if group is not None and transfer is not None:
            self.groups.go_on(host, transfer, group)

    def send_snapshot(self, host: Host, transfer: FlowTransfer, pair: PairAverage) -> None:
        """Stream the mixed part of the snapshot to the partner, as the partner will decode it."""
        if host.attacker is None:
            values, encoded = pair.as_received(pair.ours)
            pair.decoded_ours = values
        else:  # An attacker sends false values but computes with its true ones.
            sight = partial(self.attackers_sight, pair)
            values, encoded = pair.as_received(host.attacker.false_values(pair.ours, pair.session, sight))
        to, size_bytes = self.links.by_id[pair.partner], self.network.bytes_of(pair.codec.encoded_bytes(values.size))
        self.stream(host, to, transfer, values, size_bytes, pair.receives, self.on_stream, encoded)

    def attackers_sight(self, pair: PairAverage) -> Sight:
        """Return the knowledge of attackers when one of them sends: the partner's snapshot and all honest models."""
        hosts = self.links.by_id.values()
        mixed = slice(None) if pair.positions is None else pair.positions  # The elements that this exchange mixes.
        partner = self.links.by_id[pair.partner]
        snapshot = partner.averager.snapshot_of(pair.session)
        theirs = partner.vector[mixed] if snapshot is None else snapshot.array[: pair.elements]
        honest = [host.vector[mixed] for host in hosts if host.attacker is None and host.is_training and not host.gone]
        attackers = sum(host.attacker is not None for host in hosts)
        return Sight(theirs, np.stack(honest or [theirs]), attackers)

    def stream(
        self, host: Host, to: Host, transfer: FlowTransfer, values: Floats, size_bytes: int, duplex: bool,
        on_arrived: Callable[..., None], *more: object,
    ) -> None:  # fmt: skip
        """Start a stream whose last byte calls ``on_arrived(to, host, session, values, *more)``."""
        session = transfer.session
        on_sent = partial(self.on_sent, host, transfer, on_arrived in (self.on_piece, self.on_moments))
        arrive = partial(on_arrived, to, host, session, values, *more)
        callbacks = StreamCallbacks(on_sent, arrive, partial(self.on_stalled, to, host, session))
        transfer.flow = self.links.carrier.stream(host, to, size_bytes, duplex, callbacks)

    def on_sent(self, host: Host, transfer: FlowTransfer, is_piece: bool) -> None:
        """Forget a stream whose last byte has been sent, and report it if it served a joining peer."""
        transfer.flow = None
        if is_piece:
            self.events.push(self.events.now, self.on_served, host, transfer.session)

    def on_stream(
        self, host: Host, sender: Host, session: int, theirs: Floats, encoded: bytearray | None = None
    ) -> None:  # fmt: skip
        """Pass the partner's values to the averager; the second side reuses the first one's difference."""
        pair = self.pair_with(host, session, sender)
        if pair is None:
            return
        if encoded is not None and not pair.can_decode(encoded):
            host.averager.report_failed(session, "overflow")
            return
        both_honest = host.attacker is None and sender.attacker is None
        if host.attacker is not None and sender.attacker is not None:
            theirs = pair.ours  # Attackers collude, so an exchange between two of them changes nothing.
        pair.receive_whole(theirs, self.pair_with(sender, session, host) if both_honest else None)
        self.events.log(host.index, sender.index, STREAMED)
        host.averager.report_streamed(pair)

    def pair_with(self, host: Host, session: int, partner: Host) -> PairAverage | None:
        """Return the pair of this session with that partner, None if it has ended."""
        transfer = None if host.gone else host.averager.transfers.get(session)
        pair = None if transfer is None else transfer.pair
        return pair if pair is not None and pair.partner == partner.id else None

    def on_stalled(self, host: Host, sender: Host, session: int) -> None:
        """Close the link over which a stream has stalled, as a node does."""
        transfer = None if host.gone else host.averager.transfers.get(session)
        if transfer is None:
            return
        pair = transfer.pair
        is_awaited = transfer.awaited is not None or (pair is not None and pair.receives and not pair.is_complete)
        if is_awaited and self.links.is_linked(host, sender.id):
            self.links.close(host, sender.id)

    def mix(self, host: Host, effect: Mix) -> None:
        if host.averager.mix(effect):
            transfer = host.averager.transfers[effect.session]
            self.count_mix(host, transfer, 1 / (2 if transfer.group is None else len(transfer.group.members)))

    def merge(self, host: Host, effect: Merge) -> None:
        """Merge a vector that was pushed to this host, or its own that it could not push."""
        if host.averager.merge(effect):
            # One exchange, because the pushing side mixes nothing.
            self.count_mix(host, host.averager.transfers[effect.session], 1.0)

    def count_mix(self, host: Host, transfer: FlowTransfer, share: float) -> None:
        """Count a mix and its share of an exchange."""
        self.exchanges += share
        self.record(host, transfer)
        assert transfer.requested_at is not None
        self.durations.add(self.events.now - transfer.requested_at)

    def record(self, host: Host, transfer: FlowTransfer, reason: str = "") -> None:
        """Write an exchange that has begun to the timeline, once; ``reason`` says why it failed, if it did."""
        if host.timeline is None or not transfer.partners:
            return
        sides, transfer.partners = [side.hex() for side in (host.id, *transfer.partners)], ()
        began_at, asked_at = transfer.began_at, transfer.requested_at
        host.timeline.record_exchange(
            transfer.session, sides, began_at if asked_at is None else asked_at, began_at, self.events.now, reason
        )  # fmt: skip

    # -- the end of a session ------------------------------------------------------------------------------------
    def release(self, host: Host, effect: Release) -> None:
        host.has_free_slot = True
        transfer = host.averager.transfers.get(effect.session)
        if transfer is not None:
            self.end_transfer(host, transfer, "failed")
        host.averager.release(effect.session)

    def end_transfer(self, host: Host, transfer: FlowTransfer, reason: str) -> None:
        """Stop a host's streams of a session, and record its failure unless it has mixed."""
        self.record(host, transfer, reason)
        flows = [*transfer.group_flows.values()] if transfer.flow is None else [transfer.flow]
        for flow in flows:
            self.links.carrier.flows.stop(flow)
        transfer.group_flows.clear()

    def on_killed(self, host: Host) -> None:
        """Stop the streams of a host that died. Streams to it go on and are ignored on arrival."""
        self.failures_of_gone += host.peer.exchanges.failures
        for transfer in host.averager.transfers.values():
            self.end_transfer(host, transfer, "gone")

    # -- joining -------------------------------------------------------------------------------------------------
    def receive(self, host: Host, effect: ReceivePiece | ReceiveMoments) -> None:
        """Await a piece of the joining vector, or a partner's moments."""
        if isinstance(effect, ReceivePiece):
            host.averager.joining_array(effect)
        else:
            host.averager.begin_moments(effect)
        if self.links.is_linked(host, effect.partner):
            host.averager.open(effect.session).awaited = effect
        else:
            host.averager.report_failed_soon(effect.session, "broken")

    def send_piece(self, host: Host, effect: SendPiece) -> None:
        """Stream a piece of a snapshot to a joining peer."""
        snapshot = host.averager.served_snapshot(effect)
        if snapshot is None or not self.links.is_linked(host, effect.partner):
            host.averager.report_failed_soon(effect.session, "broken")
            return
        piece = snapshot.piece(effect.start, effect.stop)
        size_bytes = self.network.bytes_of(self.piece_codec.encoded_bytes(piece.size))
        to, transfer = self.links.by_id[effect.partner], host.averager.open(effect.session)
        self.stream(host, to, transfer, piece, size_bytes, False, self.on_piece)

    # -- the optimizer's moments ---------------------------------------------------------------------------------
    def send_moments(self, host: Host, effect: SendMoments) -> None:
        """Stream a copy of the optimizer's moments to a member, as the member will decode it."""
        snapshot = host.averager.snapshot_of(effect.session)
        if snapshot is None or not self.links.is_linked(host, effect.partner):
            host.averager.report_failed_soon(effect.session, "broken")
            return
        codec = effect.form.codec(effect.stop - effect.start)
        values = np.empty_like(snapshot.array)
        codec.quantised(snapshot.array, values, effect.session)
        size_bytes = self.network.bytes_of(codec.encoded_bytes(values.size))
        to, transfer = self.links.by_id[effect.partner], host.averager.open(effect.session)
        self.stream(host, to, transfer, values, size_bytes, False, self.on_moments)

    def on_moments(self, host: Host, sender: Host, session: int, values: Floats) -> None:
        """Pass a partner's moments to the averager."""
        transfer = None if host.gone else host.averager.transfers.get(session)
        if transfer is None or transfer.awaited is None or transfer.awaited.partner != sender.id:
            return
        self.events.log(host.index, sender.index, MOMENTS)
        assert transfer.moments is not None
        transfer.moments.array[:] = values
        host.averager.report_moments(session)

    def on_served(self, host: Host, session: int) -> None:
        if not host.gone:
            self.perform(host, host.peer.on_served(session, self.events.now))

    def on_piece(self, host: Host, sender: Host, session: int, piece: Floats) -> None:
        """Pass a piece to the averager of the joining peer; close the link of a donor that sent an invalid one."""
        transfer = None if host.gone else host.averager.transfers.get(session)
        effect = None if transfer is None else transfer.awaited
        if not isinstance(effect, ReceivePiece) or effect.partner != sender.id:
            return
        self.events.log(host.index, sender.index, COLLECTED)
        if not host.averager.store_piece(effect, piece) and self.links.is_linked(host, sender.id):
            self.links.close(host, sender.id)
