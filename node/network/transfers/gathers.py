"""Group means on real links: an all-reduce in two phases, reduce-scatter and all-gather.

Each member owns a slice of the vector. It receives the others' values of its slice, and sends their mean to all. So the
chunks that another member sends us are values of our slice or the mean of its own; their start tells which.
"""

import trio

from gossip.averaging.all_reduce import GroupAverage
from gossip.averaging.averager import Averager
from gossip.averaging.streams import Receiver, Sender
from gossip.averaging.vectors import Floats
from gossip.config import Config
from gossip.errors import ProtocolError
from gossip.exchange.groups.group import Group
from gossip.exchange.transitions import State
from gossip.peer import Peer
from gossip.wire.messages import MAX_GROUP, MIN_CHUNK_ELEMENTS, Chunk
from node.links.link import Link
from node.links.pool import Links
from node.model.pool import VectorPool
from node.network.transfers.slices import EarlyChunk, EarlyChunks, SliceBulk
from node.network.transfers.transfer import LinkTransfer


class GroupTransfers:
    """The streams between this node and the other members of its groups. All of it runs in trio's thread."""

    def __init__(
        self, peer: Peer, config: Config, averager: Averager[LinkTransfer], pool: VectorPool, links: Links
    ) -> None:  # fmt: skip
        self.peer, self.config, self.averager, self.pool, self.links = peer, config, averager, pool, links

    # -- a group -------------------------------------------------------------------------------------------------
    def stream_to_members(self, transfer: LinkTransfer, group: GroupAverage) -> None:
        """Stream to the members that have a link. A further call adds members whose link is newer."""
        assert transfer.snapshot is not None
        if not transfer.is_gathering:
            transfer.is_gathering = True
            group.create_receivers()
        for place, member in enumerate(group.members):
            link = None if place == group.place or place in transfer.outgoing else self.links.newest(member)
            if link is not None:
                transfer.outgoing[place] = link, SliceBulk(self.pool.lease(transfer.snapshot))
                transfer.last_data.setdefault(place, (link, trio.current_time()))
                their_slice = group.slices[place]
                self.queue_values(transfer, group, place, group.ours[their_slice], their_slice.start)
                if group.slice_mean is not None:
                    self.queue_mean(transfer, group, place, group.slice_mean)
        for early in [] if transfer.early is None else transfer.early.filled_chunks():
            self.replay(transfer, early)
        self.go_on(transfer, group)

    def queue_values(
        self, transfer: LinkTransfer, group: GroupAverage, place: int, values: Floats, start: int
    ) -> None:  # fmt: skip
        """Queue these values for a member; ``start`` is the index of the first one in the whole vector.

        The members share our uplink. Chunks are shorter in larger groups, so that no member waits long enough to find
        us stalled.
        """
        if not values.size:
            return
        link, bulk = transfer.outgoing[place]
        elements = max(self.config.chunk_elements // (len(group.members) - 1), MIN_CHUNK_ELEMENTS)
        bulk.senders.append(Sender(group.session, values, group.codec, elements, start, limit=link.motion))
        link.start_bulk(group.session, bulk)

    def queue_mean(self, transfer: LinkTransfer, group: GroupAverage, place: int, mean: Floats) -> None:
        """Queue the mean of our slice for a member."""
        self.queue_values(transfer, group, place, mean, group.slices[group.place].start)

    # -- chunks --------------------------------------------------------------------------------------------------
    def is_group(self, transfer: LinkTransfer) -> bool:
        """Return True for the session of a group that streams, or of one whose invitation we have accepted."""
        if transfer.is_gathering or not self.config.grouped:
            return transfer.is_gathering
        exchange = self.peer.exchanges.table.get(transfer.session)
        return exchange is not None and exchange.state is State.OFFERED and not exchange.is_initiator

    def buffer_for(self, transfer: LinkTransfer, link: Link, chunk: Chunk, body_bytes: int) -> memoryview:
        """Return the buffer for a chunk's body. Early chunks take at most a vector's size in all.

        Raises:
            ProtocolError: The group has no use for the chunk.
        """
        if transfer.group is not None and transfer.is_gathering:
            return self.receiver(transfer.group, link, chunk)[1].begin_chunk(chunk, body_bytes)
        group = self.peer.exchanges.table.get(chunk.session)
        assert isinstance(group, Group)
        if link.peer not in (group.inviter, *group.invite_list):
            raise ProtocolError("A chunk came of a group to which its sender was not invited.")
        early_chunks = transfer.early = transfer.early or EarlyChunks()
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
    def receiver(group: GroupAverage, link: Link, chunk: Chunk) -> tuple[int, Receiver]:
        """Return the sender's place and the receiver of a chunk; raise ProtocolError if none is expected."""
        place = group.members.index(link.peer) if link.peer in group.members else None
        receiver = None if place is None else group.chunk_receiver(place, chunk.start)
        if place is None or receiver is None:
            raise ProtocolError("A chunk came that belongs to no part of its group's vector.")
        return place, receiver

    def on_body(self, transfer: LinkTransfer, link: Link, chunk: Chunk) -> None:
        """Handle a chunk whose body is in its buffer."""
        early = None if transfer.early is None else transfer.early.filling_chunk(link)
        if early is not None and early.chunk is chunk:
            early.is_filled = True
            if transfer.is_gathering:
                self.replay(transfer, early)
            return
        group = transfer.group
        if group is None or not transfer.is_gathering:
            return
        place, receiver = self.receiver(group, link, chunk)
        transfer.last_data[place] = link, trio.current_time()
        if not receiver.finish_chunk(chunk):
            link.close_now()  # This fails all sessions on the link, the group included.
        elif receiver.is_complete:
            group.on_received(place, receiver)
            self.go_on(transfer, group)

    def replay(self, transfer: LinkTransfer, early: EarlyChunk) -> None:
        """Handle an early chunk as if it came now."""
        if transfer.is_over or transfer.early is None:
            return  # An earlier chunk has ended the group.
        transfer.early.remove(early)
        if not transfer.early.chunks:
            transfer.early = None
        try:
            self.buffer_for(transfer, early.link, early.chunk, len(early.body))[:] = early.body
            self.on_body(transfer, early.link, early.chunk)
        except ProtocolError:
            early.link.close_now()

    # -- means ---------------------------------------------------------------------------------------------------
    def go_on(self, transfer: LinkTransfer, group: GroupAverage) -> None:
        """Compute our slice's mean if all values of it have come, and report the group if all means have."""
        self.averager.average_slice(group, lambda: self.on_averaged(transfer, group))
        self.report_gathered(transfer, group)

    def on_averaged(self, transfer: LinkTransfer, group: GroupAverage) -> None:
        """Handle the computed mean of our slice: send it to all members."""
        assert group.slice_mean is not None
        for place in sorted(transfer.outgoing):
            self.queue_mean(transfer, group, place, group.slice_mean)
        self.report_gathered(transfer, group)

    def report_gathered(self, transfer: LinkTransfer, group: GroupAverage) -> None:
        """Report the group to the averager, which finishes it once all means have come."""
        if transfer.outgoing:  # Without a link nothing can be sent, and the group will fail.
            self.averager.report_gathered(group)

    # -- stalls --------------------------------------------------------------------------------------------------
    def stalled_links(self, now: float, stall_s: float) -> list[Link]:
        """Return the links over which nothing came for ``stall_s`` seconds although data is due."""
        return [
            link for transfer in self.averager.transfers.values() if (group := transfer.group) is not None
            for place, (link, data_at) in transfer.last_data.items()
            if now - max(data_at, link.received_at) > stall_s and self.is_due(group, place)
        ]  # fmt: skip

    @staticmethod
    def is_due(group: GroupAverage, place: int) -> bool:
        """Return True if a member has values to send, or the rest of a mean, which begins once all values have come."""
        mean = group.missing_means.get(place)
        return place in group.missing_values or (mean is not None and mean.position > 0)
