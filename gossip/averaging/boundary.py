"""The step boundary: where exchanges meet the training loop, and nowhere else.

The network leaves wishes (a snapshot, an update to add, weights to take over); the training loop fulfils them between
two steps, in one order: weights come back, updates are added, weights are taken over, snapshots are taken, so that what
is sent includes what was received. Nobody waits for anybody: without wishes a visit is one attribute read.

``lock`` is for a driver whose training loop and network are two threads. What changes the model is called by the loop
alone; the lock guards the wishes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from gossip.arithmetic.mixing import push_mass
from gossip.arithmetic.subsets import Subset
from gossip.averaging.vectors import Cut, Floats, Positions, Vector, Vectors

__all__ = ["Adoption", "Boundary", "Kept", "Model", "Pending", "Update", "Visit"]


class Pending(Protocol):
    """A copy that may be under way. Until it is done the host array is not to be read (of a read) or written (of an
    addition)."""

    def done(self) -> bool: ...


class Model(Protocol):
    """The live weights, and the optimizer's state behind them: changed by the training loop alone. None for a copy
    that is done when the call returns. Exchanges carry all weights but those that nobody changes, which lie behind
    them."""

    @property
    def finite(self) -> bool | None:
        """Whether all is that was read last, by :meth:`begin_read` or :meth:`add_read`; None where nobody looked."""

    @property
    def weighs(self) -> bool:
        """Whether a difference may come with its weight, which then costs no pass of its own."""

    def size(self) -> int:
        """Elements of the weights that exchanges carry."""

    def optimizer_range(self) -> range:
        """Where the optimizer's state lies in the vector that newcomers take: behind all weights."""

    def begin_read(self, out: Floats) -> Pending | None:
        """``out[:] = weights``."""

    def begin_read_optimizer(self, out: Floats, start: int) -> Pending | None:
        """``out[:]`` = the optimizer's state, from ``start`` of what newcomers take on."""

    def begin_read_piece(self, out: Floats, start: int) -> Pending | None:
        """``out[:]`` = the weights from ``start`` on, all of them such as exchanges carry."""

    def begin_read_at(self, out: Floats, positions: Positions) -> Pending | None:
        """``out[:] = weights[positions]``."""

    def read_frozen(self, out: Floats, start: int) -> None:
        """``out[:]`` = the weights from ``start`` on, of which nobody changes any: in any thread."""

    def add(self, values: Floats) -> Pending | None:
        """``weights += values``."""

    def add_weighted(self, values: Floats, weight: float) -> Pending | None:
        """``weights += weight values``, where it :attr:`weighs`; ``values`` may be overwritten."""

    def add_read(self, values: Floats, weight: float) -> bool:
        """As both, then ``values[:] = weights``, which takes one pass over memory where the two take two.
        False where it cannot be had in one: nothing has changed."""

    def add_at(self, values: Floats, positions: Positions) -> Pending | None:
        """``weights[positions] += values``."""

    def merge(self, vector: Floats, ratio: float) -> Pending | None:
        """``weights += ratio (vector - weights)``; ``vector`` may be overwritten."""

    def adopt(self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float]) -> None:
        """Overwrite the weights, and the optimizer's state where this optimizer keeps it."""


class Kept(Protocol):
    """The weights that were there, while others are on trial."""

    why_not: str

    @property
    def holds(self) -> bool:
        """Whether weights are kept."""

    def keep(self) -> bool:
        """Keep them; False, with the reason in ``why_not``, where they could not be."""

    def distance(self, theirs: Floats) -> tuple[float, float]:
        """``|theirs - kept|^2`` and ``|kept|^2``."""

    def put_back(self) -> Floats:
        """Overwrite the live weights with those kept, and return them."""

    def forget(self) -> None:
        """They may go."""


@dataclass(frozen=True, slots=True)
class Update:
    """What an exchange brought: a difference to add, to all or at these positions, or with a mass a vector to merge, as
    :class:`gossip.effects.Merge` says."""

    vector: Vector
    mass: float | None = None
    sample: Floats | None = None  # of a vector to merge, as gossip.arithmetic.movement asks for: to merge overwrites it
    positions: Positions | None = None
    weight: float = 1.0  # of a difference to all


@dataclass(frozen=True, slots=True)
class Adoption:
    """Weights to take over, and perhaps an optimizer's state behind them."""

    vector: Floats
    optimizer_keys: tuple[str, ...] = ()
    optimizer_scalars: tuple[tuple[str, float], ...] = ()
    trial: bool = False


