"""More connections of one link, where one does not fill the path: they carry its vectors, and it its messages alone.

TCP's window belongs to a connection: where packets are lost cubic's stays small, and where a path is long the other
side's receive buffer is too small for it, however fast the path is. Chunks are dealt as connections have room, so that
none waits for a slower one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from gossip.errors import ProtocolError
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk, Widen
from node.links.bulk import LEAST_ELEMENTS, Bulk, ChunkMotion
from node.links.frame_reader import FrameReader
from node.transport.byte_stream import ByteStream

if TYPE_CHECKING:
    from node.links.link import Link

__all__ = ["LEAST_ELEMENTS", "Lane", "Lanes", "chunk_elements"]

CHUNKS = 8  # of a vector for each connection: more cost more, fewer leave some waiting for the last
MOST_ELEMENTS = 131_072  # of a chunk: eight that are read at once hold what one of the largest over a link does
NOT_SENT_BYTES = 8_192  # that the kernel may queue: what is queued on a slow connection no faster one can take
LAST_WORDS_S = 1.0

Place = Callable[[Chunk, int], Awaitable[memoryview | None]]


def chunk_elements(most: int, elements: int, connections: int) -> int:
    """Of a chunk, when so many lanes share a vector; ``most`` where there are none."""
    if not connections:
        return most
    share = elements // (CHUNKS * connections) // LEAST_ELEMENTS * LEAST_ELEMENTS
    return min(most, MOST_ELEMENTS, max(share, LEAST_ELEMENTS))


class Lanes:
    """Of one link. All that is theirs is of trio's thread."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.all: list[Lane] = []
        self.bulk: dict[int, Bulk] = {}  # by session, as for the link itself
        self.behind: dict[int, int] = {}
        self.held: Counter[Bulk] = Counter()  # how many lanes send a chunk of it at the moment
        self.last: dict[Bulk, int] = {}  # sessions of which all is taken, and something is still being sent
        self.more = trio.lowlevel.ParkingLot()  # lanes that have nothing to send
        self.bytes_sent = self.bytes_received = 0  # by all that ever were

    def __len__(self) -> int:
        """How many share a vector."""
        return sum(lane.open for lane in self.all)

    def start(self, session: int, bulk: Bulk) -> None:
        self.bulk[session], self.behind[session] = bulk, self.link.queued
        self.rouse()

    def rouse(self) -> None:
        """There is something to send, or may be, since messages have gone."""
        if self.bulk:
            self.more.unpark_all()

    def stop(self, session: int, bulk: Bulk) -> None:
        """Take no more of it. Chunks that are being sent are sent to their ends, and the bulk let go only then."""
        self.bulk.pop(session, None)
        self.behind.pop(session, None)
        if bulk not in self.held:
            bulk.let_go()

    def take(self) -> tuple[int, Bulk] | None:
        """What a lane sends a chunk of next, others after it: :meth:`put_down` when it is out."""
        for session, behind in self.behind.items():
            if behind <= self.link.taken:
                self.behind[session] = self.behind.pop(session)
                bulk = self.bulk[session]
                self.held[bulk] += 1
                return session, bulk
        return None

    def ended(self, session: int, bulk: Bulk) -> None:
        """All of it is taken."""
        if self.bulk.get(session) is bulk:
            self.last[bulk] = session
            self.stop(session, bulk)

    def put_down(self, session: int, bulk: Bulk) -> None:
        self.held[bulk] -= 1
        if self.held[bulk]:
            return
        del self.held[bulk]
        if self.bulk.get(session) is not bulk:
            bulk.let_go()
        if self.last.pop(bulk, None) is not None:
            self.link.on_finished(session)


class Lane:
    """One of them, in the care of its link, with which it ends."""

    def __init__(self, link: Link, stream: ByteStream, reader: FrameReader) -> None:
        self.link, self.stream, self.reader = link, stream, reader
        self.movement = ChunkMotion(stream, reader)
        self.open = False  # the other side has it too
        self.counted = 0  # bytes
        self.socket = self.movement.socket
        if self.socket is not None:
            self.socket.queue_at_most(NOT_SENT_BYTES)

    async def run(self, dialled: bool, place: Place, on_body: Callable[[Chunk], None]) -> None:
        """Until the link ends, or either side closes this one. ``place`` gives the buffer for a chunk's body once its
        session is agreed, or None where that is over; ``on_body`` is called when it is filled."""
        link, lanes, ended = self.link, self.link.lanes, False
        lanes.all.append(self)
        try:
            async with trio.open_nursery() as nursery:
                if not dialled:  # who dialled sends nothing before it knows that this was let in
                    await self.stream.send_all(encode(Widen(len(lanes.all))))
                    self.admitted(nursery)
                await self.read(dialled, nursery, place, on_body)
                nursery.cancel_scope.cancel()
            ended = True
        finally:
            lanes.all.remove(self)
            if ended or link.ending:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST_WORDS_S):
                    await self.stream.aclose()
            self.stream.close_now()

    def admitted(self, nursery: trio.Nursery) -> None:
        self.open = True
        nursery.start_soon(self.write)

    async def read(self, dialled: bool, nursery: trio.Nursery, place: Place, on_body: Callable[[Chunk], None]) -> None:
        reader, link = self.reader, self.link
        while (got := await reader.message()) is not None:
            message, body_bytes = got
            if isinstance(message, Widen) and dialled and not self.open:
                self.admitted(nursery)
                continue
            if not isinstance(message, Chunk) or not body_bytes or message.elements > MOST_ELEMENTS:
                raise ProtocolError("Something else than a chunk, or too large a one, came over a lane.")
            body = await place(message, body_bytes)
            link.used_at = link.clock.current_time()
            if body is None:
                await reader.discard(body_bytes)
                continue
            self.movement.filling = True
            await reader.exactly(body)
            self.movement.filling = False
            link.lanes.bytes_received += reader.bytes_received - self.counted
            self.counted = reader.bytes_received
            on_body(message)

    async def write(self) -> None:
        """Chunks of one stream after another, as long as there are any, each when there is room for it."""
        link, lanes = self.link, self.link.lanes
        while True:
            if self.socket is not None:
                await self.socket.room()
            taken = lanes.take()
            if taken is None:
                await lanes.more.park()
                continue
            session, bulk = taken
            try:
                frame = bulk.next_frame(apart=True)
                if frame is None:
                    lanes.ended(session, bulk)
                    continue
                self.movement.begin(link.clock.current_time())
                await self.stream.send_all(b"".join(frame))  # else a header has a packet of its own
                lanes.bytes_sent += len(frame[0]) + frame[1].nbytes
                link.used_at = link.clock.current_time()
                self.movement.end(link.used_at)
                link.on_sent(session)
            finally:
                lanes.put_down(session, bulk)
