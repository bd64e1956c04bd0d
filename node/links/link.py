"""A link: one stream after its Hello, which sends control frames ahead of bulk data and bounds every queue.

A control frame is a message without a body. Bulk data are the chunks of a vector.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from gossip.discovery.sightings import Sighting
from gossip.ids import Address, PeerId
from gossip.wire.frames import encode
from gossip.wire.messages import Close, Message
from node.links.bulk import Bulk, ChunkMotion, Inflow, QueuedBulk, SendBatch
from node.links.frame_reader import FrameReader
from node.links.stripes import Stripes
from node.transport.blocking_io import BlockingIoPool, BlockingStream
from node.transport.byte_stream import ByteStream, PlainStream

OUTBOX_FRAMES = 1_024  # Frames that may wait. A peer that reads none of this many has stopped, and its link is closed.
OUTBOX_BYTES = 8 << 20  # Bytes that may wait. The largest member table, 10,000 records of 519 B, is 5 MB.
CONTROL_BURST = 32  # The most control frames between two chunks, so that neither starves the other.
BURST_BYTES = 256 << 10  # Bytes of such control frames, which are copied into one buffer.
NOT_SENT_BYTES = 128 << 10  # Limit on the kernel's unsent queue: a probe waits behind it, 1 s at 1 Mbit/s.
FLUSHED_CHUNKS = 4  # Batches sent without waking the writer task: by default all of a vector too small for a thread.


def refuse_lane(stream: ByteStream, reader: FrameReader, dialled: bool) -> bool:
    """Refuse a lane: the value of ``Link.admit_lane`` before the link runs, and after it has ended."""
    return False


class Outboxes(Protocol):
    """The pool that a link belongs to, a :class:`node.links.pool.Links`."""

    batch_depth: int
    to_flush: list[Link]

    def add_waiting(self, count: int) -> None:
        """Add to the bytes that wait in all outboxes."""

    def drop_outbox(self, link: Link) -> None:
        """Subtract the outbox of a closed link from them."""


class Link:
    """An authenticated connection to one peer, and its lanes, which are further connections for vectors.

    Control frames are sent in order. A vector, or *bulk*, is sent chunk by chunk behind the frames that were queued
    before it; several vectors take turns. Everything runs in trio's thread. For a large vector, a task of this link
    lends its work to an I/O thread, and waits for it.
    """

    def __init__(self, stream: ByteStream, reader: FrameReader, peer: PeerId) -> None:
        self.stream, self.reader, self.peer = stream, reader, peer
        self.motion = ChunkMotion(stream, reader)  # For this connection; each lane has its own.
        if self.motion.socket is not None:
            self.motion.socket.limit_unsent(NOT_SENT_BYTES)
        self.outbox: deque[bytes] = deque()
        self.outbox_bytes = 0  # Includes the batch that is being sent.
        self.queued_frames = self.taken_frames = 0  # Totals of control frames put into the outbox and taken out of it.
        # The vectors that this connection itself sends, by session, in the order of turns.
        self.bulk: dict[int, QueuedBulk] = {}
        self.lanes = Stripes(self)  # Further connections, which carry the vectors that are assigned to them.
        self.name_for_their_lanes = self.name_for_our_lanes = b""  # The secret names by which lanes join this link.
        self.address: Address | None = None  # The address at which this side has dialled; None on the other side.
        self.sighting: Sighting | None = None  # The addresses at which the two sides see each other.
        self.path = "direct"  # How it came about: direct, punched, or "relay" and the relay's id.
        self.visit: trio.CancelScope | None = None  # The time limit of an observer that has dialled us.
        self.has_widened = False  # Lanes were requested, by either side, or opened.
        # Starts a lane on a stream, which either side may have dialled; returns False to refuse it.
        self.admit_lane: Callable[[ByteStream, FrameReader, bool], bool] = refuse_lane
        self.batch: SendBatch | None = None  # The batch that is being sent.
        self.is_writer_idle = False
        self.is_flush_due = False  # True while the link is in `pool.to_flush`.
        self.on_sent: Callable[[int], None] = lambda session: None  # Called after each chunk of a session.
        self.on_finished: Callable[[int], None] = lambda session: None  # Called after the last one.
        self.pool: Outboxes | None = None  # All links of the node; None while this one is not among them.
        self.io_pool: BlockingIoPool | None = None  # The I/O threads for large vectors; None: trio's thread sends them.
        self.inflow: Inflow | None = None  # The vector that an I/O thread receives now.
        self.wake = trio.Event()  # Wakes the writer task.
        self.clock = trio.lowlevel.current_clock()
        self.used_at = self.clock.current_time()  # The time of the last frame in either direction.
        self.sent_bytes = 0  # Without those of the lanes.
        self.ignored_messages = 0  # Messages of a newer version that were skipped.
        self.fault = ""  # The sentence about a fault of this program for which the link was closed.
        self.is_unread = False  # Closed because the other side does not read what it causes us to send.
        self.is_closing = False  # It is closed once the outbox is sent.
        self.is_orderly = False  # Closed as idle, by either side.
        self.retired_at = math.inf  # The time at which this side closed it as idle.
        self.is_closed = False
        self.cancel_scope: trio.CancelScope | None = None  # That of all tasks of the link, once they run.

    @property
    def bytes_sent(self) -> int:
        return self.sent_bytes + self.lanes.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self.reader.bytes_received + self.lanes.bytes_received

    @property
    def motions(self) -> list[ChunkMotion]:
        """Return the motion of chunks over each of its connections."""
        return [self.motion, *(lane.motion for lane in self.lanes.all)]

    @property
    def received_at(self) -> float:
        """Return the time at which bytes of a chunk last arrived, over any of its connections."""
        return max(motion.received_at for motion in self.motions)

    @property
    def sent_at(self) -> float:
        """Return the time at which bytes of a chunk last left, over any of its connections."""
        return max(motion.sent_at for motion in self.motions)

    def poll_motion(self, now: float) -> bool:
        """Poll all connections; return True if bytes of chunks have moved since the last poll."""
        return any([motion.poll(now) for motion in self.motions])  # A list, so that each of them is polled.

    @property
    def is_ending(self) -> bool:
        """Return True if either side is closing the link, so that nothing may begin on it."""
        return self.is_closing or self.is_orderly or self.is_closed

    def send(self, message: Message) -> None:
        """Queue a message. Close the link if the message cannot be encoded, or the peer does not read."""
        try:
            frame = encode(message)
        except (OverflowError, ValueError, TypeError) as error:  # Such an error concerns this link alone.
            kind = type(message).__name__
            self.fault = f"A {kind} could not be written ({type(error).__name__}): its link is closed."
            self.close_now()
            return
        if len(self.outbox) >= OUTBOX_FRAMES or self.outbox_bytes + len(frame) > OUTBOX_BYTES:
            self.is_unread = self.is_unread or not self.is_closed
            self.close_now()
            return
        self.outbox.append(frame)
        self.outbox_bytes += len(frame)
        self.queued_frames += 1
        if not self.is_flush_due:
            self.request_flush()
        if self.pool is not None:
            self.pool.add_waiting(len(frame))

    def start_bulk(self, session: int, bulk: Bulk, large: bool = False, shared: bool = False) -> None:
        """Queue a vector behind the frames in the outbox, because a chunk ahead of its Accept would end the link.

        Args:
            session: The session of the vector.
            bulk: The vector.
            large: True if an I/O thread is worth its cost; it may then call ``next_frame``.
            shared: True if lanes may carry the vector.
        """
        if shared and len(self.lanes):
            self.lanes.start(session, bulk)
            return
        self.bulk[session] = QueuedBulk(bulk, self.queued_frames, large)
        if not self.is_flush_due:
            self.request_flush()

    def stop_bulk(self, session: int, bulk: Bulk) -> None:
        """Send no more chunks of a vector, and release it once its chunk in flight is sent."""
        if self.lanes.carries(session, bulk):
            self.lanes.stop(session, bulk)
            return
        self.bulk.pop(session, None)
        if bulk not in self.lanes.chunks_in_flight and (self.batch is None or self.batch.bulk is not bulk):
            bulk.let_go()

    def request_flush(self) -> None:
        """Wake the writer now, or have the link flushed at the end of the batch of effects."""
        if self.pool is None or not self.pool.batch_depth:
            self.wake.set()
        else:
            self.is_flush_due = True
            self.pool.to_flush.append(self)

    def finish(self) -> None:
        """Close the link once the outbox is sent."""
        self.is_closing = True
        self.wake.set()

    def retire(self) -> None:
        """Close an idle link with a Close, because the peer would suspect us if the link ended without one."""
        self.is_orderly, self.retired_at = True, trio.current_time()
        self.send(Close("idle", "this link is not needed at the moment.", ()))
        self.finish()

    def close_now(self) -> None:
        """Close the link at once; its outbox is lost, and the other side sees a broken link."""
        self.is_closed = True
        if self.pool is not None:
            self.pool.drop_outbox(self)
        self.stream.close_now()
        if self.cancel_scope is not None:
            self.cancel_scope.cancel()

    def is_held_up(self, now: float, stall_s: float, chunk_s: float) -> bool:
        """Return True if an I/O thread waits in vain for a chunk of a session that has ended.

        No session watches that chunk any more, so it would hold the thread as long as the link lives.

        Args:
            now: Current time in seconds.
            stall_s: The time in which no byte came.
            chunk_s: The time that a chunk may take while bytes of it come.
        """
        inflow = self.inflow
        if inflow is None or not inflow.is_over:
            return False
        return now - max(inflow.heard_at, self.received_at) > stall_s or now - inflow.heard_at > stall_s + chunk_s

    async def cut_when_cancelled(self) -> None:
        """Close the stream on cancellation. This task runs next to the reading and the writing one.

        Their I/O threads block in the kernel, and notice nothing but the end of the connection.
        """
        try:
            await trio.sleep_forever()
        finally:
            self.stream.close_now()

    def flush(self) -> None:
        """Give the kernel what it takes at once, without waking a task, which suffices for most short messages.

        The writer task sends the rest and handles errors.
        """
        self.is_flush_due, stream = False, self.stream
        if self.is_writer_idle and self.batch is None and isinstance(stream, PlainStream):
            # Taking a frame can end a vector, whose handler may flush again. It must not send here: the frames that it
            # queues belong behind these.
            self.is_writer_idle = False
            try:
                self.send_at_once(stream)
            finally:
                self.is_writer_idle = True
        if self.batch is not None or self.outbox or self.bulk:
            self.wake.set()

    def send_at_once(self, stream: PlainStream) -> None:
        """Send up to ``FLUSHED_CHUNKS`` batches, as far as the kernel takes them at once."""
        for _ in range(FLUSHED_CHUNKS):
            batch = self.take_batch() if self.outbox or self.bulk else None
            if batch is None:
                return
            batch.pieces = stream.send_now(batch.pieces)
            if batch.pieces:
                return
            self.on_batch_sent(batch)

    async def write_loop(self, on_sent: Callable[[int], None], on_finished: Callable[[int], None]) -> None:
        """Send until the link is closed: control frames first, then one chunk of each vector in turn.

        Args:
            on_sent: Called after each chunk, with its session.
            on_finished: Called after the last chunk of a vector, with its session.
        """
        self.on_sent, self.on_finished = on_sent, on_finished
        try:
            while True:
                if not (self.outbox or self.bulk or self.batch is not None):
                    if self.is_closing:
                        return
                    self.wake, self.is_writer_idle = trio.Event(), True
                    await self.wake.wait()
                    self.is_writer_idle = False
                    continue
                batch = self.batch or self.take_batch()
                if batch is not None:
                    await self.send_batch(batch)
                # A batch leaves the chunks of large vectors, which an I/O thread sends.
                session = self.next_session() if self.bulk else None
                if session is not None and self.bulk[session].is_large and self.io_pool is not None:
                    await self.send_large(session, self.io_pool)
        finally:
            self.is_writer_idle = False
            if self.batch is not None:
                self.clear_batch(self.batch)

    def next_session(self) -> int | None:
        """Return the session that sends the next chunk, None if there is none."""
        for session, queued in self.bulk.items():
            if queued.sendable_from <= self.taken_frames:
                return session
        return None

    def carries(self, session: int, bulk: Bulk) -> bool:
        """Return True if this connection is to send more of the vector."""
        queued = self.bulk.get(session)
        return queued is not None and queued.bulk is bulk

    def take_batch(self) -> SendBatch | None:
        """Take the next control frames and chunk; None if there are none. Chunks for I/O threads are left."""
        frames: list[bytes | memoryview] = []
        control_bytes = 0
        while self.outbox and len(frames) < CONTROL_BURST and control_bytes < BURST_BYTES:
            frame = self.outbox.popleft()
            frames.append(frame)
            control_bytes += len(frame)
        self.taken_frames += len(frames)
        if self.lanes.all:
            self.lanes.wake_lanes()
        batch = SendBatch(frames if len(frames) < 2 else [b"".join(frames)], control_bytes)
        session = self.next_session() if self.bulk else None
        if session is not None and (not self.bulk[session].is_large or self.io_pool is None):
            self.take_chunk(batch, session)
        if not batch.pieces:
            return None
        self.batch = batch
        return batch

    def take_chunk(self, batch: SendBatch, session: int) -> None:
        """Add the next chunk of the session to the batch, if one is left; otherwise the vector has ended."""
        bulk = self.rotate(session)
        frame = bulk.next_frame()
        if frame is None:
            self.on_vector_sent(session, bulk)
            return
        self.motion.on_chunk_begun(self.clock.current_time())
        header, body = frame
        batch.session, batch.bulk, batch.chunk_bytes = session, bulk, len(header) + body.nbytes
        batch.pieces += frame

    def rotate(self, session: int) -> Bulk:
        """Move the session behind the others that take turns, and return its vector."""
        queued = self.bulk[session] = self.bulk.pop(session)
        return queued.bulk

    def on_vector_sent(self, session: int, bulk: Bulk) -> None:
        """Handle a vector of which every chunk is sent."""
        self.stop_bulk(session, bulk)
        self.on_finished(session)

    async def send_batch(self, batch: SendBatch) -> None:
        """Send a batch, and wait while the peer does not read."""
        pieces = batch.pieces
        if isinstance(self.stream, PlainStream):
            pieces = batch.pieces = self.stream.send_now(pieces)  # One system call for all pieces.
            if not pieces:
                await trio.lowlevel.checkpoint()  # Let other tasks run, although nothing waited.
        for piece in pieces:
            await self.stream.send_all(piece)
        self.on_batch_sent(batch)

    def on_batch_sent(self, batch: SendBatch) -> None:
        """Handle a batch of which every byte is sent."""
        if batch.bulk is None:
            self.batch = None
        else:
            self.clear_batch(batch)
        self.sent_bytes += batch.control_bytes + batch.chunk_bytes
        self.used_at = self.clock.current_time()
        if batch.bulk is not None:
            self.motion.on_chunk_sent(self.used_at)
        if batch.control_bytes:
            self.outbox_bytes -= batch.control_bytes
            if self.pool is not None:
                self.pool.add_waiting(-batch.control_bytes)
        if batch.bulk is not None:
            self.on_sent(batch.session)

    async def send_large(self, session: int, io_pool: BlockingIoPool) -> None:
        """Send chunks of the vector from an I/O thread if one is free, else one chunk from here."""
        bulk, blocking_stream = self.rotate(session), io_pool.lend(self.stream)
        if blocking_stream is None:
            batch = self.batch = SendBatch([], 0)
            self.take_chunk(batch, session)
            await self.send_batch(batch)
        elif not await self.send_in_thread(blocking_stream, session, bulk) and self.carries(session, bulk):
            self.on_vector_sent(session, bulk)

    async def send_in_thread(self, stream: BlockingStream, session: int, bulk: Bulk) -> bool:
        """Send chunks in a thread until something else waits to be sent; return False when none are left."""
        assert self.io_pool is not None

        async def send_chunks(blocking: BlockingStream) -> bool:
            while (frame := bulk.next_frame()) is not None:
                self.motion.on_chunk_begun(self.clock.current_time())
                await blocking.send_frame(*frame)
                self.sent_bytes += len(frame[0]) + frame[1].nbytes
                self.used_at = self.clock.current_time()
                self.motion.on_chunk_sent(self.used_at)
                self.on_sent(session)
                if self.outbox or len(self.bulk) > 1 or not self.carries(session, bulk):
                    return True
            return False

        batch = self.batch = SendBatch([], 0, session, bulk)
        try:
            return await self.io_pool.run(stream, "gossip-send", send_chunks)
        finally:
            self.clear_batch(batch)

    def clear_batch(self, batch: SendBatch) -> None:
        """Forget the batch, and release its vector if that was stopped meanwhile."""
        self.batch = None
        if batch.bulk is not None and not self.carries(batch.session, batch.bulk):
            batch.bulk.let_go()
