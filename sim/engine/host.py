"""The state of a simulated node around its Peer: model vector, averager, links, and the end times of its steps.

The Peer decides and the averager computes (:mod:`gossip.averaging`); the host carries out what they ask for. A *step
boundary* is the end of a training step, the only moment at which a mix may change the model.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from gossip.arithmetic.correction import Correction, Lesson
from gossip.arithmetic.outer_step import OuterStep
from gossip.averaging.averager import Averager
from gossip.averaging.boundary import Boundary
from gossip.averaging.jobs import Job
from gossip.averaging.transfer import VectorTransfer
from gossip.averaging.visit import Visit
from gossip.config import Config
from gossip.effects import Effect, ReceiveMoments, ReceivePiece
from gossip.ids import Address, PeerId
from gossip.peer import Peer
from gossip.timeline import NodeTimeline
from gossip.wire.messages import Message
from sim.arrays import F64
from sim.engine.events import Events
from sim.engine.flows import Flow
from sim.engine.vector_model import Floats, HostVectors, KeptVector, VectorModel
from sim.learning.optimizer.moments import RowMoments
from sim.scenario.adversaries import Attacker
from sim.seeds import derive, derive_int
from sim.world.line import Line

__all__ = ["DurationSource", "Floats", "FlowTransfer", "Host", "Setup", "name_of_life"]

# The simulation has one thread, so this lock is never contended. It costs a tenth of contextlib.nullcontext.
LOCK = threading.Lock()

DurationSource = Callable[[int], F64]
"""Returns the durations of one peer's next n steps, shape (n,), in seconds; the next call continues from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The facts of a peer that stay the same in all of its lives."""

    index: int
    name: str  # With the swarm's seed it determines the peer's randomness.
    vector: Floats  # The live model, float32, shape (elements,).
    draw_durations: DurationSource
    samples_per_step: int = 1
    row: int  # Its row of the trainer's matrix.
    attacker: Attacker | None = None  # Computes what this peer sends in place of its model, if it attacks.


class FlowTransfer(VectorTransfer):
    """The transfer of one session of a host, with its streams. A member's *place* is its index in the group."""

    def __init__(self, session: int) -> None:
        super().__init__(session)
        self.flow: Flow | None = None  # The open stream to a partner.
        self.awaited: ReceivePiece | ReceiveMoments | None = None  # The piece or the moments that are to come.
        self.began_at, self.partners = 0.0, tuple[PeerId, ...]()  # For a timeline, of an exchange whose streams began.
        self.receivers: dict[int, PeerId] | None = None  # Group members that it streams to, by place; None before.
        self.group_flows: dict[tuple[PeerId, str], Flow] = {}  # Open streams to them, by what takes the values.
        self.early: list[Callable[[], None]] = []  # Streams that arrived before the group began here.


