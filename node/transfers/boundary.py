"""Where the training thread and the network thread meet: the step boundary, and nowhere else.

The network thread leaves wishes (a snapshot, a shift to add, weights to take over); the training thread fulfils them
between two steps. Nobody waits for anybody: without wishes a visit is one attribute read.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.mixing import push_mass
from gossip.arithmetic.subsets import Subset
from gossip.errors import LayoutError
from node.model.kept import Kept
from node.model.snapshot import ModelState, Parts, Pending

__all__ = ["Boundary", "Cut", "Done", "Lease", "Update", "Vector", "VectorPool"]

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The elements of the weights that a snapshot holds, where it does not hold all."""

    part: Subset
    positions: Positions  # ascending


@dataclass(slots=True, eq=False)
class Vector:
    """A host vector of the pool, shared by ``users`` sessions."""

    array: Floats  # with a cut: its elements, and behind them the sampled ones
    users: int = 1
    cut: Cut | None = None

    @property
    def elements(self) -> int:
        """Without the sampled ones."""
        return self.array.size if self.cut is None else self.cut.positions.size


class Lease:
    """One more use of a vector, by one who reads it while others give it back; ends once, however often said."""

    def __init__(self, pool: VectorPool, vector: Vector) -> None:
        self.pool, self.vector, self.open = pool, vector, True

    def end(self) -> None:
        if self.open:
            self.open = False
            self.pool.give(self.vector)


class VectorPool:
    """Host vectors, reused: an exchange needs two (snapshot and difference) and page faults would cost as much as the
    transfer. Used by both threads."""

    KEPT = 8  # 2 x (1 outgoing + 2 incoming) and a joiner's donation or two

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self.lock = threading.Lock()
        self.free: dict[int, list[Floats]] = {}  # by size, those given back last at the end
        self.largest = self.held = 0  # elements: of one, and of all in free
        # The newest snapshot, for newcomers that come while the training loop stands. It costs nothing: what is kept is
        # a vector that the next exchange takes anyway, after all others; by then it has a newer snapshot.
        self.last: Vector | None = None
        self.last_at = -math.inf  # time.monotonic() when one was last taken or asked for

    def take(self, parts: Parts, size: int | None = None) -> Vector:
        """A vector of those parts; the network thread names the size: the optimizer's state is not its to read."""
        if size is None:
            size = self.state.size(parts)
        with self.lock:
            kept, last = self.free.get(size), None if self.last is None else self.last.array
            array = None
            if kept:
                array = kept.pop(max((at for at, one in enumerate(kept) if one is not last), default=0))
                self.held -= size
                if array is last:
                    self.last = None
        return Vector(self.state.buffer(size) if array is None else array)

    def lease(self, vector: Vector) -> Lease:
        """The vector is nobody else's until that, and all others, have ended."""
        with self.lock:
            vector.users += 1
        return Lease(self, vector)

    def keep(self, vector: Vector) -> None:
        """A snapshot, newer than any other, that nobody will change while it has users."""
        with self.lock:
            self.last, self.last_at = vector, time.monotonic()

    def recall(self) -> Vector | None:
        """The newest snapshot, with one more user."""
        with self.lock:
            last = self.last
            if last is None:
                return None
            if not last.users:
                kept = self.free[last.array.size]
                self.free[last.array.size] = [one for one in kept if one is not last.array]
                self.held -= last.array.size
            last.users += 1
            return last

    def forget(self) -> None:
        """The weights are others now."""
        with self.lock:
            self.last, self.last_at = None, -math.inf

    def give(self, vector: Vector) -> None:
        with self.lock:
            vector.users -= 1
            if vector.users:
                return
            size = vector.array.size
            kept = self.free[size] = self.free.pop(size, [])
            if len(kept) == self.KEPT:
                self.drop([vector.array])
                return
            kept.append(vector.array)
            self.held += size
            self.largest = max(self.largest, size)
            while self.held > self.KEPT * self.largest:  # a partner's offer says how large a part is
                oldest = next(iter(self.free))
                self.held -= oldest * len(self.free[oldest])
                self.drop(self.free.pop(oldest))

    def drop(self, arrays: list[Floats]) -> None:
        """These are no longer kept, and so the newest snapshot is not where it is among them."""
        if self.last is not None and any(one is self.last.array for one in arrays):
            self.last = None


@dataclass(frozen=True, slots=True)
class Update:
    """What an exchange brought: a difference to add, all or at these positions, or with a mass a vector to merge, as
    effects.Merge says."""

    vector: Vector
    mass: float | None = None
    sample: Floats | None = None  # of a vector to merge, as gossip.progress asks for: to merge it overwrites it
    positions: Positions | None = None


