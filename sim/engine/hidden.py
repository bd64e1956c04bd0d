"""Links between undialable peers: by connections that both open at once, and by tunnels through a relay.

:mod:`gossip.discovery.meetings` decides when and with which member, and :mod:`sim.world.nat` which connections come
about. A tunnel is one TCP connection over the whole way. Its streams take a share of the relay's rates as well.
"""

import math

from gossip.effects import Punch, Tunnel
from gossip.ids import PeerId
from sim.engine.carrier import TunnelWay
from sim.engine.host import Host
from sim.engine.links import VirtualLinks

PUNCH_S, TUNNEL_S = 3.0, 10.0  # The times for both sides to connect, and to join a tunnel, as on a real node.


class HiddenDials:
    """The performer of Punch and Tunnel for all hosts, which reports the members that were not met."""

    def __init__(self, links: VirtualLinks) -> None:
        self.links, self.events, self.carrier, self.network = links, links.events, links.carrier, links.network
        self.punched_at: dict[tuple[PeerId, PeerId], float] = {}  # By the side that connects and the other one.
        self.joined: dict[bytes, Host] = {}  # The side that waits at a relay for the other one, by tunnel.

    def report_not_met(self, host: Host, peer: PeerId) -> None:
        if not host.gone and peer not in host.links:
            self.links.perform(host, host.peer.on_not_met(peer, self.events.now))

    def connect(self, dialler: Host, acceptor: Host, after_s: float) -> None:
        """Begin the handshake of a link in ``after_s`` seconds."""
        dial = self.links.dials.new_dial(dialler, acceptor, None, None)
        dial.is_hidden = True
        self.events.push(self.events.now + after_s, self.links.dials.on_connected, dial)

    # -- hole punching -------------------------------------------------------------------------------------------
    def punch(self, host: Host, effect: Punch) -> None:
        """Connect to a member. The connection comes about if the member does so too and both routers let it in."""
        nat, other, now = self.network.nat, self.links.by_id[effect.peer], self.events.now
        both_connect = now - self.punched_at.get((other.id, host.id), -math.inf) <= PUNCH_S
        is_possible = nat is not None and nat.punches(host.name, other.name)
        if both_connect and is_possible and not other.gone and not self.carrier.is_cut(host, other):
            del self.punched_at[other.id, host.id]
            sides = (host, other) if effect.dials else (other, host)
            self.connect(*sides, self.carrier.latency(host.index, other.index))
        else:
            self.punched_at[host.id, other.id] = now
            self.events.push(now + PUNCH_S, self.on_punch_ended, host, other.id, now)

    def on_punch_ended(self, host: Host, peer: PeerId, began_at: float) -> None:
        if self.punched_at.get((host.id, peer)) == began_at:
            del self.punched_at[host.id, peer]
            self.report_not_met(host, peer)

    # -- tunnels -------------------------------------------------------------------------------------------------
    def tunnel(self, host: Host, effect: Tunnel) -> None:
        """Dial a relay, which joins this side and the other one."""
        relay, now = self.links.by_id[effect.relay], self.events.now
        latencies = 6 if self.network.tls else 4  # As any link.
        dial_s = latencies * self.carrier.latency(host.index, relay.index)
        self.events.push(now + dial_s, self.on_joined, host, relay, effect)
        self.events.push(now + TUNNEL_S, self.on_tunnel_due, host, effect)

    def on_joined(self, host: Host, relay: Host, effect: Tunnel) -> None:
        """Open a link through the relay if the other side has joined the tunnel as well."""
        nat, name = self.network.nat, effect.name
        is_open = not relay.gone and nat is not None and nat.is_dialable(relay.name)
        if host.gone or not is_open or name not in relay.peer.meetings.tunnels or self.carrier.is_cut(host, relay):
            return
        other = self.joined.setdefault(name, host)
        if other is host or other.gone:
            return
        del self.joined[name]
        self.links.end_tunnel(host, other)
        for sender, receiver in ((host, other), (other, host)):
            self.carrier.tunnels[sender.index, receiver.index] = TunnelWay(sender, receiver, relay, name)
        self.links.perform(relay, relay.peer.on_tunnel(name, True))
        asker, target = (host, other) if effect.dials else (other, host)
        # The relay asks the target, which confirms, and lets the asker speak.
        latency = self.network.latency
        self.connect(asker, target, 2 * latency(relay.index, target.index) + latency(relay.index, asker.index))

    def on_tunnel_due(self, host: Host, effect: Tunnel) -> None:
        """Give up a tunnel that has led to no link."""
        other = self.links.by_id[effect.peer]
        if self.joined.get(effect.name) is host:
            del self.joined[effect.name]
        way = self.carrier.tunnels.get((host.index, other.index))
        if way is not None and way.name == effect.name and other.id not in host.links:
            self.links.end_tunnel(host, other)
        self.report_not_met(host, effect.peer)
