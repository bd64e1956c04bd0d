"""The transfer of one session over links: the vectors that it sends and receives, their progress and their stalls."""

import math
import threading
from collections import deque
from collections.abc import Callable

import trio

from gossip.averaging.streams import Receiver, Sender
from gossip.averaging.transfer import VectorTransfer
from gossip.errors import ProtocolError
from gossip.exchange.session import MAX_NEIGHBOURS, Session
from gossip.ids import PeerId
from gossip.wire.messages import Chunk
from node.links.link import Link
from node.network.transfers.slices import EarlyChunks, SliceBulk
from node.transport.sealed import SealedStream

# Ended sessions that are remembered, so that their late chunks are dropped and are no fault. At most half as many run
# at once: with ``partners = 0`` one of ours and one of theirs for each neighbour.
ENDED_SESSIONS = 4 * MAX_NEIGHBOURS


class LinkTransfer(VectorTransfer):
    """The transfer of one exchange, of one piece to fetch or of one piece to serve.

    A piece is a range of the weights that a newcomer fetches. An I/O thread may receive the vector. The lock keeps the
    vector alive while the thread handles a chunk. ``clock`` is trio's, which threads may read.

    In a group a member's *place* is its index among the members, and each member has a link of its own.
    """

    def __init__(self, session: int, clock: Callable[[], float]) -> None:
        super().__init__(session)
        self.clock = clock
        # The exchange, for its statistics. All but the offer are set when its streams begin.
        self.offer: tuple[PeerId, float] | None = None  # The partner and the time of an Offer that is not answered.
        self.exchange: Session | None = None  # The peer's session.
        self.partners: tuple[str, ...] = ()  # 32 hexadecimal digits each.
        self.codec = ""
        self.seconds = 0.0  # From the request for a snapshot to the mix; 0 before that.
        # The streams with a partner.
        self.link: Link | None = None  # The link that the session is bound to, from its offer on.
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        self.moved_at = 0.0  # The last progress in either direction.
        self.heard_at = 0.0  # The last time that a chunk of the partner's began or arrived.
        self.is_over = False  # The vectors must not be used any more.
        self.uses_lanes: bool | None = None  # True if the partner's vector comes over lanes; None before any chunk.
        self.lock = threading.Lock()
        # The streams with a group's members.
        self.is_gathering = False  # They have begun.
        self.early: EarlyChunks | None = None  # Chunks that came, at least in part, before the group began here.
        self.outgoing: dict[int, tuple[Link, SliceBulk]] = {}  # By place.
        self.last_data: dict[int, tuple[Link, float]] = {}  # By place: the link of a member, and when it last sent.

    # -- streams with a partner ------------------------------------------------------------------------------------
    def start(self, link: Link, sender: Sender | None, receiver: Receiver | None, large: bool = False) -> None:
        """Start the streams. ``large`` says that an I/O thread is worth its cost for sending."""
        self.link, self.sender, self.receiver = link, sender, receiver
        self.moved_at = self.heard_at = self.clock()
        is_sealed = isinstance(link.stream, SealedStream)
        if receiver is not None:
            receiver.sealed = is_sealed
        if sender is not None:
            sender.sealed = is_sealed
            link.start_bulk(self.session, sender, large, shared=True)

    @property
    def has_started(self) -> bool:
        return self.sender is not None or self.receiver is not None

    def buffer_for(self, chunk: Chunk, body_bytes: int, over_lane: bool = False) -> memoryview | None:
        """Return the buffer for the body of a chunk, which may come over a lane; None if the session has ended."""
        assert self.receiver is not None
        with self.lock:
            self.heard_at = self.clock()
            if self.uses_lanes is not None and self.uses_lanes is not over_lane:
                raise ProtocolError("Chunks of one vector came over its link and over others.")
            self.uses_lanes = over_lane
            return None if self.is_over else self.receiver.begin_chunk(chunk, body_bytes, over_lane)

    def on_body(self, chunk: Chunk) -> bool:
        """Handle a chunk whose body is in its buffer. Return True if more chunks are due.

        False means that the vector is complete, that the receiver has a fault, or that the session has ended.
        """
        assert self.receiver is not None
        with self.lock:
            self.moved_at = self.heard_at = self.clock()
            return not self.is_over and self.receiver.finish_chunk(chunk) and not self.receiver.is_complete

    def has_stalled(self, now: float, stall_s: float) -> bool:
        """Return True if for ``stall_s`` seconds nothing moved, or the partner sent nothing.

        The second condition holds while data of the partner is due, so that a partner cannot hold its session by
        reading ours and sending nothing. All chunks on a link count for each of its sessions, because streams on one
        link take turns.
        """
        link, sender, receiver = self.link, self.sender, self.receiver
        if link is None or not self.has_started:
            return False
        is_sending = sender is not None and not sender.done
        is_receiving = receiver is not None and not receiver.is_complete
        # -inf: no data is due in this direction, so that the link's other streams say nothing of it.
        sent_at, received_at = (
            link.sent_at if is_sending else -math.inf,
            link.received_at if is_receiving else -math.inf,
        )
        has_stopped = now - max(self.moved_at, sent_at, received_at) > stall_s and (is_sending or is_receiving)
        return has_stopped or (is_receiving and now - max(self.heard_at, link.received_at) > stall_s)

    def end(self) -> None:
        """Stop all streams, after a thread has finished the chunk that it handles.

        This usually takes a millisecond, and some ten for the largest chunk that a peer may send, in int8. From here on
        only a sender uses the vectors; it has a lease.
        """
        with self.lock:
            self.is_over = True
        if self.link is not None and self.sender is not None:
            self.link.stop_bulk(self.session, self.sender)
        for link, bulk in self.outgoing.values():
            link.stop_bulk(self.session, bulk)
        self.early = None

    # -- all streams -----------------------------------------------------------------------------------------------
    @property
    def links(self) -> list[Link]:
        """Return the links that it uses."""
        own = [] if self.link is None else [self.link]
        return [*own, *(link for link, _ in self.outgoing.values())]

    def on_link_ended(self, link: Link) -> bool:
        """Handle the end of a link. Return True if the session was bound to it, so that its streams have failed."""
        if self.early is not None:
            self.early.drop_link(link)
        if self.link is not link:
            return False
        if self.sender is not None:
            link.stop_bulk(self.session, self.sender)
        self.link = None
        return True

    def moved_bytes(self) -> tuple[int, int]:
        """Return the bytes of an exchange's encoded weights that were sent and received."""
        average, group = self.average, self.group
        if average is None:
            return 0, 0
        if group is not None:
            sent, received = sum(bulk.sent_elements for _, bulk in self.outgoing.values()), group.received_elements
        else:
            sent = 0 if self.sender is None else self.sender.position
            received = 0 if self.receiver is None else self.receiver.elements_arrived
        encoded_bytes = average.codec.encoded_bytes
        return encoded_bytes(sent) if sent else 0, encoded_bytes(received) if received else 0

    def distance(self, elements: int) -> float | None:
        """Return the distance from the partner's weights, in a group from the mean, scaled to all ``elements``.

        It is None if it was not measured.
        """
        distance_sq = math.nan
        if self.pair is not None and self.pair.is_complete:
            distance_sq = self.pair.difference_sq * (
                1.0 if self.pair.positions is None else elements / self.pair.elements
            )
        elif self.group is not None:
            distance_sq = self.group.difference_sq
        return math.sqrt(distance_sq) if math.isfinite(distance_sq) else None


