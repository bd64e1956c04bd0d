"""A link: one stream after its Hello, which sends control frames ahead of bulk data and bounds every queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from gossip.errors import ProtocolError
from gossip.ids import Address, PeerId
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk, Close, Message, Unknown
from node.links.bulk import Bulk, ChunkMotion, Inflow, Sending
from node.links.frame_reader import FrameReader, nothing
from node.links.stripes import Stripes
from node.transport.blocking_io import WHOLE_BYTES, BlockingIoPool, BlockingStream
from node.transport.byte_stream import ByteStream, PlainStream

__all__ = ["CONTROL_BURST", "FLUSHED", "Link", "admits_none"]

OUTBOX_FRAMES = 1_024  # A peer that reads none of this many frames has stopped, and the link is closed.
OUTBOX_BYTES = 8 << 20  # The same limit in bytes: the largest member table, 10,000 records of 519 B, is 5 MB.
CONTROL_BURST = 32  # Control frames between two chunks, so that neither starves the other.
BURST_BYTES = 256 << 10  # Their size limit, since they are copied into one buffer.
NOT_SENT_BYTES = 128 << 10  # Limit on the kernel's unsent queue: a probe waits behind it, 1 s at 1 Mbit/s.
FLUSHED = 4  # Chunks sent without waking the writer task: by default all of a vector too small for a worker thread.


def admits_none(stream: ByteStream, reader: FrameReader, dialled: bool) -> bool:
    """Refuse every lane: the default of a link that has not begun or has ended."""
    return False


class Outboxes(Protocol):
    """The links of a node as one of them sees them, a :class:`node.links.pool.Links`."""

    gathering: int
    to_flush: list[Link]

    def add_waiting(self, count: int) -> None:
        """Count bytes that wait in outboxes."""

    def drop_outbox(self, link: Link) -> None:
        """Subtract a closed link's outbox."""


