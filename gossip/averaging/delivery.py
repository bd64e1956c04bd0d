"""The delivery of copies, which a visit to the step boundary took, to the sessions that wait for them.

A copy serves every session that asked for the same elements. If a copy failed, its sessions end and training goes on.
:mod:`gossip.effects` defines the terms. The *mass* of a pushed copy is its weight in the swarm's mean, taken from the
model; it is 0 for a copy that is exchanged.
"""

import math
from functools import partial
from typing import Any

import numpy as np

from gossip.arithmetic.mixing import is_finite
from gossip.averaging.jobs import AveragerState, MixJob
from gossip.averaging.vectors import Vector
from gossip.averaging.visit import Visit
from gossip.effects import Merge, Notice


def is_sound(vector: Vector) -> bool:
    """Return True if all values are finite, so that the vector may be sent; they are checked only once."""
    if vector.is_finite is None:
        vector.is_finite = is_finite(vector.array)
    return vector.is_finite


def deliver(averager: AveragerState[Any], visit: Visit) -> None:
    """Deliver the finished copies of a visit."""
    for update, share in zip(visit.updates, visit.merged_shares, strict=True):
        if update.merge_sample is not None and averager.movement is not None and not visit.adopted:
            averager.movement.add_merge(update.merge_sample, share)
    for vector in visit.busy_vectors:
        averager.vectors.give(vector)
    visit.record_checks()
    give_up_failed(averager, visit)
    is_current = visit.decided_updates == averager.boundary.decided_updates
    for session, vector, mass in visit.snapshots:
        # A push's mass and a newcomer's piece concern their own session alone, even if it has ended.
        is_shareable = not (mass or vector.is_transient)
        if is_shareable and not averager.peer.view.needs_snapshot(session):
            deliver_to_sharers(averager, vector, is_current)
            averager.vectors.give(vector)
        elif is_current or mass > 0 or not averager.peer.view.has_exchange(session):
            sharers = take_sharers(averager, vector) if is_current and not mass else []
            deliver_snapshot(averager, session, vector, mass)
            for other in sharers:
                deliver_snapshot(averager, other, vector)
        else:  # An update was decided since, and the snapshot of an exchange must include it.
            averager.vectors.give(vector)
            averager.boundary.request_snapshot(session, cut=vector.cut)
    if visit.spare_copy is not None and deliver_to_sharers(averager, visit.spare_copy, is_current):
        averager.vectors.give(visit.spare_copy)
    elif visit.spare_copy is not None:
        # No session needs the copy. It may have replaced the newest snapshot, which newcomers would then lack.
        keep_for_newcomers(averager, visit.spare_copy, visit.replacements)
    if visit.newcomers_copy is not None:
        keep_for_newcomers(averager, visit.newcomers_copy, visit.replacements)


def deliver_snapshot(averager: AveragerState[Any], session: int, vector: Vector, mass: float = 0.0) -> None:
    """Give a session its copy and report it, or return the copy to the pool if the session has ended.

    Args:
        averager: The state of the averager.
        session: The session that requested the copy.
        vector: The copy.
        mass: The mass that it took from the model.
    """
    peer, driver, movement = averager.peer, averager.driver, averager.movement
    if not peer.view.needs_snapshot(session):
        return_mass(averager, session, vector, mass)
        return
    if vector.moments is not None:
        encode_moments(averager, session, vector)
        return
    transfer = averager.open(session)
    if transfer.snapshot is not None:  # It got another copy meanwhile.
        averager.vectors.give(vector)
        return
    transfer.snapshot = vector
    if not is_sound(vector):
        driver.perform(peer.on_spoiled(session, driver.now, name_spoiled(averager, vector)))
        return
    moved = math.nan  # How far local steps moved the model since the last snapshot; NaN if not measured.
    if vector.cut is None and not vector.is_transient:
        averager.vectors.keep_snapshot(vector)
        moved = math.nan if movement is None else movement.measure(vector.array)
    elif vector.cut is not None and movement is not None:
        moved = movement.measure_sample(vector.array[vector.elements :].copy())
    driver.perform(peer.on_snapshotted(session, driver.now, mass, moved))


