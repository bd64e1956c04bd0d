"""The state of a simulated node around its Peer: model vector, averager, links, and the end times of its steps."""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.correction import Correction
from gossip.arithmetic.mixing import OuterStep
from gossip.averaging.averager import Averager
from gossip.averaging.boundary import Boundary, Visit
from gossip.averaging.jobs import Job
from gossip.config import Config
from gossip.effects import Effect, ReceivePiece
from gossip.ids import Address, PeerId
from gossip.peer import Peer
from gossip.timeline import NodeTimeline
from gossip.wire.messages import Message
from sim.engine.events import Events
from sim.engine.vector_model import Floats, HostVectors, KeptVector, VectorModel
from sim.scenario.adversaries import Liar
from sim.world.line import Line

__all__ = ["Floats", "Host", "Times"]

# The simulation has one thread, so this lock is never contended. It costs a tenth of contextlib.nullcontext.
LOCK = threading.Lock()

Times = Callable[[int], NDArray[np.float64]]
"""Returns the durations of one peer's next n steps, shape (n,), in seconds; the next call continues from there."""


class Host:
    """One life of a simulated peer, and the driver of its averager.

    ``vector`` is the live model, float32, shape (elements,). Mixes change it only at step boundaries. The trainer may
    already have computed steps that have not ended yet (see :mod:`sim.engine.training`).
    """

    __slots__ = (
        "address", "armed", "averager", "begun", "behind_s", "behind_since", "behind_until", "boundary", "collecting",
        "cursor", "dialling", "ends", "events", "gone", "id", "index", "key", "liar", "lines", "links", "name",
        "offering", "peer", "pending", "perform", "ready", "released", "reported_at", "rest_until", "rng", "row",
        "samples_per_step", "silent", "since", "steps", "taken", "timeline", "times", "vector", "visit_at", "visiting",
        "waiting", "watched",
    )  # fmt: skip

    def __init__(
        self, index: int, name: str, peer: Peer, vector: Floats, times: Times, samples_per_step: int,
        rng: random.Random, key: int, row: int, events: Events, performer: Callable[[Host, list[Effect]], None],
        liar: Liar | None = None,
    ) -> None:  # fmt: skip
        address = peer.membership.me.address
        assert address is not None, "a simulated peer can be dialled"
        self.index, self.name, self.peer, self.address, self.id = index, name, peer, address, peer.id
        self.vector, self.samples_per_step = vector, samples_per_step
        self.row = row  # row of the trainer's matrix
        self.events = events
        self.perform = partial(performer, self)
        self.liar = liar  # set if this peer is an attacker
        self.rng = rng  # the network's random draws for what this host sends
        self.key = key  # 64-bit seed of the draws for its lines
        self.gone = False  # it was killed or has left
        self.silent = False  # its machine is off too, so no partner learns that its links are gone
        # links
        self.links: dict[PeerId, int] = {}  # link numbers by partner; later links have higher numbers
        self.lines: dict[PeerId, Line] = {}  # lines by partner, where the network has TCP
        self.watched = False  # its links are checked for idleness at intervals
        # Mean queueing delay of its messages behind its own stream (s), and the period during which it applies.
        self.behind_s, self.behind_since, self.behind_until = 0.0, -math.inf, -math.inf
        self.pending: dict[PeerId, deque[Message]] = {}  # messages for peers that are being dialled
        self.dialling: set[Address] = set()
        # sessions
        self.averager: Averager
        self.boundary: Boundary
        self.since: dict[int, float] = {}  # when each session asked for its snapshot
        self.begun: dict[int, tuple[float, tuple[PeerId, ...]]] = {}  # begin and partners of streams, for a timeline
        self.collecting: dict[int, ReceivePiece] = {}
        self.offering = False  # an exchange has begun, during which the peer may start no other
        self.released = False  # an exchange has ended, so the next mix may be due before the planned visit
        # steps
        self.times = times
        self.ends: list[float] = []  # end times of steps, past and future
        self.cursor = 0  # index in `ends` of the first step that has not been counted
        self.steps = 0  # steps of this life that have been counted
        self.waiting: tuple[float, list[float]] | None = None  # start of the wait at a boundary, and its postponed ends
        self.taken = 0  # steps of this life that the vector contains; may exceed `steps`
        self.ready = False  # the loop trained at the last boundary
        self.visit_at = math.inf  # the scheduled visit to a step boundary
        self.visiting = False  # it is at a boundary; its timer is armed once, at the end of the visit
        self.reported_at = -math.inf
        self.timeline: NodeTimeline | None = None
        # timer
        self.armed = math.inf  # when the timer fires; timers pushed for other times are void
        self.rest_until = -math.inf  # no tick before this time

    def make_averager(
        self, config: Config, wish: Callable[[Host], None], recall: Callable[[Host], bool], parameters: int | None,
        corrects: bool = False,
    ) -> None:  # fmt: skip
        """Create the averager and its boundary.

        Args:
            config: The run's configuration.
            wish: Called when the network side needs a visit to the next boundary.
            recall: Returns True if the vector still equals the model at the last boundary.
            parameters: Number of elements that the outer step covers; by default all.
            corrects: True if the trainer applies the drift correction that exchanges teach.
        """
        vector = self.vector
        outer = OuterStep(parameters or vector.size, *config.outer, config.averaged)
        outer.reset(vector)
        if corrects:
            outer.correction = Lessons(vector.size, outer.parameters, config.kappa, config.first_interval or 1)
        vectors = HostVectors(lambda: vector.copy() if recall(self) else None)
        model, kept = VectorModel(vector), KeptVector(vector)
        self.boundary = Boundary(model, vectors, kept, config.conserves, LOCK, partial(wish, self))
        self.averager = Averager(self.peer, config, self.boundary, vectors, outer, self, LOCK)
        self.averager.begin(vector)

    def lessons(self) -> list[Lesson]:
        """Take the lessons of exchanges that finished since the last call."""
        correction = self.averager.outer.correction
        return correction.take() if isinstance(correction, Lessons) else []

    # -- the averager's driver -----------------------------------------------------------------------------------
    @property
    def now(self) -> float:
        return self.events.now

    def soon(self, report: Callable[..., None], *arguments: object) -> None:
        self.events.push(self.events.now, self.happen, report, *arguments)

    def happen(self, report: Callable[..., None], *arguments: object) -> None:
        if not self.gone:
            report(*arguments)

    def compute(self, job: Job) -> None:
        job.run()
        job.land()

    def when_copied(self, visit: Visit, report: Callable[[Visit], None]) -> None:
        raise AssertionError("a copy of a simulated model is done at once")

    def end(self) -> None:
        """Break the reference cycle of averager and driver, because a run disables the cyclic garbage collector."""
        del self.averager, self.boundary, self.perform
        vars(self.peer).clear()


# The shift added to the model, its weight in the correction, |Q(s)|^2, and the new interval in steps
Lesson = tuple[Floats, float, float, int]


class Lessons(Correction):
    """A correction that only queues the lessons of exchanges, until the peer's next boundary.

    The trainer may compute a step before it ends. The correction must therefore not change in the middle of a step.
    """

    __slots__ = ("_learned",)

    def __init__(self, size: int, parameters: int, kappa: float, every: int) -> None:
        super().__init__(size, parameters, kappa, every)
        self._learned: list[Lesson] = []

    def learn(self, difference: Floats, weight: float, credit: float, own_sq: float, every: int = 0) -> None:
        self._learned.append((np.float32(weight) * difference[: self.parameters], credit, own_sq, every))

    def reset(self) -> None:
        self._learned.clear()

    def take(self) -> list[Lesson]:
        """Return the queued lessons and empty the queue."""
        learned, self._learned = self._learned, []
        return learned
