"""Striping: additional connections (lanes) of one link, which carry its vectors while the link carries its messages.

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
from node.links.bulk import LEAST_ELEMENTS, Bulk, ChunkMotion
from node.links.frame_reader import FrameReader
from node.transport.byte_stream import ByteStream

__all__ = ["LEAST_ELEMENTS", "Lane", "Stripes", "chunk_elements"]

CHUNKS = 8  # Chunks of a vector per connection: more cost more, fewer leave connections idle at the end.
# The largest chunk: eight that are read at once hold as much as one of the largest over a link.
MOST_ELEMENTS = 131_072
# Limit on the kernel's unsent queue: a faster connection cannot take chunks queued on a slow one.
NOT_SENT_BYTES = 8_192
LAST_WORDS_S = 1.0

Place = Callable[[Chunk, int], Awaitable[memoryview | None]]


def chunk_elements(most: int, elements: int, connections: int) -> int:
    """Return the chunk size for a vector that several lanes share; ``most`` where there are no lanes."""
    if not connections:
        return most
    share = elements // (CHUNKS * connections) // LEAST_ELEMENTS * LEAST_ELEMENTS
    return min(most, MOST_ELEMENTS, max(share, LEAST_ELEMENTS))


class Striped(Protocol):
    """The link of stripes, a :class:`node.links.link.Link`."""

    lanes: Stripes
    clock: trio.abc.Clock
    queued: int  # Frames and messages that were queued so far.
    taken: int  # Those of them that were taken to be sent.
    used_at: float
    on_sent: Callable[[int], None]
    on_finished: Callable[[int], None]

    @property
    def ending(self) -> bool: ...


class Stripes:
    """The lanes of one link. Only trio's thread touches them."""

    def __init__(self, link: Striped) -> None:
        self.link = link
        self.all: list[Lane] = []
        self.bulk: dict[int, Bulk] = {}  # By session, as for the link itself.
        self.behind: dict[int, int] = {}
        self.held: Counter[Bulk] = Counter()  # The number of lanes that are sending a chunk of each vector.
        self.last: dict[Bulk, int] = {}  # Vectors whose last chunk is taken but not yet sent, with their sessions.
        self.more = trio.lowlevel.ParkingLot()  # Stripes that have nothing to send.
        self.bytes_sent = self.bytes_received = 0  # Totals over open and closed lanes.

    def __len__(self) -> int:
        """Return the number of lanes that can carry a vector."""
        return sum(lane.open for lane in self.all)

    def start(self, session: int, bulk: Bulk) -> None:
        self.bulk[session], self.behind[session] = bulk, self.link.queued
        self.rouse()

    def rouse(self) -> None:
        """Wake idle lanes: there is a new vector, or the messages that it must follow have been sent."""
        if self.bulk:
            self.more.unpark_all()

    def stop(self, session: int, bulk: Bulk) -> None:
        """Take no more chunks of a vector. It is released once the chunks in flight are sent."""
        self.bulk.pop(session, None)
        self.behind.pop(session, None)
        if bulk not in self.held:
            bulk.let_go()

    def take(self) -> tuple[int, Bulk] | None:
        """Return the vector whose chunk a lane sends next, in rotation; :meth:`put_down` must follow."""
        for session, behind in self.behind.items():
            if behind <= self.link.taken:
                self.behind[session] = self.behind.pop(session)
                bulk = self.bulk[session]
                self.held[bulk] += 1
                return session, bulk
        return None

    def ended(self, session: int, bulk: Bulk) -> None:
        """Note that all chunks of a vector are taken."""
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
    """One lane, which belongs to its link and ends with it."""

    def __init__(self, link: Striped, stream: ByteStream, reader: FrameReader) -> None:
        self.link, self.stream, self.reader = link, stream, reader
        self.movement = ChunkMotion(stream, reader)
        self.open = False  # True once the other side has admitted it too.
        self.counted = 0  # Received bytes that are already in the total.
        self.socket = self.movement.socket
        if self.socket is not None:
            self.socket.queue_at_most(NOT_SENT_BYTES)

    async def run(self, dialled: bool, place: Place, on_body: Callable[[Chunk], None]) -> None:
        """Run until the link ends or either side closes this lane.

        ``place`` returns the buffer for a chunk's body once its session is agreed, or None if that session has ended.
        ``on_body`` is called when the buffer is full.
        """
        link, lanes, ended = self.link, self.link.lanes, False
        lanes.all.append(self)
        try:
            async with trio.open_nursery() as nursery:
                if not dialled:  # The dialling side sends nothing before it knows that its lane was admitted.
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
                raise ProtocolError("A lane received a chunk above its size limit, or a message of another kind.")
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
        """Send chunks of each vector in turn, each as soon as the socket has room."""
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
                await self.stream.send_all(b"".join(frame))  # Otherwise the header would take a packet of its own.
                lanes.bytes_sent += len(frame[0]) + frame[1].nbytes
                link.used_at = link.clock.current_time()
                self.movement.end(link.used_at)
                link.on_sent(session)
            finally:
                lanes.put_down(session, bulk)
