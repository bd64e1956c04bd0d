"""Striping: further connections (lanes) of one link, which carry its vectors while the link carries its messages.

TCP's window belongs to a connection. Where packets are lost, cubic's window stays small; on a long path the receive
buffer is the limit, however fast the path is. Chunks go to whichever connection has room, so that none waits for a
slower one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from gossip.errors import ProtocolError
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk, Widen
from node.links.bulk import LEAST_ELEMENTS, Bulk, ChunkMotion, QueuedBulk
from node.links.frame_reader import FrameReader
from node.transport.byte_stream import ByteStream

# About so many chunks of a vector for each lane. More would cost more, and fewer would leave lanes idle at the end.
CHUNKS_PER_LANE = 8
LANE_ELEMENTS = 131_072  # The largest chunk of a lane, so that eight at once take as much memory as one over a link.
# Limit on the kernel's unsent queue of a lane, because a faster lane cannot take the chunks that wait there.
NOT_SENT_BYTES = 8_192
LAST_WORDS_S = 1.0  # Time for the close of a lane to leave.

BufferFor = Callable[[Chunk, int], Awaitable[memoryview | None]]
"""Returns the buffer for a chunk's body once its session is agreed, or None if that session has ended."""


def chunk_elements(max_elements: int, elements: int, lanes: int) -> int:
    """Return the chunk size for a vector of ``elements`` over ``lanes`` lanes; ``max_elements`` without lanes."""
    if not lanes:
        return max_elements
    share = elements // (CHUNKS_PER_LANE * lanes) // LEAST_ELEMENTS * LEAST_ELEMENTS
    return min(max_elements, LANE_ELEMENTS, max(share, LEAST_ELEMENTS))


class StripedLink(Protocol):
    """The link that lanes belong to, a :class:`node.links.link.Link`."""

    lanes: Stripes
    clock: trio.abc.Clock
    queued_frames: int  # Control frames that were queued so far.
    taken_frames: int  # Those of them that were taken to be sent.
    used_at: float
    on_sent: Callable[[int], None]
    on_finished: Callable[[int], None]

    @property
    def is_ending(self) -> bool: ...


class Stripes:
    """The lanes of one link, and the vectors that they carry. Only trio's thread touches them."""

    def __init__(self, link: StripedLink) -> None:
        self.link = link
        self.all: list[Lane] = []
        self.bulk: dict[int, QueuedBulk] = {}  # The vectors by session, as for the link itself.
        self.chunks_in_flight: Counter[Bulk] = Counter()  # The number of lanes that send a chunk of each vector now.
        self.finishing: dict[Bulk, int] = {}  # Vectors whose last chunk is taken but not sent, with their sessions.
        self.lanes_waiting = trio.lowlevel.ParkingLot()  # Lanes that have nothing to send.
        self.bytes_sent = self.bytes_received = 0  # Totals over open and closed lanes.

    def __len__(self) -> int:
        """Return the number of lanes that can carry a vector."""
        return sum(lane.is_open for lane in self.all)

    def start(self, session: int, bulk: Bulk) -> None:
        self.bulk[session] = QueuedBulk(bulk, self.link.queued_frames)
        self.wake_lanes()

    def carries(self, session: int, bulk: Bulk) -> bool:
        """Return True if lanes are to send more of the vector."""
        queued = self.bulk.get(session)
        return queued is not None and queued.bulk is bulk

    def wake_lanes(self) -> None:
        """Wake idle lanes: there is a new vector, or the messages that it must follow have been sent."""
        if self.bulk:
            self.lanes_waiting.unpark_all()

    def stop(self, session: int, bulk: Bulk) -> None:
        """Take no more chunks of a vector, and release it once its chunks in flight are sent."""
        self.bulk.pop(session, None)
        if bulk not in self.chunks_in_flight:
            bulk.let_go()

    def take_turn(self) -> tuple[int, Bulk] | None:
        """Return the session and the vector whose chunk a lane sends next, in turns. :meth:`end_turn` must follow."""
        for session, queued in self.bulk.items():
            if queued.sendable_from <= self.link.taken_frames:
                self.bulk[session] = self.bulk.pop(session)
                self.chunks_in_flight[queued.bulk] += 1
                return session, queued.bulk
        return None

    def on_all_taken(self, session: int, bulk: Bulk) -> None:
        """Handle the end of a vector, all of whose chunks are taken."""
        if self.carries(session, bulk):
            self.finishing[bulk] = session
            self.stop(session, bulk)

    def end_turn(self, session: int, bulk: Bulk) -> None:
        """End a lane's turn. After the last chunk in flight, release the vector if it was stopped or has ended."""
        self.chunks_in_flight[bulk] -= 1
        if self.chunks_in_flight[bulk]:
            return
        del self.chunks_in_flight[bulk]
        if not self.carries(session, bulk):
            bulk.let_go()
        if self.finishing.pop(bulk, None) is not None:
            self.link.on_finished(session)


