"""The delivery of copies, which a visit to the step boundary took, to the sessions that wait for them.

A copy serves every session that asked for the same elements. If a copy failed, its sessions end and training goes on.
:mod:`gossip.effects` defines the terms. The *mass* of a pushed copy is its weight in the swarm's mean, taken from the
model; it is 0 for a copy that is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gossip.arithmetic.mixing import is_finite
from gossip.arithmetic.movement import Movement
from gossip.averaging.boundary import Boundary
from gossip.averaging.jobs import Driver
from gossip.averaging.transfer import VectorTransfer
from gossip.averaging.vectors import Vector, Vectors
from gossip.averaging.visit import Visit
from gossip.effects import Notice
from gossip.peer import Peer

__all__ = ["CopyDelivery", "is_sound"]


def is_sound(vector: Vector) -> bool:
    """Return True if all values are finite, so that the vector may be sent; they are checked only once."""
    if vector.is_finite is None:
        vector.is_finite = is_finite(vector.array)
    return vector.is_finite


class CopyDelivery:
    """The delivery of one averager's copies, which become the snapshots of transfers that ``open`` returns.

    ``return_mass`` takes the copy of a session that has ended, with the push-sum mass that must not be lost.
    """

    __slots__ = (
        "boundary", "driver", "encode_moments", "movement", "open", "peer", "return_mass", "vectors",
        "warnings_shown",
    )  # fmt: skip

    def __init__(
        self, peer: Peer, driver: Driver[Any], boundary: Boundary, vectors: Vectors,
        open_transfer: Callable[[int], VectorTransfer], movement: Movement | None,
        return_mass: Callable[[int, Vector, float], None],
    ) -> None:  # fmt: skip
        self.peer, self.driver, self.boundary, self.vectors = peer, driver, boundary, vectors
        self.open, self.movement, self.return_mass = open_transfer, movement, return_mass
        self.encode_moments: Callable[[int, Vector], None]  # Set by the averager: it encodes moments and reports them.
        self.warnings_shown: set[str] = set()  # Sentences that the user has seen.

    def deliver(self, visit: Visit) -> None:
        """Deliver the finished copies of a visit."""
        for update, share in zip(visit.updates, visit.merged_shares, strict=True):
            if update.merge_sample is not None and self.movement is not None and not visit.adopted:
                self.movement.add_merge(update.merge_sample, share)
        for vector in visit.busy_vectors:
            self.vectors.give(vector)
        visit.record_checks()
        self.give_up_failed(visit)
        is_current = visit.decided_updates == self.boundary.decided_updates
        for session, vector, mass in visit.snapshots:
            # A push's mass and a newcomer's piece concern their own session alone, even if it has ended.
            is_shareable = not (mass or vector.is_transient)
            if is_shareable and not self.peer.view.needs_snapshot(session):
                self.deliver_to_sharers(vector, is_current)
                self.vectors.give(vector)
            elif is_current or mass > 0 or not self.peer.view.has_exchange(session):
                sharers = self.take_sharers(vector) if is_current and not mass else []
                self.deliver_snapshot(session, vector, mass)
                for other in sharers:
                    self.deliver_snapshot(other, vector)
            else:  # An update was decided since, and the snapshot of an exchange must include it.
                self.vectors.give(vector)
                self.boundary.request_snapshot(session, cut=vector.cut)
        if visit.spare_copy is not None and self.deliver_to_sharers(visit.spare_copy, is_current):
            self.vectors.give(visit.spare_copy)
        elif visit.spare_copy is not None:
            # No session needs the copy. It may have replaced the newest snapshot, which newcomers would then lack.
            self.keep_for_newcomers(visit.spare_copy, visit.replacements)
        if visit.newcomers_copy is not None:
            self.keep_for_newcomers(visit.newcomers_copy, visit.replacements)

    def deliver_snapshot(self, session: int, vector: Vector, mass: float = 0.0) -> None:
        """Give a session its copy and report it, or return the copy to the pool if the session has ended.

        Args:
            session: The session that requested the copy.
            vector: The copy.
            mass: The mass that it took from the model.
        """
        peer, driver, movement = self.peer, self.driver, self.movement
        if not peer.view.needs_snapshot(session):
            self.return_mass(session, vector, mass)
            return
        if vector.moments is not None:
            self.encode_moments(session, vector)
            return
        transfer = self.open(session)
        if transfer.snapshot is not None:  # It got another copy meanwhile.
            self.vectors.give(vector)
            return
        transfer.snapshot = vector
        if not is_sound(vector):
            driver.perform(peer.on_spoiled(session, driver.now, self.name_spoiled(vector)))
            return
        moved = math.nan  # How far local steps moved the model since the last snapshot; NaN if not measured.
        if vector.cut is None and not vector.is_transient:
            self.vectors.keep_snapshot(vector)
            moved = math.nan if movement is None else movement.measure(vector.array)
        elif vector.cut is not None and movement is not None:
            moved = movement.measure_sample(vector.array[vector.elements :].copy())
        driver.perform(peer.on_snapshotted(session, driver.now, mass, moved))

    def name_spoiled(self, vector: Vector) -> str:
        """Return the name of the first tensor with a value in this copy that is not finite."""
        index = int(np.argmin(np.isfinite(vector.array)))
        if vector.cut is None:
            return self.boundary.model.tensor_at(vector.start + index)
        positions = vector.cut.positions
        return self.boundary.model.tensor_at(int(positions[index])) if index < positions.size else ""

    def deliver_to_sharers(self, vector: Vector, is_current: bool) -> int:
        """Deliver a copy that no session holds to all that wait for the same elements, unless it lacks an update.

        Return the number of sessions that got it.
        """
        sessions = self.take_sharers(vector) if is_current else []
        for session in sessions:
            self.deliver_snapshot(session, vector)
        return len(sessions)

    def take_sharers(self, vector: Vector) -> list[int]:
        """Take the requests that this copy fulfils too, and return their sessions; each becomes a user of it."""
        sessions = [] if vector.is_transient else self.boundary.take_matching_requests(vector.cut)
        vector.users += len(sessions)
        return sessions

    def keep_for_newcomers(self, vector: Vector, replacements: int) -> None:
        """Keep a copy of the weights for newcomers, unless the weights were replaced since or are not finite."""
        view, is_latest = self.peer.view, replacements == self.boundary.replacements
        is_whole = vector.cut is None
        if is_whole and is_latest and view.ready and not view.is_joining and is_sound(vector):
            self.vectors.keep_snapshot(vector)
        self.vectors.give(vector)

    # -- copies that failed --------------------------------------------------------------------------------------
    def give_up_failed(self, visit: Visit) -> None:
        """End the exchanges whose snapshots could not be taken; training and the other exchanges go on."""
        if visit.failed_sessions or visit.lost_updates:
            self.warn_once(
                "The model's device has no memory left for an exchange, which is given up: training goes on. Leave "
                "256 MB of it free."
            )
        for session in visit.failed_sessions:
            self.driver.call_soon(self.report_not_taken, session)
        torn = any(copy.torn for copy in visit.copies)
        failure = next((copy.failure for copy in visit.copies if copy.failure), "")
        if torn:
            self.warn_once(
                "The weights changed outside the optimizer while they were copied, and an exchange is given up: change "
                "them before node.step(). Copies take their memory on the device first from now on."
            )
        if failure:
            self.warn_once(
                f"The weights could not be copied from the model's device ({failure}), and an exchange is given up: "
                "training goes on."
            )
        if not torn and not failure:
            return
        snapshots, visit.snapshots = visit.snapshots, ()
        for session, vector, mass in snapshots:
            self.report_not_taken(session)
            self.deliver_snapshot(session, vector, mass)  # The session has ended, so vector and mass go back.
        for unrequested in (visit.spare_copy, visit.newcomers_copy):
            if unrequested is not None:
                self.vectors.give(unrequested)
        visit.spare_copy = visit.newcomers_copy = None

    def report_not_taken(self, session: int) -> None:
        self.driver.perform(self.peer.on_not_taken(session, self.driver.now))

    def warn_once(self, sentence: str) -> None:
        if sentence not in self.warnings_shown:
            self.warnings_shown.add(sentence)
            self.driver.perform([Notice("device", sentence)])
