"""The handshake pool: the connections that are not authenticated yet, bounded so that strangers keep no member out."""

import contextlib
import functools
import ipaddress
from collections import Counter
from collections.abc import Callable, Collection

from node.links.link import Link
from node.transport.byte_stream import ByteStream

MAX_VISITORS = 64  # Connections in the pool. Silent ones can fill it, but not the pool of links.
MAX_UNKNOWN = MAX_VISITORS // 2  # Those from unknown hosts; the other half is for hosts of known members.
MAX_PER_UNKNOWN_HOST = 8  # Those from one unknown host: a few nodes behind one router may restart together.
FIRST_FLIGHT_S = 1.0  # A connection that was silent for so long is evicted before one in the middle of its handshake.


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
    """A connection in its handshake, or that of an observer."""

    def __init__(self, stream: ByteStream, host_range: str, is_known: bool, now: float) -> None:
        self.stream, self.host_range, self.is_known, self.came_at = stream, host_range, is_known, now
        self.link: Link | None = None  # That of an observer; None for a connection in its handshake.


class HandshakePool:
    """A bounded pool of connections in their handshake.

    Args:
        known_hosts: Returns the address ranges of known members' hosts.
        on_evicted: Called with the host of each evicted connection.
    """

    def __init__(
        self, known_hosts: Callable[[], Collection[str]], on_evicted: Callable[[str], None] = lambda host: None
    ) -> None:
        self.known_hosts, self.on_evicted = known_hosts, on_evicted
        self.visitors: dict[Visitor, None] = {}  # The oldest first.

    def __len__(self) -> int:
        return len(self.visitors)

    def enter(self, stream: ByteStream, now: float) -> Visitor:
        """Add a connection, and evict another one if the pool is full."""
        host_range = neighbourhood(stream.peer_host)
        is_known = host_range in self.known_hosts()
        if not is_known:
            same_host = [visitor for visitor in self.visitors if visitor.host_range == host_range]
            unknown = [visitor for visitor in self.visitors if not visitor.is_known]
            if len(same_host) >= MAX_PER_UNKNOWN_HOST:
                self.evict(same_host, now)
            elif len(unknown) >= MAX_UNKNOWN:
                self.evict(unknown, now)
        if len(self.visitors) >= MAX_VISITORS:
            self.evict(list(self.visitors), now)
        visitor = Visitor(stream, host_range, is_known, now)
        self.visitors[visitor] = None
        return visitor

    def leave(self, visitor: Visitor) -> None:
        self.visitors.pop(visitor, None)

    def evict(self, candidates: list[Visitor], now: float) -> None:
        """Evict the oldest silent connection, an observer that is sent no weights, or one of the busiest host."""
        late = [visitor for visitor in candidates if now - visitor.came_at > FIRST_FLIGHT_S]
        # A stream that cannot tell whether a byte has come counts as not silent.
        silent = [visitor for visitor in late if not getattr(visitor.stream, "has_received", True)]
        unserved = [visitor for visitor in candidates if visitor.link is not None and not visitor.link.bulk]
        candidates = [visitor for visitor in candidates if visitor.link is None] or candidates
        if silent or unserved:
            evicted = (silent or unserved)[0]
        else:
            per_host = Counter(visitor.host_range for visitor in candidates)
            most_connections = max(per_host.values())
            evicted = next(visitor for visitor in candidates if per_host[visitor.host_range] == most_connections)
        del self.visitors[evicted]
        evicted.stream.close_now()
        if evicted.link is None:
            self.on_evicted(evicted.stream.peer_host)
