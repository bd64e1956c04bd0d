"""The handshake pool: connections not yet authenticated, bounded so that strangers cannot keep members out."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from collections import Counter
from collections.abc import Callable, Collection

from node.transport.byte_stream import ByteStream

__all__ = ["HandshakePool", "Visitor", "neighbourhood"]

PLACES = 64  # Half of it is for addresses of known members: silent sockets fill this pool, never that of links.
OF_OTHERS = PLACES // 2  # Places for unknown addresses.
OF_ONE = 8  # Places for one unknown address: a few nodes behind one router that restart together.
FIRST_FLIGHT_S = 1.0  # A connection silent for this long is evicted before one in the middle of its handshake.


@functools.lru_cache(maxsize=4_096)  # Recomputed for all members whenever one joins or leaves.
def neighbourhood(host: str) -> str:
    """Return the range of addresses that one host owns: an IPv4 address, or the /64 of an IPv6 address."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address):
            if address.ipv4_mapped is not None:
                return str(address.ipv4_mapped)
            return f"{int(address) >> 64:x}::/64"
        return str(address)
    return host


class Visitor:
    """A connection in its handshake."""

    __slots__ = ("came_s", "known", "place", "stream")

    def __init__(self, stream: ByteStream, place: str, known: bool, now: float) -> None:
        self.stream, self.place, self.known, self.came_s = stream, place, known, now


class HandshakePool:
    """A bounded pool of connections in their handshake.

    Args:
        known: Returns the hosts of known members.
        spoke: Tells whether a byte has come over a stream.
        turned_out: Called with the host of each evicted connection.
    """

    def __init__(
        self, known: Callable[[], Collection[str]], spoke: Callable[[ByteStream], bool],
        turned_out: Callable[[str], None] = lambda host: None,
    ) -> None:  # fmt: skip
        self.known, self.spoke, self.turned_out = known, spoke, turned_out
        self.visitors: dict[Visitor, None] = {}  # The oldest first.

    def __len__(self) -> int:
        return len(self.visitors)

    def enter(self, stream: ByteStream, now: float) -> Visitor:
        """Add a connection, and evict another one if the pool is full."""
        place = neighbourhood(stream.peer_host)
        known = place in self.known()
        if not known:
            neighbours = [one for one in self.visitors if one.place == place]
            others = [one for one in self.visitors if not one.known]
            if len(neighbours) >= OF_ONE:
                self.turn_out(neighbours, now)
            elif len(others) >= OF_OTHERS:
                self.turn_out(others, now)
        if len(self.visitors) >= PLACES:
            self.turn_out(list(self.visitors), now)
        visitor = Visitor(stream, place, known, now)
        self.visitors[visitor] = None
        return visitor

    def leave(self, visitor: Visitor) -> None:
        self.visitors.pop(visitor, None)

    def turn_out(self, among: list[Visitor], now: float) -> None:
        """Evict the oldest silent connection, or else the oldest one of the address with the most connections."""
        silent = [one for one in among if now - one.came_s > FIRST_FLIGHT_S and not self.spoke(one.stream)]
        crowd = Counter(one.place for one in among)
        most = max(crowd.values())
        oldest = next(one for one in silent or among if silent or crowd[one.place] == most)
        del self.visitors[oldest]
        oldest.stream.close_now()
        self.turned_out(oldest.stream.peer_host)
