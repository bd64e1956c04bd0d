"""One node's averaging: what Peer wants done with vectors, done, and what is to be told of it.

Peer decides, this computes, a driver carries. It holds the snapshots of the sessions under way, the averages that come
of them, the outer step, how far local steps went, how far apart members are, and the weights that a newcomer collects.
It knows sessions by their numbers and has no clock, thread or socket: the driver gives what it needs of those
(:class:`Driver`) and moves the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from gossip.arithmetic.mixing import OuterStep, difference, finite
from gossip.arithmetic.movement import Movement
from gossip.arithmetic.subsets import ALL, Subset, lasting_parts
from gossip.averaging.all_reduce import GroupAverage
from gossip.averaging.boundary import Adoption, Boundary, Visit
from gossip.averaging.jobs import Averaging, Beginning, Copying, Job, MakingRoom, Mixing, Reserving, TakingOver
from gossip.averaging.pair import PairAverage
from gossip.averaging.vectors import Cut, Floats, Vector, Vectors
from gossip.codecs import Spread, get_codec, needs_spread
from gossip.config import Config
from gossip.effects import (
    Adopt,
    Collect,
    Confirm,
    CopyFrozen,
    CopyPiece,
    Effect,
    Gather,
    Merge,
    Mix,
    Notice,
    Recall,
    Rename,
    Restore,
    Serve,
    Snapshot,
    Transfer,
)  # fmt: skip
from gossip.ids import PeerId

__all__ = ["PERFORM", "Averager", "Driver", "Reports"]


class Reports(Protocol):
    """Whom it reports to: a :class:`gossip.peer.Peer`. Each report's effects are performed at once."""

    @property
    def elements(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def taking(self) -> bool: ...
    def concerns(self, session: int) -> bool: ...
    def under_way(self, session: int) -> bool: ...
    def serves(self, session: int) -> bool: ...
    def counted(self, steps: int, samples: int) -> None: ...
    def stepped(self, steps: int, samples: int, loss: float | None, now: float) -> list[Effect]: ...
    def snapshotted(self, session: int, now: float, mass: float = 0.0, moved: float = math.nan) -> list[Effect]: ...
    def recalled(self, session: int, now: float) -> list[Effect]: ...
    def spoiled(self, session: int | None, now: float) -> list[Effect]: ...
    def streamed(self, session: int, difference_sq: float, own_sq: float, now: float) -> list[Effect]: ...
    def failed(self, session: int, code: str, now: float) -> list[Effect]: ...
    def gathered(
        self, session: int, difference_sq: float, own_sq: float, refused: list[PeerId], now: float
    ) -> list[Effect]: ...
    def collected(self, session: int, position: int, now: float) -> list[Effect]: ...
    def compared(self, session: int, difference_sq: float, own_sq: float, now: float) -> list[Effect]: ...
    def adopted(self, now: float, difference_sq: float = 0.0, own_sq: float = 0.0) -> list[Effect]: ...
    def not_kept(self, now: float) -> list[Effect]: ...
    def restored(self, now: float) -> list[Effect]: ...


class Driver(Protocol):
    """What an averager needs of the world."""

    @property
    def now(self) -> float: ...
    def perform(self, effects: list[Effect], /) -> None: ...
    def soon(self, report: Callable[..., None], *arguments: object) -> None:
        """Call it when what is being performed has been."""

    def compute(self, job: Job) -> None:
        """Run it and land it."""

    def when_copied(self, visit: Visit, report: Callable[[Visit], None]) -> None:
        """Report it when its copies are done."""


class Averager:
    """Of one node. ``lock`` guards the outer step, where jobs run in another thread than the boundary's visits."""

    __slots__ = (
        "boundary", "config", "counted", "driver", "generation", "groups", "joining", "lock", "movement", "outer",
        "pairs", "part", "peer", "snapshots", "spreads", "vectors",
    )  # fmt: skip

    def __init__(
        self, peer: Reports, config: Config, boundary: Boundary, vectors: Vectors, outer: OuterStep, driver: Driver,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:  # fmt: skip
        self.peer, self.config, self.boundary, self.vectors, self.outer = peer, config, boundary, vectors, outer
        self.driver = driver
        self.lock: AbstractContextManager[object] = nullcontext() if lock is None else lock
        self.snapshots: dict[int, Vector] = {}  # by session
        self.pairs: dict[int, PairAverage] = {}
        self.groups: dict[int, GroupAverage] = {}
        self.joining: Vector | None = None  # what is collected of another run's weights
        self.generation = 0  # of the weights: counts replacements from outside
        self.counted = 0  # Vector.taken of the newest snapshot whose local progress the outer step has counted
        self.part = ALL  # of the next mix of our own
        size = peer.elements
        parts = lasting_parts(config.part, size) if needs_spread(config.codec) else []
        self.spreads = {part: Spread(part.elements(size)) for part in parts}
        self.movement = Movement(size) if config.watches_movement else None

    def begin(self, weights: Floats) -> None:
        """Local steps count from these weights on."""
        if self.movement is not None:
            self.begin_at(self.movement.sample(weights))

    def begin_at(self, sample: Floats) -> None:
        """As :meth:`begin`, of which these are the elements that movement is measured by."""
        if self.movement is not None:
            self.boundary.sampled = self.movement.places
            self.movement.moved(sample)

    def replaced(self, weights: Floats) -> None:
        """The training loop holds these weights now, in place of others."""
        with self.lock:
            self.outer.replace(weights)

    def forget(self) -> None:
        """The weights were replaced from outside (a checkpoint): what was on its way to the old ones is dropped."""
        self.generation += 1
        self.joining = None
        self.vectors.forget()
        self.boundary.forget()

    # -- effects -------------------------------------------------------------------------------------------------
    def perform(self, effect: Effect) -> None:
        """An effect of vectors alone, for which no driver has to do anything. Raises KeyError for another."""
        PERFORM[type(effect)](self, effect)

    # -- snapshots -----------------------------------------------------------------------------------------------
    def snapshot(self, effect: Snapshot) -> None:
        self.want(effect.session, effect.pushes, self.cut(effect.part, effect.session))

    def want(self, session: int, pushes: int = 0, cut: Cut | None = None) -> None:
        """A snapshot of the next boundary, in memory that is there by then. What is owed brings its own."""
        boundary = self.boundary
        if boundary.owed or self.vectors.at_hand(boundary.copied_elements(cut)):
            boundary.want_snapshot(session, None, pushes, cut)
        else:
            self.driver.compute(Reserving(self, session, pushes, cut))

    def copy_piece(self, effect: CopyPiece) -> None:
        """For a newcomer, when there is room for it."""
        self.driver.compute(MakingRoom(self, effect))

    def cut(self, part: Subset, session: int) -> Cut | None:
        """Where the elements of a part lie; None for all of them."""
        expected = self.boundary.expected
        if expected is not None and expected.part == part:
            return expected
        positions = part.positions(self.peer.elements, session)
        return None if positions is None else Cut(part, positions)

    def expect(self, part: Subset) -> None:
        """The next mix of our own is of this part. Where it lies is drawn now, which takes as long as the copy that the
        training loop makes when the mix is due."""
        if part is not self.part:
            self.part = part
            self.boundary.expected = self.cut(part, 0)

    def snapshotted(self, session: int, vector: Vector, mass: float) -> None:
        """The copy that a session wanted is here; one that is over gives it back."""
        peer, driver = self.peer, self.driver
        if not peer.concerns(session):
            if mass > 0 and self.config.conserves:  # it was to carry this away, and goes nowhere
                self.decide(Mixing(self, vector, None, None, 0.0, mass))
            else:
                self.vectors.give(vector)
            return
        if session in self.snapshots:  # an earlier one does already
            self.vectors.give(vector)
            return
        self.snapshots[session] = vector
        if not sound(vector):
            driver.perform(peer.spoiled(session, driver.now))
            return
        moved, movement = math.nan, self.movement
        if vector.cut is None and not vector.passing:
            self.vectors.keep(vector)
            moved = math.nan if movement is None else movement.since(vector.array)
        elif vector.cut is not None and movement is not None:
            moved = movement.moved(vector.array[vector.elements :].copy())
        driver.perform(peer.snapshotted(session, driver.now, mass, moved))

    def recall(self, effect: Recall) -> None:
        """The newest snapshot is this session's; where there is none that of the next boundary."""
        vector = self.vectors.recall()
        if vector is None:
            if effect.session not in self.boundary.requests:
                self.want(effect.session)
            return
        self.boundary.cancel(effect.session)
        self.snapshots[effect.session] = vector
        self.driver.soon(self.recalled, effect.session)

    def recalled(self, session: int) -> None:
        vector = self.snapshots.get(session)
        if vector is not None:
            report = self.peer.recalled if sound(vector) else self.peer.spoiled
            self.driver.perform(report(session, self.driver.now))

    def copy_frozen(self, effect: CopyFrozen) -> None:
        """For a newcomer, who is not kept waiting for a boundary by what does not change there."""
        self.driver.compute(Copying(self, effect))

    def copied_frozen(self, session: int, vector: Vector) -> None:
        if self.peer.concerns(session) and session not in self.snapshots:
            self.snapshots[session] = vector
            self.driver.soon(self.recalled, session)
        else:
            self.vectors.give(vector)

    def rename(self, effect: Rename) -> None:
        """Another partner is asked with the same snapshot."""
        snapshot = self.snapshots.pop(effect.session, None)
        if snapshot is not None:
            self.snapshots[effect.to] = snapshot

    def release(self, session: int) -> None:
        self.boundary.cancel(session)
        average = self.pairs.pop(session, None) or (self.groups.pop(session, None) if self.groups else None)
        if average is not None:
            average.release()
        snapshot = self.snapshots.pop(session, None)
        if snapshot is not None:
            self.vectors.give(snapshot)

    # -- averages ------------------------------------------------------------------------------------------------
    def transfer(self, effect: Transfer) -> PairAverage | str:
        """What the session's streams are to work on, or why they cannot begin, for :meth:`fail`."""
        snapshot = self.snapshots.get(effect.session)
        if snapshot is None:
            return "layout"
        codec = get_codec(effect.codec)
        spread = self.spreads.get(ALL if snapshot.cut is None else snapshot.cut.part)
        if codec.needs_spread:
            if spread is None or not spread.known:  # as no bound would do
                return "overflow"
            codec = codec.bound(spread)
        pair = self.pairs[effect.session] = PairAverage(effect, snapshot, codec, spread, self.vectors)
        return pair

    def streamed(self, pair: PairAverage) -> None:
        """All of theirs is here."""
        self.driver.perform(
            self.peer.streamed(pair.session, pair.difference_sq, pair.own_sq, self.driver.now)
        )  # fmt: skip

    def gather(self, effect: Gather) -> GroupAverage | str:
        """What a group's streams are to work on, the same at every call; or why they cannot begin."""
        group = self.groups.get(effect.session)
        if group is None:
            snapshot = self.snapshots.get(effect.session)
            if snapshot is None:
                return "layout"
            group = GroupAverage(effect, snapshot, get_codec(effect.codec), self.config, self.vectors)
            self.groups[effect.session] = group
        return group

    def average(self, group: GroupAverage, averaged: Callable[[], None]) -> None:
        """When all of our slice is here: compute its mean, and say when that is done."""
        if group.can_average:
            group.averaging = True
            self.driver.compute(Averaging(self, group, averaged))

    def gathered(self, group: GroupAverage) -> None:
        """All means may be here."""
        if group.complete and not group.told:
            group.told = True
            self.driver.perform(self.peer.gathered(group.session, *group.outcome(), self.driver.now))

    def fail(self, session: int, code: str) -> None:
        """It could not begin: that is reported after what is being performed, as a stream's failure would be."""
        self.driver.soon(self.failed, session, code)

    def failed(self, session: int, code: str) -> None:
        self.driver.perform(self.peer.failed(session, code, self.driver.now))

    # -- what comes of them --------------------------------------------------------------------------------------
    def mix(self, effect: Mix) -> bool:
        """Both sides of a pair, or all of a group, committed. Whether there was anything to mix."""
        pair = self.pairs.get(effect.session)
        average = pair or self.groups.get(effect.session)
        if average is None or average.difference is None:
            return False
        snapshot = self.snapshots.pop(effect.session, None)
        if snapshot is None:
            return False
        if pair is not None:
            pair.learn()
        taken = average.take_difference()
        positions = None if pair is None else pair.positions
        own_sq = 0.0 if pair is None else pair.own_sq
        how = effect.plain, effect.credit, own_sq, effect.every
        self.decide(Mixing(self, snapshot, taken, positions, effect.weight, None, *how))
        return True

    def merge(self, effect: Merge) -> bool:
        """A vector with a mass is ours: the partner's, or our own that was not taken. Whether it is the partner's."""
        pair, snapshot = self.pairs.get(effect.session), self.snapshots.pop(effect.session, None)
        if snapshot is None:
            return False
        theirs = None if pair is None else pair.take_difference()
        self.decide(Mixing(self, snapshot, theirs, None, 0.0, effect.mass))
        return theirs is not None

    def decide(self, mixing: Mixing) -> None:
        self.boundary.owe()
        if mixing.mass is None and not self.outer.plain:
            self.order(mixing)
        self.driver.compute(mixing)

    def order(self, mixing: Mixing) -> None:
        """Of mixes that overlap each piece of local progress counts once: one whose snapshot is older than the newest
        that was counted counts none, and the newer ones under way are told what they lack."""
        snapshot = mixing.snapshot
        mixing.since, mixing.late = snapshot.since, snapshot.taken < self.counted
        self.counted = max(self.counted, snapshot.taken)
        part = None if snapshot.cut is None else snapshot.cut.part
        lacking = {
            id(other): other for session, other in self.snapshots.items()
            if other.taken >= self.counted and (None if other.cut is None else other.cut.part) == part
            and not (other.passing or self.peer.serves(session))
        }  # fmt: skip
        for other in lacking.values():
            new = other.since is None
            if other.since is None:
                other.since = self.vectors.take(snapshot.elements)
            other.since.users += 1
            mixing.later.append((other.since, new))

    # -- joining -------------------------------------------------------------------------------------------------
    def collect(self, effect: Collect) -> Floats:
        """The vector that pieces of another run's weights go to."""
        joining = self.joining
        if joining is None or joining.array.size != effect.size:
            # The outer step's own, where it has none yet; or one of those that exchanges will need, where it is as
            # long. It goes back only when it has been adopted: of what is given up sooner somebody may still write a
            # piece.
            lent = self.outer.begun and effect.size == self.peer.elements
            joining = self.joining = self.vectors.take(effect.size) if lent else Vector.mapped(effect.size)
        return joining.array

    def take_piece(self, effect: Collect, values: Floats) -> bool:
        """A whole piece is here: kept, or compared with what is. False where it is none that a node would send."""
        held = self.collect(effect)[effect.start : effect.stop]
        if not finite(values):
            return False
        peer, driver = self.peer, self.driver
        if effect.compare:
            sums = difference(values, held, np.empty_like(held))
            driver.perform(peer.compared(effect.session, *sums, driver.now))
        else:
            held[:] = values
            driver.perform(peer.collected(effect.session, effect.stop, driver.now))
        return True

    def serve(self, effect: Serve) -> Vector | None:
        """The snapshot that a newcomer gets a piece of."""
        snapshot = self.snapshots.get(effect.session)
        return snapshot if snapshot is not None and snapshot.holds(effect.start, effect.stop) else None

    def adopt(self, effect: Adopt) -> None:
        assert self.joining is not None, "nothing was collected"
        adoption = Adoption(self.joining.array, effect.optimizer_keys, effect.optimizer_scalars, effect.trial)
        self.driver.compute(TakingOver(self, adoption))  # behind mixes of the old: they must not land on the new

    def confirm(self, effect: Confirm) -> None:
        self.boundary.kept.forget()

    def restore(self, effect: Restore) -> None:
        self.boundary.want_restore()

    # -- the training loop ---------------------------------------------------------------------------------------
    def visited(self, visit: Visit | None, steps: int, samples: int, loss: float | None) -> None:
        """The training loop was at its boundary, after so many steps, and reports."""
        peer, driver = self.peer, self.driver
        if visit is not None and visit.replaced:
            peer.counted(steps, samples)
            self.weights_replaced(visit)
        driver.perform(peer.stepped(steps, samples, loss, driver.now))  # first: an Offer states how old the model is
        if visit is not None:
            self.updated(visit)

    def weights_replaced(self, visit: Visit) -> None:
        peer, driver, movement = self.peer, self.driver, self.movement
        if visit.adopted or visit.restored:
            self.vectors.forget()
        if visit.adopted and self.joining is None and self.boundary.kept.holds:
            self.boundary.want_restore()  # an earlier averager collected them, and nobody is left who would judge them
        if visit.adopted:
            joining, self.joining = self.joining, None
            if joining is not None:
                if movement is not None:
                    movement.since(joining.array)
                if self.outer.owns(joining.array):
                    driver.compute(Beginning(self, joining))
                else:
                    self.vectors.give(joining)
            driver.perform(peer.adopted(driver.now, *visit.apart))
        if visit.not_kept:
            self.joining = None
            text = f"The weights were not replaced, since they could not be kept: {visit.not_kept}"
            driver.perform([Notice("kept", text)])
            driver.perform(peer.not_kept(driver.now))
        if visit.restored:
            if movement is not None:
                movement.expected = None  # there is no snapshot of what came back
            driver.perform(peer.restored(driver.now))

    def updated(self, visit: Visit) -> None:
        """What exchanges brought is in the model, and the copies that were asked for are on their way."""
        if visit.copies:
            self.driver.when_copied(visit, self.copied)
        else:
            self.copied(visit)

    def copied(self, visit: Visit) -> None:
        boundary = self.boundary
        for update, ratio in zip(visit.updates, visit.ratios, strict=True):
            if update.sample is not None and self.movement is not None and not visit.adopted:
                self.movement.merged(update.sample, ratio)
        for vector in visit.read:
            self.vectors.give(vector)
        current = visit.decided == boundary.decided
        for session, vector, mass in visit.snapshots:
            if not (mass or vector.passing or self.peer.concerns(session)):
                self.use_spare(vector, current)  # another exchange took its place while the copy was made
            elif current or mass > 0 or not self.peer.under_way(session):
                others = self.shares(vector) if current and not mass else []
                self.snapshotted(session, vector, mass)
                for other in others:
                    self.snapshotted(other, vector, 0.0)
            else:  # an update was decided since: it is to be in what this exchange mixes
                self.vectors.give(vector)
                boundary.want_snapshot(session, cut=vector.cut)
        if visit.spare is not None:
            self.use_spare(visit.spare, current)
        if visit.kept is not None:
            self.keep(visit.kept, visit.lives)

    def use_spare(self, spare: Vector, current: bool) -> None:
        for session in self.shares(spare) if current else ():
            self.snapshotted(session, spare, 0.0)
        self.vectors.give(spare)

    def shares(self, vector: Vector) -> list[int]:
        """Those that want what this copy holds have their snapshot already, where no update was decided since."""
        sessions = [] if vector.passing else self.boundary.take_requests(vector.cut)
        vector.users += len(sessions)
        return sessions

    def keep(self, vector: Vector, lives: int) -> None:
        """A copy of the weights for newcomers; not of weights that were replaced since, or are no numbers."""
        peer = self.peer
        if lives == self.boundary.lives and peer.ready and not peer.taking and sound(vector):
            self.vectors.keep(vector)
        self.vectors.give(vector)


def sound(vector: Vector) -> bool:
    """Whether what was copied there may be sent; looked at once."""
    if vector.finite is None:
        vector.finite = finite(vector.array)
    return vector.finite


PERFORM: dict[type, Callable[[Averager, Any], None]] = {
    Snapshot: Averager.snapshot, CopyPiece: Averager.copy_piece, Recall: Averager.recall,
    CopyFrozen: Averager.copy_frozen, Adopt: Averager.adopt, Confirm: Averager.confirm, Restore: Averager.restore,
}  # fmt: skip
"""What :meth:`Averager.perform` performs; other effects need a driver, which calls the averager for its part."""
