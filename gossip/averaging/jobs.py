"""Jobs of an averager: arithmetic on whole vectors, which a driver may run in another thread; and what they work on.

Each ends where effects are performed, in the order in which the averager gave them. :mod:`gossip.effects` defines the
terms. A *push* sends a snapshot one way, with a *mass*: its weight in the swarm's mean (:mod:`gossip.config.mixings`).
The mass is taken from the model, and both come back if the push fails.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from gossip.arithmetic.correction import Lesson
from gossip.arithmetic.distances import furthest_tensor
from gossip.arithmetic.layout import Layout
from gossip.arithmetic.mixing import join_weight
from gossip.arithmetic.movement import Movement
from gossip.arithmetic.outer_step import OuterStep
from gossip.arithmetic.sketch import Sketcher
from gossip.arithmetic.subsets import ALL, lasting_parts
from gossip.averaging.boundary import Boundary
from gossip.averaging.transfer import VectorTransfer
from gossip.averaging.vectors import Floats, Positions, Statistics, Vector, Vectors, count_weights
from gossip.averaging.visit import Update, Visit
from gossip.codecs import Spread, needs_spread
from gossip.config import Config
from gossip.effects import Effect, HashFrozen, Merge, Mix, Rename
from gossip.peer import Peer

# Elements of the frozen weights that are hashed at once, in some 10 ms. Mixes wait for one block and not for all of a
# large base. A block is longer than any job that a driver runs in its own thread.
BLOCK_ELEMENTS = 2 << 20
LAST_SETTLEMENTS = 4  # Settlements whose furthest tensors are remembered: a node's last partners, most of them unlike.
AnyTransfer = TypeVar("AnyTransfer", bound=VectorTransfer)
NewTransfer = TypeVar("NewTransfer", bound=VectorTransfer, covariant=True)
Result = TypeVar("Result")


class Job(Protocol):
    """Arithmetic on whole vectors, of ``elements`` elements in all. Implementations inherit from this class.

    ``run`` touches only its own vectors and may run in any thread. ``finish`` follows where effects are performed, in
    the order in which jobs were given. ``fail`` replaces both if either raises an error.
    """

    elements: int

    @property
    def allocates(self) -> bool:
        """Return True if ``run`` allocates a vector, which may take much longer than arithmetic on it."""
        return False

    def run(self) -> None: ...
    def finish(self) -> None: ...
    def fail(self) -> None: ...


class FunctionJob(Job, Generic[Result]):
    """A job of two functions: the first may run in any thread, and the second gets its result, where jobs finish."""

    def __init__(
        self, elements: int, work: Callable[[], Result], use: Callable[[Result], None],
        on_failed: Callable[[], None] = lambda: None, takes_memory: bool = False,
    ) -> None:  # fmt: skip
        self.elements, self.work, self.use, self.on_failed = elements, work, use, on_failed
        self.takes_memory, self.result = takes_memory, list[Result]()

    @property
    def allocates(self) -> bool:
        return self.takes_memory

    def run(self) -> None:
        self.result.append(self.work())

    def finish(self) -> None:
        self.use(self.result.pop())

    def fail(self) -> None:
        self.on_failed()


class Driver(Protocol[NewTransfer]):
    """The services of a driver that an averager and its jobs use."""

    @property
    def sketch_seed(self) -> int:
        """The seed of the sketches of differences: 64 random bits that no other peer knows."""

    @property
    def now(self) -> float: ...
    def new_transfer(self, session: int) -> NewTransfer:
        """Return a transfer, with room for what the driver holds for the session."""

    def perform(self, effects: list[Effect], /) -> None: ...
    def call_soon(self, report: Callable[..., None], *arguments: object) -> None:
        """Call ``report`` after the effects that are being performed."""

    def run_job(self, job: Job) -> None:
        """Run the job, here or in another thread, and finish it here in the order of jobs."""

    def await_copies(self, visit: Visit, report: Callable[[Visit], None]) -> None:
        """Call ``report`` with the visit once its copies are done, widened, and if large checked for finite values."""


class AveragerState(Generic[AnyTransfer]):
    """The parts of an :class:`gossip.averaging.averager.Averager`, and what it remembers between its calls."""

    def __init__(
        self, peer: Peer, config: Config, boundary: Boundary, vectors: Vectors, outer_step: OuterStep,
        driver: Driver[AnyTransfer], lock: AbstractContextManager[object] | None = None,
    ) -> None:  # fmt: skip
        self.peer, self.config, self.boundary, self.vectors = peer, config, boundary, vectors
        self.outer_step, self.driver = outer_step, driver
        self.lock: AbstractContextManager[object] = nullcontext() if lock is None else lock
        self.transfers: dict[int, AnyTransfer] = {}  # By session.
        self.joining_vector: Vector | None = None  # State of another run, as far as it has arrived.
        self.layout: Layout | None = None  # The names of the tensors; None if the driver has none.
        # The furthest tensors in the last settlements: the relative distance, and the name.
        self.furthest: deque[tuple[float, str]] = deque(maxlen=LAST_SETTLEMENTS)
        self.outside_replacements = 0  # Number of times that the weights were replaced from outside (a checkpoint).
        # Number of the visit that took the newest snapshot whose local steps the outer step has counted (MixJob).
        self.counted_visit = 0
        self.hash_job: HashFrozenJob | None = None  # The hash of the frozen weights in progress.
        self.movement = Movement(outer_step.parameters) if config.finds_radius else None
        self.warnings_shown: set[str] = set()  # Sentences about failed copies that the user has seen.
        self.next_part = ALL  # Part of our next mix.
        size = peer.view.elements
        parts = lasting_parts(config.part, size) if needs_spread(config.codec_name) else []
        # The distance to other members in each part, for codecs that need a bound on it.
        self.spreads = {part: Spread(part.elements(size)) for part in parts}
        self.sketcher = Sketcher(size, driver.sketch_seed) if config.limits_directions else None

    # -- transfers -----------------------------------------------------------------------------------------------
    def open(self, session: int) -> AnyTransfer:
        """Return the session's transfer, a new one if it has none."""
        transfer = self.transfers.get(session)
        if transfer is None:
            transfer = self.transfers[session] = self.driver.new_transfer(session)
        return transfer

    def rename(self, effect: Rename) -> None:
        """Move a snapshot to the session of the next partner that is asked, or of the exchange that it serves now."""
        transfer = self.transfers.pop(effect.session, None)
        if transfer is not None:
            self.open(effect.to).continue_from(transfer)

    def release(self, session: int) -> None:
        """Return a session's vectors to the pool, and forget the session and its request."""
        self.boundary.cancel_snapshot(session)
        transfer = self.transfers.pop(session, None)
        if transfer is not None:
            transfer.give_vectors(self.vectors)

    def snapshot_of(self, session: int) -> Vector | None:
        """Return the session's snapshot, None if it has none."""
        transfer = self.transfers.get(session)
        return None if transfer is None else transfer.snapshot

    # -- jobs ----------------------------------------------------------------------------------------------------
    def start_mixing(self, job: MixJob) -> None:
        """Announce the update that the job will make, and run the job."""
        self.boundary.begin_update()
        if job.mass is None and not self.outer_step.is_plain:  # Pushes and plain means count no local steps.
            job.count_local_steps_once()
        self.driver.run_job(job)

    def run_for(
        self, session: int, elements: int, work: Callable[[], Result], use: Callable[[Result], None],
        takes_memory: bool = False,
    ) -> None:  # fmt: skip
        """Run a task of a session, which fails with it."""
        self.driver.run_job(
            FunctionJob(elements, work, use, lambda: self.report_failed(session, "fault"), takes_memory)
        )

    def report_failed(self, session: int, code: str) -> None:
        self.driver.perform(self.peer.on_failed(session, code, self.driver.now))


