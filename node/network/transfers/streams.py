"""The driver of a node's averager: it moves vectors over links, and runs large arithmetic in a worker thread.

A *snapshot* is a copy of the weights that the training loop makes at a step boundary. A *job* is arithmetic on vectors.
A *session* is one exchange with a partner or a group, or one *piece* of the weights on its way from a *donor* to a
newcomer.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import trio

from gossip.arithmetic.mixing import is_finite
from gossip.arithmetic.outer_step import OuterStep
from gossip.averaging.averager import CHECKED_BY_DRIVER_ELEMENTS, Averager
from gossip.averaging.boundary import Boundary
from gossip.averaging.jobs import FunctionJob, Job
from gossip.averaging.streams import (
    ComparingReceiver,
    DifferenceReceiver,
    PieceReceiver,
    Receiver,
    Sender,
    ValuesReceiver,
)
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
    Release,
    Rename,
    SendMoments,
    SendPiece,
    Transfer,
)
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
from node.network.transfers.log import ExchangeLog
from node.network.transfers.transfer import LinkTransfer, LinkTransfers

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


class Streams:
    """One node's streams, which are the driver of its averager. ``log`` announces exchanges.

    ``perform`` performs the effects of a report to the peer, and ``spawn`` runs a task until the network side ends.
    Everything runs in trio's thread, but for :meth:`allocate_memory`, and for jobs on large vectors.
    """

    def __init__(
        self, peer: Peer, live: SharedModel, links: Links, log: ExchangeLog, faults: Faults,
        perform: Callable[[Iterable[Effect]], None], spawn: Callable[..., None],
    ) -> None:  # fmt: skip
        config, boundary, pool = peer.config, live.boundary, live.pool
        self.peer, self.config, self.pool, self.links, self.log = peer, config, pool, links, log
        self.perform, self.spawn, self.faults = perform, spawn, faults
        self.sketch_seed = secrets.randbits(64)
        self.averager: Averager[LinkTransfer] = Averager(
            peer, config, boundary, pool, live.outer, self, live.outer_lock
        )  # fmt: skip
        self.averager.layout = pool.state.layout
        self.transfers = LinkTransfers(self.averager.transfers)
        self.gathers = GroupTransfers(peer, config, self.averager, pool, links)
        # Durations of the last exchanges in seconds. The tuple is replaced, because the training thread reads it.
        self.durations: tuple[float, ...] = ()
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

    def new_transfer(self, session: int) -> LinkTransfer:
        return LinkTransfer(session, self.clock.current_time)

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

    def perform_one(self, effect: Effect) -> None:
        """Perform an effect of vectors. Those that move nothing over links go to the averager."""
        perform = PERFORM.get(type(effect))
        if perform is None:
            self.averager.perform(effect)
        else:
            perform(self, effect)

    # -- an exchange ---------------------------------------------------------------------------------------------
    def fail_later(self, session: int, code: str) -> None:
        """Report a failure that was found while an effect is performed, after all effects of the same decision.

        Meanwhile chunks of a session that never began to stream are late, and no fault.
        """
        self.transfers.expect_late_chunks(session)
        self.averager.report_failed_soon(session, code)

    def start(
        self, transfer: LinkTransfer, link: Link, sender: Sender | None, receiver: Receiver | None, large: bool = False
    ) -> None:
        """Start the streams of a transfer; lanes may wait for them."""
        transfer.start(link, sender, receiver, large)
        self.transfers.changed.unpark_all()

    def transfer(self, effect: Transfer) -> None:
        """Send our vector, receive the partner's, or both, over the link that the session is bound to."""
        number, transfer = effect.session, self.averager.open(effect.session)
        self.log.on_begun(transfer, (effect.partner,), effect.codec)
        # A text is the reason why the exchange cannot begin.
        link, vector = transfer.link, transfer.snapshot
        pair = "broken" if link is None else self.averager.begin_pair(effect)
        if link is None or vector is None or isinstance(pair, str):
            self.fail_later(number, str(pair))
            return
        receiver, sender = pair.create_receiver(), None
        if effect.sends:
            sender = self.make_sender(link, number, pair.ours, pair.codec, vector)
        self.start(transfer, link, sender, receiver, effect.sends and is_large(pair.codec, pair.elements))

    def make_sender(self, link: Link, number: int, values: Floats, codec: Codec, vector: Vector) -> Sender:
        """Return a stream that brings these values of ``vector`` to a partner."""
        elements = chunk_elements(self.config.chunk_elements, values.size, len(link.lanes))
        # Over the link alone, chunks are as short as its motion says. Lanes have bounds of their own.
        limit = None if len(link.lanes) else link.motion
        return Sender(number, values, codec, elements, lease=self.pool.lease(vector), limit=limit)

    def gather(self, effect: Gather) -> None:
        """Stream to the members of a group."""
        transfer = self.averager.open(effect.session)
        # Members that did not answer the invitation were counted before it began.
        self.log.on_offer_ended(effect.session, transfer, self.now)
        if not transfer.partners:
            others = (*effect.members[: effect.place], *effect.members[effect.place + 1 :])
            self.log.on_begun(transfer, others, effect.codec)
        group = self.averager.begin_group(effect)
        if isinstance(group, str):
            self.fail_later(effect.session, group)
        else:
            self.gathers.stream_to_members(transfer, group)

    def leave_out(self, effect: LeaveOut) -> None:
        group, transfer = self.averager.leave_out(effect), self.averager.transfers.get(effect.session)
        if group is not None and transfer is not None:
            self.gathers.go_on(transfer, group)

    def buffer_for(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return the buffer for a chunk's body, or None if the session has ended."""
        transfer = self.averager.transfers.get(chunk.session)
        if transfer is not None and self.gathers.is_group(transfer):
            return self.gathers.buffer_for(transfer, link, chunk, body_bytes)
        return self.transfers.buffer_for(link, chunk, body_bytes)

    async def buffer_once_agreed(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return the buffer for a lane's chunk, which may come before the messages about its session over the link."""
        with trio.move_on_after(self.config.stall_s):
            while not self.transfers.is_known(chunk.session):
                await self.transfers.changed.park()
        return self.transfers.buffer_for(link, chunk, body_bytes, over_lane=True)

    def on_body(self, link: Link, chunk: Chunk) -> None:
        """Handle a chunk whose body is in its buffer."""
        transfer = self.averager.transfers.get(chunk.session)
        if transfer is None:
            return
        if self.gathers.is_group(transfer):
            self.gathers.on_body(transfer, link, chunk)
        elif transfer.receiver is not None:
            transfer.on_body(chunk)
            self.on_progress(transfer)

    def inflow_of(self, chunk: Chunk) -> LinkTransfer | None:
        """Return the chunk's transfer if an I/O thread may receive the rest of its vector, else None."""
        transfer = self.averager.transfers.get(chunk.session)
        receiver = None if transfer is None else transfer.receiver  # A group has receivers of its own.
        is_inflow = isinstance(receiver, DifferenceReceiver) and is_large(receiver.codec, receiver.size)
        return transfer if is_inflow else None

    def on_inflow(self, chunk: Chunk) -> None:
        """Handle the progress of a vector that an I/O thread has received."""
        transfer = self.averager.transfers.get(chunk.session)
        if transfer is not None:
            self.on_progress(transfer)

    def on_piece_sent(self, session: int) -> None:
        """Handle the end of a vector that was sent: tell the peer, if it was a piece for a newcomer."""
        if self.peer.view.has_donation(session):
            self.perform(self.peer.on_served(session, self.now))

    def on_progress(self, transfer: LinkTransfer) -> None:
        """Handle the progress of a transfer: tell the peer or the averager how much has come."""
        receiver, number, peer = transfer.receiver, transfer.session, self.peer
        if receiver is None:
            return
        if receiver.fault:
            self.averager.report_failed(number, receiver.fault)
        elif isinstance(receiver, PieceReceiver):
            self.perform(peer.on_collected(number, receiver.start + receiver.position, self.now))
        elif isinstance(receiver, ValuesReceiver) and receiver.is_complete:
            self.averager.report_moments(number)
        elif isinstance(receiver, ComparingReceiver) and receiver.is_complete:
            self.perform(peer.on_compared(number, receiver.difference_sq, receiver.own_sq, self.now))
        elif isinstance(receiver, DifferenceReceiver) and receiver.is_complete and transfer.pair is not None:
            transfer.pair.on_received()
            self.averager.report_streamed(transfer.pair)

    def mix(self, effect: Mix) -> None:
        if self.averager.mix(effect):
            self.record_duration(effect.session)

    def merge(self, effect: Merge) -> None:
        if self.averager.merge(effect):
            self.record_duration(effect.session)

    def record_duration(self, session: int) -> None:
        """Record the time from the request for a snapshot to the mix."""
        transfer = self.averager.transfers[session]
        if transfer.requested_at is not None:
            transfer.seconds = self.now - transfer.requested_at
            self.durations = (*self.durations, transfer.seconds)[-DURATIONS:]

    def rename(self, effect: Rename) -> None:
        """Move the snapshot to the session of the next partner, and drop what still comes for this one."""
        transfer = self.averager.transfers.get(effect.session)
        self.transfers.expect_late_chunks(effect.session)
        self.averager.rename(effect)
        self.log.on_offer_ended(effect.session, transfer, self.now)

    def release(self, session: int) -> None:
        """End a session's streams and average, and announce its end."""
        transfer = self.averager.transfers.get(session)
        self.transfers.expect_late_chunks(session)
        if transfer is not None:
            transfer.end()
            if transfer.partners:
                self.log.on_ended(transfer, self.now)
        if transfer is None or not transfer.partners:
            self.log.on_offer_ended(session, transfer, self.now)
        self.averager.release(session)  # It gives the vectors back.

    # -- joining -------------------------------------------------------------------------------------------------
    def receive_piece(self, effect: ReceivePiece) -> None:
        """Receive a piece of the weights from a donor, and allocate the memory of exchanges with the first one."""
        is_first = self.averager.joining_vector is None
        vector, link = self.averager.joining_array(effect), self.links.newest(effect.partner)
        if is_first and self.allocates_ahead and not self.is_allocated:
            self.allocate_meanwhile()
        if link is None:
            self.fail_later(effect.session, "broken")
            return
        receiver_class = ComparingReceiver if effect.compare else PieceReceiver
        receiver = receiver_class(effect.session, vector, effect.start, effect.stop)
        self.start(self.averager.open(effect.session), link, None, receiver)

    def allocate_meanwhile(self) -> None:
        """Allocate the memory of exchanges while pieces of the weights arrive.

        The job that adopts the weights is queued after it, so that no step boundary finds the memory missing. If the
        pieces are collected in a vector of the pool, that is one of the two that exchanges need.
        """
        joining = self.averager.joining_vector

        def allocate() -> Exception | None:
            try:
                self.allocate_memory(1 if joining is not None and not joining.is_transient else 2)
            except Exception as error:
                return error
            return None

        def report(error: Exception | None) -> None:
            if error is not None:
                self.faults.contain(error, "Taking the memory of an exchange", "it is taken when it is needed")

        self.run_job(FunctionJob(self.peer.view.elements, allocate, report))

    def receive_moments(self, effect: ReceiveMoments) -> None:
        """Receive a partner's moments over the newest link."""
        vector, link, form = self.averager.begin_moments(effect), self.links.newest(effect.partner), effect.form
        if link is None:
            self.fail_later(effect.session, "broken")
            return
        receiver = ValuesReceiver(effect.session, vector, form.codec(effect.stop - effect.start))
        self.start(self.averager.open(effect.session), link, None, receiver)

    def send_moments(self, effect: SendMoments) -> None:
        """Send a copy of our moments to a member."""
        self.send_copy(effect, self.averager.snapshot_of(effect.session), effect.form.codec(effect.stop - effect.start))

    def send_piece(self, effect: SendPiece) -> None:
        """Send a piece of the weights to a newcomer."""
        self.send_copy(effect, self.averager.served_snapshot(effect), get_codec("fp32"))

    def send_copy(self, effect: SendPiece | SendMoments, copy: Vector | None, codec: Codec) -> None:
        """Send a copy of weights, or of moments, over the link that its session is bound to."""
        transfer = self.averager.transfers.get(effect.session)
        link = None if transfer is None else transfer.link
        if transfer is None or copy is None or link is None:
            self.fail_later(effect.session, "broken")
            return
        values = copy.array if isinstance(effect, SendMoments) else copy.piece(effect.start, effect.stop)
        sender = self.make_sender(link, effect.session, values, codec, copy)
        self.start(transfer, link, sender, None, is_large(codec, values.size))


PERFORM: dict[type, Callable[[Streams, Any], None]] = {
    Transfer: Streams.transfer, Gather: Streams.gather, LeaveOut: Streams.leave_out, Mix: Streams.mix,
    Merge: Streams.merge, Rename: Streams.rename, ReceivePiece: Streams.receive_piece,
    SendPiece: Streams.send_piece, ReceiveMoments: Streams.receive_moments, SendMoments: Streams.send_moments,
    Release: lambda streams, effect: streams.release(effect.session),
}  # fmt: skip
"""The effects that move vectors over links."""


def is_large(codec: Codec, elements: int) -> bool:
    """Return True if an encoded vector of this many elements is worth an I/O thread."""
    return codec.encoded_bytes(elements) >= LARGE_BYTES
