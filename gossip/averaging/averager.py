"""The averaging of one node: it performs the vector effects that Peer decides, and reports the results.

It holds snapshots, averages in progress, the outer step, statistics of movement and distance, and the weights that a
newcomer collects. It has no clock, thread or socket: a :class:`Driver` provides them and moves the bytes.
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
from gossip.averaging.frozen import Copying, Hashing
from gossip.averaging.jobs import Averaging, Beginning, Job, MakingRoom, Mixing, Reserving, TakingOver
from gossip.averaging.model import finite_of, torn
from gossip.averaging.pair import PairAverage
from gossip.averaging.reports import Reports
from gossip.averaging.vectors import Cut, Floats, Vector, Vectors
from gossip.codecs import Spread, get_codec, needs_spread
from gossip.config import Config
from gossip.effects import (
    Adopt,
    Confirm,
    CopyFrozen,
    CopyPiece,
    Effect,
    Gather,
    HashFrozen,
    Merge,
    Mix,
    Notice,
    ReceivePiece,
    Rename,
    Restore,
    Serve,
    Snapshot,
    Transfer,
    UseLastSnapshot,
)  # fmt: skip

__all__ = ["PERFORM", "Averager", "Driver"]


class Driver(Protocol):
    """The services of a driver that an averager uses."""

    @property
    def now(self) -> float: ...
    def perform(self, effects: list[Effect], /) -> None: ...
    def soon(self, report: Callable[..., None], *arguments: object) -> None:
        """Call ``report`` after the effects that are being performed."""

    def compute(self, job: Job) -> None:
        """Run the job and land it."""

    def when_copied(self, visit: Visit, report: Callable[[Visit], None]) -> None:
        """Report the visit when its copies are done."""


class Averager:
    """The averaging of one node. ``lock`` guards the outer step if jobs run in another thread than boundary visits."""

    __slots__ = (
        "boundary", "config", "counted", "driver", "generation", "groups", "hashing", "joining", "lock", "movement",
        "outer", "pairs", "part", "peer", "snapshots", "spreads", "vectors", "warned",
    )  # fmt: skip

    def __init__(
        self, peer: Reports, config: Config, boundary: Boundary, vectors: Vectors, outer: OuterStep, driver: Driver,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:  # fmt: skip
        self.peer, self.config, self.boundary, self.vectors, self.outer = peer, config, boundary, vectors, outer
        self.driver = driver
        self.lock: AbstractContextManager[object] = nullcontext() if lock is None else lock
        self.snapshots: dict[int, Vector] = {}  # Snapshots by session.
        self.pairs: dict[int, PairAverage] = {}
        self.groups: dict[int, GroupAverage] = {}
        self.joining: Vector | None = None  # Weights of another run, as far as they are collected.
        self.generation = 0  # Number of times that the weights were replaced from outside.
        self.counted = 0  # ``taken`` of the newest snapshot whose local progress is counted.
        self.part = ALL  # Part of our next mix.
        self.warned: set[str] = set()
        self.hashing: Hashing | None = None  # The hash of the frozen weights in progress.
        size = peer.view.elements
        parts = lasting_parts(config.part, size) if needs_spread(config.codec_name) else []
        self.spreads = {part: Spread(part.elements(size)) for part in parts}
        self.movement = Movement(size) if config.watches_movement else None

    def begin(self, weights: Floats) -> None:
        """Count local steps from these weights on."""
        if self.movement is not None:
            self.begin_at(self.movement.sample(weights))

    def begin_at(self, sample: Floats) -> None:
        """Count local steps from weights whose sampled elements are ``sample``."""
        if self.movement is not None:
            self.boundary.sampled = self.movement.places
            self.movement.moved(sample)

    def replaced(self, weights: Floats) -> None:
        """Restart the outer step from weights that replaced others in the training loop."""
        with self.lock:
            self.outer.replace(weights)

    def forget(self) -> None:
        """Drop all that was meant for weights that were replaced from outside (a checkpoint)."""
        self.generation += 1
        self.joining = None
        self.vectors.forget()
        self.boundary.forget()

    # -- effects -------------------------------------------------------------------------------------------------
    def perform(self, effect: Effect) -> None:
        """Perform an effect of vectors alone. Raises KeyError for an effect that needs the driver."""
        PERFORM[type(effect)](self, effect)

    # -- snapshots -----------------------------------------------------------------------------------------------
    def snapshot(self, effect: Snapshot) -> None:
        self.want(effect.session, effect.pushes, self.cut(effect.part, effect.session))

    def want(self, session: int, pushes: int = 0, cut: Cut | None = None) -> None:
        """Request a snapshot at the next boundary, in memory that exists by then; a pending update brings its own."""
        boundary = self.boundary
        if boundary.owed or self.vectors.at_hand(boundary.copied_elements(cut)):
            boundary.want_snapshot(session, None, pushes, cut)
        else:
            self.driver.compute(Reserving(self, session, pushes, cut))

    def copy_piece(self, effect: CopyPiece) -> None:
        """Copy a piece for a newcomer, once there is memory for it."""
        self.driver.compute(MakingRoom(self, effect))

    def cut(self, part: Subset, session: int) -> Cut | None:
        """Return the cut of a part, None for all elements."""
        expected = self.boundary.expected
        if expected is not None and expected.part == part:
            return expected
        positions = part.positions(self.peer.view.elements, session)
        return None if positions is None else Cut(part, positions)

    def expect(self, part: Subset) -> None:
        """Draw the positions of our next mix's part now, as that takes as long as the copy when the mix is due."""
        if part is not self.part:
            self.part = part
            self.boundary.expected = self.cut(part, 0)

    def snapshotted(self, session: int, vector: Vector, mass: float) -> None:
        """Take the copy that a session requested, or return it to the pool if the session has ended."""
        peer, driver = self.peer, self.driver
        if not peer.view.needs_snapshot(session):
            if mass > 0 and self.config.conserves:  # The session has ended, so this mass comes back.
                self.decide(Mixing(self, vector, None, None, Merge(session, mass)))
            else:
                self.vectors.give(vector)
            return
        if session in self.snapshots:  # The session has a snapshot already.
            self.vectors.give(vector)
            return
        self.snapshots[session] = vector
        if not sound(vector):
            driver.perform(peer.on_spoiled(session, driver.now))
            return
        moved, movement = math.nan, self.movement
        if vector.cut is None and not vector.passing:
            self.vectors.keep(vector)
            moved = math.nan if movement is None else movement.since(vector.array)
        elif vector.cut is not None and movement is not None:
            moved = movement.moved(vector.array[vector.elements :].copy())
        driver.perform(peer.on_snapshotted(session, driver.now, mass, moved))

    def recall(self, effect: UseLastSnapshot) -> None:
        """Give a session the newest snapshot, or that of the next boundary if there is none."""
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
            report = self.peer.on_recalled if sound(vector) else self.peer.on_spoiled
            self.driver.perform(report(session, self.driver.now))

    def copy_frozen(self, effect: CopyFrozen) -> None:
        """Copy frozen weights for a newcomer, without waiting for a boundary, as they do not change."""
        self.driver.compute(Copying(self, effect))

    def hash_frozen(self, effect: HashFrozen) -> None:
        self.hashing = Hashing(self, effect)
        self.driver.compute(self.hashing)

    def rename(self, effect: Rename) -> None:
        """Move a snapshot to the session of the next partner that is asked."""
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
        """Return the average that the session's streams work on, or for :meth:`fail` the reason why there is none."""
        snapshot = self.snapshots.get(effect.session)
        if snapshot is None:
            return "layout"
        codec = get_codec(effect.codec)
        spread = self.spreads.get(ALL if snapshot.cut is None else snapshot.cut.part)
        if codec.needs_spread:
            if spread is None or not spread.known:  # Reported like a difference beyond its bound.
                return "overflow"
            codec = codec.bound(spread)
        pair = self.pairs[effect.session] = PairAverage(effect, snapshot, codec, spread, self.vectors)
        return pair

    def streamed(self, pair: PairAverage) -> None:
        """Report that the partner's vector is complete."""
        self.driver.perform(self.peer.on_streamed(pair.session, pair.difference_sq, pair.own_sq, self.driver.now))

    def gather(self, effect: Gather) -> GroupAverage | str:
        """Return the group's average for its streams, the same at every call, or the reason why there is none."""
        group = self.groups.get(effect.session)
        if group is None:
            snapshot = self.snapshots.get(effect.session)
            if snapshot is None:
                return "layout"
            group = GroupAverage(effect, snapshot, get_codec(effect.codec), self.config, self.vectors)
            self.groups[effect.session] = group
        return group

    def average(self, group: GroupAverage, averaged: Callable[[], None]) -> None:
        """Compute the mean of our slice once all of it is here, then call ``averaged``."""
        if group.can_average:
            group.averaging = True
            self.driver.compute(Averaging(self, group, averaged))

    def gathered(self, group: GroupAverage) -> None:
        """Report the group's means once all are here."""
        if group.complete and not group.told:
            group.told = True
            self.driver.perform(self.peer.on_gathered(group.session, *group.outcome(), self.driver.now))

    def fail(self, session: int, code: str) -> None:
        """Report streams that cannot begin as failed, after the effects that are being performed."""
        self.driver.soon(self.failed, session, code)

    def failed(self, session: int, code: str) -> None:
        self.driver.perform(self.peer.on_failed(session, code, self.driver.now))

    # -- results -------------------------------------------------------------------------------------------------
    def mix(self, effect: Mix) -> bool:
        """Apply a committed pair or group at the next boundary. Return False if there is nothing to mix."""
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
        self.decide(Mixing(self, snapshot, taken, positions, effect, own_sq))
        return True

    def merge(self, effect: Merge) -> bool:
        """Merge the partner's vector with its mass, or our own that comes back. Return True if it is the partner's."""
        pair, snapshot = self.pairs.get(effect.session), self.snapshots.pop(effect.session, None)
        if snapshot is None:
            return False
        theirs = None if pair is None else pair.take_difference()
        self.decide(Mixing(self, snapshot, theirs, None, effect))
        return theirs is not None

    def decide(self, mixing: Mixing) -> None:
        self.boundary.begin_update()
        if mixing.mass is None and not self.outer.plain:
            self.order(mixing)
        self.driver.compute(mixing)

    def order(self, mixing: Mixing) -> None:
        """Count local progress once in overlapping mixes: a mix older than the newest counted one counts none of it."""
        snapshot = mixing.snapshot
        mixing.since, mixing.late = snapshot.since, snapshot.taken < self.counted
        self.counted = max(self.counted, snapshot.taken)
        part = None if snapshot.cut is None else snapshot.cut.part
        lacking = {
            id(other): other for session, other in self.snapshots.items()
            if other.taken >= self.counted and (None if other.cut is None else other.cut.part) == part
            and not (other.passing or self.peer.view.has_donation(session))
        }  # fmt: skip
        for other in lacking.values():
            new = other.since is None
            if other.since is None:
                other.since = self.vectors.take(snapshot.elements)
            other.since.users += 1
            mixing.later.append((other.since, new))

    # -- joining -------------------------------------------------------------------------------------------------
    def collect(self, effect: ReceivePiece) -> Floats:
        """Return the vector that collects the pieces of another run's weights."""
        joining = self.joining
        if joining is None or joining.array.size != effect.size:
            # The outer step takes over a mapped vector if it has none yet. Neither kind goes back before its adoption:
            # a link may still write to a vector that was given up.
            lent = self.outer.begun and effect.size == self.peer.view.elements
            joining = self.joining = self.vectors.take(effect.size) if lent else self.vectors.mapped(effect.size)
        return joining.array

    def take_piece(self, effect: ReceivePiece, values: Floats) -> bool:
        """Store a whole piece, or compare it with the vector. Return False if the piece is not finite."""
        held = self.collect(effect)[effect.start : effect.stop]
        if not finite(values):
            return False
        peer, driver = self.peer, self.driver
        if effect.compare:
            sums = difference(values, held, np.empty_like(held))
            driver.perform(peer.on_compared(effect.session, *sums, driver.now))
        else:
            held[:] = values
            driver.perform(peer.on_collected(effect.session, effect.stop, driver.now))
        return True

    def serve(self, effect: Serve) -> Vector | None:
        """Return the snapshot that holds a newcomer's piece, or None."""
        snapshot = self.snapshots.get(effect.session)
        return snapshot if snapshot is not None and snapshot.holds(effect.start, effect.stop) else None

    def adopt(self, effect: Adopt) -> None:
        assert self.joining is not None, "nothing was collected"
        adoption = Adoption(
            self.joining.array, effect.optimizer_keys, effect.optimizer_scalars, effect.trial, effect.frozen
        )
        self.driver.compute(TakingOver(self, adoption))  # Queued behind mixes of the old weights.

    def confirm(self, effect: Confirm) -> None:
        self.boundary.kept.forget()

    def restore(self, effect: Restore) -> None:
        self.boundary.want_restore()

    # -- the training loop ---------------------------------------------------------------------------------------
    def visited(self, visit: Visit | None, steps: int, samples: int, loss: float | None) -> None:
        """Report a visit of the training loop to its boundary, after ``steps`` steps."""
        peer, driver = self.peer, self.driver
        if visit is not None and visit.replaced:
            peer.update_counts(steps, samples)
            self.weights_replaced(visit)
        driver.perform(peer.on_stepped(steps, samples, loss, driver.now))  # First: an Offer states the model's age.
        if visit is not None:
            self.updated(visit)

    def weights_replaced(self, visit: Visit) -> None:
        peer, driver, movement = self.peer, self.driver, self.movement
        if visit.adopted or visit.restored:
            self.vectors.forget()
        if visit.adopted and self.joining is None and self.boundary.kept.holds:
            self.boundary.want_restore()  # The averager that began the trial is gone: no peer can judge it.
        if visit.adopted:
            joining, self.joining = self.joining, None
            if joining is not None:
                if movement is not None:
                    movement.since(joining.array)
                if self.outer.owns(joining.array):
                    driver.compute(Beginning(self, joining))
                else:
                    self.vectors.give(joining)
            driver.perform(peer.on_adopted(driver.now, *visit.apart))
        if visit.not_kept:
            self.joining = None
            text = f"The weights were not replaced, since they could not be kept: {visit.not_kept}"
            driver.perform([Notice("kept", text)])
            driver.perform(peer.on_not_kept(driver.now))
        if visit.restored:
            if movement is not None:
                movement.expected = None  # No snapshot holds the weights that came back.
            driver.perform(peer.on_restored(driver.now))

    def updated(self, visit: Visit) -> None:
        """Use the copies of a visit once they are done; its updates are in the model."""
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
        for vector, copy in visit.checks:
            if vector.finite is None:
                vector.finite = finite_of(copy)
        if visit.failed or visit.lost or any(torn(copy) for copy in visit.copies):
            self.lose(visit)
        current = visit.decided == boundary.decided
        for session, vector, mass in visit.snapshots:
            if not (mass or vector.passing or self.peer.view.needs_snapshot(session)):
                self.use_spare(vector, current)  # Another exchange took the session's place during the copy.
            elif current or mass > 0 or not self.peer.view.has_exchange(session):
                others = self.shares(vector) if current and not mass else []
                self.snapshotted(session, vector, mass)
                for other in others:
                    self.snapshotted(other, vector, 0.0)
            else:  # An update was decided since, and this exchange must include it.
                self.vectors.give(vector)
                boundary.want_snapshot(session, cut=vector.cut)
        if visit.spare is not None:
            self.use_spare(visit.spare, current)
        if visit.kept is not None:
            self.keep(visit.kept, visit.lives)

    def lose(self, visit: Visit) -> None:
        """End the exchanges whose snapshots could not be taken; training and the other exchanges go on."""
        if visit.failed or visit.lost:
            self.warn(
                "The model's device has no memory left for an exchange, which is given up: training goes on. Leave "
                "256 MB of it free."
            )
        for session in visit.failed:
            self.driver.soon(self.not_taken, session)
        if not any(torn(copy) for copy in visit.copies):
            return
        self.warn(
            "The weights changed outside the optimizer while they were copied, and an exchange is given up: change "
            "them before node.step(). Copies take their memory on the device first from now on."
        )
        snapshots, visit.snapshots = visit.snapshots, ()
        for session, vector, mass in snapshots:
            self.not_taken(session)
            self.snapshotted(session, vector, mass)  # The session has ended: it gives the vector back, and the mass.
        for spare in (visit.spare, visit.kept):
            if spare is not None:
                self.vectors.give(spare)
        visit.spare = visit.kept = None

    def not_taken(self, session: int) -> None:
        self.driver.perform(self.peer.on_not_taken(session, self.driver.now))

    def warn(self, sentence: str) -> None:
        """Tell the user each sentence once."""
        if sentence not in self.warned:
            self.warned.add(sentence)
            self.driver.perform([Notice("device", sentence)])

    def use_spare(self, spare: Vector, current: bool) -> None:
        for session in self.shares(spare) if current else ():
            self.snapshotted(session, spare, 0.0)
        self.vectors.give(spare)

    def shares(self, vector: Vector) -> list[int]:
        """Return the sessions whose requests this copy fulfils as well."""
        sessions = [] if vector.passing else self.boundary.take_requests(vector.cut)
        vector.users += len(sessions)
        return sessions

    def keep(self, vector: Vector, lives: int) -> None:
        """Keep a copy of the weights for newcomers, unless the weights were replaced since or are not finite."""
        peer = self.peer
        if lives == self.boundary.lives and peer.view.ready and not peer.view.is_joining and sound(vector):
            self.vectors.keep(vector)
        self.vectors.give(vector)


def sound(vector: Vector) -> bool:
    """Return True if the vector is finite and may be sent; check it only once."""
    if vector.finite is None:
        vector.finite = finite(vector.array)
    return vector.finite


PERFORM: dict[type, Callable[[Averager, Any], None]] = {
    Snapshot: Averager.snapshot, CopyPiece: Averager.copy_piece, UseLastSnapshot: Averager.recall,
    CopyFrozen: Averager.copy_frozen, HashFrozen: Averager.hash_frozen, Adopt: Averager.adopt,
    Confirm: Averager.confirm, Restore: Averager.restore,
}  # fmt: skip
"""The effects that :meth:`Averager.perform` performs. For others a driver calls the averager itself."""
