"""Jobs: arithmetic on whole vectors, which a driver runs in any thread. Their consequences follow in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from gossip.arithmetic.mixing import OuterStep
from gossip.arithmetic.movement import Movement
from gossip.averaging.all_reduce import GroupAverage
from gossip.averaging.boundary import Adoption, Boundary, Update
from gossip.averaging.reports import Reports
from gossip.averaging.vectors import Cut, Positions, Vector, Vectors
from gossip.effects import CopyPiece, Merge, Mix

__all__ = ["Averaging", "Beginning", "Job", "JobOwner", "MakingRoom", "Mixing", "Reserving", "TakingOver"]


class Job(Protocol):
    """Arithmetic on whole vectors.

    ``run`` touches only its own vectors and may run in any thread. ``land`` follows where effects are performed, in the
    order in which jobs were given. ``fail`` replaces both if either raises an error.
    """

    elements: int

    def run(self) -> None: ...
    def land(self) -> None: ...
    def fail(self) -> None: ...


class JobOwner(Protocol):
    """The parts of an :class:`gossip.averaging.averager.Averager` that its jobs use."""

    peer: Reports
    boundary: Boundary
    vectors: Vectors
    outer: OuterStep
    lock: AbstractContextManager[object]
    movement: Movement | None
    snapshots: dict[int, Vector]
    joining: Vector | None
    generation: int

    def failed(self, session: int, code: str) -> None: ...
    def not_taken(self, session: int) -> None: ...


class Mixing:
    """A job that turns a finished exchange into an update of the model; without a difference, into the snapshot."""

    __slots__ = ("averager", "credit", "difference", "elements", "every", "generation", "late", "later", "mass",
                 "own_sq", "plain", "positions", "result", "since", "snapshot", "unweighted", "weight")  # fmt: skip

    def __init__(
        self, averager: JobOwner, snapshot: Vector, difference: Vector | None, positions: Positions | None,
        effect: Mix | Merge, own_sq: float = 0.0,
    ) -> None:  # fmt: skip
        self.averager, self.snapshot, self.difference, self.positions = averager, snapshot, difference, positions
        mix = effect if isinstance(effect, Mix) else Mix(effect.session, 0.0)
        self.weight, self.plain, self.credit, self.every = mix.weight, mix.plain, mix.credit, mix.every
        self.mass = effect.mass if isinstance(effect, Merge) else None
        self.own_sq = own_sq
        self.late = False  # A mix with a newer snapshot has taken place.
        self.since: Vector | None = None  # Sum of what other mixes added after the snapshot.
        # Sums of newer snapshots that lack this mix, and whether each sum is new.
        self.later: list[tuple[Vector, bool]] = []
        self.generation = averager.generation
        self.elements = snapshot.array.size
        self.result: Vector | None = None  # The update: added as a whole or at the positions, or merged with a mass.
        folds = averager.outer.plain and averager.boundary.weighs
        # The boundary applies the weight in its own pass.
        self.unweighted = folds and self.mass is None and positions is None

    def run(self) -> None:
        averager, snapshot, difference = self.averager, self.snapshot.array, self.difference
        if difference is None:
            self.result = averager.vectors.take(snapshot.size)
            self.result.array[:] = snapshot  # Other sessions may use the snapshot too.
            return
        self.result = difference
        if self.mass is not None:
            difference.array += snapshot[: difference.array.size]
            return
        correction = averager.outer.correction if self.positions is None else None
        if correction is not None:
            with averager.lock:
                if self.generation == averager.generation:
                    correction.learn(difference.array, self.weight, self.credit, self.own_sq, self.every)
        if self.unweighted:
            return
        own = snapshot if self.snapshot.cut is None else snapshot[: self.snapshot.elements]
        with averager.lock:
            # Otherwise the outer step is at other weights now, and land() drops the result.
            if self.generation == averager.generation:
                since = None if self.since is None else self.since.array
                how = self.positions, self.late, self.plain, since
                averager.outer.shift(own, difference.array, self.weight, *how)
        for lacks, new in self.later:
            if new:
                lacks.array[:] = difference.array
            else:
                lacks.array += difference.array

    def land(self) -> None:
        averager, result = self.averager, self.result
        averager.vectors.give(self.snapshot)
        self.end_later()
        assert result is not None
        if self.generation != averager.generation:
            averager.vectors.give(result)
            averager.boundary.abort_update()
            return
        weight = self.weight if self.unweighted else 1.0
        sample, movement = None, averager.movement
        if movement is not None and self.mass is None:
            movement.added(result.array, self.positions, weight)
        elif movement is not None:
            sample = movement.sample(result.array)
        averager.boundary.want_update(Update(result, self.mass, sample, self.positions, weight))

    def fail(self) -> None:
        """Continue without the mix. Its vectors are not reused, because another thread may still write to them."""
        for lacks, new in self.later:
            if new:
                lacks.array.fill(0.0)
        self.end_later()
        self.averager.boundary.abort_update()

    def end_later(self) -> None:
        for lacks, _ in self.later:
            self.averager.vectors.give(lacks)
        self.later = []


class TakingOver:
    """A job that takes another run's weights to the step boundary."""

    __slots__ = ("adoption", "averager", "elements")

    def __init__(self, averager: JobOwner, adoption: Adoption) -> None:
        self.averager, self.adoption, self.elements = averager, adoption, 0

    def run(self) -> None:
        """Do nothing: there is nothing to compute."""

    def land(self) -> None:
        joining = self.averager.joining
        if joining is not None and self.adoption.vector is joining.array:
            self.averager.boundary.want_adoption(self.adoption)

    def fail(self) -> None:
        """Do nothing: neither ``run`` nor ``land`` can fail."""


