"""Links between undialable members: by connections that both sides open at once, and through a relay.

:mod:`gossip.discovery.meetings` decides when and with which member. Both ends encrypt their link for each other,
as any other link. So a relay can delay it or end it, and nothing else.
"""

import contextlib
from collections.abc import Callable

import trio

from gossip.discovery.meetings import JOIN_S
from gossip.discovery.relay_rate import RelayRate
from gossip.discovery.sightings import Sighting
from gossip.effects import Punch, Tunnel
from gossip.errors import ProtocolError, RemoteError
from gossip.ids import PeerId, short
from gossip.peer import Peer
from gossip.wire.frames import encode
from gossip.wire.messages import Widen
from node.links.connector import Connector
from node.links.link import Link
from node.links.pool import Links
from node.transport.byte_stream import BrokenLinkError, ByteStream, PlainStream, socket_of
from node.transport.tcp import punched
from node.transport.tls import TlsStream

PUNCH_S = 3.0  # The time for both connections to meet. TCP repeats a lost first packet after 1 s.
TUNNEL_S = 10.0  # The time for a relay to join both sides.
READY = encode(Widen(1))  # Each side of a tunnel says so, after which it reads and sends for the other side alone.
BUFFER_BYTES = 128 << 10  # Bytes of a direction that are in memory.
IDLE_S = 120.0  # A tunnel without a byte for this long is closed. Links close after a minute without one.


class HiddenLinks:
    """Opens such links for one node, and reports the members that it did not reach to ``on_not_met``."""

    def __init__(self, connector: Connector, on_not_met: Callable[[PeerId], None]) -> None:
        self.connector, self.on_not_met = connector, on_not_met

    def open(self, effect: Punch | Tunnel, contact: Link | None = None) -> None:
        """Begin a link to a member. A punch leaves from the port of our link to ``contact``, if it has one."""
        self.connector.spawn(self.open_task, effect, contact)

    async def open_task(self, effect: Punch | Tunnel, contact: Link | None) -> None:
        """Connect, shake hands and run the link, or report that the member was not met."""
        greeted = None
        with contextlib.suppress(OSError, RemoteError):
            stream = await (self.join(effect) if isinstance(effect, Tunnel) else self.meet(effect, contact))
            with trio.move_on_after(self.connector.config.hello_timeout_s):
                greeted = await self.connector.handshake(stream, not effect.dials, effect.peer)
        link, theirs = greeted or (None, None)
        if link is None or theirs is None or theirs.record is None:
            if link is not None:  # An observer has no part in this.
                link.stream.close_now()
            self.on_not_met(effect.peer)
            return
        if isinstance(effect, Tunnel):
            # This connection ends at the relay, and would show the relay's address as ours and the member's.
            link.path, link.sighting = f"relay {short(effect.relay)}", Sighting()
        else:
            link.path = "direct" if effect.via is None else "punched"
            self.connector.budget.mark_proven(effect.address)
        await self.connector.owner.run_link(link, theirs)

    async def meet(self, effect: Punch, contact: Link | None) -> ByteStream:
        """Return a connection to the member. Raises OSError or RemoteError."""
        limits = self.connector.limits(effect.address)
        if effect.via is None:
            return await self.connector.network.connect(effect.address, limits)
        socket = None if contact is None else socket_of(contact.stream)
        if socket is None or not limits(effect.address.host):
            raise BrokenLinkError(f"{effect.address} may not be dialled.")
        return await punched(effect.address, socket.local, PUNCH_S)

    async def join(self, effect: Tunnel) -> PlainStream:
        """Dial the relay, wait until it has joined both sides, and return the connection to the other one.

        Raises:
            OSError, RemoteError: The relay does not answer, or ends the tunnel.
        """
        with trio.move_on_after(TUNNEL_S):
            stream = await self.connector.connect(effect.address)
            try:
                return await self.wait_for_other(stream, effect)
            except BaseException:
                stream.close_now()
                raise
        raise BrokenLinkError(f"The relay {effect.address} joined nothing in {TUNNEL_S:g} s.")

    async def wait_for_other(self, stream: ByteStream, effect: Tunnel) -> PlainStream:
        """Shake hands with the relay, and wait until the other side may be spoken to."""
        link, _ = await self.connector.handshake(stream, False, effect.relay, effect.name)
        plain = socket_of(link.stream)
        if plain is None:
            raise BrokenLinkError("A tunnel needs a socket.")
        self.connector.budget.mark_proven(effect.address)
        await link.stream.send_all(READY)
        await confirmation(link)
        if not effect.dials:  # Each side speaks only once the other has read all that the relay has to say.
            await link.stream.send_all(READY)
            await plain.wait_for_bytes()
        return plain


