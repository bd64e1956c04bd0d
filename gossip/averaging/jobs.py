"""Arithmetic on whole vectors, which a driver runs where it likes, and what follows it in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gossip.averaging.all_reduce import GroupAverage
from gossip.averaging.boundary import Adoption, Update
from gossip.averaging.vectors import Cut, Positions, Vector
from gossip.effects import CopyFrozen, CopyPiece

if TYPE_CHECKING:
    from gossip.averaging.averager import Averager

__all__ = ["Averaging", "Beginning", "Copying", "Job", "MakingRoom", "Mixing", "Reserving", "TakingOver"]


class Job(Protocol):
    """Arithmetic on whole vectors. ``run`` touches nothing but its own vectors and may run in any thread; ``land``
    follows it where effects are performed, one job after another, in the order in which they were given; ``fail`` takes
    the place of both where an error came out of either."""

    elements: int

    def run(self) -> None: ...
    def land(self) -> None: ...
    def fail(self) -> None: ...


class Mixing:
    """An exchange that happened, on its way to the step boundary. Without a difference the snapshot itself comes
    back."""

    __slots__ = ("averager", "credit", "difference", "elements", "every", "generation", "late", "later", "mass",
                 "own_sq", "plain", "positions", "result", "since", "snapshot", "unweighted", "weight")  # fmt: skip

    def __init__(
        self, averager: Averager, snapshot: Vector, difference: Vector | None, positions: Positions | None,
        weight: float, mass: float | None, plain: bool = False, credit: float = 0.0, own_sq: float = 0.0,
        every: int = 0,
    ) -> None:  # fmt: skip
        self.averager, self.snapshot, self.difference, self.positions = averager, snapshot, difference, positions
        self.weight, self.mass, self.plain = weight, mass, plain
        self.late = False  # a mix whose snapshot is newer has taken place
        self.since: Vector | None = None  # what other mixes have added after the snapshot was taken
        self.later: list[tuple[Vector, bool]] = []  # of snapshots that lack this mix: what they lack, and if it is new
        self.credit, self.own_sq, self.every = credit, own_sq, every
        self.generation = averager.generation
        self.elements = snapshot.array.size
        self.result: Vector | None = None  # to be added, all of it or at the positions; with a mass to be merged
        folds = averager.outer.plain and averager.boundary.weighs
        self.unweighted = folds and mass is None and positions is None  # the boundary multiplies in its own pass

    def run(self) -> None:
        averager, snapshot, difference = self.averager, self.snapshot.array, self.difference
        if difference is None:
            self.result = averager.vectors.take(snapshot.size)
            self.result.array[:] = snapshot  # the snapshot may be other sessions' as well
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
            if (
                self.generation == averager.generation
            ):  # else the outer step is at other weights now, and land() drops this
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
            averager.boundary.excuse()
            return
        weight = self.weight if self.unweighted else 1.0
        sample, movement = None, averager.movement
        if movement is not None and self.mass is None:
            movement.added(result.array, self.positions, weight)
        elif movement is not None:
            sample = movement.sample(result.array)
        averager.boundary.want_update(Update(result, self.mass, sample, self.positions, weight))

    def fail(self) -> None:
        """This node does without it. Its vectors are not used again: who knows what still writes there."""
        for lacks, new in self.later:
            if new:
                lacks.array.fill(0.0)
        self.end_later()
        self.averager.boundary.excuse()

    def end_later(self) -> None:
        for lacks, _ in self.later:
            self.averager.vectors.give(lacks)
        self.later = []


class TakingOver:
    """Another run's weights, on their way to the step boundary."""

    __slots__ = ("adoption", "averager", "elements")

    def __init__(self, averager: Averager, adoption: Adoption) -> None:
        self.averager, self.adoption, self.elements = averager, adoption, 0

    def run(self) -> None:
        """There is nothing to compute."""

    def land(self) -> None:
        joining = self.averager.joining
        if joining is not None and self.adoption.vector is joining.array:
            self.averager.boundary.want_adoption(self.adoption)

    def fail(self) -> None:
        """Nothing can."""


class Beginning:
    """The outer step has begun with the vector that a newcomer collected: what lies behind its part is given up, and
    the momentum's memory is taken, before anything is mixed and beside the training loop."""

    __slots__ = ("averager", "elements", "vector")

    def __init__(self, averager: Averager, vector: Vector) -> None:
        self.averager, self.vector, self.elements = averager, vector, averager.outer.parameters

    def run(self) -> None:
        self.vector.shorten(self.elements)
        with self.averager.lock:
            self.averager.outer.rest()

    def land(self) -> None:
        """Nobody waits for it but what is mixed, and that comes behind it."""

    def fail(self) -> None:
        """The memory is taken when it is needed."""


class Copying:
    """What nobody changes of the weights, for a newcomer: beside the training loop, which changes nothing of it."""

    __slots__ = ("averager", "effect", "elements", "vector")

    def __init__(self, averager: Averager, effect: CopyFrozen) -> None:
        self.averager, self.effect, self.elements = averager, effect, effect.stop - effect.start
        self.vector: Vector | None = None

    def run(self) -> None:
        vector = self.vector = self.averager.vectors.pass_by(self.elements)
        vector.start = self.effect.start
        self.averager.boundary.model.read_frozen(vector.array, vector.start)

    def land(self) -> None:
        assert self.vector is not None
        self.averager.copied_frozen(self.effect.session, self.vector)

    def fail(self) -> None:
        self.averager.failed(self.effect.session, "fault")


class MakingRoom:
    """Memory for a newcomer's piece, touched before the training loop copies that there: pages that nobody has written
    to cost four times what a copy costs."""

    __slots__ = ("averager", "effect", "elements", "vector")

    def __init__(self, averager: Averager, effect: CopyPiece) -> None:
        self.averager, self.effect, self.elements = averager, effect, effect.stop - effect.start
        self.vector: Vector | None = None

    def run(self) -> None:
        self.vector = self.averager.vectors.pass_by(self.elements)
        self.vector.start = self.effect.start
        self.vector.array.fill(0.0)

    def land(self) -> None:
        averager, vector, session = self.averager, self.vector, self.effect.session
        assert vector is not None
        if averager.peer.concerns(session) and session not in averager.snapshots:
            averager.boundary.want_snapshot(session, vector)
        else:
            averager.vectors.give(vector)

    def fail(self) -> None:
        self.averager.failed(self.effect.session, "fault")


class Reserving:
    """The same for a snapshot of an exchange, where more of them are under way than there ever were."""

    __slots__ = ("averager", "cut", "elements", "pushes", "session")

    def __init__(self, averager: Averager, session: int, pushes: int, cut: Cut | None) -> None:
        self.averager, self.session, self.pushes, self.cut = averager, session, pushes, cut
        self.elements = averager.boundary.copied_elements(cut)

    def run(self) -> None:
        vectors = self.averager.vectors
        if not vectors.at_hand(self.elements):
            vector = vectors.take(self.elements)
            vector.array.fill(0.0)
            vectors.give(vector)

    def land(self) -> None:
        if self.averager.peer.concerns(self.session):
            self.averager.boundary.want_snapshot(self.session, None, self.pushes, self.cut)

    def fail(self) -> None:
        self.averager.failed(self.session, "fault")


class Averaging:
    """The mean of our slice of a group's vectors."""

    __slots__ = ("averaged", "averager", "elements", "group")

    def __init__(self, averager: Averager, group: GroupAverage, averaged: Callable[[], None]) -> None:
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
