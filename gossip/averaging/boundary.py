"""The step boundary: the only place where exchanges meet the training loop.

The network leaves requests (a snapshot, an update to add, weights to adopt). The training loop fulfils them between two
steps in a fixed order: restore weights, add updates, adopt weights, take snapshots. Snapshots therefore include what
was received. Neither side waits for the other: without requests a visit is one attribute read.

``lock`` is for a driver whose training loop and network are two threads. It guards the requests; only the loop calls
methods that change the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from gossip.arithmetic.mixing import push_mass
from gossip.arithmetic.subsets import Subset
from gossip.averaging.model import Backup, Model, Pending, Upload
from gossip.averaging.vectors import Cut, Floats, Positions, Vector, Vectors

__all__ = ["Adoption", "Boundary", "Update", "Visit"]


@dataclass(frozen=True, slots=True)
class Update:
    """The result of an exchange: a difference to add, or a vector with a mass for :class:`gossip.effects.Merge`."""

    vector: Vector
    mass: float | None = None
    sample: Floats | None = None  # Sample of a vector to merge, taken before the merge overwrites the vector.
    positions: Positions | None = None
    weight: float = 1.0  # Weight of a difference of all elements.
    upload: Upload | None = None  # Its values, if they go to a device first.


@dataclass(frozen=True, slots=True)
class Adoption:
    """Weights to adopt, and perhaps an optimizer's state behind them."""

    vector: Floats
    optimizer_keys: tuple[str, ...] = ()
    optimizer_scalars: tuple[tuple[str, float], ...] = ()
    trial: bool = False
    frozen: bool = True  # False: the vector lacks the frozen weights, and those of the model stay.


@dataclass(slots=True)
class Visit:
    """The requests that one visit fulfilled. ``copies`` must be done before the vectors are used."""

    updates: Sequence[Update] = ()  # Their vectors are given back already, except those in ``read``.
    ratios: Sequence[float] = ()  # Merged share of each update's vector, 0 for a difference.
    read: list[Vector] = field(default_factory=list)  # Vectors that copies in progress read.
    snapshots: Sequence[tuple[int, Vector, float]] = ()  # Session, vector, and the mass that it carries.
    copies: Sequence[Pending] = ()
    adopted: bool = False
    apart: tuple[float, float] = (0.0, 0.0)  # On trial: |theirs - ours|^2 and |ours|^2.
    not_kept: str = ""  # Reason why weights were not adopted: no backup was possible.
    restored: bool = False
    decided: int = 0  # ``Boundary.decided`` at the visit: the copies hold all updates until then, and none after.
    spare: Vector | None = None  # A copy for the exchange that is expected to begin now.
    kept: Vector | None = None  # A copy for newcomers that come while the training loop stands.
    checks: Sequence[tuple[Vector, Pending]] = ()  # Copies that will know whether their values are finite.
    failed: Sequence[int] = ()  # Sessions whose snapshot found no memory on the model's device.
    lost: int = 0  # Updates that found no memory there, and are not in the weights.
    lives: int = 0  # ``Boundary.lives`` at the visit: identifies the weights that were copied.

    @property
    def updates_alone(self) -> bool:
        """Return True if the visit did nothing that the peer must be told."""
        copied = self.snapshots or self.spare is not None or self.kept is not None
        return not (copied or self.replaced or self.failed or self.lost)

    @property
    def replaced(self) -> bool:
        """Return True if other weights replaced the present ones, or were to."""
        return self.adopted or self.restored or bool(self.not_kept)

    def await_copy(self, copy: Pending | None, vector: Vector | None = None) -> bool:
        """Record a copy that is in progress, into ``vector`` alone. Return False if there is none to wait for."""
        if copy is not None and vector is not None:
            self.checks = (*self.checks, (vector, copy))
        if copy is None or copy.done():
            return False
        self.copies = (*self.copies, copy)
        return True


@dataclass(frozen=True, slots=True)
class Request:
    """A session's request for a snapshot."""

    piece: Vector | None  # Memory for the piece that a newcomer waits for.
    pushes: int  # Number of partners that it is given away to.
    cut: Cut | None
    part: Subset | None  # Part of the cut: requests of the same part share one vector.


