"""What exchanges and joins move between two nodes, and what becomes of it: snapshots, streams, mixes."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio
from numpy.typing import NDArray

from gossip.arithmetic.mixing import OuterStep, finite
from gossip.arithmetic.movement import Movement
from gossip.arithmetic.subsets import ALL, Subset
from gossip.codecs import Spread, get_codec, needs_spread
from gossip.config import Config
from gossip.effects import Adopt, Collect, Effect, Gather, Serve, Transfer
from gossip.peer import Peer
from gossip.wire.messages import Chunk
from node.faults import Faults
from node.transfers.boundary import Adoption, Boundary, Cut, Update, Vector, VectorPool
from node.transfers.gathers import GroupTransfers
from node.transfers.sessions import StreamSession, StreamSessions
from node.transfers.transfer import (
    INLINE_ELEMENTS,
    ComparingReceiver,
    DifferenceReceiver,
    Sender,
    SliceReceiver,
)
from node.transport.links import Link, Links

__all__ = ["Streams"]

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]

TIMED = 64  # durations kept: the median of so many is steady


@dataclass(frozen=True, slots=True)
class Mixed:
    """An exchange that both sides committed, on its way to the step boundary."""

    snapshot: Vector
    difference: Vector | None  # None: the snapshot itself comes back
    positions: Positions | None
    weight: float
    mass: float | None  # of a vector to merge
    plain: bool  # without outer momentum
    late: bool  # the same, and others were mixed with meanwhile
    generation: int


class Streams:
    """Of one node. All methods but ``mixer`` and tasks are synchronous and run in trio's thread. ``perform`` and
    ``spawn`` are the Runtime's."""

    def __init__(
        self, peer: Peer, config: Config, boundary: Boundary, pool: VectorPool, outer: OuterStep, links: Links,
        perform: Callable[[list[Effect]], None], spawn: Callable[..., None], faults: Faults,
    ) -> None:  # fmt: skip
        self.peer, self.config, self.boundary, self.pool, self.outer = peer, config, boundary, pool, outer
        self.links, self.perform, self.spawn, self.faults = links, perform, spawn, faults
        self.sessions = StreamSessions(pool)
        self.gathers = GroupTransfers(peer, config, pool, links, self.sessions, perform, self.beside)
        self.joining_vector: Floats | None = None
        self.durations: tuple[float, ...] = ()  # of the last exchanges; replaced, since the other thread reads it
        self.began: dict[int, float] = {}
        self.generation = 0  # of the weights: counts replacements from outside
        # As long as it may get: no snapshot is taken while an update is owed, so that it holds one for each session
        # that had one before, whose number Peer bounds.
        self.mix_in, self.mix_out = trio.open_memory_channel[Mixed | Adoption](math.inf)
        size = peer.elements
        self.spread = Spread(size) if needs_spread(config.codec) else None
        self.progress = Movement(size) if config.watches_movement else None
        self.part = ALL  # of the next mix of our own
        if self.progress is not None:  # from the weights as they are now, before the first step
            boundary.sampled = self.progress.places
            start = pool.take("weights")
            boundary.state.read(start.array)
            self.progress.since(start.array[:size])
            pool.give(start)

    @property
    def now(self) -> float:
        return trio.current_time()

    def failed(self, session: int, code: str) -> None:
        """A failure found while performing is reported after it, as a real one would be. What comes until then for a
        session that never began to stream is late, and no fault."""
        self.sessions.recent.append(session)
        self.spawn(self.report_failed, session, code)

    def beside(self, session: int, task: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run what is done for this session beside everything else; a fault in it fails the session alone."""
        self.spawn(self.contained, session, task, *args)

    async def contained(self, session: int, task: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            await task(*args)
        except Exception as error:
            self.faults.contain(error, "Work on one exchange", "that exchange has failed")
            self.perform(self.peer.failed(session, "fault", self.now))

    async def report_failed(self, session: int, code: str) -> None:
        await trio.lowlevel.checkpoint()
        self.perform(self.peer.failed(session, code, self.now))

    # -- an exchange ---------------------------------------------------------------------------------------------
    def snapshotted(self, session: int, vector: Vector, mass: float) -> None:
        """The copy that a session wanted is here; one that is over gives it back."""
        if not self.peer.concerns(session):
            if mass > 0 and self.config.conserves:  # it was to carry this away, and goes nowhere
                self.boundary.owe()
                self.mix_in.send_nowait(Mixed(vector, None, None, 0.0, mass, True, False, self.generation))
            else:
                self.pool.give(vector)
            return
        if session in self.sessions.snapshots:  # an earlier one does already
            self.pool.give(vector)
            return
        self.sessions.snapshots[session] = vector
        if not finite(vector.array):
            self.perform(self.peer.spoiled(session, self.now))
            return
        moved = math.nan
        if vector.cut is None:
            self.pool.keep(vector)
            moved = math.nan if self.progress is None else self.progress.since(vector.array)
        elif self.progress is not None:
            moved = self.progress.moved(vector.array[vector.elements :].copy())
        self.perform(self.peer.snapshotted(session, self.now, mass, moved))

    def recall(self, session: int) -> None:
        """The newest snapshot is this session's; where there is none that of the next boundary."""
        vector = self.pool.recall()
        if vector is None:
            self.boundary.want_snapshot(session, False)
            return
        self.boundary.cancel(session)
        self.sessions.snapshots[session] = vector
        self.spawn(self.report_recalled, session)

    async def report_recalled(self, session: int) -> None:
        await trio.lowlevel.checkpoint()
        self.perform(self.peer.recalled(session, self.now))

    def keep(self, vector: Vector, lives: int) -> None:
        """A copy of the weights for newcomers; not of weights that were replaced since, or are no numbers."""
        peer = self.peer
        if lives == self.boundary.lives and peer.ready and not peer.taking and finite(vector.array):
            self.pool.keep(vector)
        self.pool.give(vector)

    def cut(self, part: Subset, session: int) -> Cut | None:
        """Where the elements of a part lie; None for all of them."""
        expected = self.boundary.expected
        if expected is not None and expected.part == part:
            return expected
        positions = part.positions(self.peer.elements, session)
        return None if positions is None else Cut(part, positions)

    def expect(self, part: Subset) -> None:
        """The next mix of our own is of this part. Where it lies is drawn now, which takes as long as the copy that the
        training thread makes when the mix is due."""
        if part is not self.part:
            self.part = part
            self.boundary.expected = self.cut(part, 0)

    def transfer(self, effect: Transfer) -> None:
        snapshot = self.sessions.snapshots.get(effect.session)
        link = self.sessions.links.get(effect.session)
        if snapshot is None or link is None:
            self.failed(effect.session, "layout" if link is not None else "broken")
            return
        self.began[effect.session] = self.now
        session = StreamSession(effect.session, effect.partner, link)
        self.stream(session, effect)

    def gather(self, effect: Gather) -> None:
        self.began.setdefault(effect.session, self.now)
        if not self.gathers.gather(effect):
            self.failed(effect.session, "layout")

    def stream(self, session: StreamSession, effect: Transfer) -> None:
        """Send ours, receive theirs, or both: all of the vector, or those elements of it that the part has."""
        number, snapshot = effect.session, self.sessions.snapshots[effect.session]
        positions = None if snapshot.cut is None else snapshot.cut.positions
        ours = snapshot.array[: snapshot.elements]
        session.positions = positions
        codec = get_codec(effect.codec)
        spread = self.spread if positions is None else None
        if codec.needs_spread:
            if spread is None or not spread.known:  # as no bound would do
                self.failed(number, "overflow")
                return
            codec = codec.bound(spread)
        if effect.receives:
            session.difference = self.pool.take("weights", ours.size)
            session.receiver = DifferenceReceiver(
                number, ours, session.difference.array, codec, spread, plain=not effect.sends
            )
        if effect.sends:
            lease = self.pool.lease(self.sessions.snapshots[number])
            session.sender = Sender(number, ours, codec, self.config.chunk_elements, lease=lease)
        self.sessions.add(session)

    def place(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """The buffer for a chunk's body; None for a session that is over."""
        if self.gathers.expects(chunk.session):
            return self.gathers.place(link, chunk, body_bytes)
        return self.sessions.place(link, chunk, body_bytes)

    def arrived(self, link: Link, chunk: Chunk) -> None:
        """The body of a chunk is filled."""
        if self.gathers.expects(chunk.session):
            self.gathers.arrived(link, chunk)
            return
        session = self.sessions.table.get(chunk.session)
        if session is None or session.receiver is None:
            return
        session.moved_at = session.heard_at = self.now
        receiver = session.receiver
        if not receiver.arrived(chunk):
            self.perform(self.peer.failed(session.id, receiver.fault, self.now))
        elif receiver.done and isinstance(receiver, DifferenceReceiver):
            self.perform(self.peer.streamed(session.id, *StreamSessions.norms(session), self.now))

    def mix(
        self, number: int, weight: float, mass: float | None = None, late: bool = False, plain: bool = False
    ) -> None:
        """Both sides of a pair committed, or with ``mass`` a vector is ours to merge."""
        session = self.sessions.table.get(number)
        began = self.began.get(number)
        if began is not None:
            self.durations = (*self.durations, self.now - began)[-TIMED:]
        if session is not None and isinstance(session.receiver, DifferenceReceiver) and session.receiver.done:
            session.receiver.learn()
        taken = self.sessions.take_mix(number)
        if taken is None:
            return
        if taken[1] is None and mass is None:
            self.pool.give(taken[0])
            return
        positions = None if session is None else session.positions
        self.boundary.owe()
        self.mix_in.send_nowait(Mixed(*taken, positions, weight, mass, plain, late, self.generation))

    async def mixer(self) -> None:
        """One finished exchange after another becomes a shift for the step boundary. Weights to adopt wait behind those
        that came before them: a shift of the old weights must not land on the new."""
        async for job in self.mix_out:
            if isinstance(job, Adoption):
                self.take_over(job)
                continue
            try:
                await self.land(job)
            except Exception as error:
                self.faults.contain(error, "Mixing what an exchange brought", "this node does without it")
                self.boundary.excuse()

    def take_over(self, job: Adoption) -> None:
        if job.vector is self.joining_vector:
            if self.progress is not None:
                self.progress.since(job.vector[: self.progress.size])
            self.boundary.want_adoption(job)

    async def land(self, job: Mixed) -> None:
        try:
            if job.snapshot.array.size > INLINE_ELEMENTS:
                vector = await trio.to_thread.run_sync(self.shift, job)
            else:
                vector = self.shift(job)
        finally:
            self.pool.give(job.snapshot)
        if job.generation == self.generation:
            sample = None
            if self.progress is not None and job.mass is None:
                self.progress.added(vector.array, job.positions)
            elif self.progress is not None:
                sample = self.progress.sample(vector.array)
            self.boundary.want_shift(Update(vector, job.mass, sample, job.positions))
        else:
            self.pool.give(vector)
            self.boundary.excuse()

    def shift(self, job: Mixed) -> Vector:
        """The vector to add to the weights, all of them or at the job's positions, or with a mass the one to merge."""
        snapshot, difference = job.snapshot.array, job.difference
        if difference is None:
            back = self.pool.take("weights", snapshot.size)
            back.array[:] = snapshot  # the snapshot may be other sessions' as well
            return back
        if job.mass is not None:
            difference.array += snapshot[: difference.array.size]
            return difference
        positions = job.positions
        own = snapshot[: job.snapshot.elements]
        with self.boundary.outer_lock:
            self.outer.shift(own, difference.array, job.weight, positions, job.late, job.plain)
        return difference

    def replace_weights(self) -> None:
        """The weights were replaced from outside (a checkpoint): what was on its way to the old ones is dropped."""
        self.generation += 1
        self.joining_vector = None
        self.pool.forget()
        self.boundary.forget()

    def release(self, session: int) -> None:
        self.boundary.cancel(session)
        self.gathers.release(session)
        self.sessions.release(session)
        self.began.pop(session, None)

    # -- joining -------------------------------------------------------------------------------------------------
    def adopt(self, effect: Adopt) -> None:
        assert self.joining_vector is not None
        keys, scalars = effect.optimizer_keys, effect.optimizer_scalars
        self.mix_in.send_nowait(Adoption(self.joining_vector, keys, scalars, effect.trial))

    def collect(self, effect: Collect) -> None:
        if self.joining_vector is None or self.joining_vector.size != effect.size:
            self.joining_vector = np.zeros(effect.size, np.float32)
        link = self.links.newest(effect.partner)
        if link is None:
            self.failed(effect.session, "broken")
            return
        number, vector, peer = effect.session, self.joining_vector, self.peer
        receiver: SliceReceiver | ComparingReceiver
        if effect.compare:
            receiver = ComparingReceiver(
                number, vector, effect.start, effect.stop,
                lambda apart_sq, own_sq: self.perform(peer.compared(number, apart_sq, own_sq, self.now)),
            )  # fmt: skip
        else:
            receiver = SliceReceiver(
                number, vector, effect.start, effect.stop,
                lambda position: self.perform(peer.collected(number, position, self.now)),
            )  # fmt: skip
        self.sessions.links[effect.session] = link
        self.sessions.add(StreamSession(effect.session, effect.partner, link, receiver=receiver))

    def serve(self, effect: Serve) -> None:
        snapshot = self.sessions.snapshots.get(effect.session)
        link: Link | None = self.sessions.links.get(effect.session)
        if snapshot is None or link is None or effect.stop > snapshot.array.size:
            self.failed(effect.session, "broken")
            return
        piece: Any = snapshot.array[effect.start : effect.stop]
        lease = self.pool.lease(snapshot)
        sender = Sender(effect.session, piece, get_codec("fp32"), self.config.chunk_elements, lease=lease)
        self.sessions.add(StreamSession(effect.session, effect.partner, link, sender=sender))
