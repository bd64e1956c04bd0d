"""Jobs on frozen weights, which no step changes: a copy for a newcomer, and the hash that a newcomer compares first."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np

from gossip.averaging.jobs import Driver, JobOwner
from gossip.averaging.vectors import Vector
from gossip.effects import CopyFrozen, HashFrozen

__all__ = ["CopyFrozenJob", "HashFrozenJob"]

# Number of elements that are hashed at once, in some 10 ms. Mixes wait for one block and not for all of a large base.
# A block is longer than any job that a driver runs in its own thread.
BLOCK_ELEMENTS = 2 << 20


class FrozenOwner(JobOwner, Protocol):
    """The parts of an :class:`gossip.averaging.averager.Averager` that these jobs use."""

    driver: Driver
    hash_job: HashFrozenJob | None

    def report_recalled(self, session: int) -> None: ...


class CopyFrozenJob:
    """A job that copies frozen weights for a newcomer, while the training loop runs."""

    __slots__ = ("averager", "effect", "elements", "vector")

    def __init__(self, averager: FrozenOwner, effect: CopyFrozen) -> None:
        self.averager, self.effect, self.elements = averager, effect, effect.stop - effect.start
        self.vector: Vector | None = None

    def run(self) -> None:
        vector = self.vector = self.averager.vectors.take_transient(self.elements)
        vector.start = self.effect.start
        self.averager.boundary.model.read_frozen(vector.array, vector.start)

    def finish(self) -> None:
        averager, vector, session = self.averager, self.vector, self.effect.session
        assert vector is not None
        if averager.peer.view.needs_snapshot(session) and session not in averager.snapshots:
            averager.snapshots[session] = vector
            averager.driver.call_soon(averager.report_recalled, session)
        else:
            averager.vectors.give(vector)

    def fail(self) -> None:
        self.averager.report_failed(self.effect.session, "fault")


class HashFrozenJob:
    """A job that hashes a block of the frozen weights, and then queues itself for the next one."""

    __slots__ = ("averager", "block", "elements", "hash", "start", "stop")

    def __init__(self, averager: FrozenOwner, effect: HashFrozen) -> None:
        self.averager, self.start, self.stop = averager, effect.start, effect.stop
        self.elements = min(BLOCK_ELEMENTS, self.stop - self.start)
        self.block = np.empty(self.elements, "<f4")
        self.hash = hashlib.blake2b(digest_size=32)

    def run(self) -> None:
        block = self.block[: self.stop - self.start]
        self.averager.boundary.model.read_frozen(block, self.start)
        self.hash.update(block.data)  # Without the interpreter's lock, as the copy.
        self.start += block.size

    def finish(self) -> None:
        if self.start < self.stop and self.averager.hash_job is self:
            self.averager.driver.run_job(self)
        else:
            self.averager.driver.call_soon(self.report_digest, self.hash.digest())

    def fail(self) -> None:
        self.averager.driver.call_soon(self.report_digest, b"")

    def report_digest(self, digest: bytes) -> None:
        averager = self.averager
        if averager.hash_job is self:  # Otherwise the weights were replaced meanwhile, and are hashed again.
            averager.hash_job = None
            averager.driver.perform(averager.peer.on_frozen_hashed(digest, averager.driver.now))
