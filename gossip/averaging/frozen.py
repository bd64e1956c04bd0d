"""Jobs on frozen weights, which no step changes: a copy for a newcomer, and the hash that a newcomer compares first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from gossip.averaging.jobs import Job, JobOwner
from gossip.averaging.vectors import Vector
from gossip.effects import CopyFrozen, Effect, HashFrozen

__all__ = ["Copying", "Hashing"]

# Elements that are hashed at once, some 10 ms: mixes wait for one block and not for all of a large base. Larger than
# what a driver runs in its own thread.
BLOCK_ELEMENTS = 2 << 20


class FrozenDriver(Protocol):
    """The services of a driver, an :class:`gossip.averaging.averager.Driver`."""

    @property
    def now(self) -> float: ...
    def perform(self, effects: list[Effect], /) -> None: ...
    def compute(self, job: Job) -> None: ...
    def soon(self, report: Callable[..., None], *arguments: object) -> None: ...


class FrozenOwner(JobOwner, Protocol):
    """The parts of an :class:`gossip.averaging.averager.Averager` that these jobs use."""

    hashing: Hashing | None

    @property
    def driver(self) -> FrozenDriver: ...
    def recalled(self, session: int) -> None: ...


class Copying:
    """A job that copies frozen weights for a newcomer, while the training loop runs."""

    __slots__ = ("averager", "effect", "elements", "vector")

    def __init__(self, averager: FrozenOwner, effect: CopyFrozen) -> None:
        self.averager, self.effect, self.elements = averager, effect, effect.stop - effect.start
        self.vector: Vector | None = None

    def run(self) -> None:
        vector = self.vector = self.averager.vectors.pass_by(self.elements)
        vector.start = self.effect.start
        self.averager.boundary.model.read_frozen(vector.array, vector.start)

    def land(self) -> None:
        averager, vector, session = self.averager, self.vector, self.effect.session
        assert vector is not None
        if averager.peer.view.needs_snapshot(session) and session not in averager.snapshots:
            averager.snapshots[session] = vector
            averager.driver.soon(averager.recalled, session)
        else:
            averager.vectors.give(vector)

    def fail(self) -> None:
        self.averager.failed(self.effect.session, "fault")


class Hashing:
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

    def land(self) -> None:
        if self.start < self.stop and self.averager.hashing is self:
            self.averager.driver.compute(self)
        else:
            self.averager.driver.soon(self.report, self.hash.digest())

    def fail(self) -> None:
        self.averager.driver.soon(self.report, b"")

    def report(self, digest: bytes) -> None:
        averager = self.averager
        if averager.hashing is self:  # Otherwise the weights were replaced meanwhile, and are hashed again.
            averager.hashing = None
            averager.driver.perform(averager.peer.on_frozen_hashed(digest, averager.driver.now))
