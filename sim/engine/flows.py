"""Flow-level model of streams that share the bandwidth of their two peers.

Each peer divides its upload rate equally among the streams it sends, and its download rate among those it receives.
Streams that TCP limits to less than their share leave the rest to the others. A stream runs at the smaller of its two
shares. Capacity that a stream cannot use because of its other end is not redistributed. This is therefore slightly
slower than max-min fairness, which would need a computation over the whole swarm at each change.
"""

import math
from collections.abc import Callable, Collection

from gossip.discovery.relay_rate import RelayRate
from sim.engine.events import Events
from sim.world.network import NetworkModel


class Flow:
    """One stream between two peers, which are identified by index; ``relay`` passes it on, if it is in a tunnel."""

    def __init__(
        self, sender: int, receiver: int, wire_bytes: float, now: float, on_sent: Callable[[], None], ceiling: float,
        payload_bytes: int,
    ) -> None:  # fmt: skip
        self.sender, self.receiver, self.on_sent = sender, receiver, on_sent
        self.relay: int | None = None
        self.payload_bytes = payload_bytes
        self.wire_bytes = wire_bytes  # The payload with its overhead.
        # The rates that TCP allows at most, and that a relay allows as well, in bytes/s.
        self.tcp_ceiling = self.ceiling = ceiling
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


class RelayLoad:
    """The streams that one peer passes on, and the rate that they may take."""

    def __init__(self) -> None:
        self.flows: dict[Flow, None] = {}  # The dict serves as an ordered set.
        self.allowance = RelayRate()
        self.passed_bytes = 0  # Payload bytes of streams that have ended.
        self.own_bytes = 0  # Payload bytes that the peer has sent and received itself, of streams that have ended.


class Flows:
    """All streams between peers. Streams between unlimited peers take no time.

    A stream in a tunnel also takes a share of its relay's rates up and down, and of the rate that tunnels may take.
    """

    def __init__(self, events: Events, network: NetworkModel) -> None:
        self.events, self.network = events, network
        # Open streams by sender and by receiver; a dict serves as an ordered set.
        self.outgoing: dict[int, dict[Flow, None]] = {}
        self.incoming: dict[int, dict[Flow, None]] = {}
        self.ended_bytes = 0  # Payload bytes sent by streams that have ended.
        self.relays: dict[int, RelayLoad] = {}  # By peer that has passed a stream on.

    @property
    def sent_bytes(self) -> int:
        """Return the payload bytes sent until now, also of open streams; a relay sends a stream once more."""
        now = self.events.now
        return self.ended_bytes + sum(flow.sent_bytes(now) for flows in self.outgoing.values() for flow in flows)

    def relayed_bytes(self) -> dict[int, int]:
        """Return the payload bytes that each relay has passed on until now."""
        now = self.events.now
        return {
            peer: load.passed_bytes + sum(flow.sent_bytes(now) for flow in load.flows)
            for peer, load in self.relays.items()
        }

    def share(self, sender: int, receiver: int, relay: int | None = None, newcomers: int = 0) -> float:
        """Return the rate of a stream that has no ceiling, in bytes/s; ``newcomers`` more are counted as open."""
        rate = min(
            share_of(self.network.up_bytes_s(sender), self.outgoing.get(sender, ()), newcomers),
            share_of(self.network.down_bytes_s(receiver), self.incoming.get(receiver, ()), newcomers),
        )
        if relay is None:
            return rate
        load = self.relays.setdefault(relay, RelayLoad())
        allowed = load.allowance.rate / (len(load.flows) + newcomers)
        return min(rate, self.share(relay, relay, None, newcomers), allowed)

    def own_bytes(self, relay: int) -> int:
        """Return the payload bytes that a relay has sent and received itself."""
        now, count = self.events.now, self.relays[relay].own_bytes
        for flows in (self.outgoing, self.incoming):
            count += sum(flow.sent_bytes(now) for flow in flows.get(relay, ()) if flow.relay != relay)
        return count

    def tables(self, flow: Flow) -> list[dict[Flow, None]]:
        """Return the tables in which a stream is while it is open."""
        tables = [self.outgoing.setdefault(flow.sender, {}), self.incoming.setdefault(flow.receiver, {})]
        if (relay := flow.relay) is not None:
            load = self.relays.setdefault(relay, RelayLoad())
            tables += [self.outgoing.setdefault(relay, {}), self.incoming.setdefault(relay, {}), load.flows]
        return tables

    def count_relayed(self, relay: int, passed_bytes: int) -> None:
        """Count bytes that a relay has passed on: it sends them a second time."""
        self.ended_bytes += passed_bytes
        self.relays.setdefault(relay, RelayLoad()).passed_bytes += passed_bytes

    def start(
        self, sender: int, receiver: int, wire_bytes: float, on_sent: Callable[[], None], ceiling: float = math.inf,
        payload_bytes: int | None = None, relay: int | None = None,
    ) -> Flow | None:  # fmt: skip
        """Start a stream.

        Args:
            sender: Index of the sending peer.
            receiver: Index of the receiving peer.
            wire_bytes: Bytes on the wire.
            on_sent: Called when the last byte is sent.
            ceiling: Highest rate that TCP allows, in bytes/s.
            payload_bytes: Bytes of payload; by default as many as on the wire.
            relay: Index of the peer that passes the stream on, if it is in a tunnel.

        Returns:
            The stream, or None if it took no time; ``on_sent`` was then called already.
        """
        payload_bytes = int(wire_bytes) if payload_bytes is None else payload_bytes
        up, down = self.network.up_bytes_s(sender), self.network.down_bytes_s(receiver)
        if math.isinf(up) and math.isinf(down) and math.isinf(ceiling) and relay is None:
            self.ended_bytes += payload_bytes
            on_sent()
            return None
        flow = Flow(sender, receiver, float(wire_bytes), self.events.now, on_sent, ceiling, payload_bytes)
        flow.relay = relay
        for table in self.tables(flow):
            table[flow] = None
        self.share_again(flow)
        return flow

    def stop(self, flow: Flow) -> None:
        """End a stream, complete or not, without calling ``on_sent``."""
        if flow in self.outgoing[flow.sender]:  # Else it has ended already.
            for table in self.tables(flow):
                del table[flow]
            sent_bytes = flow.sent_bytes(self.events.now)
            self.ended_bytes += sent_bytes
            flow.due = math.inf
            for peer, load in self.relays.items():
                load.own_bytes += sent_bytes * (peer in (flow.sender, flow.receiver))
            if flow.relay is not None:
                self.count_relayed(flow.relay, sent_bytes)
            self.share_again(flow)

    def share_again(self, changed: Flow) -> None:
        """Recompute the rates of all streams that share a rate with one that begins or has ended."""
        ends = [(changed.sender, changed.receiver)]
        if (relay := changed.relay) is not None:
            ends.append((relay, relay))
            load = self.relays[relay]
            allowed = load.allowance.update(lambda: self.own_bytes(relay), self.events.now)
            for flow in load.flows:
                flow.ceiling = min(flow.tcp_ceiling, allowed / len(load.flows))
        for sender, receiver in ends:
            outgoing, incoming = self.outgoing.get(sender, {}), self.incoming.get(receiver, {})
            for flow in (*outgoing, *(flow for flow in incoming if flow not in outgoing)):
                self.set_rate(flow)

    def set_rate(self, flow: Flow) -> None:
        """Set a stream's rate to its present share, and schedule its end."""
        now = self.events.now
        rate = min(self.share(flow.sender, flow.receiver, flow.relay), flow.ceiling)
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
