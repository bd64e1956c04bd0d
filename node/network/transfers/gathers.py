"""Group means on real links: an all-reduce in two phases, reduce-scatter and all-gather.

Each member owns a slice of the vector. It receives the others' values of its slice, and sends their mean to all. So the
chunks that another member sends us are values of our slice or the mean of its own; their start tells which.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from gossip.averaging.all_reduce import GroupAverage
from gossip.averaging.averager import Averager
from gossip.averaging.streams import Receiver, Sender
from gossip.averaging.vectors import Floats, Lease
from gossip.config import Config
from gossip.errors import ProtocolError
from gossip.exchange.groups.group import Group
from gossip.exchange.session import State
from gossip.peer import Peer
from gossip.wire.messages import MAX_GROUP, MIN_CHUNK_ELEMENTS, Chunk
from node.links.link import Link
from node.links.pool import Links
from node.model.pool import VectorPool
from node.network.transfers.sessions import StreamSessions

__all__ = ["GroupTransfers"]


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


@dataclass(slots=True, eq=False)
class GroupTransfer:
    """The links of one group. A member's *place* is its index among the members."""

    group: GroupAverage
    outgoing: dict[int, tuple[Link, SliceBulk]] = field(default_factory=dict)  # By place.
    # By place: the link over which a member sends, and the time of its last data.
    last_data: dict[int, tuple[Link, float]] = field(default_factory=dict)


