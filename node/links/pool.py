"""All links of a node, by the member at the other end."""

from __future__ import annotations

from gossip.ids import PeerId
from node.links.link import Link

__all__ = ["Links"]

OUTBOXES_BYTES = 64 << 20  # of all links together: beyond it the one that holds most is closed


class Links:
    """The pool: several links to one peer may exist for a moment (both dialled at once); the newest one is used."""

    def __init__(self) -> None:
        self.by_peer: dict[PeerId, list[Link]] = {}
        self.closed_bytes_sent = 0
        self.closed_bytes_received = 0
        self.closed_ignored = 0
        self.lossy = 0  # on which lost packets are taken for a full path, at the last look
        self.waiting_bytes = 0  # in all outboxes
        self.gathering = 0  # decisions being performed, one within another: what they send goes together
        self.stirred: list[Link] = []  # with something to send then

    def add(self, link: Link) -> bool:
        """True when this is the first link to its peer."""
        link.links = self
        self.waits(link.outbox_bytes)
        links = self.by_peer.setdefault(link.peer, [])
        links.append(link)
        return len(links) == 1

    def remove(self, link: Link) -> bool:
        """True when no link to its peer is left."""
        self.forget(link)
        self.closed_bytes_sent += link.bytes_sent
        self.closed_bytes_received += link.bytes_received
        self.closed_ignored += link.ignored
        links = self.by_peer.get(link.peer, [])
        if link in links:
            links.remove(link)
        if not links:
            self.by_peer.pop(link.peer, None)
        return not links

    def waits(self, count: int) -> None:
        """So many bytes more wait in outboxes. Many members that read nothing must not fill our memory together."""
        self.waiting_bytes += count
        if self.waiting_bytes > OUTBOXES_BYTES:
            max(self.all(), key=lambda link: -1 if link.closed else link.outbox_bytes).close_now()

    def flush(self) -> None:
        """Send what came of all that has been performed."""
        while self.stirred:
            self.stirred.pop().flush()

    def forget(self, link: Link) -> None:
        """What waits there is never sent."""
        if link.links is not None:
            link.links = None
            self.waiting_bytes -= link.outbox_bytes

    def newest(self, peer: PeerId) -> Link | None:
        """To begin something on: not one that either side is closing, over which nothing comes back."""
        for link in reversed(self.by_peer.get(peer, ())):
            if not link.ending:
                return link
        return None

    def all(self) -> list[Link]:
        return [link for links in list(self.by_peer.values()) for link in list(links)]  # read by the other thread too

    @property
    def bytes_sent(self) -> int:
        return self.closed_bytes_sent + sum(link.bytes_sent for link in self.all())

    @property
    def bytes_received(self) -> int:
        return self.closed_bytes_received + sum(link.bytes_received for link in self.all())

    @property
    def ignored(self) -> int:
        """Messages of newer versions that were read past."""
        return self.closed_ignored + sum(link.ignored for link in self.all())

    @property
    def shared(self) -> int:
        """Links by which vectors are not sent, but read where they lie."""
        return sum(link.channel is not None and link.channel.open for link in self.all())

    @property
    def wide(self) -> int:
        """Links with more than one connection."""
        return sum(bool(len(link.lanes)) for link in self.all())

    def __len__(self) -> int:
        return sum(len(links) for links in self.by_peer.values())
