"""The driver of a node's averager: it moves vectors over links, and runs large arithmetic in a worker thread.

A *snapshot* is a copy of the weights that the training loop makes at a step boundary. A *job* is arithmetic on vectors.
A *session* is one exchange with a partner or a group, or one *piece* of the weights on its way from a *donor* to a
newcomer.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import trio

from gossip.arithmetic.mixing import OuterStep, is_finite
from gossip.averaging.averager import CHECKED_BY_DRIVER_ELEMENTS, Averager
from gossip.averaging.boundary import Boundary
from gossip.averaging.jobs import Job
from gossip.averaging.streams import ComparingReceiver, DifferenceReceiver, PieceReceiver, Sender, ValuesReceiver
from gossip.averaging.vectors import Floats, Vector
from gossip.averaging.visit import Visit
from gossip.codecs import Codec, get_codec
from gossip.effects import (
    Effect,
    Gather,
    LeaveOut,
    Merge,
    Mix,
    ReceiveMoments,
    ReceivePiece,
    Rename,
    SendMoments,
    SendPiece,
    Snapshot,
    Transfer,
)
from gossip.exchange.session import State as SessionState
from gossip.ids import PeerId
from gossip.peer import Peer
from gossip.wire.messages import Chunk
from node.faults import Faults
from node.links.link import Link
from node.links.pool import Links
from node.links.stripes import chunk_elements
from node.model.pool import VectorPool
from node.model.state import State
from node.network.hints import WakeEvent
from node.network.transfers.gathers import GroupTransfers
from node.network.transfers.log import ExchangeStats
from node.network.transfers.sessions import StreamSession, StreamSessions

__all__ = ["Streams"]

DURATIONS = 64  # Durations of exchanges that are kept, enough for a steady median.
LARGE_BYTES = 4 << 20  # The smallest vector for an I/O thread, which saves no CPU at 4 MB, and a quarter at 40 MB.
INLINE_ELEMENTS = 1 << 20  # Arithmetic on up to 4 MB takes 1 to 2 ms and runs inline, on more in a worker thread.


class SharedModel(Protocol):
    """The parts of a model that both threads of a node use: a :class:`node.loop.live.LiveModel`."""

    @property
    def state(self) -> State: ...
    @property
    def wake(self) -> WakeEvent: ...
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
    """One node's streams, which are the driver of its averager.

    Everything runs in trio's thread, but for :meth:`allocate_memory`, and for jobs on large vectors.
    """

    def __init__(self, peer: Peer, live: SharedModel, links: Links, tasks: Tasks) -> None:
        config, boundary, pool = peer.config, live.boundary, live.pool
        self.peer, self.config, self.pool, self.links = peer, config, pool, links
        self.perform, self.spawn, self.faults = tasks.perform, tasks.spawn, tasks.faults
        self.sketch_seed = secrets.randbits(64)
        self.averager = Averager(peer, config, boundary, pool, live.outer, self, live.outer_lock)
        self.averager.layout = pool.state.layout
        self.sessions = StreamSessions()
        self.gathers = GroupTransfers(peer, config, self.averager, pool, links, self.sessions)
        # Durations of the last exchanges in seconds. The tuple is replaced, because the training thread reads it.
        self.durations: tuple[float, ...] = ()
        self.requested_at: dict[int, float] = {}  # By session, the time at which it requested its snapshot.
        self.stats: dict[int, ExchangeStats] = {}  # By session, of the exchanges whose streams have begun.
        self.on_begun: Callable[[ExchangeStats], None] = lambda stats: None
        self.on_ended: Callable[[ExchangeStats], None] = lambda stats: None
        self.clock = trio.lowlevel.current_clock()
        # The queue needs no limit. No snapshot is taken while an update is pending, so it holds at most one update for
        # each session with an earlier snapshot, and Peer bounds their number.
        self.jobs_in, self.jobs_out = trio.open_memory_channel[Job](math.inf)
        self.queued_jobs = 0  # Jobs in the queue, and the one that runs.
        # True if all exchanges carry vectors of one length, and this length is large.
        has_one_length = config.part == "all" and not config.grouped
        self.allocates_ahead = has_one_length and is_large(get_codec("fp32"), peer.view.elements)
        self.is_allocated, self.allocation_lock = False, threading.Lock()  # The lock guards the flag.
        if not (peer.may_join or peer.view.ready):
            self.allocate_memory()
        movement = self.averager.movement
        if peer.view.ready:  # After a fault the memory exists already, and the loop is changing the weights.
            self.is_allocated = True
            if movement is not None:
                boundary.sampled_positions = movement.positions
        elif movement is not None:  # Sample the weights as they are before the first step.
            sample = np.empty(movement.positions.size, np.float32)
            pending = pool.state.begin_read_at(sample, movement.positions)
            while not (pending is None or pending.done()):
                time.sleep(0.001)  # A CUDA event can only be polled.
            if pending is not None:
                pending.widen()
            self.averager.start_movement_at(sample)

    def allocate_memory(self, vectors: int = 2) -> None:
        """Allocate the memory of exchanges, a snapshot and a difference, once. Any thread may call it.

        A node that starts with its own weights does this before its first step, and another one while it receives
        weights.
        """
        with self.allocation_lock:
            if self.allocates_ahead and not self.is_allocated:
                self.touch_vectors(vectors)
                self.is_allocated = True

    def touch_vectors(self, vectors: int = 2) -> None:
        """Write to fresh vectors, so that no step boundary has their page faults, which cost four times a copy."""
        for vector in [self.pool.take() for _ in range(vectors)]:
            vector.array.fill(0.0)
            self.pool.give(vector)

    # -- calls of the averager (Driver) ------------------------------------------------------------------------------
    @property
    def now(self) -> float:
        return self.clock.current_time()

    def call_soon(self, report: Callable[..., None], *arguments: object) -> None:
        """Call ``report`` when the effects of the present decision are performed."""
        self.spawn(self.report_soon, report, *arguments)

    async def report_soon(self, report: Callable[..., None], *arguments: object) -> None:
        await trio.lowlevel.checkpoint()
        report(*arguments)

    def run_job(self, job: Job) -> None:
        """Run a job inline if it is small and none is queued; otherwise queue it."""
        if self.queued_jobs or not self.is_inline(job):
            self.queued_jobs += 1
            self.jobs_in.send_nowait(job)
            return
        try:
            job.run()
            job.finish()
        except Exception as error:
            self.on_job_failed(job, error)

    def is_inline(self, job: Job) -> bool:
        """Return True if a job runs in trio's thread: a small one, which locks no pages, as that takes long."""
        locks = self.pool.state.locks and job.allocates
        return job.elements <= (VectorPool.MAPPED_ELEMENTS if locks else INLINE_ELEMENTS)

    async def run_jobs(self) -> None:
        """Run the queued jobs in order, because weights to adopt must wait for the updates before them."""
        async for job in self.jobs_out:
            try:
                if self.is_inline(job):
                    job.run()
                else:
                    await trio.to_thread.run_sync(job.run)
                job.finish()
            except Exception as error:
                self.on_job_failed(job, error)
            finally:
                self.queued_jobs -= 1

    def on_job_failed(self, job: Job, error: Exception) -> None:
        self.faults.contain(error, "Mixing what an exchange brought", "this node does without it")
        job.fail()

    def await_copies(self, visit: Visit, report: Callable[[Visit], None]) -> None:
        """Report a visit once its copies are done, their values are float32, and large vectors are checked."""
        is_done = all(copy.done() and not copy.is_narrow for copy in visit.copies)  # Narrow: still half precision.
        if is_done and not self.vectors_to_check(visit):
            report(visit)
        else:
            self.spawn(self.wait_for_copies, visit, report)

    async def wait_for_copies(self, visit: Visit, report: Callable[[Visit], None]) -> None:
        """Wait for the copies of a visit, then widen and check them in a worker thread, and report the visit."""
        while not all(copy.done() for copy in visit.copies):  # noqa: ASYNC110 - a CUDA event can only be polled
            await trio.sleep(0.001)
        for copy in visit.copies:
            if copy.is_narrow:
                await trio.to_thread.run_sync(copy.widen)
        for vector in self.vectors_to_check(visit):
            vector.is_finite = await trio.to_thread.run_sync(is_finite, vector.array)
        report(visit)

    @staticmethod
    def vectors_to_check(visit: Visit) -> list[Vector]:
        """Return the large vectors whose copies, which are done, did not check for finite values."""
        visit.record_checks()
        return visit.unchecked_vectors(CHECKED_BY_DRIVER_ELEMENTS)

    # -- an exchange ---------------------------------------------------------------------------------------------
    def fail_later(self, session: int, code: str) -> None:
        """Report a failure that was found while an effect is performed, after all effects of the same decision.

        Meanwhile chunks of a session that never began to stream are late, and no fault.
        """
        self.sessions.expect_late_chunks(session)
        self.averager.report_failed_soon(session, code)

    def snapshot(self, effect: Snapshot) -> None:
        """Request a snapshot. The duration of an exchange begins here, as in the simulator."""
        self.requested_at[effect.session] = self.now
        self.averager.request_snapshot(effect)

    def transfer(self, effect: Transfer) -> None:
        """Send our vector, receive the partner's, or both, over the link that the session is bound to."""
        number, link = effect.session, self.sessions.links.get(effect.session)
        self.begin_stats(number, (effect.partner,), effect.codec)
        # A text is the reason why the exchange cannot begin.
        pair = "broken" if link is None else self.averager.begin_pair(effect)
        if link is None or isinstance(pair, str):
            self.fail_later(number, str(pair))
            return
        session = StreamSession(number, effect.partner, link, receiver=pair.create_receiver())
        if effect.sends:
            session.sender = self.make_sender(link, number, pair.ours, pair.codec, self.averager.snapshots[number])
        self.sessions.add(session, effect.sends and is_large(pair.codec, pair.elements))

    def make_sender(self, link: Link, number: int, values: Floats, codec: Codec, vector: Vector) -> Sender:
        """Return a stream that brings these values of ``vector`` to a partner."""
        elements = chunk_elements(self.config.chunk_elements, values.size, len(link.lanes))
        # Over the link alone, chunks are as short as its motion says. Lanes have bounds of their own.
        limit = None if len(link.lanes) else link.motion
        return Sender(number, values, codec, elements, lease=self.pool.lease(vector), limit=limit)

    def gather(self, effect: Gather) -> None:
        """Stream to the members of a group."""
        if effect.session not in self.stats:
            others = (*effect.members[: effect.place], *effect.members[effect.place + 1 :])
            self.begin_stats(effect.session, others, effect.codec)
        group = self.averager.begin_group(effect)
        if isinstance(group, str):
            self.fail_later(effect.session, group)
        else:
            self.gathers.stream_to_members(group)

    def leave_out(self, effect: LeaveOut) -> None:
        self.averager.leave_out(effect)
        self.gathers.go_on(effect.session)

    def begin_stats(self, session: int, partners: tuple[PeerId, ...], codec: str) -> None:
        """Begin the statistics of an exchange, on which all sides have agreed."""
        exchange, partner_ids = self.peer.exchanges.table.get(session), tuple(map(bytes.hex, partners))
        self.stats[session] = ExchangeStats(session, partner_ids, codec, exchange)
        self.on_begun(self.stats[session])

    def buffer_for(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return the buffer for a chunk's body, or None if the session has ended."""
        if self.gathers.is_group(chunk.session):
            return self.gathers.buffer_for(link, chunk, body_bytes)
        return self.sessions.buffer_for(link, chunk, body_bytes)

    async def buffer_once_agreed(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return the buffer for a lane's chunk, which may come before the messages about its session over the link."""
        with trio.move_on_after(self.config.stall_s):
            while not self.sessions.is_known(chunk.session):
                await self.sessions.session_changed.park()
        return self.sessions.buffer_for(link, chunk, body_bytes, over_lane=True)

    def on_body(self, link: Link, chunk: Chunk) -> None:
        """Handle a chunk whose body is in its buffer."""
        if self.gathers.is_group(chunk.session):
            self.gathers.on_body(link, chunk)
            return
        session = self.sessions.table.get(chunk.session)
        if session is not None and session.receiver is not None:
            session.on_body(chunk)
            self.on_progress(chunk)

    def inflow_of(self, chunk: Chunk) -> StreamSession | None:
        """Return the chunk's session if an I/O thread may receive the rest of its vector, else None."""
        if self.gathers.is_group(chunk.session):
            return None
        session = self.sessions.table.get(chunk.session)
        receiver = None if session is None else session.receiver
        return session if isinstance(receiver, DifferenceReceiver) and is_large(receiver.codec, receiver.size) else None

    def on_piece_sent(self, session: int) -> None:
        """Handle the end of a vector that was sent: tell the peer, if it was a piece for a newcomer."""
        if self.peer.view.has_donation(session):
            self.perform(self.peer.on_served(session, self.now))

    def on_progress(self, chunk: Chunk) -> None:
        """Handle the progress of a chunk's session: tell the peer or the averager how much has come."""
        session = self.sessions.table.get(chunk.session)
        if session is None or session.receiver is None:
            return
        receiver, number, peer = session.receiver, session.id, self.peer
        if receiver.fault:
            self.averager.report_failed(number, receiver.fault)
        elif isinstance(receiver, PieceReceiver):
            self.perform(peer.on_collected(number, receiver.start + receiver.position, self.now))
        elif isinstance(receiver, ValuesReceiver) and receiver.is_complete:
            self.averager.report_moments(number)
        elif isinstance(receiver, ComparingReceiver) and receiver.is_complete:
            self.perform(peer.on_compared(number, receiver.difference_sq, receiver.own_sq, self.now))
        elif isinstance(receiver, DifferenceReceiver) and receiver.is_complete:
            pair = self.averager.pairs[number]
            pair.on_received()
            self.averager.report_streamed(pair)

    def mix(self, effect: Mix) -> None:
        if self.averager.mix(effect):
            self.record_duration(effect.session)

    def merge(self, effect: Merge) -> None:
        if self.averager.merge(effect):
            self.record_duration(effect.session)

    def record_duration(self, session: int) -> None:
        """Record the time from the request for a snapshot to the mix."""
        requested_at, stats = self.requested_at.get(session), self.stats.get(session)
        if requested_at is not None:
            duration_s = self.now - requested_at
            self.durations = (*self.durations, duration_s)[-DURATIONS:]
            if stats is not None:
                stats.seconds = duration_s

    def rename(self, effect: Rename) -> None:
        self.sessions.rename(effect.session)
        self.averager.rename(effect)
        requested_at = self.requested_at.pop(effect.session, None)
        if requested_at is not None:
            self.requested_at[effect.to] = requested_at

    def release(self, session: int) -> None:
        """End a session's streams and average, and complete its statistics."""
        stats = self.stats.pop(session, None)
        if stats is not None:
            self.complete_stats(stats)
        self.gathers.release(session)
        self.sessions.release(session)  # From here on only a sender uses the vectors; it has a lease.
        self.averager.release(session)  # It gives the vectors back.
        self.requested_at.pop(session, None)
        if stats is not None:
            self.on_ended(stats)

    def complete_stats(self, stats: ExchangeStats) -> None:
        """Complete an exchange's statistics, while its streams and averages still exist."""
        number, distance_sq = stats.session, math.nan
        stats.has_succeeded = stats.exchange is not None and stats.exchange.state is SessionState.DONE
        if not stats.seconds and number in self.requested_at:
            stats.seconds = self.now - self.requested_at[number]
        stream, pair = self.sessions.table.get(number), self.averager.pairs.get(number)
        if stream is not None and stream.sender is not None and stream.sender.position:
            stats.bytes_sent = stream.sender.codec.encoded_bytes(stream.sender.position)
        if stream is not None and stream.receiver is not None and stream.receiver.elements_arrived:
            stats.bytes_received = stream.receiver.codec.encoded_bytes(stream.receiver.elements_arrived)
        if pair is not None and pair.is_complete:
            scale = 1.0 if pair.positions is None else self.peer.view.elements / pair.elements
            distance_sq = pair.difference_sq * scale
        group = None if pair is not None else self.averager.groups.get(number)
        if group is not None:
            sent, received = self.gathers.moved_elements(number)
            stats.bytes_sent = group.codec.encoded_bytes(sent) if sent else 0
            stats.bytes_received = group.codec.encoded_bytes(received) if received else 0
            distance_sq = group.difference_sq
        stats.distance = math.sqrt(distance_sq) if math.isfinite(distance_sq) else None

    def busy_links(self) -> set[Link]:
        """Return the links that active transfers use."""
        return {*self.sessions.links.values(), *self.gathers.used_links()}

    # -- joining -------------------------------------------------------------------------------------------------
    def receive_piece(self, effect: ReceivePiece) -> None:
        """Receive a piece of the weights from a donor, and allocate the memory of exchanges with the first one."""
        is_first = self.averager.joining_vector is None
        vector, link = self.averager.joining_array(effect), self.links.newest(effect.partner)
        if is_first and self.allocates_ahead and not self.is_allocated:
            self.run_job(MemoryAllocation(self))
        if link is None:
            self.fail_later(effect.session, "broken")
            return
        receiver_class = ComparingReceiver if effect.compare else PieceReceiver
        receiver = receiver_class(effect.session, vector, effect.start, effect.stop)
        self.sessions.links[effect.session] = link
        self.sessions.add(StreamSession(effect.session, effect.partner, link, receiver=receiver))

    def receive_moments(self, effect: ReceiveMoments) -> None:
        """Receive a partner's moments over the newest link."""
        vector, link, form = self.averager.begin_moments(effect), self.links.newest(effect.partner), effect.form
        if link is None:
            self.fail_later(effect.session, "broken")
            return
        receiver = ValuesReceiver(effect.session, vector, form.codec(effect.stop - effect.start))
        self.sessions.links[effect.session] = link
        self.sessions.add(StreamSession(effect.session, effect.partner, link, receiver=receiver))

    def send_moments(self, effect: SendMoments) -> None:
        """Send a copy of our moments to a member."""
        snapshot, link = self.averager.snapshots.get(effect.session), self.sessions.links.get(effect.session)
        if snapshot is None or link is None:
            self.fail_later(effect.session, "broken")
            return
        codec = effect.form.codec(effect.stop - effect.start)
        sender = self.make_sender(link, effect.session, snapshot.array, codec, snapshot)
        self.sessions.add(StreamSession(effect.session, effect.partner, link, sender=sender))

    def send_piece(self, effect: SendPiece) -> None:
        """Send a piece of the weights to a newcomer."""
        snapshot, link = self.averager.served_snapshot(effect), self.sessions.links.get(effect.session)
        if snapshot is None or link is None:
            self.fail_later(effect.session, "broken")
            return
        piece = snapshot.piece(effect.start, effect.stop)
        sender = self.make_sender(link, effect.session, piece, get_codec("fp32"), snapshot)
        session = StreamSession(effect.session, effect.partner, link, sender=sender)
        self.sessions.add(session, is_large(sender.codec, piece.size))


class MemoryAllocation(Job):
    """A job that allocates the memory of exchanges while pieces of the weights arrive.

    The job that adopts the weights is queued after it, so that no step boundary finds the memory missing. If the pieces
    are collected in a vector of the pool, that is one of the two that exchanges need.
    """

    def __init__(self, streams: Streams) -> None:
        joining = streams.averager.joining_vector
        self.streams, self.elements = streams, streams.peer.view.elements
        self.vectors = 1 if joining is not None and not joining.is_transient else 2
        self.error: Exception | None = None  # A failure of :meth:`run`, which :meth:`finish` reports.

    def run(self) -> None:
        try:
            self.streams.allocate_memory(self.vectors)
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        if self.error is not None:
            consequence = "it is taken when it is needed"
            self.streams.faults.contain(self.error, "Taking the memory of an exchange", consequence)

    def fail(self) -> None:
        """Do nothing, because nothing waits for this job."""


def is_large(codec: Codec, elements: int) -> bool:
    """Return True if an encoded vector of this many elements is worth an I/O thread."""
    return codec.encoded_bytes(elements) >= LARGE_BYTES