@dataclass(slots=True)
class Done:
    """What one visit fulfilled. ``copies`` must be done before the arrays are used by the network thread."""

    snapshots: list[tuple[int, Vector, float]] = field(default_factory=list)  # session, and the mass that it carries
    copies: list[Pending] = field(default_factory=list)
    shifted: list[Update] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # of each of them: how much of a vector was merged, 0 if added
    adopted: bool = False
    apart: tuple[float, float] = (0.0, 0.0)  # on trial: |theirs - ours|^2 and |ours|^2
    not_kept: str = ""  # why weights were not adopted: those that are here could not be kept
    restored: bool = False
    decided: int = 0  # Boundary.decided as it was then: the copies hold all of those updates, and none after
    spare: Vector | None = None  # a copy of the weights for the exchange that is expected to begin now
    kept: Vector | None = None  # one for whoever comes while the loop stands
    lives: int = 0  # Boundary.lives as it was then: of which weights the copies are

    @property
    def shifts_alone(self) -> bool:
        """Nothing of it need be told to the peer."""
        replaced = self.adopted or self.not_kept or self.restored
        return not (replaced or self.snapshots or self.spare is not None or self.kept is not None)


@dataclass(slots=True)
class Adoption:
    vector: Floats
    optimizer_keys: tuple[str, ...]
    optimizer_scalars: tuple[tuple[str, float], ...]
    trial: bool = False


