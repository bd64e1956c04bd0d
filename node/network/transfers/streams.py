"""The averager's driver: it moves vectors over links, and runs large arithmetic in a thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import trio

from gossip.arithmetic.mixing import OuterStep
from gossip.averaging.averager import Averager
from gossip.averaging.boundary import Boundary, Visit
from gossip.averaging.jobs import Job
from gossip.averaging.streams import ComparingReceiver, DifferenceReceiver, PieceReceiver, Sender
from gossip.averaging.vectors import Floats, Vector
from gossip.codecs import Codec, get_codec
from gossip.effects import Effect, Gather, Merge, Mix, ReceivePiece, Rename, Serve, Snapshot, Transfer
from gossip.exchange.session import State
from gossip.ids import PeerId
from gossip.peer import Peer
from gossip.wire.messages import Chunk
from node.faults import Faults
from node.links.link import Link
from node.links.pool import Links
from node.links.stripes import chunk_elements
from node.model.pool import VectorPool
from node.network.transfers.gathers import GroupTransfers
from node.network.transfers.log import ExchangeStats
from node.network.transfers.sessions import StreamSession, StreamSessions

__all__ = ["Streams"]

TIMED = 64  # Durations kept: enough for a steady median.
LARGE_BYTES = 4 << 20  # The least size for threads: they save no CPU at 4 MB, and a quarter at 40 MB.
INLINE_ELEMENTS = 1 << 20  # Arithmetic on up to 4 MB runs inline, 1 to 2 ms; on more in a worker thread.


class SharedModel(Protocol):
    """The parts of a model that both threads of a node use: a :class:`node.loop.live.LiveModel`."""

    @property
    def boundary(self) -> Boundary: ...
    @property
    def pool(self) -> VectorPool: ...
    @property
    def outer(self) -> OuterStep: ...
    @property
    def outer_lock(self) -> AbstractContextManager[object]:
        """The lock of the outer step, which both threads move."""


class Tasks(Protocol):
    """The network side that runs the streams, a :class:`node.network.runtime.Runtime`."""

    faults: Faults

    def perform(self, effects: Iterable[Effect]) -> None:
        """Perform the effects of a report to the peer."""

    def spawn(self, task: Callable[..., Any], *args: object) -> None:
        """Run a task until the network side ends."""


class Streams:
    """One node's streams, the driver of its averager.

    All methods but tasks are synchronous and run in trio's thread.
    """

    def __init__(self, peer: Peer, live: SharedModel, links: Links, tasks: Tasks) -> None:
        config, boundary, pool = peer.config, live.boundary, live.pool
        self.peer, self.config, self.pool, self.links = peer, config, pool, links
        self.perform, self.spawn, self.faults = tasks.perform, tasks.spawn, tasks.faults
        self.averager = Averager(peer, config, boundary, pool, live.outer, self, live.outer_lock)
        self.sessions = StreamSessions()
        self.gathers = GroupTransfers(peer, config, self.averager, pool, links, self.sessions)
        # Durations of the last exchanges. It is replaced, not changed, since the other thread reads it.
        self.durations: tuple[float, ...] = ()
        self.began: dict[int, float] = {}  # The time at which each session requested its snapshot.
        self.accounts: dict[int, ExchangeStats] = {}  # Exchanges whose streams have begun.
        self.on_begun: Callable[[ExchangeStats], None] = lambda account: None
        self.on_over: Callable[[ExchangeStats], None] = lambda account: None
        # The queue needs no limit: no snapshot is taken while an update is pending. So it holds at most one update for
        # each session with an earlier snapshot, and Peer bounds their number.
        self.clock = trio.lowlevel.current_clock()
        self.jobs_in, self.jobs_out = trio.open_memory_channel[Job](math.inf)
        self.queued = 0
        whole = config.part == "all" and not config.grouped and large(get_codec("fp32"), peer.view.elements)
        self.whole = whole  # All exchanges carry vectors of one length, and that is large.
        # True once exchanges' memory is allocated, and the lock for allocating it.
        self.taken, self.taking = False, threading.Lock()
        if not (peer.may_join or peer.view.ready):
            self.take_memory()
        movement = self.averager.movement
        # After a fault the memory is allocated, and the loop is changing the weights.
        if peer.view.ready:
            self.taken = True
            if movement is not None:
                boundary.sampled = movement.places
        # Sample the weights as they are now, before the first step.
        elif movement is not None:
            sample = np.empty(movement.places.size, np.float32)
            pending = pool.state.begin_read_at(sample, movement.places)
            while not (pending is None or pending.done()):
                time.sleep(0.001)  # A CUDA event can only be polled.
            self.averager.begin_at(sample)

    def take_memory(self, vectors: int = 2) -> None:
        """Allocate a snapshot and a difference for exchanges, once. Thread-safe.

        This happens before the first step if a node starts with its own weights. Otherwise it happens while pieces of
        others' weights arrive.
        """
        with self.taking:
            if self.whole and not self.taken:
                self.touch(vectors)
                self.taken = True

    def touch(self, vectors: int = 2) -> None:
        """Write to fresh vectors before they are needed.

        Page faults cost four times what a copy costs, and a step boundary would pay for them.
        """
        for vector in [self.pool.take() for _ in range(vectors)]:
            vector.array.fill(0.0)
            self.pool.give(vector)

    def not_taken(self, error: Exception) -> None:
        self.faults.contain(error, "Taking the memory of an exchange", "it is taken when it is needed")

    # -- the averager's driver -----------------------------------------------------------------------------------
    @property
    def now(self) -> float:
        return self.clock.current_time()

    def soon(self, report: Callable[..., None], *arguments: object) -> None:
        self.spawn(self.report_soon, report, *arguments)

    async def report_soon(self, report: Callable[..., None], *arguments: object) -> None:
        await trio.lowlevel.checkpoint()
        report(*arguments)

    def compute(self, job: Job) -> None:
        """Run a job inline if it is small and none is queued; otherwise queue it."""
        if self.queued or job.elements > INLINE_ELEMENTS:
            self.queued += 1
            self.jobs_in.send_nowait(job)
            return
        try:
            job.run()
            job.land()
        except Exception as error:
            self.give_up(job, error)

    async def mixer(self) -> None:
        """Run the queued jobs in order.

        Weights to adopt wait behind earlier updates, which belong to the old weights.
        """
        async for job in self.jobs_out:
            try:
                if job.elements > INLINE_ELEMENTS:
                    await trio.to_thread.run_sync(job.run)
                else:
                    job.run()
                job.land()
            except Exception as error:
                self.give_up(job, error)
            finally:
                self.queued -= 1

    def give_up(self, job: Job, error: Exception) -> None:
        self.faults.contain(error, "Mixing what an exchange brought", "this node does without it")
        job.fail()

    def when_copied(self, visit: Visit, report: Callable[[Visit], None]) -> None:
        if all(copy.done() for copy in visit.copies):
            report(visit)
        else:
            self.spawn(self.wait_for_copies, visit, report)

    async def wait_for_copies(self, visit: Visit, report: Callable[[Visit], None]) -> None:
        while not all(copy.done() for copy in visit.copies):  # noqa: ASYNC110 - a CUDA event can only be polled
            await trio.sleep(0.001)
        report(visit)

    # -- an exchange ---------------------------------------------------------------------------------------------
    def fail(self, session: int, code: str) -> None:
        """Report a failure that was found while performing an effect, later, as a real one would be.

        Until then, chunks of a session that never began to stream are late and no fault.
        """
        self.sessions.late(session)
        self.averager.fail(session, code)

    def snapshot(self, effect: Snapshot) -> None:
        """Begin an exchange's time with the request for a snapshot, as the simulator does."""
        self.began[effect.session] = self.now
        self.averager.snapshot(effect)

    def transfer(self, effect: Transfer) -> None:
        """Send our vector, receive theirs, or both: the whole, or the elements of the exchange's part."""
        number, link = effect.session, self.sessions.links.get(effect.session)
        self.begin(number, (effect.partner,), effect.codec)
        pair = "broken" if link is None else self.averager.transfer(effect)
        if link is None or isinstance(pair, str):
            self.fail(number, str(pair))
            return
        session = StreamSession(number, effect.partner, link, receiver=pair.stream())
        if effect.sends:
            session.sender = self.sender(link, number, pair.ours, pair.codec, self.averager.snapshots[number])
        self.sessions.add(session, effect.sends and large(pair.codec, pair.elements))

    def sender(self, link: Link, number: int, values: Floats, codec: Codec, vector: Vector) -> Sender:
        """Return a stream that brings these values of a vector to a partner."""
        elements = chunk_elements(self.config.chunk_elements, values.size, len(link.lanes))
        most = None if len(link.lanes) else link.movement
        return Sender(number, values, codec, elements, lease=self.pool.lease(vector), most=most)

    def gather(self, effect: Gather) -> None:
        if effect.session not in self.accounts:
            others = (*effect.members[: effect.place], *effect.members[effect.place + 1 :])
            self.begin(effect.session, others, effect.codec)
        group = self.averager.gather(effect)
        if isinstance(group, str):
            self.fail(effect.session, group)
        else:
            self.gathers.gather(group)

    def begin(self, session: int, partners: tuple[PeerId, ...], codec: str) -> None:
        """Begin an exchange's statistics once all sides have agreed."""
        others = tuple(map(bytes.hex, partners))
        account = self.accounts[session] = ExchangeStats(session, others, codec, self.peer.exchanges.table.get(session))
        self.on_begun(account)

    def place(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return the buffer for a chunk's body, or None if the session has ended."""
        if self.gathers.expects(chunk.session):
            return self.gathers.place(link, chunk, body_bytes)
        return self.sessions.place(link, chunk, body_bytes)

    async def agreed(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return :meth:`place` for a lane's chunk, which may come before the link's messages about its session."""
        with trio.move_on_after(self.config.stall_s):
            while not self.sessions.knows(chunk.session):
                await self.sessions.changed.park()
        return self.sessions.place(link, chunk, body_bytes, wide=True)

    def arrived(self, link: Link, chunk: Chunk) -> None:
        """Process a chunk whose body is filled."""
        if self.gathers.expects(chunk.session):
            self.gathers.arrived(link, chunk)
            return
        session = self.sessions.table.get(chunk.session)
        if session is not None and session.receiver is not None:
            session.arrived(chunk)
            self.moved(chunk)

    def flow(self, chunk: Chunk) -> StreamSession | None:
        """Return the session whose chunks, from this one on, are worth a thread; None if not."""
        if self.gathers.expects(chunk.session):
            return None
        session = self.sessions.table.get(chunk.session)
        receiver = None if session is None else session.receiver
        return session if isinstance(receiver, DifferenceReceiver) and large(receiver.codec, receiver.size) else None

    def served(self, session: int) -> None:
        """Tell Peer that all of a newcomer's piece was sent."""
        if self.peer.view.serves(session):
            self.perform(self.peer.served(session, self.now))

    def moved(self, chunk: Chunk) -> None:
        """Tell the peer and the averager how far a chunk's session has come."""
        session = self.sessions.table.get(chunk.session)
        if session is None or session.receiver is None:
            return
        receiver, number, peer = session.receiver, session.id, self.peer
        if receiver.fault:
            self.averager.failed(number, receiver.fault)
        elif isinstance(receiver, PieceReceiver):
            self.perform(peer.collected(number, receiver.start + receiver.position, self.now))
        elif isinstance(receiver, ComparingReceiver) and receiver.done:
            self.perform(peer.compared(number, receiver.difference_sq, receiver.own_sq, self.now))
        elif isinstance(receiver, DifferenceReceiver) and receiver.done:
            pair = self.averager.pairs[number]
            pair.arrived()
            self.averager.streamed(pair)

    def mix(self, effect: Mix) -> None:
        if self.averager.mix(effect):
            self.time(effect.session)

    def merge(self, effect: Merge) -> None:
        if self.averager.merge(effect):
            self.time(effect.session)

    def time(self, session: int) -> None:
        began, account = self.began.get(session), self.accounts.get(session)
        if began is not None:
            took_s = self.now - began
            self.durations = (*self.durations, took_s)[-TIMED:]
            if account is not None:
                account.seconds = took_s

    def rename(self, effect: Rename) -> None:
        self.sessions.rename(effect.session)
        self.averager.rename(effect)
        began = self.began.pop(effect.session, None)
        if began is not None:
            self.began[effect.to] = began

    def release(self, session: int) -> None:
        account = self.accounts.pop(session, None)
        if account is not None:
            self.measure(account)
        self.gathers.release(session)
        # Release the session before its vectors are returned; a sender keeps its lease.
        self.sessions.release(session)
        self.averager.release(session)
        self.began.pop(session, None)
        if account is not None:
            self.on_over(account)

    def measure(self, account: ExchangeStats) -> None:
        """Complete an exchange's statistics while its streams exist."""
        number, apart_sq = account.session, math.nan
        account.done = account.exchange is not None and account.exchange.state is State.DONE
        if not account.seconds and number in self.began:
            account.seconds = self.now - self.began[number]
        stream, pair = self.sessions.table.get(number), self.averager.pairs.get(number)
        if stream is not None and stream.sender is not None and stream.sender.position:
            account.bytes_sent = stream.sender.codec.encoded_bytes(stream.sender.position)
        if stream is not None and stream.receiver is not None and stream.receiver.elements_arrived:
            account.bytes_received = stream.receiver.codec.encoded_bytes(stream.receiver.elements_arrived)
        if pair is not None and pair.whole:
            whole = 1.0 if pair.positions is None else self.peer.view.elements / pair.elements
            apart_sq = pair.difference_sq * whole
        group = None if pair is not None else self.averager.groups.get(number)
        if group is not None:
            sent, received = self.gathers.moved(number)
            account.bytes_sent = group.codec.encoded_bytes(sent) if sent else 0
            account.bytes_received = group.codec.encoded_bytes(received) if received else 0
            apart_sq = group.outcome()[0] if group.told else math.nan
        account.distance = math.sqrt(apart_sq) if math.isfinite(apart_sq) else None

    def busy(self) -> set[Link]:
        """Return the links that active transfers use."""
        return {*self.sessions.links.values(), *self.gathers.links_used()}

    # -- joining -------------------------------------------------------------------------------------------------
    def collect(self, effect: ReceivePiece) -> None:
        first = self.averager.joining is None
        vector, link = self.averager.collect(effect), self.links.newest(effect.partner)
        if first and self.whole and not self.taken:
            self.compute(TakingMemory(self))
        if link is None:
            self.fail(effect.session, "broken")
            return
        kind = ComparingReceiver if effect.compare else PieceReceiver
        receiver = kind(effect.session, vector, effect.start, effect.stop)
        self.sessions.links[effect.session] = link
        self.sessions.add(StreamSession(effect.session, effect.partner, link, receiver=receiver))

    def serve(self, effect: Serve) -> None:
        snapshot, link = self.averager.serve(effect), self.sessions.links.get(effect.session)
        if snapshot is None or link is None:
            self.fail(effect.session, "broken")
            return
        piece = snapshot.piece(effect.start, effect.stop)
        sender = self.sender(link, effect.session, piece, get_codec("fp32"), snapshot)
        session = StreamSession(effect.session, effect.partner, link, sender=sender)
        self.sessions.add(session, large(sender.codec, piece.size))


class TakingMemory:
    """A job that allocates memory for exchanges while pieces of the weights arrive.

    The weights are adopted after it in the queue, so that no step boundary finds the memory missing. If the pieces are
    collected in a vector of the pool, that is one of the two.
    """

    def __init__(self, streams: Streams) -> None:
        joining = streams.averager.joining
        self.streams, self.elements = streams, streams.peer.view.elements
        self.vectors = 1 if joining is not None and not joining.passing else 2
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.streams.take_memory(self.vectors)
        except Exception as error:
            self.error = error

    def land(self) -> None:
        if self.error is not None:
            self.streams.not_taken(self.error)

    def fail(self) -> None:
        """Do nothing: nothing waits for this job."""


def large(codec: Codec, elements: int) -> bool:
    """Return True if this many elements are worth a thread."""
    return codec.encoded_bytes(elements) >= LARGE_BYTES