class Link:
    """An authenticated connection to one peer."""

    def __init__(self, stream: ByteStream, reader: FrameReader, peer: PeerId) -> None:
        self.stream, self.reader, self.peer = stream, reader, peer
        self.movement = ChunkMotion(stream, reader)  # For this connection; each lane has its own.
        if self.movement.socket is not None:
            self.movement.socket.queue_at_most(NOT_SENT_BYTES)
        self.outbox: deque[bytes] = deque()
        self.outbox_bytes = 0  # Includes the batch that is being sent.
        self.queued = self.taken = 0  # Totals of control frames put into the outbox and taken out of it.
        self.bulk: dict[int, Bulk] = {}  # By session.
        self.behind: dict[int, int] = {}  # For each session, the value of `taken` from which its chunks may be sent.
        self.large: set[int] = set()  # Sessions whose vector a worker thread sends, if one is free.
        self.lanes = Stripes(self)  # Additional connections, which carry the vectors that are assigned to them.
        # The names of this link: `name` for lanes dialled by the peer, `named` for lanes dialled here.
        self.name = self.named = b""
        self.address: Address | None = None  # The address at which we dialled it.
        self.widened = False  # Stripes were requested or opened.
        # Admits a lane, which either side may have dialled.
        self.admit: Callable[[ByteStream, FrameReader, bool], bool] = admits_none
        self.sending: Sending | None = None  # The batch in progress; its rest goes next.
        self.resting = False  # The writer task is idle.
        self.flush_due = False  # Queued in `links.to_flush`, to be flushed after the effects in progress.
        self.on_sent: Callable[[int], None] = lambda session: None
        self.on_finished: Callable[[int], None] = lambda session: None
        self.links: Outboxes | None = None  # The pool, once the link belongs to it.
        self.hands: BlockingIoPool | None = None  # Worker threads for large vectors.
        self.flow: Inflow | None = None  # The vector that a worker thread receives now.
        self.wake = trio.Event()
        self.clock = trio.lowlevel.current_clock()
        self.used_at = self.clock.current_time()
        self.sent_bytes = 0  # Without the lanes' bytes.
        self.ignored = 0  # Messages of a newer version that were skipped.
        self.fault = ""  # A fault of our own for which this link is closed.
        self.unread = False  # Closed because the other side requests more than it reads.
        self.closing = False
        self.orderly = False  # Closed as idle, by either side.
        self.closed = False
        self.cancel_scope: trio.CancelScope | None = None

    @property
    def bytes_sent(self) -> int:
        return self.sent_bytes + self.lanes.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.reader.bytes_received + self.lanes.bytes_received

    @property
    def movements(self) -> list[ChunkMotion]:
        """Return the motion of all its connections."""
        return [self.movement, *(lane.movement for lane in self.lanes.all)]

    @property
    def received_at(self) -> float:
        """Return the time at which bytes of a chunk last arrived, over any of its connections."""
        return max(one.received_at for one in self.movements)

    @property
    def sent_at(self) -> float:
        """Return the time at which bytes of a chunk last left, over any of its connections."""
        return max(one.sent_at for one in self.movements)

    def look(self, now: float) -> bool:
        """Note and return whether bytes of chunks have moved since the last look."""
        return any([one.look(now) for one in self.movements])

    @property
    def ending(self) -> bool:
        """Return True if either side is closing the link, so that nothing may begin on it."""
        return self.closing or self.orderly or self.closed

    def send(self, message: Message) -> None:
        try:
            frame = encode(message)
        except (OverflowError, ValueError, TypeError) as error:  # Whatever the error is, it concerns this link alone.
            kind = type(message).__name__
            self.fault = f"A {kind} could not be written ({type(error).__name__}): its link is closed."
            self.close_now()
            return
        if len(self.outbox) >= OUTBOX_FRAMES or self.outbox_bytes + len(frame) > OUTBOX_BYTES:
            self.unread = self.unread or not self.closed
            self.close_now()
            return
        self.outbox.append(frame)
        self.outbox_bytes += len(frame)
        self.queued += 1
        if not self.flush_due:
            self.request_flush()
        if self.links is not None:
            self.links.add_waiting(len(frame))

    def start_bulk(self, session: int, bulk: Bulk, large: bool = False, shared: bool = False) -> None:
        """Queue a vector behind the frames already sent: a chunk ahead of its Accept would end the link.

        Args:
            session: The session of the vector.
            bulk: The vector.
            large: True if a worker thread is worth its cost; it may then call ``next_frame``.
            shared: True if stripes may carry the vector.
        """
        if shared and len(self.lanes):
            self.lanes.start(session, bulk)
            return
        self.bulk[session] = bulk
        if large:
            self.large.add(session)
        self.behind[session] = self.queued
        if not self.flush_due:
            self.request_flush()

    def stop_bulk(self, session: int, bulk: Bulk) -> None:
        """Send no more chunks of a vector. It is released once the chunk in flight is sent."""
        if self.lanes.bulk.get(session) is bulk:
            self.lanes.stop(session, bulk)
            return
        self.bulk.pop(session, None)
        self.behind.pop(session, None)
        self.large.discard(session)
        if bulk not in self.lanes.held and (self.sending is None or self.sending.bulk is not bulk):
            bulk.let_go()

    def request_flush(self) -> None:
        """Wake the writer, now or after the effects that are being performed."""
        if self.links is None or not self.links.gathering:
            self.wake.set()
        else:
            self.flush_due = True
            self.links.to_flush.append(self)

    def finish(self) -> None:
        """Close the link once the outbox is sent."""
        self.closing = True
        self.wake.set()

    def retire(self) -> None:
        """Close an idle link with a Close, since a link that ends without one makes the peer suspect."""
        self.orderly = True
        self.send(Close("idle", "this link is not needed at the moment.", ()))
        self.finish()

    def close_now(self) -> None:
        self.closed = True
        if self.links is not None:
            self.links.drop_outbox(self)
        self.stream.close_now()
        if self.cancel_scope is not None:
            self.cancel_scope.cancel()

    def held_up(self, now: float, stall_s: float, chunk_s: float) -> bool:
        """Return True if a worker thread waits for a chunk that nothing needs and that the peer does not send.

        No session watches that chunk any more, so it would hold the thread as long as the link lives. ``chunk_s`` is
        how long a chunk may take while bytes of it arrive.
        """
        flow = self.flow
        if flow is None or not flow.over:
            return False
        return now - max(flow.heard_at, self.received_at) > stall_s or now - flow.heard_at > stall_s + chunk_s

    async def cut_when_cancelled(self) -> None:
        """Close the stream on cancellation.

        Worker threads block in the kernel and notice nothing but the end of the connection. So this task runs next to
        the two loops, and ends their threads too.
        """
        try:
            await trio.sleep_forever()
        finally:
            self.stream.close_now()

    def flush(self) -> None:
        """Give the kernel what it takes at once, without waking a task: the usual case for short messages.

        The writer task sends the rest and handles errors.
        """
        self.flush_due, stream = False, self.stream
        if self.resting and self.sending is None and isinstance(stream, PlainStream):
            # Taking frames can end a stream, which may flush again. Frames queued by that stay in the outbox, behind
            # these.
            self.resting = False
            try:
                self.send_some(stream)
            finally:
                self.resting = True
        if self.sending is not None or self.outbox or self.bulk:
            self.wake.set()

    def send_some(self, stream: PlainStream) -> None:
        """Send up to FLUSHED batches, as far as the kernel takes them at once."""
        for _ in range(FLUSHED):
            batch = self.take() if self.outbox or self.bulk else None
            if batch is None:
                return
            batch.pieces = stream.send_now(batch.pieces)
            if batch.pieces:
                return
            self.sent(batch)

    async def write_loop(self, sent: Callable[[int], None], finished: Callable[[int], None]) -> None:
        """Send until closed: control frames first, then one chunk of each vector in turn."""
        self.on_sent, self.on_finished = sent, finished
        try:
            while True:
                if not (self.outbox or self.bulk or self.sending is not None):
                    if self.closing:
                        return
                    self.wake, self.resting = trio.Event(), True
                    await self.wake.wait()
                    self.resting = False
                    continue
                batch = self.sending or self.take()
                if batch is not None:
                    await self.send_batch(batch)
                session = self.turn() if self.large else None
                if session in self.large and self.hands is not None:
                    await self.send_large(session, self.hands)
        finally:
            self.resting = False
            if self.sending is not None:
                self.let_go(self.sending)

    def turn(self) -> int | None:
        """Return the session that sends the next chunk."""
        for session, behind in self.behind.items():
            if behind <= self.taken:
                return session
        return None

    def take(self) -> Sending | None:
        """Return the next batch, without chunks that a worker thread sends."""
        frames: list[bytes | memoryview] = []
        count = 0
        while self.outbox and len(frames) < CONTROL_BURST and count < BURST_BYTES:
            frame = self.outbox.popleft()
            frames.append(frame)
            count += len(frame)
        self.taken += len(frames)
        if self.lanes.all:
            self.lanes.rouse()
        batch = Sending(frames if len(frames) < 2 else [b"".join(frames)], count)
        session = self.turn() if self.bulk else None
        if session is not None and (session not in self.large or self.hands is None):
            self.take_chunk(batch, session)
        if not batch.pieces:
            return None
        self.sending = batch
        return batch

    def take_chunk(self, batch: Sending, session: int) -> None:
        """Add the next chunk of the session to the batch, if one is left."""
        bulk = self.to_the_back(session)
        frame = bulk.next_frame()
        if frame is None:
            self.ended(session, bulk)
            return
        self.movement.begin(self.clock.current_time())
        header, body = frame
        batch.session, batch.bulk, batch.chunk_bytes = session, bulk, len(header) + body.nbytes
        batch.pieces += frame

    def to_the_back(self, session: int) -> Bulk:
        """Move the session to the end of the rotation."""
        self.behind[session] = self.behind.pop(session)
        return self.bulk[session]

    def ended(self, session: int, bulk: Bulk) -> None:
        """Note that all of the vector is sent."""
        self.stop_bulk(session, bulk)
        self.on_finished(session)

    async def send_batch(self, batch: Sending) -> None:
        pieces = batch.pieces
        if isinstance(self.stream, PlainStream):
            pieces = batch.pieces = self.stream.send_now(pieces)  # One system call for all pieces.
            if not pieces:
                await trio.lowlevel.checkpoint()  # Let other tasks run, although nothing waited.
        for piece in pieces:
            await self.stream.send_all(piece)
        self.sent(batch)

    def sent(self, batch: Sending) -> None:
        """Account for a batch that is sent completely."""
        if batch.bulk is None:
            self.sending = None
        else:
            self.let_go(batch)
        self.sent_bytes += batch.control_bytes + batch.chunk_bytes
        self.used_at = self.clock.current_time()
        if batch.bulk is not None:
            self.movement.end(self.used_at)
        if batch.control_bytes:
            self.outbox_bytes -= batch.control_bytes
            if self.links is not None:
                self.links.add_waiting(-batch.control_bytes)
        if batch.bulk is not None:
            self.on_sent(batch.session)

    async def send_large(self, session: int, hands: BlockingIoPool) -> None:
        """Send the vector from a worker thread if one is free, else one chunk of it from here."""
        bulk, lent = self.to_the_back(session), hands.lend(self.stream)
        if lent is None:
            batch = self.sending = Sending([], 0)
            self.take_chunk(batch, session)
            await self.send_batch(batch)
        elif not await self.send_in_thread(lent, session, bulk) and self.bulk.get(session) is bulk:
            self.ended(session, bulk)

    async def send_in_thread(self, lent: BlockingStream, session: int, bulk: Bulk) -> bool:
        """Send chunks until something else is waiting; return False when none are left."""
        assert self.hands is not None

        async def chunks(blocking: BlockingStream) -> bool:
            while (frame := bulk.next_frame()) is not None:
                self.movement.begin(self.clock.current_time())
                await blocking.send_frame(*frame)
                self.sent_bytes += len(frame[0]) + frame[1].nbytes
                self.used_at = self.clock.current_time()
                self.movement.end(self.used_at)
                self.on_sent(session)
                if self.outbox or len(self.bulk) > 1 or self.bulk.get(session) is not bulk:
                    return True
            return False

        batch = self.sending = Sending([], 0, session, bulk)
        try:
            return await self.hands.run(lent, "gossip-send", chunks)
        finally:
            self.let_go(batch)

    def let_go(self, batch: Sending) -> None:
        """Clear the batch, and release its vector if that was stopped meanwhile."""
        self.sending = None
        if batch.bulk is not None and self.bulk.get(batch.session) is not batch.bulk:  # It was stopped in the middle.
            batch.bulk.let_go()

    async def read_loop(
        self,
        on_message: Callable[[Message], None],
        on_chunk: Callable[[Chunk, int], memoryview | None],
        on_body: Callable[[Chunk], None],
        flow_of: Callable[[Chunk], Inflow | None] = lambda chunk: None,
        on_flow: Callable[[Chunk], None] = lambda chunk: None,
    ) -> None:
        """Read until the other side ends.

        Args:
            on_message: Called with each message that is not a chunk.
            on_chunk: Returns the buffer for a body of this many bytes; None if the session has ended and the body is
                discarded.
            on_body: Called when that buffer is full.
            flow_of: Returns the vector of a chunk if a worker thread may receive it.
            on_flow: Called when the worker thread has returned, with the first chunk that it received.
        """
        got = None
        while True:
            got = got or await self.reader.message()
            if got is None:
                return
            (message, body_bytes), got = got, None
            self.used_at = self.clock.current_time()
            if not isinstance(message, Chunk):
                if isinstance(message, Unknown):
                    self.ignored += 1
                    await self.reader.discard(body_bytes)
                on_message(message)  # Unknown messages count too against the rate limit of a link.
                continue
            if not body_bytes:
                raise ProtocolError("A chunk came without a body.")
            place = on_chunk(message, body_bytes)
            if place is None:
                await self.reader.discard(body_bytes)
                continue
            flow = None if self.hands is None or body_bytes < WHOLE_BYTES else flow_of(message)
            lent = None if self.hands is None or flow is None else self.hands.lend(self.stream)
            self.movement.filling = True
            if flow is None or lent is None:
                await self.reader.exactly(place)
            else:
                got = await self.receive_in_thread(lent, flow, message, place)
            self.movement.filling = False
            if flow is None or lent is None:
                on_body(message)
            else:
                on_flow(message)

    async def receive_in_thread(
        self, lent: BlockingStream, flow: Inflow, chunk: Chunk, place: memoryview
    ) -> tuple[Message, int] | None:
        """Receive this chunk and those of the same vector that follow, in a worker thread.

        Returns:
            The first message that is not of this vector, as :meth:`FrameReader.message` returns it; None if none was
            read.
        """
        assert self.hands is not None
        reader = self.reader

        async def chunks(blocking: BlockingStream) -> tuple[Message, int] | None:
            into, last = place, chunk
            reader.stream = blocking
            while True:
                await reader.exactly(into)
                if not flow.arrived(last) or not (reader.ahead or blocking.waits(lambda: flow.over)):
                    return None
                got = await reader.message()
                if got is None:
                    return None
                message, body_bytes = got
                if not isinstance(message, Chunk) or message.session != chunk.session or not body_bytes:
                    return got
                found = flow.place(message, body_bytes)
                if found is None:
                    return got
                into, last = found, message

        self.flow, before_waiting = flow, reader.before_waiting
        before_waiting()
        reader.before_waiting = nothing
        try:
            return await self.hands.run(lent, "gossip-receive", chunks)
        finally:
            reader.stream, reader.before_waiting, self.flow = self.stream, before_waiting, None