class MixJob(Job):
    """A job that turns a finished exchange, or a failed push of ours, into an update of the model.

    ``run`` computes the update in the memory of the difference. It learns the correction from it first.
    """

    def __init__(
        self, averager: AveragerState[Any], snapshot: Vector, difference: Vector | None, positions: Positions | None,
        effect: Mix | Merge, own_sq: float = 0.0,
    ) -> None:  # fmt: skip
        """Prepare a mix.

        Args:
            averager: What the job works on.
            snapshot: Our vector as it was exchanged or pushed.
            difference: The partner's vector minus ours, or a group's mean minus ours; None for a failed push of ours,
                whose snapshot is the result.
            positions: The positions of the elements of both in the model; None for all.
            effect: The decision of the peer.
            own_sq: Squared norm of our vector as the partner decodes it.
        """
        self.averager, self.snapshot, self.difference, self.positions = averager, snapshot, difference, positions
        mix = effect if isinstance(effect, Mix) else Mix(effect.session, 0.0)  # A Merge uses none of a mix's figures.
        self.weight, self.plain, self.joins = mix.weight, mix.plain, mix.joins
        self.is_settlement = False  # True if the furthest tensor is to be found.
        self.credit, self.interval_steps = mix.credit, mix.interval_steps
        self.mass = effect.mass if isinstance(effect, Merge) else None
        self.own_sq = own_sq
        self.is_late = False  # A mix with a newer snapshot has been counted (count_local_steps_once).
        self.added_since: Vector | None = None  # As in Vector: what other mixes have added after the snapshot.
        # The ``added_since`` of newer snapshots, which lack this mix: run() adds its update. True: the vector is not
        # initialised yet, and run() sets it to the update.
        self.newer_sums: list[tuple[Vector, bool]] = []
        self.outside_replacements = averager.outside_replacements
        self.elements = snapshot.array.size
        # Elements of the difference that are one. The partner's statistics themselves follow.
        self.weights = count_weights(snapshot, averager.outer_step.parameters)
        self.statistics: Statistics | None = None  # The partner's, once run() has taken them out of the difference.
        self.result: Vector | None = None  # The update: added as a whole or at the positions, or merged with a mass.
        # True: run() leaves the weight out, and the boundary applies it while it adds, which saves a pass.
        can_leave = averager.outer_step.is_plain and averager.boundary.adds_weighted
        self.leaves_weight = can_leave and self.mass is None and positions is None

    def count_local_steps_once(self) -> None:
        """Let the outer step count the same local steps in only one of several overlapping mixes.

        Snapshots of overlapping exchanges share some local steps. A mix whose snapshot is older than the newest counted
        one is late, and counts no steps. Snapshots that are as new, and not mixed yet, lack what this mix adds: it goes
        into their ``added_since``.
        """
        averager, snapshot = self.averager, self.snapshot
        self.added_since, self.is_late = snapshot.added_since, snapshot.visit_number < averager.counted_visit
        averager.counted_visit = max(averager.counted_visit, snapshot.visit_number)
        newer_snapshots = {  # By id, since sessions may share a snapshot.
            id(newer): newer for session, transfer in averager.transfers.items()
            if (newer := transfer.snapshot) is not None
            and newer.visit_number >= averager.counted_visit and newer.part == snapshot.part
            and not (newer.is_transient or averager.peer.view.has_donation(session))
        }  # fmt: skip
        for newer in newer_snapshots.values():
            is_uninitialised = newer.added_since is None
            if newer.added_since is None:
                newer.added_since = averager.vectors.take_scratch(snapshot.elements)
            newer.added_since.users += 1
            self.newer_sums.append((newer.added_since, is_uninitialised))

    @property
    def allocates(self) -> bool:
        """Return True for a failed push, which copies the snapshot, and for the first lesson, for the pull's vector."""
        correction = self.averager.outer_step.correction
        return self.difference is None or (correction is not None and correction.pull is None)

    def run(self) -> None:
        averager, snapshot, difference = self.averager, self.snapshot.array, self.difference
        if difference is None:  # A failed push of ours: our vector comes back.
            self.result = averager.vectors.take(snapshot.size)
            self.result.array[:] = snapshot  # A copy, since other sessions may use the snapshot too.
            return
        self.result = difference
        if self.mass is not None:  # A push: the partner's vector itself is merged.
            difference.array[: self.weights] += snapshot[: self.weights]  # Statistics are the partner's values already.
            return
        if self.is_settlement and averager.layout is not None:
            averager.furthest.append(furthest_tensor(averager.layout, snapshot, difference.array))
        if self.joins:
            self.weight = join_weight(difference.array, self.weight)
        self.take_statistics(difference.array)
        lesson = Lesson(self.credit, self.own_sq, self.interval_steps)
        with averager.lock:
            if self.is_current and self.leaves_weight:
                averager.outer_step.learn(difference.array, self.weight, lesson)
            elif self.is_current:
                averager.outer_step.shift(
                    snapshot[: self.snapshot.elements],  # Without the sampled elements that follow a cut.
                    difference.array, self.weight, self.positions, self.is_late, self.plain,
                    None if self.added_since is None else self.added_since.array,
                    lesson if self.positions is None else None,
                )  # fmt: skip
        if self.leaves_weight:
            return
        if self.positions is None:  # In a settlement statistics are weights, which the outer step leaves alone.
            difference.array[averager.outer_step.parameters : self.weights] *= np.float32(self.weight)
        for newer_sum, is_uninitialised in self.newer_sums:
            if is_uninitialised:
                newer_sum.array[:] = difference.array
            else:
                newer_sum.array += difference.array

    @property
    def is_current(self) -> bool:
        """Return False if the weights were replaced from outside since the exchange: the outer step has begun anew."""
        return self.outside_replacements == self.averager.outside_replacements

    def finish(self) -> None:
        """Deliver the update to the boundary, or drop it if the weights were replaced from outside."""
        averager, result = self.averager, self.result
        averager.vectors.give(self.snapshot)
        self.release_newer_sums()
        assert result is not None
        if not self.is_current:
            averager.vectors.give(result)
            if self.statistics is not None:
                averager.vectors.give(self.statistics.vector)
            averager.boundary.abort_update()
            return
        weight = self.weight if self.leaves_weight else 1.0
        sample, movement = None, averager.movement
        if movement is not None and self.mass is None:
            movement.add_shift(result.array, self.positions, weight)
        elif movement is not None:
            sample = movement.sample(result.array)
        averager.boundary.deliver_update(Update(result, self.mass, sample, self.positions, weight, self.statistics))

    def take_statistics(self, difference: Floats) -> None:
        """Take the partner's statistics, which are mixed in another way, out of the difference, and leave zeros."""
        averager, positions = self.averager, self.positions
        start = averager.outer_step.parameters
        values = difference[self.weights : self.snapshot.elements]
        if not values.size:
            return
        vector = averager.vectors.take(averager.boundary.model.size() - start)  # In the memory of copies to a device.
        if positions is None:
            vector.array[:] = values
        else:
            vector.array.fill(np.nan)
            vector.array[positions[positions.size - values.size :] - start] = values
        values.fill(0.0)
        self.statistics = Statistics(vector, self.weight, start, moves_all=self.plain)

    def fail(self) -> None:
        """Continue without the mix. Its vectors are not reused, because another thread may still write to them."""
        for newer_sum, is_uninitialised in self.newer_sums:
            if is_uninitialised:
                newer_sum.array.fill(0.0)
        self.release_newer_sums()
        self.averager.boundary.abort_update()

    def release_newer_sums(self) -> None:
        for newer_sum, _ in self.newer_sums:
            self.averager.vectors.give(newer_sum)
        self.newer_sums = []