class Boundary:
    """The network's requests, which the training loop fulfils.

    ``wanted`` is read without the lock: a request that comes a moment too late waits for the next step. A new request
    calls ``wake``, in case the loop has nothing else to do; a visit that takes requests calls ``rest``.
    """

    __slots__ = (
        "adoption", "conserves", "decided", "expected", "kept", "lives", "lock", "mass", "model", "owed", "requests",
        "rest", "restoring", "sampled", "updates", "uploads", "vectors", "visits", "wake", "wanted",
    )  # fmt: skip

    def __init__(
        self, model: Model, vectors: Vectors, kept: Backup, conserves: bool = False,
        lock: AbstractContextManager[object] | None = None, wake: Callable[[], None] = lambda: None,
        rest: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.vectors, self.kept = model, vectors, kept
        self.conserves = conserves  # A push takes mass away from the model.
        self.lock: AbstractContextManager[object] = nullcontext() if lock is None else lock
        self.wake, self.rest = wake, rest
        # True if an update goes to the model's device when it arrives, and is added once it is there. Otherwise the
        # boundary brings it there, and the device waits.
        self.uploads = False
        self.mass = 1.0  # Push-sum mass: it changes with the weights, so only in the training loop.
        self.wanted = False
        self.requests: dict[int, Request] = {}  # Requests by session.
        self.expected: Cut | None = None  # Cut of our next mix; None: all elements.
        self.sampled: Positions | None = None  # Elements that every snapshot holds, for gossip.arithmetic.movement.
        self.updates: list[Update] = []
        self.adoption: Adoption | None = None
        self.restoring = False
        # Updates that are decided and not in the model yet. A snapshot without them would count a difference twice: the
        # partner gives half of it a second time, and both end beyond the mean.
        self.owed = 0
        self.decided = 0  # Number of updates ever decided.
        self.lives = 0  # Number of times that the weights were replaced.
        self.visits = 0  # Number of visits that took copies: it orders snapshots.

    @property
    def weighs(self) -> bool:
        """Return True if a difference of all elements may come with its weight."""
        return self.model.weighs

    # -- called by the network -----------------------------------------------------------------------------------
    def want_snapshot(
        self, session: int, piece: Vector | None = None, pushes: int = 0, cut: Cut | None = None
    ) -> None:  # fmt: skip
        with self.lock:
            self.requests[session] = Request(piece, pushes, cut, None if cut is None else cut.part)
            self.signal()

    def cancel(self, session: int) -> None:
        if session in self.requests:
            with self.lock:
                request = self.requests.pop(session, None)
                self.wanted = bool(self.requests or self.updates or self.adoption or self.restoring)
            if request is not None and request.piece is not None:
                self.vectors.give(request.piece)

    def take_requests(self, here: Cut | None = None) -> list[int]:
        """Remove and return the sessions that a spare copy of these elements can serve before the next boundary."""
        part = None if here is None else here.part
        with self.lock:
            sessions = [
                session for session, request in self.requests.items()
                if request.piece is None and not request.pushes and request.part == part
            ]  # fmt: skip
        for session in sessions:
            self.cancel(session)
        return sessions

    def begin_update(self) -> None:
        """Announce a decided update, which ``want_update`` delivers or ``abort_update`` cancels."""
        with self.lock:
            self.owed += 1
            self.decided += 1

    def abort_update(self) -> None:
        with self.lock:
            self.owed -= 1
            self.signal()  # Snapshots may have waited for this update.

    def want_update(self, update: Update) -> None:
        """Deliver an announced update."""
        if self.uploads and update.positions is None:
            update = replace(update, upload=self.model.begin_upload(update.vector.array))
        with self.lock:
            self.updates.append(update)
            self.signal()

    def want_adoption(self, adoption: Adoption) -> None:
        """Request the adoption of other weights.

        Updates that are not applied yet belong to the present weights and are dropped. In a trial they are applied
        first, so that the backup holds what the partners have added already.
        """
        with self.lock:
            self.adoption = adoption
            dropped: list[Update] = []
            if not adoption.trial:
                dropped, self.updates = self.updates, []
            self.owed -= len(dropped)
            self.signal()
        for update in dropped:
            self.vectors.give(update.vector)

    def want_restore(self) -> None:
        with self.lock:
            self.restoring = True
            self.signal()

    def forget(self) -> None:
        """Drop all that was meant for weights that are no longer there."""
        self.kept.forget()
        self.lives += 1
        with self.lock:
            dropped, self.updates, self.adoption, self.restoring = self.updates, [], None, False
            self.owed -= len(dropped)
        for update in dropped:
            self.vectors.give(update.vector)

    def restart(self) -> None:
        """Drop the requests of a network side that ended by a fault, once none of its tasks runs any more.

        Updates of finished exchanges stay, since the partners have them too. The backup replaces weights on trial.
        """
        with self.lock:
            dropped, self.requests = self.requests, {}
            self.adoption, self.expected = None, None
            self.owed = len(self.updates)
            self.restoring = self.kept.holds
            self.wanted = bool(self.updates) or self.restoring
        for request in dropped.values():
            if request.piece is not None:
                self.vectors.give(request.piece)
        self.wake()

    def signal(self) -> None:
        if not self.wanted:  # Otherwise the loop was woken, and has not looked since.
            self.wanted = True
            self.wake()

    # -- called by the training loop -----------------------------------------------------------------------------
    def visit(self, replaced: Callable[[Floats], None], spare: bool = False, keep: bool = False) -> Visit:
        """Fulfil all requests.

        While an update is pending, snapshots for exchanges wait for it. Pushed snapshots carry their mass with them,
        and newcomers need only weights, so neither waits.

        Args:
            replaced: Callback for weights that take the place of others.
            spare: A mix is due: copy the weights ahead of its request, so that the exchange begins a step sooner.
            keep: Take a copy for newcomers, which may come while the loop stands.
        """
        with self.lock:
            ready = self.uploaded()
            updates, self.updates = self.updates[:ready], self.updates[ready:]
            self.owed -= len(updates)
            current, wishes, self.requests = not self.owed, self.requests, {}
            requests: dict[int, Request] = {}
            for session, one in wishes.items():
                waits = not (current or one.pushes or one.piece is not None)
                (self.requests if waits else requests)[session] = one
            adoption, self.adoption = self.adoption, None
            restoring, self.restoring = self.restoring, False
            self.wanted = bool(self.updates)
            if self.rest is not None and not self.wanted:
                self.rest()
            visit = Visit(updates=updates, decided=self.decided)
        if restoring:
            replaced(self.kept.put_back())
            visit.restored = True
            self.lives += 1
        copies: dict[Subset | None, Vector] = {}
        if updates:
            whole = keep or (spare and current and self.expected is None)
            whole = whole or any(one.cut is None and one.piece is None for one in requests.values())
            last = updates[-1] if whole and adoption is None else None
            visit.ratios = [self.apply(update, visit, copies if update is last else None) for update in updates]
        if adoption is not None:
            self.adopt(adoption, visit, replaced)
        if requests:
            visit.snapshots = self.fulfil(requests, visit, copies)
        if spare and current and self.at_hand(self.expected, copies):
            visit.spare = self.copy(visit, self.expected, copies)
        if keep and self.at_hand(None, copies):
            visit.kept = self.copy(visit, None, copies)
        if copies:
            self.visits += 1
            for vector in copies.values():
                vector.taken = self.visits
        visit.lives = self.lives
        return visit

    def uploaded(self) -> int:
        """Return how many updates can be applied without waiting: of those in order, the ones that are uploaded.

        Before the weights are replaced, all must be applied. The caller holds the lock.
        """
        if self.adoption is None and not self.restoring:
            for number, update in enumerate(self.updates):
                if update.upload is not None and not update.upload.done():
                    return number
        return len(self.updates)

    def copy_piece(self, piece: Vector, visit: Visit) -> bool:
        """Copy a piece for a newcomer. It holds nothing if the optimizer's state has changed its length.

        Return False if there is no memory for it.
        """
        model, start, stop = self.model, piece.start, piece.start + piece.array.size
        place = model.optimizer_range()
        try:
            if stop <= model.size():
                visit.await_copy(model.begin_read_piece(piece.array, start), piece)
            elif place.start <= start and stop <= place.stop:
                visit.await_copy(model.begin_read_optimizer(piece.array, start), piece)
            else:
                piece.start = sys.maxsize
        except MemoryError:
            self.vectors.give(piece)
            return False
        return True

    def copied_elements(self, cut: Cut | None) -> int:
        """Return the length of a copy of this cut, the sampled elements included."""
        if cut is None:
            return self.model.size()
        return cut.positions.size + (0 if self.sampled is None else self.sampled.size)

    def at_hand(self, cut: Cut | None, copies: dict[Subset | None, Vector]) -> bool:
        """Return True if a copy that no session has requested needs no new memory."""
        part = None if cut is None else cut.part
        return part in copies or self.vectors.at_hand(self.copied_elements(cut))

    def copy(self, visit: Visit, cut: Cut | None, copies: dict[Subset | None, Vector]) -> Vector | None:
        """Copy the live weights, or only the cut. Requests of a visit for the same part share one of ``copies``.

        Return None if the model's device has no memory for it.
        """
        model, part = self.model, None if cut is None else cut.part
        vector = copies.get(part)
        if vector is not None:
            vector.users += 1  # No other thread knows this vector yet.
            return vector
        vector = self.vectors.take(self.copied_elements(cut))
        pending = False
        try:
            if cut is None:
                visit.await_copy(model.begin_read(vector.array), vector)
                vector.finite = model.finite
            else:
                elements, sampled = cut.positions.size, self.sampled
                vector.cut = cut
                pending = visit.await_copy(model.begin_read_at(vector.array[:elements], cut.positions))
                if sampled is not None:
                    visit.await_copy(model.begin_read_at(vector.array[elements:], sampled))
        except MemoryError:
            if pending:
                visit.read.append(vector)  # It is given back once nothing writes to it.
            else:
                self.vectors.give(vector)
            return None
        copies[part] = vector
        return vector

    def fulfil(
        self, requests: dict[int, Request], visit: Visit, copies: dict[Subset | None, Vector]
    ) -> list[tuple[int, Vector, float]]:  # fmt: skip
        snapshots = []
        for session, request in requests.items():
            mass, vector = 0.0, request.piece
            if vector is None:
                vector = self.copy(visit, request.cut, copies)
            elif not self.copy_piece(vector, visit):
                vector = None
            if vector is None:
                visit.failed = (*visit.failed, session)
                continue
            if request.pushes:
                mass, self.mass = push_mass(self.mass, request.pushes, self.conserves)
            snapshots.append((session, vector, mass))
        return snapshots

    def apply(self, update: Update, visit: Visit, copies: dict[Subset | None, Vector] | None = None) -> float:
        """Apply an update, and return the merged share of its vector, 0 for a difference.

        ``copies``: all weights will be copied next, perhaps into the vector of the update.
        """
        whole = update.mass is None and update.positions is None and update.upload is None
        if copies is not None and whole and self.model.add_read(update.vector.array, update.weight):
            update.vector.users, update.vector.finite = 0, self.model.finite
            copies[None] = update.vector
            return 0.0
        ratio = 0.0 if update.mass is None else update.mass / (self.mass + update.mass)
        try:
            pending = self.added(update) if update.mass is None else self.merged(update, ratio)
        except MemoryError:
            visit.lost += 1
            self.vectors.give(update.vector)
            return 0.0
        if update.mass is not None:
            self.mass += update.mass
        if visit.await_copy(pending):
            visit.read.append(update.vector)
        else:  # The vector is free at once, and this visit may copy into it.
            self.vectors.give(update.vector)
        return ratio

    def added(self, update: Update) -> Pending | None:
        values, weight = update.vector.array, update.weight
        if update.positions is not None:
            return self.model.add_at(values, update.positions)
        if update.upload is not None:
            return update.upload.add()
        return self.model.add(values) if weight == 1.0 else self.model.add_weighted(values, weight)

    def merged(self, update: Update, ratio: float) -> Pending | None:
        if update.upload is not None:
            return update.upload.merge(ratio)
        return self.model.merge(update.vector.array, ratio)

    def adopt(self, adoption: Adoption, visit: Visit, replaced: Callable[[Floats], None]) -> None:
        if adoption.trial:
            if not self.kept.keep():
                visit.not_kept = self.kept.why_not
                return
            visit.apart = self.kept.distance(adoption.vector)
        adopt = self.model.adopt if adoption.frozen else self.model.adopt_exchanged
        adopt(adoption.vector, adoption.optimizer_keys, dict(adoption.optimizer_scalars))
        replaced(adoption.vector)
        visit.adopted = True
        self.lives += 1
        self.mass = 1.0