class Host:
    """One life of a simulated peer, and the driver of its averager.

    Mixes change the vector only at step boundaries. The trainer may already have computed steps that have not ended yet
    (see :mod:`sim.engine.training`). A time of ``math.inf`` means that nothing is scheduled, and ``-math.inf`` that it
    never happened.
    """

    def __init__(
        self, setup: Setup, life: int, seed: int, peer: Peer, events: Events,
        performer: Callable[[Host, list[Effect]], None],
    ) -> None:  # fmt: skip
        address = peer.membership.me.address
        assert address is not None, "a simulated peer begins with an address"
        self.setup, self.life = setup, life  # Lives are counted from 0.
        self.index, self.name, self.row, self.attacker = setup.index, setup.name, setup.row, setup.attacker
        self.vector, self.peer, self.address, self.id = setup.vector, peer, address, peer.id
        self.events = events
        self.perform = partial(performer, self)
        self.draws_name = name_of_life(setup.name, life)
        self.rng = random.Random(derive(seed, self.draws_name, "network"))  # Draws for what this host sends.
        self.line_seed = derive_int(seed, self.draws_name, "lines")
        self.sketch_seed = derive_int(seed, self.draws_name, "sketch")  # The secret of its sketches of differences.
        self.gone = False  # True once it was killed or has left.
        self.is_leaving = False  # True while it mixes a last time, and trains no more.
        self.silent = False  # True if its machine is off too, so that no partner learns that its links are gone.
        # Links
        self.links: dict[PeerId, int] = {}  # Link numbers by partner; later links have higher numbers.
        self.lines: dict[PeerId, Line] = {}  # Lines by partner, where the network has TCP.
        self.is_watched = False  # True while its links are checked for idleness at intervals.
        # The mean queueing delay of its messages behind its own stream, and the period during which it applies.
        self.queueing_mean_s, self.queueing_since, self.queueing_until = 0.0, -math.inf, -math.inf
        self.pending: dict[PeerId, deque[Message]] = {}  # Messages for peers that are being dialled.
        self.dialled: set[Address] = set()  # Addresses of links that are being opened.
        # Sessions
        self.averager: Averager[FlowTransfer]
        self.boundary: Boundary
        self.is_offering = False  # True after a snapshot was requested, until the peer may start another exchange.
        self.has_free_slot = False  # True if an exchange has ended: the next mix may be due before the planned visit.
        # Steps
        self.step_ends: list[float] = []  # Past and future end times of steps.
        self.cursor = 0  # Index in `step_ends` of the first step that has not been counted.
        self.steps = 0  # Counted steps of this life.
        self.computed_steps = 0  # Steps of this life that the vector contains; may exceed `steps`.
        # While the loop waits at a boundary: since when, and the step ends to postpone by the wait.
        self.pause: tuple[float, list[float]] | None = None
        self.is_training = False  # True if the loop trained at the last boundary.
        self.visit_at = math.inf  # When the next visit to a step boundary is scheduled.
        self.is_visiting = False  # True during a visit to a boundary, at the end of which the timer is armed once.
        self.reported_at = -math.inf  # When the loop last reported progress to the peer.
        self.timeline: NodeTimeline | None = None
        # Timer
        self.timer_at = math.inf  # When the timer fires; timers pushed for other times are void.
        self.rest_until = -math.inf  # The peer is not ticked before this time.

    def make_averager(
        self, config: Config, request_visit: Callable[[Host], None], prepare_copy: Callable[[Host], bool],
        parameters: int | None, has_correction: bool, moments: RowMoments | None,
    ) -> None:  # fmt: skip
        """Create the averager and its boundary.

        Args:
            config: The run's configuration.
            request_visit: Called when the averager needs a visit to the next boundary.
            prepare_copy: Returns True once the vector is the model of the last boundary; False if it is too late.
            parameters: Number of elements that the outer step covers; by default all.
            has_correction: True if the trainer applies the drift correction that exchanges teach.
            moments: The optimizer's moments that are mixed; None if none are.
        """
        vector = self.vector
        outer = OuterStep(parameters or vector.size, *config.outer, config.averaged, config.measures_momentum)
        outer.reset(vector)
        if has_correction:
            outer.correction = Lessons(vector.size, outer.parameters, config.kappa, config.first_interval or 1)
        vectors = HostVectors(lambda: vector.copy() if prepare_copy(self) else None)
        model, backup = VectorModel(vector, moments), KeptVector(vector)
        self.peer.set_moments(None if moments is None else moments.form)
        self.boundary = Boundary(model, vectors, backup, config.conserves, LOCK, partial(request_visit, self))
        self.averager = Averager(self.peer, config, self.boundary, vectors, outer, self, LOCK)
        if self.averager.movement is not None:
            self.averager.start_movement_at(self.averager.movement.sample(vector))

    def take_lessons(self) -> list[tuple[Floats, Lesson]]:
        """Return the lessons of exchanges that finished since the last call, each with the shift of its exchange."""
        correction = self.averager.outer_step.correction
        return correction.take() if isinstance(correction, Lessons) else []

    # -- the averager's driver -----------------------------------------------------------------------------------
    @property
    def now(self) -> float:
        return self.events.now

    def new_transfer(self, session: int) -> FlowTransfer:
        return FlowTransfer(session)

    def call_soon(self, report: Callable[..., None], *arguments: object) -> None:
        self.events.push(self.events.now, self.on_soon, report, *arguments)

    def on_soon(self, report: Callable[..., None], *arguments: object) -> None:
        if not self.gone:
            report(*arguments)

    def run_job(self, job: Job) -> None:
        job.run()
        job.finish()

    def await_copies(self, visit: Visit, report: Callable[[Visit], None]) -> None:
        assert not visit.copies, "a simulated model lies on no device, so its copies are complete at once"
        report(visit)


class Lessons(Correction):
    """A correction that only queues the lessons of exchanges, until the peer's next boundary.

    The trainer may compute a step before it ends. The correction must therefore not change in the middle of a step.
    ``every`` is the local steps in an interval.
    """

    def __init__(self, size: int, parameters: int, kappa: float, every: int) -> None:
        super().__init__(size, parameters, kappa, every)
        self._queue: list[tuple[Floats, Lesson]] = []

    def learn(self, difference: Floats, weight: float, lesson: Lesson, _: object = None) -> bool:
        self._queue.append((np.float32(weight) * difference[: self.parameters], lesson))
        return False

    def reset(self) -> None:
        self._queue.clear()

    def take(self) -> list[tuple[Floats, Lesson]]:
        """Return the queued lessons and empty the queue."""
        lessons, self._queue = self._queue, []
        return lessons


def name_of_life(name: str, life: int) -> str:
    """Return the name from which the randomness of one life comes; lives are counted from 0."""
    return f"{name}/{life}" if life else name
