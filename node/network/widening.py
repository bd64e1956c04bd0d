"""Which links get more connections: those on which one does not fill the path, and whose other side lets them in."""

from __future__ import annotations

from hmac import compare_digest

import trio

from gossip.config import Config
from gossip.errors import ProtocolError, RemoteError
from gossip.wire.messages import Hello, Widen
from node.links.connector import Doors
from node.links.link import Link
from node.links.pool import Links

__all__ = ["Widening"]


class Widening:
    """Of one node. Who dialled a link opens its lanes, since the other side may not be able to; either may ask."""

    def __init__(self, links: Links, doors: Doors, config: Config) -> None:
        self.links, self.doors, self.config = links, doors, config
        self.opening = 0

    @property
    def full(self) -> bool:
        """Lanes of all links together are bounded as links are."""
        return self.opening + sum(len(link.lanes.all) for link in self.links.all()) >= self.config.max_links

    def widen(self, link: Link) -> None:
        """One connection does not fill its path. Said again and again it is done once."""
        if link.widened or self.config.connections < 2 or not link.named:
            return
        link.widened = True
        if link.address is None:
            link.send(Widen(self.config.connections))
        else:
            self.open(link, self.config.connections)

    def asked(self, link: Link, connections: int) -> None:
        """The other side says so."""
        if link.address is None:
            raise ProtocolError("A member asked for more connections where it can open them itself.")
        if not link.widened and link.named:
            link.widened = True
            self.open(link, min(connections, self.config.connections))

    def open(self, link: Link, connections: int) -> None:
        """So many lanes; one would do what the link does by itself."""
        for _ in range(connections if connections > 1 else 0):
            if not self.full:
                self.opening += 1
                self.doors.spawn(self.open_one, link)

    async def open_one(self, link: Link) -> None:
        try:
            assert link.address is not None
            lane = await self.doors.dial_lane(link.address, link.peer, link.named)
        except (OSError, RemoteError):  # the link does without it
            return
        finally:
            self.opening -= 1
        if lane is not None and not link.admit(lane.stream, lane.reader, True):
            lane.stream.close_now()

    async def join(self, lane: Link, theirs: Hello) -> None:
        """Somebody dialled a lane of a link that it has to us."""
        most = self.config.connections
        for link in self.links.by_peer.get(lane.peer, ()):
            if link.ending or not link.name or not compare_digest(link.name, theirs.joins):
                continue
            room = 1 < most > len(link.lanes.all) and not self.full
            if room and link.admit(lane.stream, lane.reader, False):
                link.widened = True
                return
        with trio.move_on_after(1.0):
            await lane.stream.aclose()  # who dialled sends nothing before it is let in
        lane.stream.close_now()