async def confirmation(link: Link) -> None:
    """Read the message by which a relay, or a side of a tunnel, says that it is ready.

    Raises:
        RemoteError: Another message came, or the connection ended.
    """
    if isinstance(link.stream, TlsStream):
        raise ProtocolError("A tunnel needs links that have left TLS.")
    read = await link.reader.read_message()
    if read is None or not isinstance(read[0], Widen) or link.reader.has_read_ahead:
        raise ProtocolError(f"{link.stream.peer_host} did not open a tunnel.")


class Relay:
    """The tunnels through one node.

    Args:
        peer: The peer, which has agreed to each tunnel.
        links: This node's own links, by whose traffic the tunnels are limited.
    """

    def __init__(self, peer: Peer, links: Links) -> None:
        self.peer, self.links = peer, links
        self.waiting: dict[bytes, tuple[Link, trio.Event]] = {}  # Sides of tunnels whose other side has not come.
        self.relayed_bytes = 0
        self.free_at = 0.0  # The time from which on the next bytes may be passed on.
        self.allowance = RelayRate()

    async def on_joined(self, link: Link, name: bytes) -> None:
        """Handle a side of a tunnel that has dialled us; return when the tunnel has ended."""
        tunnel, other = self.peer.meetings.tunnels.get(name), self.waiting.pop(name, None)
        if tunnel is None or link.peer not in tunnel.ends or (other is not None and other[0].peer == link.peer):
            link.stream.close_now()
            return
        if other is None:
            joined = trio.Event()
            self.waiting[name] = link, joined
            with trio.move_on_after(JOIN_S):
                await joined.wait()
                return
            self.waiting.pop(name, None)
            link.stream.close_now()
            return
        other[1].set()
        asker, target = (link, other[0]) if link.peer == tunnel.ends[0] else (other[0], link)
        self.peer.on_tunnel(name, True)
        try:
            with trio.fail_after(JOIN_S):
                await confirmation(asker)
                await confirmation(target)
                await target.stream.send_all(READY)
                await confirmation(target)  # From here on it reads what the asker sends.
                await asker.stream.send_all(READY)
            await self.join(asker, target)
        except (RemoteError, trio.TooSlowError):
            pass
        finally:
            asker.stream.close_now()
            target.stream.close_now()
            self.peer.on_tunnel(name, False)

    async def join(self, asker: Link, target: Link) -> None:
        """Pass bytes on in both directions until either side ends."""
        sides = socket_of(asker.stream), socket_of(target.stream)
        if sides[0] is None or sides[1] is None:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pump, sides[0], sides[1], nursery.cancel_scope)
            nursery.start_soon(self.pump, sides[1], sides[0], nursery.cancel_scope)

    async def pump(self, source: ByteStream, target: ByteStream, scope: trio.CancelScope) -> None:
        """Pass bytes on in one direction, at the rate that tunnels may take."""
        buffer = memoryview(bytearray(BUFFER_BYTES))
        try:
            while True:
                count = 0
                with trio.move_on_after(IDLE_S):
                    count = await source.receive_into(buffer)
                if not count:
                    return
                await trio.sleep_until(self.turn(count))
                await target.send_all(buffer[:count])
        except RemoteError:
            pass
        finally:
            scope.cancel()

    def turn(self, count: int) -> float:
        """Return the time at which ``count`` bytes may be passed on, and count them."""
        now = trio.current_time()
        rate = self.allowance.update(lambda: self.links.bytes_sent + self.links.bytes_received, now)
        self.relayed_bytes += count
        begin = max(self.free_at, now)
        self.free_at = begin + count / rate
        return begin
