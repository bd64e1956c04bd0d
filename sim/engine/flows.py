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
    """One stream. ``due``: virtual time at which its last byte is sent if no other stream begins or ends before."""

    __slots__ = ("ceiling", "done", "due", "payload", "rate", "receiver", "remaining", "sender", "since", "size")

    def __init__(
        self, sender: int, receiver: int, size_bytes: float, now: float, done: Callable[[], None], ceiling: float,
        payload: int,
    ) -> None:  # fmt: skip
        self.sender, self.receiver, self.since, self.done = sender, receiver, now, done
        self.size = self.remaining = size_bytes  # on the wire, with overhead
        self.payload = payload  # bytes, without overhead
        self.ceiling = ceiling  # bytes/s that TCP allows at most
        self.rate = 0.0  # bytes/s
        self.due = math.inf

    def sent(self, now: float) -> int:
        """Return how many bytes of the payload have been sent."""
        left = self.remaining - self.rate * (now - self.since)
        return round(self.payload * min(1.0, 1.0 - left / self.size)) if self.size else self.payload


class Flows:
    """All streams between peers, which are identified by index. Streams between unlimited peers take no time."""

    def __init__(self, events: Events, network: NetworkModel) -> None:
        self.events, self.network = events, network
        self.sending: dict[int, dict[Flow, None]] = {}
        self.receiving: dict[int, dict[Flow, None]] = {}
        self.ended_bytes = 0  # payload sent by streams that have ended

    @property
    def sent_bytes(self) -> int:
        """Return the payload bytes sent until now, including the sent part of open streams."""
        now = self.events.now
        return self.ended_bytes + sum(flow.sent(now) for flows in self.sending.values() for flow in flows)

    def offered(self, sender: int, receiver: int) -> float:
        """Return the rate that one more stream would get, in bytes/s."""
        return min(
            shared(self.network.up_bytes_s(sender), self.sending.get(sender, ()), 1),
            shared(self.network.down_bytes_s(receiver), self.receiving.get(receiver, ()), 1),
        )

    def start(
        self, sender: int, receiver: int, size_bytes: float, done: Callable[[], None], ceiling: float = math.inf,
        payload: int | None = None,
    ) -> Flow | None:  # fmt: skip
        """Start a stream and call ``done`` when its last byte is sent.

        Args:
            sender: Index of the sending peer.
            receiver: Index of the receiving peer.
            size_bytes: Bytes on the wire.
            done: Called when the last byte is sent.
            ceiling: Highest rate that TCP allows, in bytes/s.
            payload: Bytes of payload; by default as many as on the wire.

        Returns:
            The stream, or None if it took no time; ``done`` was then called already.
        """
        payload = int(size_bytes) if payload is None else payload
        up, down = self.network.up_bytes_s(sender), self.network.down_bytes_s(receiver)
        if math.isinf(up) and math.isinf(down) and math.isinf(ceiling):
            self.ended_bytes += payload
            done()
            return None
        flow = Flow(sender, receiver, float(size_bytes), self.events.now, done, ceiling, payload)
        self.sending.setdefault(sender, {})[flow] = None
        self.receiving.setdefault(receiver, {})[flow] = None
        self.share(sender, receiver)
        return flow

    def stop(self, flow: Flow) -> None:
        """End a stream, complete or not, without calling ``done``."""
        if self.sending[flow.sender].pop(flow, 0) is None:  # Values are None: 0 means that it has ended already.
            del self.receiving[flow.receiver][flow]
            self.ended_bytes += flow.sent(self.events.now)
            flow.due = math.inf
            self.share(flow.sender, flow.receiver)

    def share(self, sender: int, receiver: int) -> None:
        """Recompute the rates of all streams that ``sender`` sends or ``receiver`` receives."""
        outgoing, incoming = self.sending.get(sender, {}), self.receiving.get(receiver, {})
        for flow in (*outgoing, *(flow for flow in incoming if flow not in outgoing)):
            self.pace(flow)

    def pace(self, flow: Flow) -> None:
        """Set a stream's rate to its present share, and schedule its end."""
        now, network = self.events.now, self.network
        rate = min(
            shared(network.up_bytes_s(flow.sender), self.sending[flow.sender]),
            shared(network.down_bytes_s(flow.receiver), self.receiving[flow.receiver]),
            flow.ceiling,
        )
        if rate == flow.rate:
            return
        flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.since))
        flow.since, flow.rate = now, rate
        flow.due = now + flow.remaining / rate
        self.events.push(flow.due, self.on_due, flow, flow.due)

    def on_due(self, flow: Flow, due: float) -> None:
        if due == flow.due:
            self.stop(flow)
            flow.done()


def shared(rate: float, flows: Collection[Flow], more: int = 0) -> float:
    """Return an unlimited stream's share of ``rate`` among ``flows`` and ``more`` further unlimited streams."""
    count = len(flows) + more
    if count > 1:
        for ceiling in sorted([flow.ceiling for flow in flows if flow.ceiling < math.inf]):
            if count == 1 or ceiling * count >= rate:
                break
            rate, count = rate - ceiling, count - 1
    return rate / count
