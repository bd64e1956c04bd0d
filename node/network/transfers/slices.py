"""The chunks of a group's slices: those that wait to be sent, and those that came before the group began here."""

from dataclasses import dataclass

from gossip.averaging.streams import Sender
from gossip.averaging.vectors import Lease
from gossip.errors import ProtocolError
from gossip.wire.messages import MIN_CHUNK_ELEMENTS, Chunk
from node.links.link import Link


class SliceBulk:
    """The values for one member: ours of its slice, then the mean of our slice. A :class:`node.links.bulk.Bulk`."""

    def __init__(self, lease: Lease) -> None:
        self.senders: list[Sender] = []  # The senders that are not done, of which the first one sends now.
        self.lease = lease  # It keeps the snapshot in memory while its values are sent.
        self.finished_elements = 0  # Elements of the senders that are done.

    def next_frame(self, apart: bool = False) -> tuple[bytes, memoryview] | None:
        while self.senders and self.senders[0].done:
            self.finished_elements += self.senders.pop(0).position
        return self.senders[0].next_frame(apart) if self.senders else None

    @property
    def sent_elements(self) -> int:
        """Return the number of elements that were sent."""
        return self.finished_elements + sum(sender.position for sender in self.senders)

    def let_go(self) -> None:
        self.lease.end()


@dataclass(slots=True, eq=False)
class EarlyChunk:
    """A chunk that came, at least in part, before its group began here."""

    link: Link
    chunk: Chunk
    body: bytearray
    is_filled: bool = False


class EarlyChunks:
    """All early chunks of one group, by link and in their order."""

    def __init__(self) -> None:
        self.by_link: dict[Link, dict[int, EarlyChunk]] = {}  # Each link's chunks, by their start in the vector.
        self.bytes = self.chunks = 0  # Totals over all links.

    def add(self, link: Link, chunk: Chunk, body_bytes: int) -> EarlyChunk:
        """Add a chunk whose body is about to come, and return it. Raises ProtocolError if it came before."""
        early = EarlyChunk(link, chunk, bytearray(body_bytes))
        link_chunks = self.by_link.setdefault(link, {})
        if chunk.start in link_chunks:
            raise ProtocolError("A chunk of a group came twice.")
        link_chunks[chunk.start] = early
        self.bytes += body_bytes
        self.chunks += 1
        return early

    def filling_chunk(self, link: Link) -> EarlyChunk | None:
        """Return the chunk that the link is reading, which is its last, because a link reads one after the other."""
        link_chunks = self.by_link.get(link)
        return next(reversed(link_chunks.values())) if link_chunks else None

    def filled_chunks(self) -> list[EarlyChunk]:
        return [early for chunks in self.by_link.values() for early in chunks.values() if early.is_filled]

    def largest_link(self) -> Link:
        """Return the link with the most early data. Each chunk also counts MIN_CHUNK_ELEMENTS bytes for its memory."""
        sizes = {
            link: sum(len(early.body) + MIN_CHUNK_ELEMENTS for early in chunks.values())
            for link, chunks in self.by_link.items()
        }
        return max(sizes, key=lambda link: sizes[link])

    def remove(self, early: EarlyChunk) -> None:
        del self.by_link[early.link][early.chunk.start]
        self.bytes -= len(early.body)
        self.chunks -= 1

    def drop_link(self, link: Link) -> None:
        for early in list(self.by_link.get(link, {}).values()):
            self.remove(early)
        self.by_link.pop(link, None)
