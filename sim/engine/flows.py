"""Flow-level model of streams that share the bandwidth of their two peers.

Each peer divides its upload rate equally among the streams it sends, and its download rate among those it receives.
Streams that TCP limits to less than their share leave the rest to the others. A stream runs at the smaller of its two
shares. Capacity that a stream cannot use because of its other end is not redistributed. This is therefore slightly
slower than max-min fairness, which would need a computation over the whole swarm at each change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from sim.engine.events import Events
from sim.world.network import NetworkModel

__all__ = ["Flow", "Flows"]


class Flow:
    """One stream between two peers, which are identified by index."""

    __slots__ = (
        "ceiling", "due", "on_sent", "payload_bytes", "rate", "receiver", "sender", "since", "unsent_bytes",
        "wire_bytes",
    )  # fmt: skip

    def __init__(
        self, sender: int, receiver: int, wire_bytes: float, now: float, on_sent: Callable[[], None], ceiling: float,
        payload_bytes: int,
    ) -> None:  # fmt: skip
        self.sender, self.receiver, self.on_sent = sender, receiver, on_sent
        self.payload_bytes = payload_bytes
        self.wire_bytes = wire_bytes  # The payload with its overhead.
        self.ceiling = ceiling  # The rate that TCP allows at most, in bytes/s.
        self.rate = 0.0  # The present rate, in bytes/s.
        self.since = now  # When the rate was set.
        self.unsent_bytes = wire_bytes  # The wire bytes that were left when the rate was set.
        # When the last byte is sent if no other stream begins or ends before; infinite before the start and after.
        self.due = math.inf

    def sent_bytes(self, now: float) -> int:
        """Return how many bytes of the payload have been sent."""
        if not self.wire_bytes:
            return self.payload_bytes
        unsent_bytes = self.unsent_bytes - self.rate * (now - self.since)
        return round(self.payload_bytes * min(1.0, 1.0 - unsent_bytes / self.wire_bytes))


class Flows:
    """All streams between peers. Streams between unlimited peers take no time."""

    def __init__(self, events: Events, network: NetworkModel) -> None:
        self.events, self.network = events, network
        # Open streams by sender and by receiver; a dict serves as an ordered set.
        self.outgoing: dict[int, dict[Flow, None]] = {}
        self.incoming: dict[int, dict[Flow, None]] = {}
        self.ended_bytes = 0  # Payload bytes sent by streams that have ended.

    @property
    def sent_bytes(self) -> int:
        """Return the payload bytes sent until now, including the sent part of open streams."""
        now = self.events.now
        return self.ended_bytes + sum(flow.sent_bytes(now) for flows in self.outgoing.values() for flow in flows)

    def offered_rate(self, sender: int, receiver: int) -> float:
        """Return the rate that one more stream would get, in bytes/s."""
        return min(
            share_of(self.network.up_bytes_s(sender), self.outgoing.get(sender, ()), 1),
            share_of(self.network.down_bytes_s(receiver), self.incoming.get(receiver, ()), 1),
        )

    def start(
        self, sender: int, receiver: int, wire_bytes: float, on_sent: Callable[[], None], ceiling: float = math.inf,
        payload_bytes: int | None = None,
    ) -> Flow | None:  # fmt: skip
        """Start a stream.

        Args:
            sender: Index of the sending peer.
            receiver: Index of the receiving peer.
            wire_bytes: Bytes on the wire.
            on_sent: Called when the last byte is sent.
            ceiling: Highest rate that TCP allows, in bytes/s.
            payload_bytes: Bytes of payload; by default as many as on the wire.

        Returns:
            The stream, or None if it took no time; ``on_sent`` was then called already.
        """
        payload_bytes = int(wire_bytes) if payload_bytes is None else payload_bytes
        up, down = self.network.up_bytes_s(sender), self.network.down_bytes_s(receiver)
        if math.isinf(up) and math.isinf(down) and math.isinf(ceiling):
            self.ended_bytes += payload_bytes
            on_sent()
            return None
        flow = Flow(sender, receiver, float(wire_bytes), self.events.now, on_sent, ceiling, payload_bytes)
        self.outgoing.setdefault(sender, {})[flow] = None
        self.incoming.setdefault(receiver, {})[flow] = None
        self.share_again(sender, receiver)
        return flow

    def stop(self, flow: Flow) -> None:
        """End a stream, complete or not, without calling ``on_sent``."""
        if flow in self.outgoing[flow.sender]:  # Else it has ended already.
            del self.outgoing[flow.sender][flow]
            del self.incoming[flow.receiver][flow]
            self.ended_bytes += flow.sent_bytes(self.events.now)
            flow.due = math.inf
            self.share_again(flow.sender, flow.receiver)

    def share_again(self, sender: int, receiver: int) -> None:
        """Recompute the rates of all streams that ``sender`` sends or ``receiver`` receives."""
        outgoing, incoming = self.outgoing.get(sender, {}), self.incoming.get(receiver, {})
        for flow in (*outgoing, *(flow for flow in incoming if flow not in outgoing)):
            self.set_rate(flow)

    def set_rate(self, flow: Flow) -> None:
        """Set a stream's rate to its present share, and schedule its end."""
        now, network = self.events.now, self.network
        rate = min(
            share_of(network.up_bytes_s(flow.sender), self.outgoing[flow.sender]),
            share_of(network.down_bytes_s(flow.receiver), self.incoming[flow.receiver]),
            flow.ceiling,
        )
        if rate == flow.rate:
            return
        flow.unsent_bytes = max(0.0, flow.unsent_bytes - flow.rate * (now - flow.since))
        flow.since, flow.rate = now, rate
        flow.due = now + flow.unsent_bytes / rate
        self.events.push(flow.due, self.on_due, flow, flow.due)

    def on_due(self, flow: Flow, due: float) -> None:
        """End the stream, unless its rate has changed since this end was scheduled."""
        if due == flow.due:
            self.stop(flow)
            flow.on_sent()


def share_of(rate: float, flows: Collection[Flow], newcomers: int = 0) -> float:
    """Return the share of ``rate`` that a stream without a ceiling has, next to the other streams of a peer.

    A stream whose ceiling is below an equal share leaves the rest of that share to the others.

    Args:
        rate: The peer's rate in one direction, in bytes/s.
        flows: Its open streams in that direction.
        newcomers: Further streams without a ceiling that are counted as open.
    """
    count = len(flows) + newcomers
    if count > 1:
        for ceiling in sorted([flow.ceiling for flow in flows if flow.ceiling < math.inf]):
            if count == 1 or ceiling * count >= rate:
                break
            rate, count = rate - ceiling, count - 1
    return rate / count