class Beginning:
    """A job that prepares the outer step's memory, once the step has taken over the vector that a newcomer collected.

    It frees the vector's part that the outer step does not use, and allocates the momentum, while the training loop
    runs and before anything is mixed.
    """

    __slots__ = ("averager", "elements", "vector")

    def __init__(self, averager: JobOwner, vector: Vector) -> None:
        self.averager, self.vector, self.elements = averager, vector, averager.outer.parameters

    def run(self) -> None:
        self.vector.shorten(self.elements)
        with self.averager.lock:
            self.averager.outer.rest()

    def land(self) -> None:
        """Do nothing: only later mixes need the result."""

    def fail(self) -> None:
        """Do nothing: the memory is allocated when it is needed."""


class MakingRoom:
    """A job that allocates memory for a newcomer's piece and touches it before the training loop copies.

    Writing to untouched pages takes four times as long as the copy.
    """

    __slots__ = ("averager", "effect", "elements", "vector")

    def __init__(self, averager: JobOwner, effect: CopyPiece) -> None:
        self.averager, self.effect, self.elements = averager, effect, effect.stop - effect.start
        self.vector: Vector | None = None

    def run(self) -> None:
        self.vector = self.averager.vectors.pass_by(self.elements)
        self.vector.start = self.effect.start
        self.vector.array.fill(0.0)

    def land(self) -> None:
        averager, vector, session = self.averager, self.vector, self.effect.session
        assert vector is not None
        if averager.peer.view.needs_snapshot(session) and session not in averager.snapshots:
            averager.boundary.want_snapshot(session, vector)
        else:
            averager.vectors.give(vector)

    def fail(self) -> None:
        self.averager.failed(self.effect.session, "fault")


class Reserving:
    """A job that allocates the memory of a snapshot, if more exchanges are in progress than ever before."""

    __slots__ = ("averager", "cut", "elements", "pushes", "session")

    def __init__(self, averager: JobOwner, session: int, pushes: int, cut: Cut | None) -> None:
        self.averager, self.session, self.pushes, self.cut = averager, session, pushes, cut
        self.elements = averager.boundary.copied_elements(cut)

    def run(self) -> None:
        self.averager.vectors.reserve(self.elements)

    def land(self) -> None:
        if self.averager.peer.view.needs_snapshot(self.session):
            self.averager.boundary.want_snapshot(self.session, None, self.pushes, self.cut)

    def fail(self) -> None:
        self.averager.not_taken(self.session)


class Averaging:
    """A job that computes the mean of our slice of a group's vectors."""

    __slots__ = ("averaged", "averager", "elements", "group")

    def __init__(self, averager: JobOwner, group: GroupAverage, averaged: Callable[[], None]) -> None:
        self.averager, self.group, self.averaged = averager, group, averaged
        self.elements = group.parts.size

    def run(self) -> None:
        self.group.average()

    def land(self) -> None:
        group = self.group
        group.averaging = False
        if group.over:
            group.release()
        else:
            self.averaged()

    def fail(self) -> None:
        self.group.averaging = False
        self.averager.failed(self.group.session, "fault")
