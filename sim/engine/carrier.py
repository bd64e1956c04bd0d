"""The simulated network: ordered delivery of messages and streams between hosts, and network partitions.

Streams share bandwidth (:mod:`sim.engine.flows`). With TCP (:mod:`sim.world.tcp`) nothing is lost: a lost segment
arrives late and delays what is sent after it on the same line (head-of-line blocking). A segment sent during a
partition arrives with the first retransmission after it. Without TCP a message takes exactly the latency, and a message
sent during a partition is lost silently. A partition is a "cut" in the code.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any

from sim.engine.events import Events
from sim.engine.flows import Flow, Flows
from sim.engine.host import Host
from sim.world.line import Line, line_key
from sim.world.network import NetworkModel
from sim.world.tcp import Back

__all__ = ["Carrier"]


class Carrier:
    """The network between hosts. ``transport`` is None where there is no TCP."""

    def __init__(self, events: Events, network: NetworkModel, stall_s: float) -> None:
        self.events, self.network, self.stall_s = events, network, stall_s
        self.flows = Flows(events, network)
        self.latency = network.latency
        self.transport = network.transport
        self.group_of: dict[int, int] | None = None  # group by host row during a partition
        self.cut_at = -math.inf  # when the latest partition began
        # Lines with segments that wait for the end of a partition, and since when TCP has been retransmitting.
        self.holding: dict[Line, tuple[Host, Host, float]] = {}

    def after(self, sender: Host, receiver: Host) -> float:
        """Return when a message sent now arrives if nothing delays it."""
        return self.events.now + self.latency(sender.index, receiver.index)

    # -- cuts ----------------------------------------------------------------------------------------------------
    def partition(self, groups: Iterable[Iterable[int]]) -> None:
        self.group_of = {row: number for number, group in enumerate(groups, 1) for row in group}
        self.retransmit()
        self.cut_at = self.events.now

    def heal(self) -> None:
        self.group_of = None
        self.retransmit()

    def cut(self, a: Host, b: Host) -> bool:
        return self.group_of is not None and self.group_of.get(a.row, 0) != self.group_of.get(b.row, 0)

    def retransmit(self) -> None:
        """Schedule held segments of reconnected hosts to arrive with TCP's next retransmission."""
        if self.transport is None:
            return
        for line, (host, to, since) in list(self.holding.items()):
            if self.cut(host, to):
                continue
            del self.holding[line]
            latency = self.latency(host.index, to.index)
            again = self.transport.retransmitted_at(since, self.events.now, 2 * latency)
            line.free_at = max(line.free_at, again + latency)
            for sent_at, handler, args in line.held:
                self.events.push(line.free_at, self.arrive, line, host, to, sent_at, handler, args, None)
            line.held.clear()

    # -- lines ---------------------------------------------------------------------------------------------------
    def fresh(self, host: Host, to: Host) -> Line:
        """Return the line of a new connection, whose random draws depend only on the pair and the time."""
        now, loss = self.events.now, self.network.loss_of(host.index, to.index)
        return Line(line_key(host.key, to.key, now), now, loss)

    def to(self, host: Host, to: Host) -> Line:
        """Return the existing line to a host, or create one without a handshake."""
        line = host.lines.get(to.id)
        if line is None:
            line = host.lines[to.id] = self.fresh(host, to)
        return line

    def message(self, line: Line, host: Host, to: Host, handler: Callable[..., None], *args: object) -> float:
        """Carry one TCP segment and return its arrival time; it may queue behind a stream of the same host."""
        takes_s = self.latency(host.index, to.index)
        late_s = self.behind_s(host, line) if self.events.now < host.behind_until else 0.0
        if line.loss:
            assert self.transport is not None
            late_s += self.transport.late_s(line, 2 * takes_s)
        return self.carry(line, host, to, takes_s, late_s, handler, args)

    def carry(
        self, line: Line, host: Host, to: Host, takes_s: float, late_s: float, handler: Callable[..., None],
        args: tuple[Any, ...], stuck: Callable[[float], None] | None = None,
    ) -> float:  # fmt: skip
        """Deliver to ``handler(*args)`` in the order of the line, and return the arrival time.

        The time is infinity if a partition holds the segment. ``stuck(since)`` is called when it is held, even if the
        partition begins while the segment is on its way.
        """
        now = self.events.now
        if self.group_of is not None and self.cut(host, to):
            self.hold(line, host, to, now, handler, args, stuck)
            return math.inf
        arrives = now + (takes_s + late_s)
        # A delayed segment is checked again on arrival, in case a partition has begun. Others skip the check: a
        # partition that begins within one latency is not modelled for them.
        if late_s > 0 or arrives < line.free_at:
            arrives = line.free_at = max(arrives, line.free_at)
            self.events.push(arrives, self.arrive, line, host, to, now, handler, args, stuck)
        else:
            line.free_at = arrives
            self.events.push(arrives, handler, *args)
        return arrives

    def arrive(
        self, line: Line, host: Host, to: Host, sent_at: float, handler: Callable[..., None], args: tuple[Any, ...],
        stuck: Callable[[float], None] | None,
    ) -> None:  # fmt: skip
        """Deliver a segment that was delayed, unless a partition has begun meanwhile."""
        if self.group_of is not None and self.cut(host, to):
            self.hold(line, host, to, sent_at, handler, args, stuck)
        else:
            handler(*args)

    def hold(
        self, line: Line, host: Host, to: Host, sent_at: float, handler: Callable[..., None], args: tuple[Any, ...],
        stuck: Callable[[float], None] | None,
    ) -> None:  # fmt: skip
        """Hold a segment until the partition ends, in the order in which the line's segments were sent."""
        line.free_at = max(line.free_at, sent_at)  # the line counts as used, so it is not idle
        since = max(sent_at, self.cut_at)
        insort(line.held, (sent_at, handler, args), key=itemgetter(0))
        self.holding[line] = host, to, min(since, self.holding[line][2] if line in self.holding else since)
        if stuck is not None:
            stuck(since)

    def drop(self, line: Line) -> None:
        """Discard the held segments of a line that its receiver has closed."""
        line.held.clear()
        self.holding.pop(line, None)

    def passes(self, line: Line | None, sender: Host, receiver: Host) -> bool:
        """Return True if a single packet arrives without retransmission."""
        if self.group_of is not None and self.cut(sender, receiver):
            return False
        return line is None or self.transport is None or not self.transport.lost(line)

    # -- streams -------------------------------------------------------------------------------------------------
    def stream(
        self, host: Host, to: Host, size_bytes: int, duplex: bool, sent: Callable[[], None],
        stalled: Callable[..., None], number: int, arrived: Callable[..., None], *args: object,
    ) -> Flow | None:  # fmt: skip
        """Stream ``size_bytes`` from one host to another.

        Args:
            host: The sender.
            to: The receiver.
            size_bytes: Payload bytes.
            duplex: Whether the receiver streams as much in the other direction.
            sent: Called when the last byte has been sent.
            stalled: Called as ``stalled(to, host, number)`` when a partition, or a loss without TCP, has stopped the
                stream for ``stall_s``.
            number: The session.
            arrived: Called as ``arrived(to, *args)`` when the last byte has arrived.
            *args: Arguments of ``arrived``.

        Returns:
            The flow, or None if everything is sent already.
        """
        transport = self.transport
        if transport is None:
            landing = partial(self.land, host, to, None, 0.0, sent, stalled, number, arrived, args)
            return self.flows.start(host.index, to.index, size_bytes, landing)
        line = self.to(host, to)
        rate, rtt = self.flows.offered(host.index, to.index), 2 * self.latency(host.index, to.index)
        back = Back(self.to(to, host), self.flows.offered(to.index, host.index)) if duplex else None
        wire_bytes, ceiling, late_s = transport.stream(line, size_bytes, rate, rtt, self.events.now, back)
        self.queue(host, line.queue_s, wire_bytes / rate + late_s)
        landing = partial(self.land, host, to, line, late_s, sent, stalled, number, arrived, args)
        return self.flows.start(host.index, to.index, wire_bytes, landing, ceiling, size_bytes)

    def queue(self, host: Host, queue_s: float, takes_s: float) -> None:
        """Record that for ``takes_s`` the host's messages queue behind a stream of its own."""
        now = self.events.now
        if now >= host.behind_until:
            host.behind_s, host.behind_since = 0.0, now
        host.behind_s, host.behind_until = max(queue_s, host.behind_s), max(host.behind_until, now + takes_s)

    def behind_s(self, host: Host, line: Line) -> float:
        """Draw how long a message waits now in the host's uplink queue, in seconds.

        The mean over the stream is ``host.behind_s``. The wait is zero at the stream's beginning and end and largest in
        its middle. Each draw lies between zero and twice the mean for that moment.
        """
        done = (self.events.now - host.behind_since) / (host.behind_until - host.behind_since)
        return 12.0 * done * (1.0 - done) * line.draw() * host.behind_s

    def land(
        self, host: Host, to: Host, line: Line | None, late_s: float, sent: Callable[[], None],
        stalled: Callable[..., None], number: int, arrived: Callable[..., None], args: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Report the last byte as sent, and schedule its arrival."""
        sent()
        if host.gone:
            return
        if line is not None:
            stuck = partial(self.stuck, stalled, to, host, number)
            self.carry(line, host, to, self.latency(host.index, to.index), late_s, arrived, (to, *args), stuck)
        elif self.cut(host, to) or self.network.loses(host.rng):
            self.stuck(stalled, to, host, number, self.events.now)
        else:
            self.events.push_bulk(self.after(host, to), arrived, to, *args)

    def stuck(self, stalled: Callable[..., None], to: Host, host: Host, number: int, since: float) -> None:
        """Schedule the stall timeout of a stream that has not moved since ``since``."""
        self.events.push(max(since + self.stall_s, self.events.now), stalled, to, host, number)