class HashFrozenJob(Job):
    """A job that hashes a block of the frozen weights, and then queues itself for the next one."""

    def __init__(self, averager: AveragerState[Any], effect: HashFrozen) -> None:
        self.averager, self.start, self.stop = averager, effect.start, effect.stop
        self.elements = min(BLOCK_ELEMENTS, self.stop - self.start)
        self.block = np.empty(self.elements, "<f4")
        self.hash = hashlib.blake2b(digest_size=32)

    def run(self) -> None:
        block = self.block[: self.stop - self.start]
        self.averager.boundary.model.read_frozen(block, self.start)
        self.hash.update(block.data)  # Other threads run meanwhile, since it releases the interpreter's lock.
        self.start += block.size

    def finish(self) -> None:
        if self.start < self.stop and self.averager.hash_job is self:
            self.averager.driver.run_job(self)
        else:
            self.averager.driver.call_soon(self.report_digest, self.hash.digest())

    def fail(self) -> None:
        self.averager.driver.call_soon(self.report_digest, b"")

    def report_digest(self, digest: bytes) -> None:
        """Report the hash, which is empty if it could not be computed."""
        averager = self.averager
        if averager.hash_job is self:  # Otherwise the weights were replaced meanwhile, and are hashed again.
            averager.hash_job = None
            averager.driver.perform(averager.peer.on_frozen_hashed(digest, averager.driver.now))