class Lane:
    """One further connection of a link, which ends with the link."""

    def __init__(self, link: StripedLink, stream: ByteStream, reader: FrameReader) -> None:
        self.link, self.stream, self.reader = link, stream, reader
        self.motion = ChunkMotion(stream, reader)
        self.is_open = False  # True once both sides have admitted the lane.
        self.counted_bytes = 0  # Bytes that this lane has received and that the link's total already contains.
        self.socket = self.motion.socket
        if self.socket is not None:
            self.socket.limit_unsent(NOT_SENT_BYTES)

    async def run(self, dialled: bool, buffer_for: BufferFor, on_body: Callable[[Chunk], None]) -> None:
        """Run until the link ends or either side closes this lane.

        Args:
            dialled: True if this side has dialled the lane.
            buffer_for: See :data:`BufferFor`.
            on_body: Called when that buffer is full.
        """
        link, lanes, has_ended = self.link, self.link.lanes, False
        lanes.all.append(self)
        try:
            async with trio.open_nursery() as nursery:
                if not dialled:  # The dialling side sends nothing before it knows that its lane was admitted.
                    await self.stream.send_all(encode(Widen(len(lanes.all))))
                    self.on_admitted(nursery)
                await self.read(dialled, nursery, buffer_for, on_body)
                nursery.cancel_scope.cancel()
            has_ended = True
        finally:
            lanes.all.remove(self)
            if has_ended or link.is_ending:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST_WORDS_S):
                    await self.stream.aclose()
            self.stream.close_now()

    def on_admitted(self, nursery: trio.Nursery) -> None:
        self.is_open = True
        nursery.start_soon(self.write)

    async def read(
        self, dialled: bool, nursery: trio.Nursery, buffer_for: BufferFor, on_body: Callable[[Chunk], None]
    ) -> None:
        """Receive chunks until the other side ends, after its Widen if this side has dialled."""
        reader, link = self.reader, self.link
        while (frame := await reader.read_message()) is not None:
            message, body_bytes = frame
            if isinstance(message, Widen) and dialled and not self.is_open:
                self.on_admitted(nursery)
                continue
            if not isinstance(message, Chunk) or not body_bytes or message.elements > LANE_ELEMENTS:
                raise ProtocolError("A lane received a chunk above its size limit, or a message of another kind.")
            body = await buffer_for(message, body_bytes)
            link.used_at = link.clock.current_time()
            if body is None:
                await reader.discard(body_bytes)
                continue
            self.motion.is_receiving = True
            await reader.read_exactly(body)
            self.motion.is_receiving = False
            link.lanes.bytes_received += reader.bytes_received - self.counted_bytes
            self.counted_bytes = reader.bytes_received
            on_body(message)

    async def write(self) -> None:
        """Send chunks of each vector in turn, each as soon as the socket has room."""
        link, lanes = self.link, self.link.lanes
        while True:
            if self.socket is not None:
                await self.socket.wait_for_room()
            turn = lanes.take_turn()  # None: nothing is to be sent now.
            if turn is None:
                await lanes.lanes_waiting.park()
                continue
            session, bulk = turn
            try:
                frame = bulk.next_frame(apart=True)
                if frame is None:
                    lanes.on_all_taken(session, bulk)
                    continue
                self.motion.on_chunk_begun(link.clock.current_time())
                await self.stream.send_all(b"".join(frame))  # Otherwise the header would take a packet of its own.
                lanes.bytes_sent += len(frame[0]) + frame[1].nbytes
                link.used_at = link.clock.current_time()
                self.motion.on_chunk_sent(link.used_at)
                link.on_sent(session)
            finally:
                lanes.end_turn(session, bulk)