@dataclass(slots=True)
class Visit:
    """What one visit fulfilled. ``copies`` must be done before anybody uses the vectors."""

    updates: Sequence[Update] = ()  # their vectors are given back already, but for those in ``read``
    ratios: Sequence[float] = ()  # of each of them: how much of a vector was merged, 0 if added
    read: list[Vector] = field(default_factory=list)  # by copies under way
    snapshots: Sequence[tuple[int, Vector, float]] = ()  # session, and the mass that it carries
    copies: Sequence[Pending] = ()
    adopted: bool = False
    apart: tuple[float, float] = (0.0, 0.0)  # on trial: |theirs - ours|^2 and |ours|^2
    not_kept: str = ""  # why weights were not adopted: those that are here could not be kept
    restored: bool = False
    decided: int = 0  # Boundary.decided as it was then: the copies hold all of those updates, and none after
    spare: Vector | None = None  # a copy for the exchange that is expected to begin now
    kept: Vector | None = None  # a copy for whoever comes while the loop stands
    lives: int = 0  # Boundary.lives as it was then: of which weights the copies are

    @property
    def updates_alone(self) -> bool:
        """Nothing of it need be told to the peer."""
        return not (self.snapshots or self.spare is not None or self.kept is not None or self.replaced)

    @property
    def replaced(self) -> bool:
        """Whether other weights were to take the place of those that were there."""
        return self.adopted or self.restored or bool(self.not_kept)

    def await_copy(self, copy: Pending | None) -> bool:
        """Whether there is something to wait for."""
        if copy is None or copy.done():
            return False
        self.copies = (*self.copies, copy)
        return True


@dataclass(frozen=True, slots=True)
class Request:
    """A snapshot that a session wants."""

    piece: Vector | None  # that a newcomer waits for, and where it goes
    pushes: int  # to how many it is given away
    cut: Cut | None
    part: Subset | None  # of the cut: requests of the same share one vector


