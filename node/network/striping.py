"""Striping decisions: which links get further connections, called lanes (:mod:`node.links.stripes`).

A lane joins the link whose secret name is in its Hello. Each side of a link has a name for the lanes that it dials.
"""

from hmac import compare_digest

import trio

from gossip.config import Config
from gossip.errors import ProtocolError, RemoteError
from gossip.wire.messages import Hello, Widen
from node.links.connector import Connector
from node.links.link import Link
from node.links.pool import Links


class Striping:
    """The striping decisions of one node. Either side of a link may want lanes.

    The side that dialled the link opens them, since the other side may be unable to dial.
    """

    def __init__(self, links: Links, connector: Connector, config: Config) -> None:
        self.links, self.connector, self.config = links, connector, config
        self.opening_lanes = 0  # The number of lanes that are being dialled.

    @property
    def is_full(self) -> bool:
        """Return True if all links together have as many lanes as a node may have links."""
        return (
            self.opening_lanes + sum(len(link.lanes.all) for link in self.links.all()) >= self.config.internal.max_links
        )

    def widen(self, link: Link) -> None:
        """Open lanes for a link whose path one connection does not fill, or request them from the side that dialled.

        Repeated calls have no effect.
        """
        if link.has_widened or self.config.connections < 2 or not link.name_for_our_lanes or link.path != "direct":
            return  # A punched or relayed link has no address to dial a second time.
        link.has_widened = True
        if link.address is None:
            link.send(Widen(self.config.connections))
        else:
            self.open_lanes(link, self.config.connections)

    def on_widen(self, link: Link, connections: int) -> None:
        """Handle the other side's request for ``connections`` lanes."""
        if link.address is None:
            if link.path != "direct":
                return
            raise ProtocolError("A member asked for more connections where it can open them itself.")
        if not link.has_widened and link.name_for_our_lanes:
            link.has_widened = True
            self.open_lanes(link, min(connections, self.config.connections))

    def open_lanes(self, link: Link, connections: int) -> None:
        """Open ``connections`` lanes, but not a single one, which would add nothing to the link itself."""
        for _ in range(connections if connections > 1 else 0):
            if not self.is_full:
                self.opening_lanes += 1
                self.connector.spawn(self.open_lane, link)

    async def open_lane(self, link: Link) -> None:
        """Dial one lane of a link and add it; a failure changes nothing."""
        try:
            assert link.address is not None
            lane = await self.connector.dial_lane(link.address, link.peer, link.name_for_our_lanes)
        except (OSError, RemoteError):  # The link works without the lane.
            return
        finally:
            self.opening_lanes -= 1
        if lane is not None and not link.admit_lane(lane.stream, lane.reader, True):
            lane.stream.close_now()

    async def on_lane(self, lane: Link, theirs: Hello) -> None:
        """Handle a lane that a peer dialled: add it to the link that its Hello names, or close it."""
        max_lanes = self.config.connections
        for link in self.links.by_peer.get(lane.peer, ()):
            name = link.name_for_their_lanes
            # Without a name a link takes no lanes: two empty names would be equal.
            if link.is_ending or not name or not compare_digest(name, theirs.joins):
                continue
            has_room = max_lanes > 1 and len(link.lanes.all) < max_lanes and not self.is_full
            if has_room and link.admit_lane(lane.stream, lane.reader, False):
                link.has_widened = True
                return
        with trio.move_on_after(1.0):
            await lane.stream.aclose()  # The dialling side sends nothing before it is admitted.
        lane.stream.close_now()
