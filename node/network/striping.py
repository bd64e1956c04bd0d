"""Striping decisions: which links get more connections."""

from __future__ import annotations

from hmac import compare_digest

import trio

from gossip.config import Config
from gossip.errors import ProtocolError, RemoteError
from gossip.wire.messages import Hello, Widen
from node.links.connector import Connector
from node.links.link import Link
from node.links.pool import Links

__all__ = ["Striping"]


class Striping:
    """The striping decisions of one node.

    The side that dialled a link opens its lanes, since the other side may be unable to; either side may request them.
    """

    def __init__(self, links: Links, connector: Connector, config: Config) -> None:
        self.links, self.connector, self.config = links, connector, config
        self.opening = 0

    @property
    def full(self) -> bool:
        """Return True if all links together have as many lanes as a node may have links."""
        return self.opening + sum(len(link.lanes.all) for link in self.links.all()) >= self.config.internal.max_links

    def widen(self, link: Link) -> None:
        """Widen a link that one connection does not fill; repeated calls have no effect."""
        if link.widened or self.config.connections < 2 or not link.named:
            return
        link.widened = True
        if link.address is None:
            link.send(Widen(self.config.connections))
        else:
            self.open(link, self.config.connections)

    def asked(self, link: Link, connections: int) -> None:
        """Handle the other side's request for lanes."""
        if link.address is None:
            raise ProtocolError("A member asked for more connections where it can open them itself.")
        if not link.widened and link.named:
            link.widened = True
            self.open(link, min(connections, self.config.connections))

    def open(self, link: Link, connections: int) -> None:
        """Open ``connections`` lanes; a single one would add nothing to the link itself."""
        for _ in range(connections if connections > 1 else 0):
            if not self.full:
                self.opening += 1
                self.connector.spawn(self.open_one, link)

    async def open_one(self, link: Link) -> None:
        try:
            assert link.address is not None
            lane = await self.connector.dial_lane(link.address, link.peer, link.named)
        except (OSError, RemoteError):  # The link works without it.
            return
        finally:
            self.opening -= 1
        if lane is not None and not link.admit(lane.stream, lane.reader, True):
            lane.stream.close_now()

    async def join(self, lane: Link, theirs: Hello) -> None:
        """Admit a lane that a peer dialled to one of its links, or close it."""
        most = self.config.connections
        for link in self.links.by_peer.get(lane.peer, ()):
            if link.ending or not link.name or not compare_digest(link.name, theirs.joins):
                continue
            room = 1 < most > len(link.lanes.all) and not self.full
            if room and link.admit(lane.stream, lane.reader, False):
                link.widened = True
                return
        with trio.move_on_after(1.0):
            await lane.stream.aclose()  # The dialling side sends nothing before it is admitted.
        lane.stream.close_now()
