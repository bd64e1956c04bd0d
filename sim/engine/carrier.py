"""The simulated network: ordered delivery of messages and streams between hosts, and network partitions.

Streams share bandwidth (:mod:`sim.engine.flows`). With TCP (:mod:`sim.world.tcp`) nothing is lost: a lost segment
arrives late and delays what is sent after it on the same line (head-of-line blocking). A *line* is one direction of a
connection (:class:`sim.world.line.Line`). A segment sent during a partition arrives with the first retransmission after
it. Without TCP a message takes exactly the latency, and a message sent during a partition is lost silently. Two hosts
are "cut" while a partition separates them.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from sim.engine.events import Events
from sim.engine.flows import Flow, Flows
from sim.engine.host import Host
from sim.world.line import Line, line_key
from sim.world.network import NetworkModel
from sim.world.tcp import Back


class StreamCallbacks(NamedTuple):
    """The functions that a stream calls: when its last byte has been sent, when that byte has arrived, and on a stall.

    A stream has stalled when a partition, or a loss without TCP, has stopped it for ``stall_s``.
    """

    on_sent: Callable[[], object]
    on_arrived: Callable[[], None]
    on_stalled: Callable[[], None]


class TunnelWay(NamedTuple):
    """One direction of a link that leads through a tunnel."""

    sender: Host
    receiver: Host
    relay: Host
    name: bytes  # Of the tunnel.


class Carrier:
    """The network between hosts. ``transport`` is None where there is no TCP."""

    def __init__(self, events: Events, network: NetworkModel, stall_s: float) -> None:
        self.events, self.network, self.stall_s = events, network, stall_s
        self.flows = Flows(events, network)
        self.tunnels: dict[tuple[int, int], TunnelWay] = {}  # By the indices of the sender and the receiver.
        self.latency = network.latency if network.nat is None else self.latency_with_relays
        self.transport = network.transport
        self.group_of: dict[int, int] | None = None  # Group by host row; None while there is no partition.
        self.partitioned_at = -math.inf  # When the latest partition began.
        # The lines with segments that a partition holds back: sender, receiver, and since when TCP retransmits.
        self.holding: dict[Line, tuple[Host, Host, float]] = {}

    def latency_with_relays(self, sender: int, receiver: int) -> float:
        """Return the latency in seconds; a tunnel leads over its relay."""
        relay, latency = self.relay_of(sender, receiver), self.network.latency
        if relay is None:
            return latency(sender, receiver)
        return latency(sender, relay) + latency(relay, receiver)

    def relay_of(self, sender: int, receiver: int) -> int | None:
        """Return the index of the peer that passes the link of a pair on; None if their link is direct."""
        way = self.tunnels.get((sender, receiver))
        return None if way is None else way.relay.index

    def arrival(self, sender: Host, receiver: Host) -> float:
        """Return when a message sent now arrives if nothing delays it."""
        return self.events.now + self.latency(sender.index, receiver.index)

    # -- partitions ----------------------------------------------------------------------------------------------
    def partition(self, groups: Iterable[Iterable[int]]) -> None:
        """Cut the network between these groups of host rows; all other hosts form one more group."""
        self.group_of = {row: number for number, group in enumerate(groups, 1) for row in group}
        self.retransmit_held()
        self.partitioned_at = self.events.now

    def heal(self) -> None:
        self.group_of = None
        self.retransmit_held()

    def is_cut(self, a: Host, b: Host) -> bool:
        if self.group_of is None:
            return False
        way = self.tunnels.get((a.index, b.index))
        hosts = (a, b) if way is None else (a, b, way.relay)
        return len({self.group_of.get(host.row, 0) for host in hosts}) > 1

    def retransmit_held(self) -> None:
        """Schedule held segments of reconnected hosts to arrive with TCP's next retransmission."""
        if self.transport is None:
            return
        for line, (sender, receiver, since) in list(self.holding.items()):
            if self.is_cut(sender, receiver):
                continue
            del self.holding[line]
            latency = self.latency(sender.index, receiver.index)
            again_at = self.transport.retransmitted_at(since, self.events.now, 2 * latency)
            line.free_at = max(line.free_at, again_at + latency)
            for sent_at, handler, args in line.held:
                self.events.push(
                    line.free_at, self.on_late_arrival, line, sender, receiver, sent_at, handler, args, None
                )
            line.held.clear()

    # -- lines and their segments --------------------------------------------------------------------------------
    def new_line(self, sender: Host, receiver: Host) -> Line:
        """Return the line of a new connection, whose random draws depend only on the pair and the time."""
        now, loss_of = self.events.now, self.network.loss_of
        relay = self.relay_of(sender.index, receiver.index)
        if relay is None:
            loss = loss_of(sender.index, receiver.index)
        else:
            loss = 1 - (1 - loss_of(sender.index, relay)) * (1 - loss_of(relay, receiver.index))
        return Line(line_key(sender.line_seed, receiver.line_seed, now), now, loss)

    def line_to(self, sender: Host, receiver: Host) -> Line:
        """Return the existing line to a host, or create one without a handshake."""
        line = sender.lines.get(receiver.id)
        if line is None:
            line = sender.lines[receiver.id] = self.new_line(sender, receiver)
        return line

    def delivers_packet(self, line: Line | None, sender: Host, receiver: Host) -> bool:
        """Draw whether a single packet arrives without retransmission."""
        if self.group_of is not None and self.is_cut(sender, receiver):
            return False
        return line is None or self.transport is None or not self.transport.lost(line)

    def send_segment(
        self, line: Line, sender: Host, receiver: Host, handler: Callable[..., None], *args: object
    ) -> float:
        """Send one TCP segment and return its arrival time; it may queue behind a stream of the same host."""
        latency = self.latency(sender.index, receiver.index)
        late_s = self.draw_queueing_s(sender, line) if self.events.now < sender.queueing_until else 0.0
        if line.loss:
            assert self.transport is not None
            late_s += self.transport.late_s(line, 2 * latency)
        return self.deliver_in_order(line, sender, receiver, latency, late_s, handler, args)

    def deliver_in_order(
        self, line: Line, sender: Host, receiver: Host, latency: float, late_s: float, handler: Callable[..., None],
        args: tuple[Any, ...], on_held: Callable[[float], None] | None = None,
    ) -> float:  # fmt: skip
        """Schedule ``handler(*args)`` in the order of the line, and return the arrival time.

        The time is infinity if a partition holds the segment. ``on_held(since)`` is called when it is held, even if the
        partition begins while the segment is on its way.
        """
        now = self.events.now
        if self.group_of is not None and self.is_cut(sender, receiver):
            self.hold(line, sender, receiver, now, handler, args, on_held)
            return math.inf
        arrives = now + (latency + late_s)
        # A delayed segment is checked again on arrival, in case a partition has begun. Others skip the check: a
        # partition that begins within one latency is not modelled for them.
        if late_s > 0 or arrives < line.free_at:
            arrives = line.free_at = max(arrives, line.free_at)
            self.events.push(arrives, self.on_late_arrival, line, sender, receiver, now, handler, args, on_held)
        else:
            line.free_at = arrives
            self.events.push(arrives, handler, *args)
        return arrives

    def on_late_arrival(
        self, line: Line, sender: Host, receiver: Host, sent_at: float, handler: Callable[..., None],
        args: tuple[Any, ...], on_held: Callable[[float], None] | None,
    ) -> None:  # fmt: skip
        """Deliver a segment that was delayed, unless a partition has begun meanwhile."""
        if self.group_of is not None and self.is_cut(sender, receiver):
            self.hold(line, sender, receiver, sent_at, handler, args, on_held)
        else:
            handler(*args)

    def hold(
        self, line: Line, sender: Host, receiver: Host, sent_at: float, handler: Callable[..., None],
        args: tuple[Any, ...], on_held: Callable[[float], None] | None,
    ) -> None:  # fmt: skip
        """Hold a segment until the partition ends, in the order in which the line's segments were sent."""
        line.free_at = max(line.free_at, sent_at)  # The line counts as used, so it is not idle.
        since = max(sent_at, self.partitioned_at)
        insort(line.held, (sent_at, handler, args), key=itemgetter(0))
        self.holding[line] = sender, receiver, min(since, self.holding[line][2] if line in self.holding else since)
        if on_held is not None:
            on_held(since)

    def drop_held(self, line: Line) -> None:
        """Drop the held segments of a line that its receiver has closed."""
        line.held.clear()
        self.holding.pop(line, None)

    # -- streams -------------------------------------------------------------------------------------------------
    def stream(
        self, sender: Host, receiver: Host, size_bytes: int, duplex: bool, callbacks: StreamCallbacks
    ) -> Flow | None:
        """Stream ``size_bytes`` of payload from one host to another.

        ``duplex`` is True if the receiver streams as much in the other direction. Returns the flow, or None if
        everything is sent already.
        """
        transport = self.transport
        if transport is None:
            finish = partial(self.on_last_byte_sent, sender, receiver, None, 0.0, callbacks)
            return self.flows.start(sender.index, receiver.index, size_bytes, finish)
        line = self.line_to(sender, receiver)
        rtt = 2 * self.latency(sender.index, receiver.index)
        relay = self.relay_of(sender.index, receiver.index)
        rate, back = self.flows.share(sender.index, receiver.index, relay, newcomers=1), None
        if duplex:
            rate_back = self.flows.share(receiver.index, sender.index, relay, newcomers=1)
            back = Back(self.line_to(receiver, sender), rate_back)
        wire_bytes, ceiling, late_s = transport.stream(line, size_bytes, rate, rtt, self.events.now, back)
        self.note_queueing(sender, line.queue_delay_s, wire_bytes / rate + late_s)
        finish = partial(self.on_last_byte_sent, sender, receiver, line, late_s, callbacks)
        return self.flows.start(sender.index, receiver.index, wire_bytes, finish, ceiling, size_bytes, relay)

    def note_queueing(self, host: Host, queueing_s: float, lasts_s: float) -> None:
        """Record that for ``lasts_s`` the host's messages queue behind a stream of its own."""
        now = self.events.now
        if now >= host.queueing_until:
            host.queueing_mean_s, host.queueing_since = 0.0, now
        host.queueing_mean_s = max(queueing_s, host.queueing_mean_s)
        host.queueing_until = max(host.queueing_until, now + lasts_s)

    def draw_queueing_s(self, host: Host, line: Line) -> float:
        """Draw how long a message waits now in the host's uplink queue, in seconds.

        The mean over the stream is ``host.queueing_mean_s``. The wait is zero at the stream's beginning and end and
        largest in its middle. Each draw lies between zero and twice the mean for that moment, which is the parabola
        ``6 done (1 - done)`` times the stream's mean.
        """
        done = (self.events.now - host.queueing_since) / (host.queueing_until - host.queueing_since)
        return 12.0 * done * (1.0 - done) * line.draw() * host.queueing_mean_s

    def on_last_byte_sent(
        self, sender: Host, receiver: Host, line: Line | None, late_s: float, callbacks: StreamCallbacks
    ) -> None:
        """Schedule the arrival of a stream's last byte."""
        callbacks.on_sent()
        if sender.gone:
            return
        on_held = partial(self.schedule_stall, callbacks.on_stalled)
        if line is not None:
            latency = self.latency(sender.index, receiver.index)
            self.deliver_in_order(line, sender, receiver, latency, late_s, callbacks.on_arrived, (), on_held)
        elif self.is_cut(sender, receiver) or self.network.loses(sender.rng):
            on_held(self.events.now)
        else:
            self.events.push_bulk(self.arrival(sender, receiver), callbacks.on_arrived)

    def schedule_stall(self, on_stalled: Callable[[], None], since: float) -> None:
        """Schedule the stall timeout of a stream that has not moved since ``since``."""
        self.events.push(max(since + self.stall_s, self.events.now), on_stalled)