def return_mass(averager: AveragerState[Any], session: int, vector: Vector, mass: float) -> None:
    """Take the copy of a session that has ended; merge it into the model again if it took mass from that."""
    if mass > 0 and averager.config.conserves:
        averager.start_mixing(MixJob(averager, vector, None, None, Merge(session, mass)))
    else:
        averager.vectors.give(vector)


def encode_moments(averager: AveragerState[Any], session: int, vector: Vector) -> None:
    """Encode a copy of our moments for a member, and report it, unless its session ends meanwhile."""
    assert vector.moments is not None

    def use(is_sound: bool) -> None:
        peer, now = averager.peer, averager.driver.now
        if not peer.view.needs_snapshot(session):
            averager.vectors.give(vector)
            return
        averager.open(session).snapshot = vector
        averager.driver.perform(peer.on_snapshotted(session, now) if is_sound else peer.on_not_taken(session, now))

    averager.run_for(session, vector.array.size, partial(vector.moments.encode, vector.array), use)


def name_spoiled(averager: AveragerState[Any], vector: Vector) -> str:
    """Return the name of the first tensor with a value in this copy that is not finite."""
    index = int(np.argmin(np.isfinite(vector.array)))
    if vector.cut is None:
        return averager.boundary.model.tensor_at(vector.start + index)
    positions = vector.cut.positions
    return averager.boundary.model.tensor_at(int(positions[index])) if index < positions.size else ""


def deliver_to_sharers(averager: AveragerState[Any], vector: Vector, is_current: bool) -> int:
    """Deliver a copy that no session holds to all that wait for the same elements, unless it lacks an update.

    Return the number of sessions that got it.
    """
    sessions = take_sharers(averager, vector) if is_current else []
    for session in sessions:
        deliver_snapshot(averager, session, vector)
    return len(sessions)


def take_sharers(averager: AveragerState[Any], vector: Vector) -> list[int]:
    """Take the requests that this copy fulfils too, and return their sessions; each becomes a user of it."""
    sessions = [] if vector.is_transient else averager.boundary.take_matching_requests(vector.cut)
    vector.users += len(sessions)
    return sessions


def keep_for_newcomers(averager: AveragerState[Any], vector: Vector, replacements: int) -> None:
    """Keep a copy of the weights for newcomers, unless the weights were replaced since or are not finite."""
    view, is_latest = averager.peer.view, replacements == averager.boundary.replacements
    is_whole = vector.cut is None
    if is_whole and is_latest and view.ready and not view.is_joining and is_sound(vector):
        averager.vectors.keep_snapshot(vector)
    averager.vectors.give(vector)


# -- copies that failed --------------------------------------------------------------------------------------


def give_up_failed(averager: AveragerState[Any], visit: Visit) -> None:
    """End the exchanges whose snapshots could not be taken; training and the other exchanges go on."""
    if visit.failed_sessions or visit.lost_updates:
        warn_once(
            averager,
            "The model's device has no memory left for an exchange, which is given up: training goes on. Leave "
            "256 MB of it free.",
        )
    for session in visit.failed_sessions:
        averager.driver.call_soon(report_not_taken, averager, session)
    torn = any(copy.torn for copy in visit.copies)
    failure = next((copy.failure for copy in visit.copies if copy.failure), "")
    if torn:
        warn_once(
            averager,
            "The weights changed outside the optimizer while they were copied, and an exchange is given up: change "
            "them before node.step(). Copies take their memory on the device first from now on.",
        )
    if failure:
        warn_once(
            averager,
            f"The weights could not be copied from the model's device ({failure}), and an exchange is given up: "
            "training goes on.",
        )
    if not torn and not failure:
        return
    snapshots, visit.snapshots = visit.snapshots, ()
    for session, vector, mass in snapshots:
        report_not_taken(averager, session)
        deliver_snapshot(averager, session, vector, mass)  # The session has ended, so vector and mass go back.
    for unrequested in (visit.spare_copy, visit.newcomers_copy):
        if unrequested is not None:
            averager.vectors.give(unrequested)
    visit.spare_copy = visit.newcomers_copy = None


def report_not_taken(averager: AveragerState[Any], session: int) -> None:
    averager.driver.perform(averager.peer.on_not_taken(session, averager.driver.now))


def warn_once(averager: AveragerState[Any], sentence: str) -> None:
    if sentence not in averager.warnings_shown:
        averager.warnings_shown.add(sentence)
        averager.driver.perform([Notice("device", sentence)])
