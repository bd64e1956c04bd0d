"""The step boundary: the only place where exchanges meet the training loop.

The network side leaves requests (a snapshot, an update to add, weights to adopt). The training loop fulfils them
between two steps in a fixed order: restore weights, add updates, adopt weights, take snapshots. Snapshots therefore
include all that was received. Neither side waits for the other: without requests a visit is one attribute read.
:mod:`gossip.effects` defines the terms. The *mass* of a model or vector is its weight in the swarm's mean, for push-sum
(:func:`gossip.arithmetic.mixing.push_mass`).

``lock`` is for a driver whose training loop and network are two threads. It guards the requests; only the loop calls
methods that change the model.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from gossip.arithmetic.mixing import push_mass
from gossip.arithmetic.subsets import ALL, Subset
from gossip.averaging.model import Backup, Model, Pending
from gossip.averaging.vectors import Cut, Floats, Moments, Positions, Statistics, Vector, Vectors
from gossip.averaging.visit import Adoption, Update, Visit

Beside = TypeVar("Beside", Statistics, Moments)

NOWHERE = sys.maxsize  # Start of a piece that holds no elements, which has_piece() therefore always denies.


@dataclass(frozen=True, slots=True)
class Request:
    """A session's request for a snapshot."""

    piece: Vector | None  # Memory for the piece that a newcomer waits for; None for an exchange.
    pushes: int  # Number of partners that the snapshot is pushed to; 0 if it is exchanged.
    cut: Cut | None  # The elements to copy; None for all.

    @property
    def part(self) -> Subset:
        """Return the part to copy; requests of the same part share one vector."""
        return ALL if self.cut is None else self.cut.part


@dataclass(frozen=True, slots=True)
class ReadyRequests:
    """The requests that one visit takes and fulfils."""

    must_restore: bool
    updates: list[Update]
    adoption: Adoption | None
    moments: list[Moments]
    requests: dict[int, Request]  # Requests for snapshots by session.
    is_current: bool  # True if the weights hold all decided updates once these are applied.
    decided_updates: int  # ``Boundary.decided_updates`` at the visit.

    @property
    def copies_all(self) -> bool:
        """Return True if an exchange requested a snapshot of all elements."""
        return any(request.cut is None and request.piece is None for request in self.requests.values())


