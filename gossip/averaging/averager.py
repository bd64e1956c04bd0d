"""The averager of one node: it performs the effects on vectors that a peer decides, and reports the results to it.

It holds snapshots, averages in progress, the outer step, statistics of movement and distance, and the weights that a
newcomer collects. It has no clock, thread or socket: a :class:`Driver` provides them and moves the bytes.
:mod:`gossip.effects` defines the terms. A *part* is the elements that one exchange mixes, and a :class:`Cut` is a part
with its positions. A *visit* is one call of :meth:`Boundary.visit` by the training loop.

Methods called ``request_...`` ask the step boundary for a copy; :mod:`gossip.averaging.delivery` handles what comes
back. Methods called ``report_...`` tell the peer what happened, and the driver performs the effects that it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from gossip.arithmetic.distances import largest_share
from gossip.arithmetic.layout import Layout
from gossip.arithmetic.mixing import OuterStep, is_finite, subtract
from gossip.arithmetic.movement import Movement
from gossip.arithmetic.sketch import Sketcher
from gossip.arithmetic.subsets import ALL, Subset, lasting_parts
from gossip.averaging.all_reduce import GroupAverage
from gossip.averaging.boundary import Boundary
from gossip.averaging.delivery import CopyDelivery, is_sound
from gossip.averaging.jobs import (
    AdoptJob,
    AllocateMomentsJob,
    AllocatePieceJob,
    AllocateSnapshotJob,
    AverageSliceJob,
    CopyFrozenJob,
    Driver,
    HashFrozenJob,
    MixJob,
    MomentsJob,
    PrepareOuterStepJob,
    moments_vector,
)  # fmt: skip
from gossip.averaging.pair import PairAverage
from gossip.averaging.transfer import VectorTransfer
from gossip.averaging.vectors import Cut, Floats, Moments, Vector, Vectors, count_weights
from gossip.averaging.visit import Adoption, Visit
from gossip.codecs import Spread, get_codec, needs_spread
from gossip.codecs.tail import with_raw_tail
from gossip.config import Config
from gossip.effects import (
    Adopt,
    Confirm,
    CopyFrozen,
    CopyMoments,
    CopyPiece,
    Effect,
    Gather,
    HashFrozen,
    LeaveOut,
    Merge,
    Mix,
    MixMoments,
    Notice,
    ReceiveMoments,
    ReceivePiece,
    Rename,
    Restore,
    SendPiece,
    Snapshot,
    Transfer,
    UseLastSnapshot,
)  # fmt: skip
from gossip.peer import Peer

__all__ = ["CHECKED_BY_DRIVER_ELEMENTS", "PERFORM", "Averager"]

# A check of so many elements for finite values takes about a millisecond. The driver does it, in another thread if it
# has one.
CHECKED_BY_DRIVER_ELEMENTS = 1 << 20
LAST_SETTLEMENTS = 4  # Settlements whose furthest tensors are remembered: a node's last partners, most of them unlike.
NO_SNAPSHOT = "layout"  # The code of a failure: the session has no snapshot of the agreed size.
AnyTransfer = TypeVar("AnyTransfer", bound=VectorTransfer)


class Averager(Generic[AnyTransfer]):
    """The averaging of one node. ``lock`` guards the outer step if jobs run in another thread than boundary visits."""

    __slots__ = (
        "boundary", "config", "counted_visit", "delivery", "driver", "furthest", "hash_job", "joining_vector",
        "layout", "lock", "movement", "next_part", "outer_step", "outside_replacements", "peer",
        "sketcher", "spreads", "transfers", "vectors",
    )  # fmt: skip

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
        self.next_part = ALL  # Part of our next mix.
        self.hash_job: HashFrozenJob | None = None  # The hash of the frozen weights in progress.
        size = peer.view.elements
        parts = lasting_parts(config.part, size) if needs_spread(config.codec_name) else []
        # The distance to other members in each part, for codecs that need a bound on it.
        self.spreads = {part: Spread(part.elements(size)) for part in parts}
        self.movement = Movement(outer_step.parameters) if config.finds_radius else None
        self.sketcher = Sketcher(size, driver.sketch_seed) if config.limits_directions else None
        self.delivery = CopyDelivery(
            peer, driver, boundary, vectors, self.open, self.movement, self.return_mass
        )  # fmt: skip
        self.delivery.encode_moments = self.encode_moments

    def start_movement_at(self, sample: Floats) -> None:
        """Measure how far local steps move the model from weights whose sampled elements are ``sample``."""
        if self.movement is not None:
            self.boundary.sampled_positions = self.movement.positions
            self.movement.measure_sample(sample)

    def on_weights_replaced(self, weights: Floats) -> None:
        """Restart the outer step from weights that replaced others in the training loop."""
        with self.lock:
            self.outer_step.replace(weights)

    def forget_old_weights(self) -> None:
        """Drop all that was meant for weights that were replaced from outside (a checkpoint)."""
        self.joining_vector = None
        self.boundary.forget_old_weights()
        self.forget_updates()

    def forget_updates(self) -> None:
        """Drop the updates and the snapshot of weights that the program has changed since."""
        self.outside_replacements += 1
        self.vectors.forget_snapshot()
        self.boundary.drop_updates()

    def perform(self, effect: Effect) -> None:
        """Perform an effect of vectors alone. Raises KeyError for an effect that needs the driver."""
        PERFORM[type(effect)](self, effect)

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

    # -- snapshots -----------------------------------------------------------------------------------------------
    def request_snapshot(self, effect: Snapshot) -> None:
        """Request the snapshot of an exchange, whose duration begins here."""
        self.open(effect.session).requested_at = self.driver.now
        self.request_copy(effect.session, effect.pushes, self.cut_of(effect.part, effect.session))

    def request_copy(self, session: int, pushes: int = 0, cut: Cut | None = None) -> None:
        """Request a snapshot at the next boundary, in memory that exists by then.

        A pending update of all elements brings memory of its own, which the snapshot can use.

        Args:
            session: Session of the snapshot.
            pushes: Number of partners that the snapshot is pushed to; 0 if it is exchanged.
            cut: The elements to copy; None for all.
        """
        boundary = self.boundary
        brings_memory = cut is None and boundary.pending_updates
        if brings_memory or self.vectors.has_free(boundary.copied_elements(cut), cut):
            boundary.request_snapshot(session, None, pushes, cut)
        else:
            self.driver.run_job(AllocateSnapshotJob(self, session, pushes, cut))

    def cut_of(self, part: Subset, session: int) -> Cut | None:
        """Return the elements of a part, None for all; ``session`` seeds a random part that has no seed of its own."""
        next_cut = self.boundary.next_cut  # Its positions are drawn already.
        if next_cut is not None and next_cut.part == part:
            return next_cut
        positions = part.positions(self.peer.view.elements, session)
        return None if positions is None else Cut(part, positions)

    def prepare_next_part(self, part: Subset) -> None:
        """Draw the positions of our next mix's part now, as that takes as long as the copy when the mix is due."""
        if part is not self.next_part:
            self.next_part = part
            cut = self.boundary.next_cut = self.cut_of(part, 0)  # The part of our own mix has a seed: 0 is not used.
            if cut is not None and not self.vectors.has_free(self.boundary.copied_elements(cut), cut):
                self.driver.run_job(AllocateSnapshotJob(self, None, 0, cut))

    def use_last_snapshot(self, effect: UseLastSnapshot) -> None:
        """Give a session the newest snapshot, or that of the next boundary if there is none."""
        vector = self.vectors.take_last_snapshot()
        if vector is None:
            if effect.session not in self.boundary.requests:
                self.request_copy(effect.session)
            return
        self.boundary.cancel_snapshot(effect.session)
        self.open(effect.session).snapshot = vector
        self.driver.call_soon(self.report_recalled, effect.session)

    def report_recalled(self, session: int) -> None:
        """Report a copy that needed no boundary, unless its session has ended meanwhile."""
        vector = self.snapshot_of(session)
        if vector is not None:
            now = self.driver.now
            if is_sound(vector):
                self.driver.perform(self.peer.on_recalled(session, now))
            else:
                self.driver.perform(self.peer.on_spoiled(session, now, self.delivery.name_spoiled(vector)))

    def hash_frozen(self, effect: HashFrozen) -> None:
        """Hash the frozen weights. A job in progress ends once it sees that this one has replaced it."""
        self.hash_job = HashFrozenJob(self, effect)
        self.driver.run_job(self.hash_job)

    def snapshot_of(self, session: int) -> Vector | None:
        """Return the session's snapshot, None if it has none."""
        transfer = self.transfers.get(session)
        return None if transfer is None else transfer.snapshot

    # -- averages ------------------------------------------------------------------------------------------------
    def begin_pair(self, effect: Transfer) -> PairAverage | str:
        """Return the average that the session's streams work on, or the code of the reason why there is none.

        The driver passes the code to :meth:`report_failed_soon`.
        """
        transfer = self.transfers.get(effect.session)
        snapshot = None if transfer is None else transfer.snapshot
        if transfer is None or snapshot is None:
            return NO_SNAPSHOT
        codec = get_codec(effect.codec)
        spread = self.spreads.get(snapshot.part)
        if codec.needs_spread:
            if spread is None or not spread.is_known:
                return "overflow"  # As for a difference beyond the codec's bound: another codec would do.
            codec = codec.with_bounds(spread)
        tail = count_weights(snapshot, self.outer_step.parameters) if effect.has_statistics else snapshot.elements
        codec = with_raw_tail(codec, tail, snapshot.elements)
        pair = transfer.pair = PairAverage(effect, snapshot, codec, spread, self.vectors, self.sketcher)
        return pair

    def report_streamed(self, pair: PairAverage) -> None:
        """Report that the partner's vector is complete."""
        now = self.driver.now
        effects = self.peer.on_streamed(pair.session, pair.difference_sq, pair.own_sq, now, pair.sketch)
        self.driver.perform(effects)

    def begin_group(self, effect: Gather) -> GroupAverage | str:
        """Return the group's average for its streams, the same at every call, or the code of the reason for none."""
        transfer = self.transfers.get(effect.session)
        if transfer is None or transfer.snapshot is None:
            return NO_SNAPSHOT
        if transfer.group is None:
            tail = self.outer_step.parameters
            codec = with_raw_tail(get_codec(effect.codec), tail, transfer.snapshot.elements)
            transfer.group = GroupAverage(effect, transfer.snapshot, codec, self.config, self.vectors)
        return transfer.group

    def average_slice(self, group: GroupAverage, on_averaged: Callable[[], None]) -> None:
        """Compute the mean of our slice once all of it has arrived, then call ``on_averaged``."""
        if group.can_average:
            group.is_averaging = True
            self.driver.run_job(AverageSliceJob(self, group, on_averaged))

    def leave_out(self, effect: LeaveOut) -> GroupAverage | None:
        """Let a group go on without some of its members. Return the group, with which the driver then goes on."""
        transfer = self.transfers.get(effect.session)
        group = None if transfer is None else transfer.group
        if group is not None and not group.is_reported:
            group.leave_out(effect.peers, effect.means)
        return group

    def report_gathered(self, group: GroupAverage) -> None:
        """Report the group's means once all are here."""
        if group.is_complete and not group.is_reported:
            group.is_reported = True
            self.driver.perform(self.peer.on_gathered(group.session, *group.outcome(), self.driver.now))

    def report_failed_soon(self, session: int, code: str) -> None:
        """Report streams that cannot begin as failed, after the effects that are being performed."""
        self.driver.call_soon(self.report_failed, session, code)

    def report_failed(self, session: int, code: str) -> None:
        self.driver.perform(self.peer.on_failed(session, code, self.driver.now))

    # -- results -------------------------------------------------------------------------------------------------
    def mix(self, effect: Mix) -> bool:
        """Apply a committed pair or group at the next boundary. Return False if there is nothing to mix."""
        transfer = self.transfers.get(effect.session)
        average = None if transfer is None else transfer.average
        if transfer is None or average is None or average.difference is None:
            return False
        pair, snapshot = transfer.pair, transfer.take_snapshot()
        if snapshot is None:
            return False
        if pair is not None:
            pair.learn_distance()
        difference = average.take_difference()
        positions = None if pair is None else pair.positions
        own_sq = 0.0 if pair is None else pair.own_sq
        job = MixJob(self, snapshot, difference, positions, effect, own_sq)
        if pair is not None:
            job.weights, job.is_settlement = pair.weights, positions is None and effect.plain
        self.start_mixing(job)
        return True

    def furthest_of(self, session: int) -> str:
        """Return the tensor that carries most of the difference of a session, for a sentence."""
        transfer = self.transfers.get(session)
        pair = None if transfer is None else transfer.pair
        if pair is None or not pair.is_complete or pair.difference is None or pair.positions is not None:
            return "model"
        return "model" if self.layout is None else largest_share(self.layout, pair.difference.array[: pair.weights])

    def merge(self, effect: Merge) -> bool:
        """Merge the partner's vector with its mass, or our own that comes back. Return True if it is the partner's."""
        transfer = self.transfers.get(effect.session)
        snapshot = None if transfer is None else transfer.take_snapshot()
        if transfer is None or snapshot is None:
            return False
        difference = None if transfer.pair is None else transfer.pair.take_difference()
        self.start_mixing(MixJob(self, snapshot, difference, None, effect))
        return difference is not None

    def return_mass(self, session: int, vector: Vector, mass: float) -> None:
        """Take the copy of a session that has ended; merge it into the model again if it took mass from that."""
        if mass > 0 and self.config.conserves:
            self.start_mixing(MixJob(self, vector, None, None, Merge(session, mass)))
        else:
            self.vectors.give(vector)

    def start_mixing(self, job: MixJob) -> None:
        """Announce the update that the job will make, and run the job."""
        self.boundary.begin_update()
        if job.mass is None and not self.outer_step.is_plain:  # Pushes and plain means count no local steps.
            job.count_local_steps_once()
        self.driver.run_job(job)

    # -- the optimizer's moments ---------------------------------------------------------------------------------
    def encode_moments(self, session: int, vector: Vector) -> None:
        """Encode a copy of our moments for a member, and report it."""
        assert vector.moments is not None
        report = partial(self.report_encoded, session, vector)
        self.driver.run_job(MomentsJob(self, session, vector, vector.moments.encode, report))

    def report_encoded(self, session: int, vector: Vector, is_sound: bool) -> None:
        """Report an encoded copy of our moments, unless its session has ended meanwhile."""
        peer, now = self.peer, self.driver.now
        if not peer.view.needs_snapshot(session):
            self.vectors.give(vector)
            return
        self.open(session).snapshot = vector
        self.driver.perform(peer.on_snapshotted(session, now) if is_sound else peer.on_not_taken(session, now))

    def begin_moments(self, effect: ReceiveMoments) -> Floats:
        """Return the array that a partner's moments arrive in."""
        vector = self.open(effect.session).moments = moments_vector(self.vectors, effect)
        return vector.array

    def report_moments(self, session: int) -> None:
        """Decode a partner's moments, which have arrived whole, and report them."""
        transfer = self.transfers.get(session)
        vector = None if transfer is None else transfer.moments
        if vector is not None and vector.moments is not None:
            report = partial(self.report_decoded, session)
            self.driver.run_job(MomentsJob(self, session, vector, vector.moments.decode, report))

    def report_decoded(self, session: int, is_sound: bool) -> None:
        self.driver.perform(self.peer.on_moments(session, is_sound, self.driver.now))

    def mix_moments(self, effect: MixMoments) -> None:
        """Mix a session's moments at the next boundary."""
        transfer = self.transfers.get(effect.session)
        if transfer is None:
            return
        vector, transfer.moments = transfer.moments, None
        if vector is not None and vector.moments is not None:
            self.boundary.deliver_moments(Moments(vector, vector.moments, vector.start, vector.stop))

    # -- joining -------------------------------------------------------------------------------------------------
    def joining_array(self, effect: ReceivePiece) -> Floats:
        """Return the array that collects the pieces of another run's weights: float32 (effect.size,)."""
        vector = self.joining_vector
        if vector is None or vector.array.size != effect.size:
            # The outer step takes over a mapped vector if it has none yet. A vector that is replaced here is not given
            # back to the pool, because a link may still write to it.
            from_pool = self.outer_step.has_weights and effect.size == self.peer.view.elements
            take = self.vectors.take if from_pool else self.vectors.take_mapped
            vector = self.joining_vector = take(effect.size)
        return vector.array

    def store_piece(self, effect: ReceivePiece, values: Floats) -> bool:
        """Store a whole piece, or compare it with the joining vector. Return False if the piece is not finite."""
        target = self.joining_array(effect)[effect.start : effect.stop]
        if not is_finite(values):
            return False
        peer, driver = self.peer, self.driver
        if effect.compare:
            sums = subtract(values, target, np.empty_like(target))
            driver.perform(peer.on_compared(effect.session, *sums, driver.now))
        else:
            target[:] = values
            driver.perform(peer.on_collected(effect.session, effect.stop, driver.now))
        return True

    def served_snapshot(self, effect: SendPiece) -> Vector | None:
        """Return the snapshot that holds a newcomer's piece, or None."""
        snapshot = self.snapshot_of(effect.session)
        return snapshot if snapshot is not None and snapshot.has_piece(effect.start, effect.stop) else None

    def adopt(self, effect: Adopt) -> None:
        assert self.joining_vector is not None, "nothing was collected"
        adoption = Adoption(
            self.joining_vector.array, effect.optimizer_keys, effect.optimizer_scalars, effect.trial, effect.frozen
        )
        self.driver.run_job(AdoptJob(self, adoption))  # Queued behind mixes of the old weights.

    # -- visits of the training loop -------------------------------------------------------------------------------
    def on_visit(self, visit: Visit | None, steps: int, samples: int, loss: float | None) -> None:
        """Report that the training loop passed its boundary after ``steps`` steps.

        ``visit`` is None if no request was there. ``loss`` is the last training loss, None if unknown.
        """
        peer, driver = self.peer, self.driver
        if visit is not None and visit.has_replaced:
            peer.update_counts(steps, samples)
            self.report_replacement(visit)
        driver.perform(peer.on_stepped(steps, samples, loss, driver.now))  # First: an Offer states the model's age.
        if visit is not None:
            self.use_copies(visit)

    def report_replacement(self, visit: Visit) -> None:
        """Report weights that were adopted, restored, or could not be backed up before an adoption."""
        peer, driver, movement = self.peer, self.driver, self.movement
        if visit.adopted or visit.restored:
            self.vectors.forget_snapshot()
        if visit.adopted and self.joining_vector is None and self.boundary.backup.holds:
            # The network side that began this trial has failed, and its peer with it: no peer can judge the trial.
            self.boundary.request_restore()
        if visit.adopted:
            vector, self.joining_vector = self.joining_vector, None
            if vector is not None:
                if movement is not None:
                    movement.measure(vector.array)
                if self.outer_step.has_taken_over(vector.array):
                    driver.run_job(PrepareOuterStepJob(self, vector))
                else:
                    self.vectors.give(vector)
            driver.perform(peer.on_adopted(driver.now, *visit.trial_distance))
        if visit.backup_failure:
            self.joining_vector = None
            text = f"The weights were not replaced, since they could not be kept: {visit.backup_failure}"
            driver.perform([Notice("kept", text)])
            driver.perform(peer.on_not_kept(driver.now))
        if visit.restored:
            if movement is not None:
                movement.forget()  # No snapshot holds the weights that came back.
            driver.perform(peer.on_restored(driver.now))

    def use_copies(self, visit: Visit) -> None:
        """Use the copies of a visit once they are done and checked; its updates are in the model."""
        if visit.copies or visit.unchecked_vectors(CHECKED_BY_DRIVER_ELEMENTS):
            self.driver.await_copies(visit, self.delivery.deliver)
        else:
            self.delivery.deliver(visit)


PERFORM: dict[type, Callable[[Averager[Any], Any], None]] = {
    Snapshot: Averager.request_snapshot, UseLastSnapshot: Averager.use_last_snapshot,
    CopyPiece: lambda averager, effect: averager.driver.run_job(AllocatePieceJob(averager, effect)),
    CopyFrozen: lambda averager, effect: averager.driver.run_job(CopyFrozenJob(averager, effect)),
    CopyMoments: lambda averager, effect: averager.driver.run_job(AllocateMomentsJob(averager, effect)),
    MixMoments: Averager.mix_moments,
    HashFrozen: Averager.hash_frozen, Adopt: Averager.adopt,
    Confirm: lambda averager, _: averager.boundary.backup.forget(),
    Restore: lambda averager, _: averager.boundary.request_restore(),
}  # fmt: skip
"""The effects that :meth:`Averager.perform` performs. For others a driver calls the averager itself."""
