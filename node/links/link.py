"""One Link is one stream after its Hello, with control frames ahead of bulk and a bound on everything."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from gossip.errors import ProtocolError
from gossip.ids import Address, PeerId
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk, Close, Message, Unknown
from node.links.bulk import Bulk, ChunkMotion, Inflow, Sending
from node.links.frame_reader import FrameReader, nothing
from node.links.lanes import Lanes
from node.transport.byte_stream import ByteStream, PlainStream
from node.transport.hands import WHOLE_BYTES, BlockingStream, Hands
from node.transport.shared import SideChannel

if TYPE_CHECKING:
    from node.links.pool import Links

__all__ = ["CONTROL_BURST", "FLUSHED", "Link", "admits_none"]

OUTBOX_FRAMES = 1_024  # a peer that reads none of so many has stopped: the link is closed
OUTBOX_BYTES = 8 << 20  # the same: the largest table of members, 10,000 records of 519 B, is 5 MB
CONTROL_BURST = 32  # control frames between two chunks, so that neither starves the other
BURST_BYTES = 256 << 10  # of them: they are copied into one
NOT_SENT_BYTES = 128 << 10  # that the kernel may queue, behind which a probe waits: a second at 1 Mbit/s
FLUSHED = 4  # chunks sent without a turn of a task's: all of what no thread is for, by default


def admits_none(stream: ByteStream, reader: FrameReader, dialled: bool) -> bool:
    """Of a link that has not begun, or has ended."""
    return False


class Link:
    """An authenticated connection to one peer."""

    def __init__(self, stream: ByteStream, reader: FrameReader, peer: PeerId) -> None:
        self.stream, self.reader, self.peer = stream, reader, peer
        self.movement = ChunkMotion(stream, reader)  # of its own chunks; lanes have theirs
        if self.movement.socket is not None:
            self.movement.socket.queue_at_most(NOT_SENT_BYTES)
        self.outbox: deque[bytes] = deque()
        self.outbox_bytes = 0  # what is being sent included
        self.queued = self.taken = 0  # control frames that were ever put into the outbox, and taken out of it
        self.bulk: dict[int, Bulk] = {}  # by session
        self.behind: dict[int, int] = {}  # by session: how many control frames go before its first chunk
        self.large: set[int] = set()  # sessions whose bulk a thread sends, where one is free
        self.lanes = Lanes(self)  # more connections, which carry what they are given in its place
        self.name = self.named = b""  # what lanes call this link, for those who join from there, and from here
        self.address: Address | None = None  # where it was dialled
        self.widened = False  # lanes were asked for, or opened
        self.admit: Callable[[ByteStream, FrameReader, bool], bool] = admits_none  # a lane, which one of us dialled
        self.sending: Sending | None = None  # at the moment; or it was begun, and its rest goes next
        self.resting = False  # the writing task has nothing to do
        self.stirred = False  # there is something to send once all is done that is being performed
        self.on_sent: Callable[[int], None] = lambda session: None
        self.on_finished: Callable[[int], None] = lambda session: None
        self.links: Links | None = None  # all of them, once it is one of a member
        self.hands: Hands | None = None  # threads for what is large
        self.flow: Inflow | None = None  # what a thread takes in at the moment
        self.channel: SideChannel | None = None  # for memory, where its other end is on this host
        self.nursery: trio.Nursery | None = None  # of what ends with it
        self.wake = trio.Event()
        self.clock = trio.lowlevel.current_clock()
        self.used_at = self.clock.current_time()
        self.sent_bytes = 0  # but for lanes
        self.ignored = 0  # messages of a newer version
        self.fault = ""  # ours, for which this link is closed
        self.unread = False  # it is closed because the other side asks for more than it reads
        self.closing = False
        self.orderly = False  # closed for want of use, by either side
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
        """Of all its connections."""
        return [self.movement, *(lane.movement for lane in self.lanes.all)]

    @property
    def received_at(self) -> float:
        """When bytes of a chunk last came, over any of its connections."""
        return max(one.received_at for one in self.movements)

    @property
    def sent_at(self) -> float:
        """When bytes of a chunk last went, over any of its connections."""
        return max(one.sent_at for one in self.movements)

    def look(self, now: float) -> bool:
        """Note and return whether bytes of chunks have moved since the last look."""
        return any([one.look(now) for one in self.movements])

    @property
    def ending(self) -> bool:
        """Whether either side closes it, and nothing is to begin on it."""
        return self.closing or self.orderly or self.closed

    def send(self, message: Message) -> None:
        try:
            frame = encode(message)
        except (OverflowError, ValueError, TypeError) as error:  # whatever it is, it is this link's alone
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
        if not self.stirred:
            self.stir()
        if self.links is not None:
            self.links.waits(len(frame))

    def start_bulk(self, session: int, bulk: Bulk, large: bool = False, shared: bool = False) -> None:
        """Stream this, behind what was sent before: a chunk ahead of its Accept would end the link. ``large``: a thread
        pays, in which ``next_frame`` may be called then. ``shared``: lanes may carry it, where there are any."""
        if shared and len(self.lanes):
            self.lanes.start(session, bulk)
            return
        self.bulk[session] = bulk
        if large:
            self.large.add(session)
        self.behind[session] = self.queued
        if not self.stirred:
            self.stir()

    def stop_bulk(self, session: int, bulk: Bulk) -> None:
        """Send no more of it. A chunk that is being sent is sent to its end, and the bulk let go only then."""
        if self.lanes.bulk.get(session) is bulk:
            self.lanes.stop(session, bulk)
            return
        self.bulk.pop(session, None)
        self.behind.pop(session, None)
        self.large.discard(session)
        if bulk not in self.lanes.held and (self.sending is None or self.sending.bulk is not bulk):
            bulk.let_go()

    def stir(self) -> None:
        """There is something to send: now, or with all else that comes of what is being performed."""
        if self.links is None or not self.links.gathering:
            self.wake.set()
        else:
            self.stirred = True
            self.links.stirred.append(self)

    def finish(self) -> None:
        """Close once the outbox is sent."""
        self.closing = True
        self.wake.set()

    def retire(self) -> None:
        """Close a link nobody needs at the moment, saying so: a link that ends without a word is a peer in doubt."""
        self.orderly = True
        self.send(Close("idle", "this link is not needed at the moment.", ()))
        self.finish()

    def close_now(self) -> None:
        self.closed = True
        if self.links is not None:
            self.links.forget(self)
        self.stream.close_now()
        if self.cancel_scope is not None:
            self.cancel_scope.cancel()

    def held_up(self, now: float, stall_s: float, chunk_s: float) -> bool:
        """Whether a thread waits for the rest of a chunk that nobody wants, and that the other side does not send: it
        is watched by no session any more, and would hold the thread for as long as the link lives. ``chunk_s``: how
        long the chunk may take where bytes of it come."""
        flow = self.flow
        if flow is None or not flow.over:
            return False
        return now - max(flow.heard_at, self.received_at) > stall_s or now - flow.heard_at > stall_s + chunk_s

    async def cut_when_cancelled(self) -> None:
        """Runs beside the two loops: what cancels them ends their threads as well, which wait in the kernel and hear of
        nothing else than the connection's end."""
        try:
            await trio.sleep_forever()
        finally:
            self.stream.close_now()

    def flush(self) -> None:
        """Give the kernel what it takes at once: the rule for what is small, of which no task is woken. The writing one
        sends the rest, and meets whatever is wrong."""
        self.stirred, stream = False, self.stream
        if self.resting and self.sending is None and isinstance(stream, PlainStream):
            # The end of a stream is performed while frames are taken, and may flush again. What it sends stays in the
            # outbox, behind these frames.
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
        """Send until closed: control frames first, then one chunk of each bulk stream in turn."""
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
        """The session whose stream is next."""
        for session, behind in self.behind.items():
            if behind <= self.taken:
                return session
        return None

    def take(self) -> Sending | None:
        """What goes next, but for what a thread sends."""
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
        """Behind what is in it, if any is left."""
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
        """Of the row: others have their turn first."""
        self.behind[session] = self.behind.pop(session)
        return self.bulk[session]

    def ended(self, session: int, bulk: Bulk) -> None:
        """All of it is sent."""
        self.stop_bulk(session, bulk)
        self.on_finished(session)

    async def send_batch(self, batch: Sending) -> None:
        pieces = batch.pieces
        if isinstance(self.stream, PlainStream):
            pieces = batch.pieces = self.stream.send_now(pieces)  # in one call of the kernel
            if not pieces:
                await trio.lowlevel.checkpoint()  # others have their turn all the same
        for piece in pieces:
            await self.stream.send_all(piece)
        self.sent(batch)

    def sent(self, batch: Sending) -> None:
        """All of it is out."""
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
                self.links.waits(-batch.control_bytes)
        if batch.bulk is not None:
            self.on_sent(batch.session)

    async def send_large(self, session: int, hands: Hands) -> None:
        """By a thread, where one is free."""
        bulk, lent = self.to_the_back(session), hands.lend(self.stream)
        if lent is None:
            batch = self.sending = Sending([], 0)
            self.take_chunk(batch, session)
            await self.send_batch(batch)
        elif not await self.send_in_thread(lent, session, bulk) and self.bulk.get(session) is bulk:
            self.ended(session, bulk)

    async def send_in_thread(self, lent: BlockingStream, session: int, bulk: Bulk) -> bool:
        """Chunk after chunk, until something else is to be sent; False where none is left."""
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
        """It is out."""
        self.sending = None
        if batch.bulk is not None and self.bulk.get(batch.session) is not batch.bulk:  # stopped in the middle
            batch.bulk.let_go()

    async def read_loop(
        self,
        on_message: Callable[[Message], None],
        on_chunk: Callable[[Chunk, int], memoryview | None],
        on_body: Callable[[Chunk], None],
        flow_of: Callable[[Chunk], Inflow | None] = lambda chunk: None,
        on_flow: Callable[[Chunk], None] = lambda chunk: None,
    ) -> None:
        """Read until the other side ends. ``on_chunk`` gives the buffer for a body of that many bytes, or None when the
        session is over and the body is to be thrown away; ``on_body`` is called when it is filled. Where ``flow_of``
        says that a thread may take in what a chunk is of, ``on_flow`` is called when it has, as far as it came."""
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
                on_message(message)  # an Unknown too: it counts against what one link may send
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
        """This chunk and what follows of the same vector. What comes else is returned as :meth:`FrameReader.message`
        returns it; None where nothing is known of what comes next."""
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
