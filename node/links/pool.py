"""All links of a node, by peer."""

from gossip.ids import PeerId
from node.links.link import Link

OUTBOXES_BYTES = 64 << 20  # Limit of the bytes that wait in all outboxes, so that silent members cannot fill memory.


class Links:
    """The pool of links. Two links to one peer may exist for a moment when both dial; the newest is used."""

    def __init__(self) -> None:
        self.by_peer: dict[PeerId, list[Link]] = {}
        # Totals of the links that have closed.
        self.closed_bytes_sent = self.closed_bytes_received = self.closed_ignored_messages = 0
        self.lossy_links: int = 0  # The number of links on which packet loss limited the rate at the last check.
        self.waiting_bytes = 0  # The sum over all outboxes.
        # The depth of nested batches of effects. Messages are sent together at the end of the outermost one.
        self.batch_depth = 0
        self.to_flush: list[Link] = []  # Links to which the current batch has queued messages.

    def add(self, link: Link) -> None:
        link.pool = self
        self.add_waiting(link.outbox_bytes)
        self.by_peer.setdefault(link.peer, []).append(link)

    def remove(self, link: Link) -> bool:
        """Remove a link; return True if no link to its peer is left."""
        self.drop_outbox(link)
        self.closed_bytes_sent += link.bytes_sent
        self.closed_bytes_received += link.bytes_received
        self.closed_ignored_messages += link.ignored_messages
        links = self.by_peer.get(link.peer, [])
        if link in links:
            links.remove(link)
        if not links:
            self.by_peer.pop(link.peer, None)
        return not links

    def add_waiting(self, count: int) -> None:
        """Add to the bytes that wait in outboxes; ``count`` is negative once some were sent.

        Over the limit, the open link whose outbox holds most is closed.
        """
        self.waiting_bytes += count
        if self.waiting_bytes > OUTBOXES_BYTES:
            max(self.all(), key=lambda link: (not link.is_closed, link.outbox_bytes)).close_now()

    def flush(self) -> None:
        """Send the messages that the finished effects queued."""
        while self.to_flush:
            self.to_flush.pop().flush()

    def drop_outbox(self, link: Link) -> None:
        """Subtract the outbox of a closed link from the waiting bytes, since it is never sent."""
        if link.pool is not None:
            link.pool = None
            self.waiting_bytes -= link.outbox_bytes

    def newest(self, peer: PeerId) -> Link | None:
        """Return the newest link to a peer on which an exchange may begin: neither side is closing it."""
        for link in reversed(self.by_peer.get(peer, ())):
            if not link.is_ending:
                return link
        return None

    def path_of(self, peer: PeerId) -> str | None:
        """Return how a peer is reached, as its newest link says; None without a link."""
        links = self.by_peer.get(peer)
        return links[-1].path if links else None

    def all(self) -> list[Link]:
        """Return all links. Metrics call this in another thread while links come and go, so it copies the lists."""
        return [link for links in list(self.by_peer.values()) for link in list(links)]

    @property
    def bytes_sent(self) -> int:
        return self.closed_bytes_sent + sum(link.bytes_sent for link in self.all())

    @property
    def bytes_received(self) -> int:
        return self.closed_bytes_received + sum(link.bytes_received for link in self.all())

    @property
    def ignored_messages(self) -> int:
        """Return the number of messages that were skipped because a newer version of the protocol sent them."""
        return self.closed_ignored_messages + sum(link.ignored_messages for link in self.all())

    @property
    def striped_links(self) -> int:
        """Return the number of links with more than one connection."""
        return sum(bool(len(link.lanes)) for link in self.all())

    def __len__(self) -> int:
        return sum(len(links) for links in self.by_peer.values())