class Boundary:
    """Wishes of the network thread, fulfilled by the training thread. ``wanted`` is read without the lock: a wish that
    comes a moment too late waits for the next step."""

    def __init__(self, state: ModelState, pool: VectorPool, conserves: bool = False) -> None:
        self.state, self.pool = state, pool
        self.conserves = conserves  # a push takes mass away
        self.mass = 1.0  # of push-sum: it changes with the weights, and so in the training thread alone
        self.lock = threading.Lock()
        self.wake = threading.Event()  # for a training thread that has nothing else to do (joining, settling)
        self.wanted = False
        self.outer_lock = threading.Lock()  # the outer step moves in the network's threads, is reset in ours
        self.requests: dict[int, tuple[bool, int, Cut | None]] = {}  # session -> full, to how many it is pushed
        self.expected: Cut | None = None  # what the next mix of our own will be of; None: all
        self.sampled: Positions | None = None  # elements that every snapshot holds, for gossip.progress
        self.shifts: list[Update] = []
        self.adoption: Adoption | None = None
        self.kept = Kept(state)  # what an adoption on trial overwrote
        self.restoring = False
        # What exchanges brought and is not in the model yet. A snapshot without it would count it twice: the partner
        # gives half of what lies between us a second time, and both end beyond the mean.
        self.owed = 0
        self.decided = 0  # how many there ever were
        self.lives = 0  # how often the weights were replaced
        self.copy_s = 0.0  # what the last copy of the weights for nobody took

    # -- network thread ------------------------------------------------------------------------------------------
    def want_snapshot(self, session: int, full: bool, pushes: int = 0, cut: Cut | None = None) -> None:
        with self.lock:
            self.requests[session] = full, pushes, cut
            self.signal()

    def cancel(self, session: int) -> None:
        with self.lock:
            self.requests.pop(session, None)
            self.wanted = bool(self.requests or self.shifts or self.adoption or self.restoring)

    def take_requests(self, here: Cut | None = None) -> list[int]:
        """The sessions that want these elements of the weights, who need not wait for the next boundary: a spare copy
        is here."""
        part = None if here is None else here.part
        with self.lock:
            sessions = [
                session for session, (full, pushes, cut) in self.requests.items()
                if not (full or pushes) and (None if cut is None else cut.part) == part
            ]  # fmt: skip
        for session in sessions:
            self.cancel(session)
        return sessions

    def owe(self) -> None:
        """An update is decided; want_shift brings it, or excuse says that it never comes."""
        with self.lock:
            self.owed += 1
            self.decided += 1

    def excuse(self) -> None:
        with self.lock:
            self.owed -= 1
            self.signal()  # snapshots may have waited for it

    def want_shift(self, shift: Update) -> None:
        """One that was owed."""
        with self.lock:
            self.shifts.append(shift)
            self.signal()

    def want_adoption(self, adoption: Adoption) -> None:
        """Shifts not yet applied belong to the weights that go: they are dropped, but for a trial, after which those
        may come back: what the partners have added already is in what is kept."""
        with self.lock:
            self.adoption = adoption
            dropped: list[Update] = []
            if not adoption.trial:
                dropped, self.shifts = self.shifts, []
            self.owed -= len(dropped)
            self.signal()
        for shift in dropped:
            self.pool.give(shift.vector)

    def want_restore(self) -> None:
        with self.lock:
            self.restoring = True
            self.signal()

    def forget(self) -> None:
        """Drop what is on its way to weights that are no longer there."""
        self.kept.forget()
        self.lives += 1
        with self.lock:
            dropped, self.shifts, self.adoption, self.restoring = self.shifts, [], None, False
            self.owed -= len(dropped)
        for shift in dropped:
            self.pool.give(shift.vector)

    def signal(self) -> None:
        self.wanted = True
        self.wake.set()

    # -- training thread -----------------------------------------------------------------------------------------
    def visit(self, on_adopt: Callable[[Floats], None], spare: bool = False, keep: bool = False) -> Done:
        """Fulfil everything; shifts before snapshots, so that what is sent includes what was received. While an update
        is owed, snapshots that are exchanged wait for it; those that are given away carry their mass with them.

        ``spare``: a mix is due, so that a snapshot will be asked for in a moment: take one along, and the exchange
        begins a step sooner. ``keep``: take a copy for newcomers, who may come while the loop stands.
        """
        with self.lock:
            shifts, self.shifts = self.shifts, []
            self.owed -= len(shifts)
            current = not self.owed
            requests = {session: wish for session, wish in self.requests.items() if current or wish[1]}
            self.requests = {session: wish for session, wish in self.requests.items() if session not in requests}
            adoption, self.adoption = self.adoption, None
            restoring, self.restoring = self.restoring, False
            self.wanted = False
            self.wake.clear()
            done = Done(shifted=shifts, decided=self.decided)
        if restoring:
            on_adopt(self.kept.put_back())
            done.restored = True
            self.lives += 1
        for shift in shifts:
            done.ratios.append(0.0 if shift.mass is None else shift.mass / (self.mass + shift.mass))
            done.copies.append(self.apply(shift))
        if adoption is not None and adoption.trial and not self.kept.keep():
            done.not_kept, adoption = self.kept.why_not, None
        if adoption is not None:
            if adoption.trial:
                done.apart = self.kept.distance(adoption.vector)
            self.adopt(adoption)
            on_adopt(adoption.vector)
            done.adopted = True
            self.lives += 1
            self.mass = 1.0
        taken: dict[tuple[Parts, Subset | None], Vector] = {}
        for session, (full, pushes, cut) in requests.items():
            what: tuple[Parts, Subset | None] = "full" if full else "weights", None if cut is None else cut.part
            vector = taken.get(what)
            if vector is None:
                vector = taken[what] = self.copy(done, what[0], cut)
            else:
                vector.users += 1
            mass = 0.0
            if pushes:
                mass, self.mass = push_mass(self.mass, pushes, self.conserves)
            done.snapshots.append((session, vector, mass))
        if spare and current:
            done.spare = self.copy(done, "weights", self.expected)
        if keep:
            began = time.perf_counter()
            done.kept = self.copy(done, "weights", None)
            self.copy_s = time.perf_counter() - began
        done.lives = self.lives
        return done

    def copy(self, done: Done, parts: Parts, cut: Cut | None) -> Vector:
        """Of the live tensors, or of the elements that are asked for: a half percent of a large model is a two
        hundredth of the memory's work."""
        if cut is None:
            vector = self.pool.take(parts)
            done.copies.append(self.state.begin_read(vector.array, parts))
            return vector
        elements, sampled = cut.positions.size, self.sampled
        vector = self.pool.take(parts, elements + (0 if sampled is None else sampled.size))
        vector.cut = cut
        done.copies.append(self.state.begin_read_at(vector.array[:elements], cut.positions))
        if sampled is not None:
            done.copies.append(self.state.begin_read_at(vector.array[elements:], sampled))
        return vector

    def apply(self, shift: Update) -> Pending:
        vector = shift.vector
        if shift.positions is not None:
            return self.state.add_at(vector.array, shift.positions)
        if shift.mass is None:
            return self.state.add(vector.array)
        total = self.mass + shift.mass
        pending = self.state.merge(vector.array, shift.mass / total)
        self.mass = total
        return pending

    def adopt(self, adoption: Adoption) -> None:
        """The weights, and the optimizer's state where this optimizer keeps that state: a donor may train with another
        one, and then ours goes on, or begins afresh where it is not finite."""
        if adoption.optimizer_keys:
            with contextlib.suppress(LayoutError):
                self.state.write(adoption.vector, adoption.optimizer_keys, dict(adoption.optimizer_scalars))
                return
        self.state.write(adoption.vector[: self.state.layout.size])
        self.state.forget_spoiled()
