"""What carries messages and streams from one host to another, in order, and who is cut off from whom. Streams share
bandwidth (:mod:`sim.engine.flows`).

Where the network has TCP (:mod:`sim.world.tcp`) nothing is lost: what is, comes late, and what is sent after it over
the same line comes after it. What is sent into a cut waits for the first retransmission after its end. Without TCP a
message takes the latency and no more, and what is sent into a cut is lost without a word.
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
        self.group_of: dict[int, int] | None = None  # by row, while the network is cut into groups
        self.cut_at = -math.inf  # when it was
        # Lines on which something waits for the end of a cut, and since when TCP sends it again.
        self.holding: dict[Line, tuple[Host, Host, float]] = {}

    def after(self, sender: Host, receiver: Host) -> float:
        """When what is sent now arrives, if nothing delays it."""
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
        """Between those who are not cut off any more all that was held arrives with the next retransmission."""
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
        """That of a connection which begins now; its draws are those of this pair and this time."""
        now, loss = self.events.now, self.network.loss_of(host.index, to.index)
        return Line(line_key(host.key, to.key, now), now, loss)

    def to(self, host: Host, to: Host) -> Line:
        """The line that is there, or one without a connection's beginning."""
        line = host.lines.get(to.id)
        if line is None:
            line = host.lines[to.id] = self.fresh(host, to)
        return line

    def message(self, line: Line, host: Host, to: Host, handler: Callable[..., None], *args: object) -> float:
        """Carry one segment, where there is TCP: behind what a stream of this host's keeps in its queue."""
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
        """Call the handler when what is sent now arrives, in the order of the line, and return that time; infinity if
        it waits for the end of a cut. ``stuck`` is told since when, also where that happens on its way."""
        now = self.events.now
        if self.group_of is not None and self.cut(host, to):
            self.hold(line, host, to, now, handler, args, stuck)
            return math.inf
        arrives = now + (takes_s + late_s)
        if late_s > 0 or arrives < line.free_at:  # a cut may begin first; within a latency alone that is left out
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
        """It was on its way for longer than a latency: unless a cut has begun meanwhile, it is there."""
        if self.group_of is not None and self.cut(host, to):
            self.hold(line, host, to, sent_at, handler, args, stuck)
        else:
            handler(*args)

    def hold(
        self, line: Line, host: Host, to: Host, sent_at: float, handler: Callable[..., None], args: tuple[Any, ...],
        stuck: Callable[[float], None] | None,
    ) -> None:  # fmt: skip
        """Between those two it waits for the end of the cut, before what was sent after it."""
        line.free_at = max(line.free_at, sent_at)  # used it was
        since = max(sent_at, self.cut_at)
        insort(line.held, (sent_at, handler, args), key=itemgetter(0))
        self.holding[line] = host, to, min(since, self.holding[line][2] if line in self.holding else since)
        if stuck is not None:
            stuck(since)

    def drop(self, line: Line) -> None:
        """Its receiver has closed it: what waits on it is refused when it comes."""
        line.held.clear()
        self.holding.pop(line, None)

    def passes(self, line: Line | None, sender: Host, receiver: Host) -> bool:
        """Whether a packet that nobody sends again arrives."""
        if self.group_of is not None and self.cut(sender, receiver):
            return False
        return line is None or self.transport is None or not self.transport.lost(line)

    # -- streams -------------------------------------------------------------------------------------------------
    def stream(
        self, host: Host, to: Host, size_bytes: int, duplex: bool, sent: Callable[[], None],
        stalled: Callable[..., None], number: int, arrived: Callable[..., None], *args: object,
    ) -> Flow | None:  # fmt: skip
        """``sent()`` is called when the last byte has gone, ``arrived(to, *args)`` when it is there, and
        ``stalled(to, host, number)`` after ``stall_s`` of a stream that is cut off, or lost where there is no TCP.
        ``duplex``: as much comes the other way. None: all is sent already."""
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
        """For so long what this host sends waits behind a stream of its own."""
        now = self.events.now
        if now >= host.behind_until:
            host.behind_s, host.behind_since = 0.0, now
        host.behind_s, host.behind_until = max(queue_s, host.behind_s), max(host.behind_until, now + takes_s)

    def behind_s(self, host: Host, line: Line) -> float:
        """How long a message of this host's waits now in what a stream keeps before its uplink: on average the queue's
        mean, nothing as the stream begins and ends, most in its middle, and at any time up to twice what is usual."""
        done = (self.events.now - host.behind_since) / (host.behind_until - host.behind_since)
        return 12.0 * done * (1.0 - done) * line.draw() * host.behind_s

    def land(
        self, host: Host, to: Host, line: Line | None, late_s: float, sent: Callable[[], None],
        stalled: Callable[..., None], number: int, arrived: Callable[..., None], args: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """The last byte is on its way."""
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
        """Nothing of a stream has moved since then."""
        self.events.push(max(since + self.stall_s, self.events.now), stalled, to, host, number)
