"""The averager of one node: it performs the effects on vectors that a peer decides, and reports the results to it.

It holds snapshots, averages in progress, the outer step, statistics of movement and distance, and the weights that a
newcomer collects. It has no clock, thread or socket: a :class:`Driver` provides them and moves the bytes.
:mod:`gossip.effects` defines the terms. A *part* is the elements that one exchange mixes, and a :class:`Cut` is a part
with its positions. A *visit* is one call of :meth:`Boundary.visit` by the training loop.

Methods called ``request_...`` ask the step boundary for a copy; :mod:`gossip.averaging.delivery` handles what comes
back. Methods called ``report_...`` tell the peer what happened, and the driver performs the effects that it returns.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gossip.arithmetic.distances import largest_share
from gossip.arithmetic.mixing import is_finite, subtract
from gossip.arithmetic.subsets import Subset
from gossip.averaging.all_reduce import GroupAverage
from gossip.averaging.delivery import deliver, is_sound, name_spoiled
from gossip.averaging.jobs import AnyTransfer, AveragerState, FunctionJob, HashFrozenJob, MixJob
from gossip.averaging.pair import PairAverage
from gossip.averaging.vectors import Cut, Floats, Moments, Vector, count_weights
from gossip.averaging.visit import Adoption, Visit
from gossip.codecs import get_codec
from gossip.codecs.tail import with_raw_tail
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
    Restore,
    SendPiece,
    Snapshot,
    Transfer,
    UseLastSnapshot,
)  # fmt: skip

# A check of so many elements for finite values takes about a millisecond. The driver does it, in another thread if it
# has one.
CHECKED_BY_DRIVER_ELEMENTS = 1 << 20
NO_SNAPSHOT = "layout"  # The code of a failure: the session has no snapshot of the agreed size.


class Averager(AveragerState[AnyTransfer]):
    """The averaging of one node. ``lock`` guards the outer step if jobs run in another thread than boundary visits."""

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
            return

        def request(_: None) -> None:
            if self.peer.view.needs_snapshot(session):
                boundary.request_snapshot(session, None, pushes, cut)

        self.reserve(cut, request, lambda: self.driver.perform(self.peer.on_not_taken(session, self.driver.now)))

    def reserve(
        self, cut: Cut | None, request: Callable[[None], None] = lambda _: None,
        on_failed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Allocate the memory of a snapshot, then request it."""
        elements = self.boundary.copied_elements(cut)
        self.driver.run_job(
            FunctionJob(elements, lambda: self.vectors.reserve(elements, cut), request, on_failed, True)
        )

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
                self.reserve(cut)

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
                self.driver.perform(self.peer.on_spoiled(session, now, name_spoiled(self, vector)))

    def hash_frozen(self, effect: HashFrozen) -> None:
        """Hash the frozen weights. A job in progress ends once it sees that this one has replaced it."""
        self.hash_job = HashFrozenJob(self, effect)
        self.driver.run_job(self.hash_job)

    # -- copies for newcomers and for moments that are mixed -----------------------------------------------------
    def copy_piece(self, effect: CopyPiece) -> None:
        """Request a copy of a piece, in memory that is touched before the training loop copies.

        Writing to untouched pages takes four times as long as the copy.
        """

        def allocate() -> Vector:
            vector = self.vectors.take_transient(elements)
            vector.start = effect.start
            vector.array.fill(0.0)
            return vector

        elements = effect.stop - effect.start
        self.run_for(effect.session, elements, allocate, partial(self.request_into, effect.session), True)

    def copy_moments(self, effect: CopyMoments) -> None:
        """Request a copy of the optimizer's moments for a member."""
        elements, allocate = effect.form.vector_elements(effect.stop - effect.start), partial(self.new_moments, effect)
        self.run_for(effect.session, elements, allocate, partial(self.request_into, effect.session), True)

    def new_moments(self, effect: CopyMoments | ReceiveMoments) -> Vector:
        """Return a vector for elements [start, stop) of moments, all of them 0."""
        vector = self.vectors.take_transient(effect.form.vector_elements(effect.stop - effect.start))
        vector.array.fill(0.0)
        vector.start, vector.stop, vector.moments = effect.start, effect.stop, effect.form
        return vector

    def needs_copy(self, session: int) -> bool:
        """Return True if the session, which may have ended meanwhile, still waits for its copy."""
        return self.peer.view.needs_snapshot(session) and self.snapshot_of(session) is None

    def request_into(self, session: int, vector: Vector) -> None:
        """Request a copy into this vector, if its session still needs it."""
        if self.needs_copy(session):
            self.boundary.request_snapshot(session, vector)
        else:
            self.vectors.give(vector)

    def copy_frozen(self, effect: CopyFrozen) -> None:
        """Copy frozen weights for a newcomer, while the training loop runs."""

        def copy() -> Vector:
            vector = self.vectors.take_transient(elements)
            vector.start = effect.start
            self.boundary.model.read_frozen(vector.array, vector.start)
            return vector

        def use(vector: Vector) -> None:
            if self.needs_copy(effect.session):
                self.open(effect.session).snapshot = vector
                self.driver.call_soon(self.report_recalled, effect.session)
            else:
                self.vectors.give(vector)

        elements = effect.stop - effect.start
        self.run_for(effect.session, elements, copy, use)

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
        if not group.can_average:
            return
        group.is_averaging = True

        def use(_: None) -> None:
            group.is_averaging = False
            if group.is_released:
                group.release()
            else:
                on_averaged()

        def fail() -> None:
            group.is_averaging = False
            self.report_failed(group.session, "fault")

        self.driver.run_job(FunctionJob(group.rows.size, group.average_slice, use, fail))

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

    # -- the optimizer's moments ---------------------------------------------------------------------------------
    def begin_moments(self, effect: ReceiveMoments) -> Floats:
        """Return the array that a partner's moments arrive in."""
        vector = self.open(effect.session).moments = self.new_moments(effect)
        return vector.array

    def report_moments(self, session: int) -> None:
        """Decode a partner's moments, which have arrived whole, and report them."""

        def report(is_sound: bool) -> None:
            self.driver.perform(self.peer.on_moments(session, is_sound, self.driver.now))

        transfer = self.transfers.get(session)
        vector = None if transfer is None else transfer.moments
        if vector is not None and vector.moments is not None:
            self.run_for(session, vector.array.size, partial(vector.moments.decode, vector.array), report)

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

        def request(_: None) -> None:
            vector = self.joining_vector
            if vector is not None and adoption.vector is vector.array:  # Else the weights were replaced meanwhile.
                self.boundary.request_adoption(adoption)

        self.driver.run_job(FunctionJob(0, lambda: None, request))  # Queued behind mixes of the old weights.

    # -- visits of the training loop -------------------------------------------------------------------------------
    def on_visit(self, visit: Visit | None, steps: int, samples: int, loss: float | None) -> None:
        """Report that the training loop passed its boundary after ``steps`` steps.

        ``visit`` is None if no request was there. ``loss`` is the last training loss, None if unknown.
        """
        peer, driver = self.peer, self.driver
        if visit is not None and visit.has_replaced:
            peer.update_counts(steps, samples)
            self.report_replacement(visit)
        if not peer.view.is_joining:
            self.joining_vector = None  # Of a transfer that was given up.
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
                    self.prepare_outer_step(vector)
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

    def prepare_outer_step(self, vector: Vector) -> None:
        """Prepare the outer step's memory, once the step has taken over the vector that a newcomer collected.

        Free the vector's part that the outer step does not use, and allocate the momentum, while the training loop
        runs and before anything is mixed. If that fails, later mixes allocate the memory themselves.
        """
        elements = self.outer_step.parameters

        def prepare() -> None:
            vector.shorten(elements)
            with self.lock:
                self.outer_step.forget_momentum()  # Writing zeros allocates its pages.

        self.driver.run_job(FunctionJob(elements, prepare, lambda _: None))

    def use_copies(self, visit: Visit) -> None:
        """Use the copies of a visit once they are done and checked; its updates are in the model."""
        if visit.copies or visit.unchecked_vectors(CHECKED_BY_DRIVER_ELEMENTS):
            self.driver.await_copies(visit, partial(deliver, self))
        else:
            deliver(self, visit)


PERFORM: dict[type, Callable[[Averager[Any], Any], None]] = {
    Snapshot: Averager.request_snapshot, UseLastSnapshot: Averager.use_last_snapshot,
    CopyPiece: Averager.copy_piece, CopyFrozen: Averager.copy_frozen, CopyMoments: Averager.copy_moments,
    MixMoments: Averager.mix_moments,
    HashFrozen: Averager.hash_frozen, Adopt: Averager.adopt,
    Confirm: lambda averager, _: averager.boundary.backup.forget(),
    Restore: lambda averager, _: averager.boundary.request_restore(),
}  # fmt: skip
"""The effects that :meth:`Averager.perform` performs. For others a driver calls the averager itself."""