class LinkTransfers:
    """The transfers of one node by session, which its averager opens and ends, and the sessions that have ended."""

    def __init__(self, table: dict[int, LinkTransfer]) -> None:
        self.table = table
        self.ended: deque[int] = deque(maxlen=ENDED_SESSIONS)
        # The lanes that wait until the session of their chunk is agreed.
        self.changed = trio.lowlevel.ParkingLot()

    def expect_late_chunks(self, session: int) -> None:
        """Drop the chunks that still come for this session from now on, without a fault."""
        if session not in self.ended:
            self.ended.append(session)
        self.changed.unpark_all()

    def is_known(self, session: int) -> bool:
        """Return True if streams of the session have started here, or if it has ended."""
        transfer = self.table.get(session)
        return (transfer is not None and transfer.has_started) or session in self.ended

    def link_of(self, session: int) -> Link | None:
        """Return the link that the session is bound to."""
        transfer = self.table.get(session)
        return None if transfer is None else transfer.link

    def buffer_for(self, link: Link, chunk: Chunk, body_bytes: int, over_lane: bool = False) -> memoryview | None:
        """Return the buffer for the body of a partner's chunk, which may come over a lane.

        It is None if the session has ended.

        Raises:
            ProtocolError: The chunk belongs to no session on this link.
        """
        transfer = self.table.get(chunk.session)
        if transfer is None or transfer.receiver is None:
            if chunk.session in self.ended:
                return None
            raise ProtocolError("A chunk came for a session that was never agreed.")
        if transfer.link is not link:
            raise ProtocolError("A chunk came over another link than its session's.")
        return transfer.buffer_for(chunk, body_bytes, over_lane)

    def stalled_links(self, now: float, stall_s: float) -> list[Link]:
        """Return the links of transfers with a partner that have stalled."""
        return [
            transfer.link for transfer in self.table.values()
            if transfer.link is not None and transfer.has_stalled(now, stall_s)
        ]  # fmt: skip

    def used_links(self) -> set[Link]:
        return {link for transfer in self.table.values() for link in transfer.links}