class Boundary:
    """Wishes of the network, fulfilled by the training loop. ``wanted`` is read without the lock: a wish that comes a
    moment too late waits for the next step. ``wake`` is called where there is one, for a loop that has nothing else to
    do, and ``rest`` when a visit takes them."""

    __slots__ = (
        "adoption", "conserves", "decided", "expected", "kept", "lives", "lock", "mass", "model", "owed", "requests",
        "rest", "restoring", "sampled", "updates", "vectors", "visits", "wake", "wanted",
    )  # fmt: skip

    def __init__(
        self, model: Model, vectors: Vectors, kept: Kept, conserves: bool = False,
        lock: AbstractContextManager[object] | None = None, wake: Callable[[], None] = lambda: None,
        rest: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.vectors, self.kept = model, vectors, kept
        self.conserves = conserves  # a push takes mass away
        self.lock: AbstractContextManager[object] = nullcontext() if lock is None else lock
        self.wake, self.rest = wake, rest
        self.mass = 1.0  # of push-sum: it changes with the weights, and so in the training loop alone
        self.wanted = False
        self.requests: dict[int, Request] = {}  # by session
        self.expected: Cut | None = None  # what the next mix of our own will be of; None: all
        self.sampled: Positions | None = None  # elements that every snapshot holds, for gossip.arithmetic.movement
        self.updates: list[Update] = []
        self.adoption: Adoption | None = None
        self.restoring = False
        # What exchanges brought and is not in the model yet. A snapshot without it would count it twice: the partner
        # gives half of what lies between us a second time, and both end beyond the mean.
        self.owed = 0
        self.decided = 0  # how many there ever were
        self.lives = 0  # how often the weights were replaced
        self.visits = 0  # that took copies: the order of snapshots

    @property
    def weighs(self) -> bool:
        """Whether a difference to all may come with its weight."""
        return self.model.weighs

    # -- the network's -------------------------------------------------------------------------------------------
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
        """The sessions that want these elements of the weights, who need not wait for the next boundary: a spare copy
        is here."""
        part = None if here is None else here.part
        with self.lock:
            sessions = [
                session for session, request in self.requests.items()
                if request.piece is None and not request.pushes and request.part == part
            ]  # fmt: skip
        for session in sessions:
            self.cancel(session)
        return sessions

    def owe(self) -> None:
        """An update is decided; want_update brings it, or excuse says that it never comes."""
        with self.lock:
            self.owed += 1
            self.decided += 1

    def excuse(self) -> None:
        with self.lock:
            self.owed -= 1
            self.signal()  # snapshots may have waited for it

    def want_update(self, update: Update) -> None:
        """One that was owed."""
        with self.lock:
            self.updates.append(update)
            self.signal()

    def want_adoption(self, adoption: Adoption) -> None:
        """Updates not yet applied belong to the weights that go: they are dropped, but for a trial, after which those
        may come back: what the partners have added already is in what is kept."""
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
        """Drop what is on its way to weights that are no longer there."""
        self.kept.forget()
        self.lives += 1
        with self.lock:
            dropped, self.updates, self.adoption, self.restoring = self.updates, [], None, False
            self.owed -= len(dropped)
        for update in dropped:
            self.vectors.give(update.vector)

    def restart(self) -> None:
        """Drop the wishes of a network side that ended by a fault, once none of its tasks runs any more. Updates of
        finished exchanges stay, since the partners have them too. Weights on trial give way to those that were kept."""
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
        if not self.wanted:  # else it was woken, and has not looked since
            self.wanted = True
            self.wake()

    # -- the training loop's -------------------------------------------------------------------------------------
    def visit(self, replaced: Callable[[Floats], None], spare: bool = False, keep: bool = False) -> Visit:
        """Fulfil everything. While an update is owed, snapshots that are exchanged wait for it; those that are given
        away carry their mass with them, and newcomers need no more than weights. ``replaced`` is told weights that take
        the place of others.

        ``spare``: a mix is due, so that a snapshot will be asked for in a moment: take one along, and the exchange
        begins a step sooner. ``keep``: take a copy for newcomers, who may come while the loop stands.
        """
        with self.lock:
            updates, self.updates = self.updates, []
            self.owed -= len(updates)
            current, wishes, self.requests = not self.owed, self.requests, {}
            requests: dict[int, Request] = {}
            for session, one in wishes.items():
                waits = not (current or one.pushes or one.piece is not None)
                (self.requests if waits else requests)[session] = one
            adoption, self.adoption = self.adoption, None
            restoring, self.restoring = self.restoring, False
            self.wanted = False
            if self.rest is not None:
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

    def copy_piece(self, piece: Vector, visit: Visit) -> None:
        """For a newcomer. Where the optimizer's state has changed its length it holds nothing then."""
        model, start, stop = self.model, piece.start, piece.start + piece.array.size
        place = model.optimizer_range()
        if stop <= model.size():
            visit.await_copy(model.begin_read_piece(piece.array, start))
        elif place.start <= start and stop <= place.stop:
            visit.await_copy(model.begin_read_optimizer(piece.array, start))
        else:
            piece.start = sys.maxsize

    def copied_elements(self, cut: Cut | None) -> int:
        """Of a copy of these elements, with the sampled ones where those are not among them anyway."""
        if cut is None:
            return self.model.size()
        return cut.positions.size + (0 if self.sampled is None else self.sampled.size)

    def at_hand(self, cut: Cut | None, copies: dict[Subset | None, Vector]) -> bool:
        """Whether a copy that nobody has asked for takes no memory that is not there."""
        part = None if cut is None else cut.part
        return part in copies or self.vectors.at_hand(self.copied_elements(cut))

    def copy(self, visit: Visit, cut: Cut | None, copies: dict[Subset | None, Vector]) -> Vector:
        """Of the live weights, or of the elements that are asked for: a half percent of a large model is a two
        hundredth of the memory's work. One for all who want the same of this visit: ``copies``, by the part."""
        model, part = self.model, None if cut is None else cut.part
        vector = copies.get(part)
        if vector is not None:
            vector.users += 1  # nobody else knows of it yet
            return vector
        if cut is None:
            vector = copies[part] = self.vectors.take(model.size())
            visit.await_copy(model.begin_read(vector.array))
            vector.finite = model.finite
            return vector
        elements, sampled = cut.positions.size, self.sampled
        vector = copies[part] = self.vectors.take(self.copied_elements(cut))
        vector.cut = cut
        visit.await_copy(model.begin_read_at(vector.array[:elements], cut.positions))
        if sampled is not None:
            visit.await_copy(model.begin_read_at(vector.array[elements:], sampled))
        return vector

    def fulfil(
        self, requests: dict[int, Request], visit: Visit, copies: dict[Subset | None, Vector]
    ) -> list[tuple[int, Vector, float]]:  # fmt: skip
        snapshots = []
        for session, request in requests.items():
            mass, vector = 0.0, request.piece
            if vector is None:
                vector = self.copy(visit, request.cut, copies)
            else:
                self.copy_piece(vector, visit)
            if request.pushes:
                mass, self.mass = push_mass(self.mass, request.pushes, self.conserves)
            snapshots.append((session, vector, mass))
        return snapshots

    def apply(self, update: Update, visit: Visit, copies: dict[Subset | None, Vector] | None = None) -> float:
        """How much of a vector was merged, 0 for a difference that was added. ``copies``: all of the weights will be
        copied next, and may be where what was added lies."""
        values, ratio = update.vector.array, 0.0
        if update.positions is not None:
            pending = self.model.add_at(values, update.positions)
        elif update.mass is None:
            weight = update.weight
            if copies is not None and self.model.add_read(values, weight):
                update.vector.users, update.vector.finite = 0, self.model.finite
                copies[None] = update.vector
                return ratio
            pending = self.model.add(values) if weight == 1.0 else self.model.add_weighted(values, weight)
        else:
            total = self.mass + update.mass
            ratio = update.mass / total
            pending = self.model.merge(values, ratio)
            self.mass = total
        if visit.await_copy(pending):
            visit.read.append(update.vector)
        else:  # at once: the copies of this visit may be made where it lies
            self.vectors.give(update.vector)
        return ratio

    def adopt(self, adoption: Adoption, visit: Visit, replaced: Callable[[Floats], None]) -> None:
        if adoption.trial:
            if not self.kept.keep():
                visit.not_kept = self.kept.why_not
                return
            visit.apart = self.kept.distance(adoption.vector)
        self.model.adopt(adoption.vector, adoption.optimizer_keys, dict(adoption.optimizer_scalars))
        replaced(adoption.vector)
        visit.adopted = True
        self.lives += 1
        self.mass = 1.0