class GroupTransfers:
    """The transfers between this node and the other members of its groups. All of it runs in trio's thread."""

    def __init__(
        self, peer: Peer, config: Config, averager: Averager, pool: VectorPool, links: Links, sessions: StreamSessions
    ) -> None:  # fmt: skip
        self.peer, self.config, self.averager, self.pool = peer, config, averager, pool
        self.links, self.sessions = links, sessions
        self.transfers: dict[int, GroupTransfer] = {}  # By session, from the group's beginning here on.
        self.early: dict[int, EarlyChunks] = {}  # By session: chunks that came, at least in part, before that.

    # -- a group -------------------------------------------------------------------------------------------------
    def stream_to_members(self, group: GroupAverage) -> None:
        """Stream to the members that have a link. A further call adds members whose link is newer."""
        session = group.session
        transfer = self.transfers.get(session)
        if transfer is None:
            group.create_receivers()
            transfer = self.transfers[session] = GroupTransfer(group)
        for place, member in enumerate(group.members):
            link = None if place == group.place or place in transfer.outgoing else self.links.newest(member)
            if link is not None:
                transfer.outgoing[place] = link, SliceBulk(self.pool.lease(self.averager.snapshots[session]))
                transfer.last_data.setdefault(place, (link, trio.current_time()))
                their_slice = group.slices[place]
                self.queue_values(transfer, place, group.ours[their_slice], their_slice.start)
                if group.slice_mean is not None:
                    self.queue_values(transfer, place, group.slice_mean, group.slices[group.place].start)
        for early in self.early[session].filled_chunks() if session in self.early else ():
            self.replay(session, early)
        self.start_average(transfer)

    def queue_values(self, transfer: GroupTransfer, place: int, values: Floats, start: int) -> None:
        """Queue these values for a member; ``start`` is the index of the first one in the whole vector.

        The members share our uplink. Chunks are shorter in larger groups, so that no member waits long enough to find
        us stalled.
        """
        if not values.size:
            return
        link, bulk = transfer.outgoing[place]
        group = transfer.group
        elements = max(self.config.chunk_elements // (len(group.members) - 1), MIN_CHUNK_ELEMENTS)
        bulk.senders.append(Sender(group.session, values, group.codec, elements, start, limit=link.motion))
        link.start_bulk(group.session, bulk)

    # -- chunks --------------------------------------------------------------------------------------------------
    def is_group(self, session: int) -> bool:
        """Return True if this session is that of a group that streams, or of one whose invitation we have accepted."""
        if session in self.transfers:
            return True
        if not self.config.grouped:
            return False
        exchange = self.peer.exchanges.table.get(session)
        return exchange is not None and exchange.state is State.OFFERED and not exchange.is_initiator

    def buffer_for(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview:
        """Return the buffer for a chunk's body. Early chunks take at most a vector's size in all.

        Raises:
            ProtocolError: The group has no use for the chunk.
        """
        transfer = self.transfers.get(chunk.session)
        if transfer is not None:
            return self.receiver(transfer, link, chunk)[1].begin_chunk(chunk, body_bytes)
        group = self.peer.exchanges.table.get(chunk.session)
        assert isinstance(group, Group)
        if link.peer not in (group.inviter, *group.invite_list):
            raise ProtocolError("A chunk came of a group to which its sender was not invited.")
        early_chunks = self.early.setdefault(chunk.session, EarlyChunks())
        early = early_chunks.add(link, chunk, body_bytes)
        # All that can come early are the other members' values of our slice, less than a vector. Only the last chunk of
        # a stream may be shorter than the minimum.
        max_bytes = 4 * self.peer.view.elements
        if early_chunks.bytes > max_bytes or early_chunks.chunks > max_bytes // MIN_CHUNK_ELEMENTS + 2 * MAX_GROUP:
            largest = early_chunks.largest_link()
            early_chunks.drop_link(largest)
            if largest is link:
                raise ProtocolError("More of a group's values came early than a vector has.")
            largest.close_now()  # This link has used more than its share.
        return memoryview(early.body)

    @staticmethod
    def receiver(transfer: GroupTransfer, link: Link, chunk: Chunk) -> tuple[int, Receiver]:
        """Return the sender's place and the receiver of a chunk; raise ProtocolError if none is expected."""
        members = transfer.group.members
        place = members.index(link.peer) if link.peer in members else None
        receiver = None if place is None else transfer.group.chunk_receiver(place, chunk.start)
        if place is None or receiver is None:
            raise ProtocolError("A chunk came that belongs to no part of its group's vector.")
        return place, receiver

    def on_body(self, link: Link, chunk: Chunk) -> None:
        """Handle a chunk whose body is in its buffer."""
        transfer = self.transfers.get(chunk.session)
        early_chunks = self.early.get(chunk.session)
        early = None if early_chunks is None else early_chunks.filling_chunk(link)
        if early is not None and early.chunk is chunk:
            early.is_filled = True
            if transfer is not None:
                self.replay(chunk.session, early)
            return
        if transfer is None:
            return  # The group has ended.
        place, receiver = self.receiver(transfer, link, chunk)
        transfer.last_data[place] = link, trio.current_time()
        if not receiver.finish_chunk(chunk):
            link.close_now()  # This fails all sessions on the link, the group included.
        elif receiver.is_complete:
            transfer.group.on_received(place, receiver)
            self.start_average(transfer)
            self.report_gathered(transfer)

    def replay(self, session: int, early: EarlyChunk) -> None:
        """Handle an early chunk as if it came now."""
        early_chunks = self.early.get(session)
        if early_chunks is None:
            return  # An earlier chunk has ended the group.
        early_chunks.remove(early)
        if not early_chunks.chunks:
            del self.early[session]
        try:
            self.buffer_for(early.link, early.chunk, len(early.body))[:] = early.body
            self.on_body(early.link, early.chunk)
        except ProtocolError:
            early.link.close_now()

    def go_on(self, session: int) -> None:
        """Go on with a group whose late members were left out."""
        if (transfer := self.transfers.get(session)) is not None:
            self.start_average(transfer)
            self.report_gathered(transfer)

    # -- means ---------------------------------------------------------------------------------------------------
    def start_average(self, transfer: GroupTransfer) -> None:
        """Compute our slice's mean, if all values of it have come."""
        self.averager.average_slice(transfer.group, lambda: self.on_averaged(transfer))

    def on_averaged(self, transfer: GroupTransfer) -> None:
        """Handle the computed mean of our slice: send it to all members."""
        group = transfer.group
        assert group.slice_mean is not None
        for place in sorted(transfer.outgoing):
            self.queue_values(transfer, place, group.slice_mean, group.slices[group.place].start)
        self.report_gathered(transfer)

    def report_gathered(self, transfer: GroupTransfer) -> None:
        """Report the group to the averager, which finishes it once all means have come."""
        if transfer.outgoing:  # Without a link nothing can be sent, and the group will fail.
            self.averager.report_gathered(transfer.group)

    # -- ends ----------------------------------------------------------------------------------------------------
    def moved_elements(self, session: int) -> tuple[int, int]:
        """Return the numbers of elements that were sent and received in a group."""
        transfer = self.transfers.get(session)
        if transfer is None:
            return 0, 0
        group, received_elements = transfer.group, 0
        our_slice = group.slices[group.place]
        for place, their_slice in enumerate(group.slices):
            if place != group.place:
                for due_slice, missing in ((our_slice, group.missing_values), (their_slice, group.missing_means)):
                    if place not in missing:  # All of it has come.
                        received_elements += due_slice.stop - due_slice.start
                    elif (receiver := missing[place]) is not None:  # None before the group streams.
                        received_elements += receiver.elements_arrived
        return sum(bulk.sent_elements for _, bulk in transfer.outgoing.values()), received_elements

    def release(self, session: int) -> None:
        self.early.pop(session, None)
        transfer = self.transfers.pop(session, None)
        if transfer is not None:
            for link, bulk in transfer.outgoing.values():
                link.stop_bulk(session, bulk)

    def on_unlinked(self, link: Link) -> None:
        """Handle the end of a link: drop its early chunks. The groups that stream over it will leave its member out."""
        for early_chunks in self.early.values():
            early_chunks.drop_link(link)

    def stalled_links(self, now: float, stall_s: float) -> list[Link]:
        """Return the links over which nothing came for ``stall_s`` seconds although data is due."""
        return [
            link for transfer in self.transfers.values() for place, (link, data_at) in transfer.last_data.items()
            if now - max(data_at, link.received_at) > stall_s and self.is_due(transfer.group, place)
        ]  # fmt: skip

    @staticmethod
    def is_due(group: GroupAverage, place: int) -> bool:
        """Return True if a member has values to send, or the rest of a mean, which begins once all values have come."""
        mean = group.missing_means.get(place)
        return place in group.missing_values or (mean is not None and mean.position > 0)

    def used_links(self) -> set[Link]:
        return {link for transfer in self.transfers.values() for link, _ in transfer.outgoing.values()}
