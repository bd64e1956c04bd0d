"""Connections that have not said who they are: a bounded pool, in which nobody without the secret keeps others out."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from collections import Counter
from collections.abc import Callable, Collection

from node.transport.byte_stream import ByteStream

__all__ = ["Lobby", "Visitor", "neighbourhood"]

PLACES = 64  # with half of it for addresses of members we know: silent sockets fill this pool, never that of links
OF_OTHERS = PLACES // 2  # for addresses that we do not know
OF_ONE = 8  # for one such address: a few nodes behind one router, restarted together
FIRST_FLIGHT_S = 1.0  # who has not sent a byte for so long goes before who is in the middle of its handshake


@functools.lru_cache(maxsize=4_096)  # of all members, whenever one has come or gone
def neighbourhood(host: str) -> str:
    """What one person has of addresses: an IPv4 address, or the 2^64 of an IPv6 network."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address):
            if address.ipv4_mapped is not None:
                return str(address.ipv4_mapped)
            return f"{int(address) >> 64:x}::/64"
        return str(address)
    return host


class Visitor:
    """One connection in its handshake."""

    __slots__ = ("came_s", "known", "place", "stream")

    def __init__(self, stream: ByteStream, place: str, known: bool, now: float) -> None:
        self.stream, self.place, self.known, self.came_s = stream, place, known, now


class Lobby:
    """``known`` gives the hosts of members we know; ``spoke`` says whether a byte came over this stream, and
    ``turned_out`` hears of who had to go."""

    def __init__(
        self, known: Callable[[], Collection[str]], spoke: Callable[[ByteStream], bool],
        turned_out: Callable[[str], None] = lambda host: None,
    ) -> None:  # fmt: skip
        self.known, self.spoke, self.turned_out = known, spoke, turned_out
        self.visitors: dict[Visitor, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self.visitors)

    def enter(self, stream: ByteStream, now: float) -> Visitor:
        """Let a connection in, in the place of another where there is none."""
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
        """Its handshake is over, or it is gone."""
        self.visitors.pop(visitor, None)

    def turn_out(self, among: list[Visitor], now: float) -> None:
        """Close the oldest of those who keep silent; if none does, the oldest of the address that has the most here."""
        silent = [one for one in among if now - one.came_s > FIRST_FLIGHT_S and not self.spoke(one.stream)]
        crowd = Counter(one.place for one in among)
        most = max(crowd.values())
        oldest = next(one for one in silent or among if silent or crowd[one.place] == most)
        del self.visitors[oldest]
        oldest.stream.close_now()
        self.turned_out(oldest.stream.peer_host)