class Boundary:
    """The requests of the network side, which the training loop fulfils.

    ``has_requests`` is read without the lock: a request that comes a moment too late waits for the next step. A new
    request calls ``wake``, in case the loop has nothing else to do; a visit that takes requests calls ``clear_wake``.
    """

    def __init__(
        self, model: Model, vectors: Vectors, backup: Backup, conserves_mass: bool = False,
        lock: AbstractContextManager[object] | None = None, wake: Callable[[], None] = lambda: None,
        clear_wake: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.vectors, self.backup = model, vectors, backup
        self.conserves_mass = conserves_mass  # A push takes mass away from the model.
        self.lock: AbstractContextManager[object] = nullcontext() if lock is None else lock
        self.wake, self.clear_wake = wake, clear_wake
        # True if an update goes to the model's device on arrival, and is added after this copy. Otherwise the
        # boundary brings it there, and the device waits.
        self.uploads_updates = False
        # False while updates, moments and other weights wait, and only snapshots are taken; a driver with several
        # processes for one model opens the boundary when all stand at it.
        self.is_open = True
        self.mass = 1.0  # The model's mass: it changes with the weights, so only in the training loop.
        self.has_requests = False
        self.requests: dict[int, Request] = {}  # Requests for snapshots by session.
        self.next_cut: Cut | None = None  # Cut of our next mix; None for all elements.
        # Positions of the elements that every snapshot holds, for gossip.arithmetic.movement.
        self.sampled_positions: Positions | None = None
        self.arrived_updates: list[Update] = []
        self.arrived_moments: list[Moments] = []
        self.adoption: Adoption | None = None
        self.must_restore = False  # The backup is to replace weights on trial.
        # Number of updates that are decided and not in the model yet. A snapshot without them would count a difference
        # twice: the partner gives half of it a second time, and both end beyond the mean.
        self.pending_updates = 0
        self.decided_updates = 0  # Number of updates ever decided.
        self.replacements = 0  # Number of times that the weights were replaced.
        self.copying_visits = 0  # Number of visits that took copies: it orders snapshots.

    @property
    def adds_weighted(self) -> bool:
        """Return True if a difference of all elements may come with its weight."""
        return self.model.adds_weighted

    # -- called by the network side ------------------------------------------------------------------------------
    def request_snapshot(
        self, session: int, piece: Vector | None = None, pushes: int = 0, cut: Cut | None = None
    ) -> None:  # fmt: skip
        """Request a snapshot for a session; the arguments are those of a :class:`Request`."""
        with self.lock:
            self.requests[session] = Request(piece, pushes, cut)
            self.announce_request()

    def cancel_snapshot(self, session: int) -> None:
        """Drop the request of a session, unless a visit has taken it already."""
        if session in self.requests:
            with self.lock:
                request = self.requests.pop(session, None)
                self.has_requests = bool(
                    self.requests or self.arrived_updates or self.arrived_moments or self.adoption or self.must_restore
                )
            if request is not None and request.piece is not None:
                self.vectors.give(request.piece)

    def take_matching_requests(self, cut: Cut | None = None) -> list[int]:
        """Remove and return the sessions that a spare copy of these elements can serve before the next boundary."""
        part = ALL if cut is None else cut.part
        with self.lock:
            sessions = [
                session for session, request in self.requests.items()
                if request.piece is None and not request.pushes and request.part == part
            ]  # fmt: skip
        for session in sessions:
            self.cancel_snapshot(session)
        return sessions

    def begin_update(self) -> None:
        """Announce a decided update, which ``deliver_update`` delivers or ``abort_update`` cancels."""
        with self.lock:
            self.pending_updates += 1
            self.decided_updates += 1

    def abort_update(self) -> None:
        with self.lock:
            self.pending_updates -= 1
            self.announce_request()  # Snapshots may have waited for this update.

    def deliver_update(self, update: Update) -> None:
        """Deliver an announced update."""
        if self.uploads_updates and update.positions is None and update.weight == 1.0:
            update = replace(update, upload=self.model.begin_upload(update.vector.array))
        with self.lock:
            self.arrived_updates.append(update)
            self.announce_request()

    def deliver_moments(self, moments: Moments) -> None:
        """Deliver a partner's moments."""
        with self.lock:
            self.arrived_moments.append(moments)
            self.announce_request()

    def request_adoption(self, adoption: Adoption) -> None:
        """Request the adoption of other weights.

        Updates that are not applied yet belong to the present weights and are dropped. In a trial they are applied
        first, so that the backup holds what the partners have added already.
        """
        if not adoption.trial:
            self.drop_updates()
        with self.lock:
            self.adoption = adoption
            self.announce_request()

    def request_restore(self) -> None:
        with self.lock:
            self.must_restore = True
            self.announce_request()

    def forget_old_weights(self) -> None:
        """Drop all that was meant for weights that were replaced from outside."""
        self.backup.forget()
        self.replacements += 1
        with self.lock:
            self.adoption, self.must_restore = None, False
        self.drop_updates()

    def drop_updates(self) -> None:
        """Drop the updates that have arrived, since they are for weights that are replaced."""
        with self.lock:
            dropped, self.arrived_updates = self.arrived_updates, []
            moments, self.arrived_moments = self.arrived_moments, []
            self.pending_updates -= len(dropped)
        for each in moments:
            self.vectors.give(each.vector)
        for update in dropped:
            self.vectors.give(update.vector)
            if update.statistics is not None:
                self.vectors.give(update.statistics.vector)

    def restart(self) -> None:
        """Drop the requests of a network side that ended by a fault, once none of its tasks runs any more.

        Updates of finished exchanges stay, since the partners have them too. The backup replaces weights on trial.
        """
        with self.lock:
            dropped, self.requests = self.requests, {}
            self.adoption, self.next_cut = None, None
            self.pending_updates = len(self.arrived_updates)
            self.must_restore = self.backup.holds
            self.has_requests = bool(self.arrived_updates or self.arrived_moments) or self.must_restore
        for request in dropped.values():
            if request.piece is not None:
                self.vectors.give(request.piece)
        self.wake()

    def announce_request(self) -> None:
        """Let the training loop see that there is a request. The caller holds the lock."""
        if not self.has_requests:  # Otherwise the loop was woken, and has not visited the boundary since.
            self.has_requests = True
            self.wake()

    # -- called by the training loop -----------------------------------------------------------------------------
    def visit(self, on_replaced: Callable[[Floats], None], spare: bool = False, keep: bool = False) -> Visit:
        """Fulfil all requests.

        While an update is pending, snapshots for exchanges wait for it. Pushed snapshots carry their mass with them,
        and newcomers need only weights, so neither waits.

        Args:
            on_replaced: Called with weights that take the place of others.
            spare: A mix is due: copy the weights ahead of its request, so that the exchange begins a step sooner.
            keep: Take a copy for newcomers, which may come while the loop stands.
        """
        ready = self.take_ready_requests()
        visit = Visit(updates=ready.updates, decided_updates=ready.decided_updates)
        if ready.must_restore:
            on_replaced(self.backup.put_back())
            visit.restored = True
            self.replacements += 1
        copies: dict[Subset, Vector] = {}  # By part, the copies that this visit has begun.
        if ready.updates:
            copies_all = keep or (spare and ready.is_current and self.next_cut is None) or ready.copies_all
            # The last update is added, and the sum copied, in one pass.
            fused = ready.updates[-1] if copies_all and ready.adoption is None else None
            visit.merged_shares = [
                self.apply_update(update, visit, copies if update is fused else None) for update in ready.updates
            ]
        for moments in ready.moments:
            self.mix_beside(self.begin_mix_moments, moments, visit)
        if ready.adoption is not None:
            self.apply_adoption(ready.adoption, visit, on_replaced)
        if ready.requests:
            visit.snapshots = self.take_snapshots(ready.requests, visit, copies)
        if spare and ready.is_current and self.has_memory_for(self.next_cut, copies):
            visit.spare_copy = self.begin_copy(visit, self.next_cut, copies)
        if keep and self.has_memory_for(None, copies):
            visit.newcomers_copy = self.begin_copy(visit, None, copies)
        if copies:
            self.copying_visits += 1
            for vector in copies.values():
                vector.visit_number = self.copying_visits
        visit.replacements = self.replacements
        return visit

    def take_ready_requests(self) -> ReadyRequests:
        """Take the requests that can be fulfilled now. The others wait for an update, and stay."""
        with self.lock:
            ready_count = self.count_ready_updates() if self.is_open else 0
            updates = self.arrived_updates[:ready_count]
            self.arrived_updates = self.arrived_updates[ready_count:]
            self.pending_updates -= len(updates)
            is_current = not self.pending_updates
            requests: dict[int, Request] = {}
            waiting: dict[int, Request] = {}
            for session, request in self.requests.items():
                if is_current or request.pushes or request.piece is not None:
                    requests[session] = request
                else:
                    waiting[session] = request
            self.requests = waiting
            adoption, moments, must_restore = None, [], False
            if self.is_open:
                adoption, self.adoption = self.adoption, None
                moments, self.arrived_moments = self.arrived_moments, moments
                must_restore, self.must_restore = self.must_restore, False
            self.has_requests = self.is_open and bool(self.arrived_updates)
            if self.clear_wake is not None and not self.has_requests:
                self.clear_wake()
            return ReadyRequests(must_restore, updates, adoption, moments, requests, is_current, self.decided_updates)

    def count_ready_updates(self) -> int:
        """Return how many of the first updates can be applied without waiting for the upload of one.

        Before the weights are replaced all are applied, even if that waits. The caller holds the lock.
        """
        if self.adoption is None and not self.must_restore:
            for number, update in enumerate(self.arrived_updates):
                if update.upload is not None and not update.upload.done():
                    return number
        return len(self.arrived_updates)

    def record_copy(self, visit: Visit, copy: Pending | None, vector: Vector | None = None) -> bool:
        """Record a copy that has begun, and return True if it still has work: it is in progress, or to be widened.

        Args:
            visit: The visit that began it.
            copy: The copy; None if it was done when the call that began it returned.
            vector: Its target, unless that is the model.
        """
        if copy is not None and vector is not None:
            visit.finite_checks = (*visit.finite_checks, (vector, copy))
        if copy is None or (copy.done() and not copy.is_narrow):
            return False
        visit.copies = (*visit.copies, copy)
        return True

    def begin_piece_copy(self, piece: Vector, visit: Visit) -> bool:
        """Begin to copy a piece for a newcomer. Return False if the model's device has no memory for it.

        If the optimizer's state has changed its length, so that the piece does not exist, its start is ``NOWHERE``.
        """
        model, start, stop = self.model, piece.start, piece.start + piece.array.size
        optimizer = model.optimizer_range()
        try:
            if piece.moments is not None:
                rows, _ = piece.moments.split(piece.array)
                self.record_copy(visit, model.begin_read_moments(rows, piece.moments, start, piece.stop), piece)
            elif stop <= model.size():
                self.record_copy(visit, model.begin_read_piece(piece.array, start), piece)
            elif optimizer.start <= start and stop <= optimizer.stop:
                self.record_copy(visit, model.begin_read_optimizer(piece.array, start), piece)
            else:
                piece.start = NOWHERE
        except MemoryError:
            self.vectors.give(piece)
            return False
        return True

    def copied_elements(self, cut: Cut | None) -> int:
        """Return the length of a copy of this cut, the sampled elements included."""
        if cut is None:
            return self.model.size()
        return cut.positions.size + (0 if self.sampled_positions is None else self.sampled_positions.size)

    def has_memory_for(self, cut: Cut | None, copies: dict[Subset, Vector]) -> bool:
        """Return True if a copy that no session has requested needs no new memory."""
        part = ALL if cut is None else cut.part
        return part in copies or self.vectors.has_free(self.copied_elements(cut), cut)

    def begin_copy(self, visit: Visit, cut: Cut | None, copies: dict[Subset, Vector]) -> Vector | None:
        """Begin to copy the live weights, or only the cut. Requests of a visit for the same part share one copy.

        Return the vector, which :meth:`visit` keeps in ``copies``; None if the model's device has no memory for it.
        """
        model, part = self.model, ALL if cut is None else cut.part
        vector = copies.get(part)
        if vector is not None:
            vector.users += 1  # Without the lock: no other thread knows this vector yet.
            return vector
        vector = self.vectors.take(self.copied_elements(cut))
        pending = False
        try:
            if cut is None:
                self.record_copy(visit, model.begin_read(vector.array), vector)
                vector.is_finite = model.finite
            else:
                elements, sampled = cut.positions.size, self.sampled_positions
                vector.cut = cut
                pending = self.record_copy(visit, model.begin_read_at(vector.array[:elements], cut.positions), vector)
                if sampled is not None:
                    self.record_copy(visit, model.begin_read_at(vector.array[elements:], sampled), vector)
        except MemoryError:
            if pending:
                visit.busy_vectors.append(vector)  # It is given back once nothing writes to it.
            else:
                self.vectors.give(vector)
            return None
        copies[part] = vector
        return vector

    def take_snapshots(
        self, requests: dict[int, Request], visit: Visit, copies: dict[Subset, Vector]
    ) -> list[tuple[int, Vector, float]]:  # fmt: skip
        """Begin to copy the weights for these requests. Return sessions, vectors, and the mass that each carries."""
        snapshots = []
        for session, request in requests.items():
            mass, vector = 0.0, request.piece
            if vector is None:
                vector = self.begin_copy(visit, request.cut, copies)
            elif not self.begin_piece_copy(vector, visit):
                vector = None
            if vector is None:
                visit.failed_sessions = (*visit.failed_sessions, session)
                continue
            if request.pushes:
                mass, self.mass = push_mass(self.mass, request.pushes, self.conserves_mass)
            snapshots.append((session, vector, mass))
        return snapshots

    def apply_update(self, update: Update, visit: Visit, copies: dict[Subset, Vector] | None = None) -> float:
        """Apply an update, and return the share of its vector in the weights, 0 for a difference.

        If ``copies`` are given, all weights are to be copied next. One pass may then add the update and copy the sum
        into the update's own vector, which goes into ``copies``.
        """
        if update.statistics is not None:
            self.mix_beside(self.model.mix_statistics, update.statistics, visit)
        is_plain_sum = update.mass is None and update.positions is None and update.upload is None
        if copies is not None and is_plain_sum and self.model.add_read(update.vector.array, update.weight):
            update.vector.users, update.vector.is_finite = 0, self.model.finite
            copies[ALL] = update.vector
            return 0.0
        share = 0.0 if update.mass is None else update.mass / (self.mass + update.mass)
        try:
            pending = self.begin_add(update) if update.mass is None else self.begin_merge(update, share)
        except MemoryError:
            visit.lost_updates += 1
            self.vectors.give(update.vector)
            return 0.0
        if update.mass is not None:
            self.mass += update.mass
        self.give_back(update.vector, pending, visit)
        return share

    def give_back(self, vector: Vector, pending: Pending | None, visit: Visit) -> None:
        """Return a vector to the pool once the copy that reads it is done. This visit may copy into a free one."""
        if self.record_copy(visit, pending):
            visit.busy_vectors.append(vector)
        else:
            self.vectors.give(vector)

    def mix_beside(self, mix: Callable[[Beside], Pending | None], theirs: Beside, visit: Visit) -> None:
        """Mix what a partner sent beside its weights into our own. Without memory on a device that stays as it is."""
        pending = None
        with suppress(MemoryError):
            pending = mix(theirs)
        self.give_back(theirs.vector, pending, visit)

    def begin_mix_moments(self, moments: Moments) -> Pending | None:
        return self.model.mix_moments(moments)

    def begin_add(self, update: Update) -> Pending | None:
        values, weight = update.vector.array, update.weight
        if update.positions is not None:
            return self.model.add_at(values, update.positions)
        if update.upload is not None:
            return update.upload.add()
        return self.model.add(values) if weight == 1.0 else self.model.add_weighted(values, weight)

    def begin_merge(self, update: Update, share: float) -> Pending | None:
        """Begin to merge a vector into the weights, which then consist of it by ``share``."""
        if update.upload is not None:
            return update.upload.merge(share)
        return self.model.merge(update.vector.array, share)

    def apply_adoption(self, adoption: Adoption, visit: Visit, on_replaced: Callable[[Floats], None]) -> None:
        """Overwrite the weights with others; before a trial back them up, and leave them if that is impossible."""
        if adoption.trial:
            if not self.backup.keep():
                visit.backup_failure = self.backup.why_not
                return
            visit.trial_distance = self.backup.distance(adoption.vector)
        adopt = self.model.adopt if adoption.frozen else self.model.adopt_exchanged
        adopt(adoption.vector, adoption.optimizer_keys, dict(adoption.optimizer_scalars))
        on_replaced(adoption.vector)
        visit.adopted = True
        self.replacements += 1
        self.mass = 1.0
