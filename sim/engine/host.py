"""What a node would hold beside its Peer: the vector it trains, its averager, its links, and when its steps end."""

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
from gossip.effects import Collect, Effect
from gossip.ids import Address, PeerId
from gossip.peer import Peer
from gossip.wire.messages import Message
from sim.engine.events import Events
from sim.engine.vector_model import Floats, HostVectors, KeptVector, VectorModel
from sim.scenario.adversaries import Liar
from sim.world.line import Line

__all__ = ["Floats", "Host", "Times"]

LOCK = threading.Lock()  # nobody waits for it: one thread simulates. A lock costs a tenth of contextlib.nullcontext

Times = Callable[[int], NDArray[np.float64]]
"""How long the next so many steps of one peer take, in seconds: asked again, it goes on where it ended."""


class Host:
    """One life of one simulated member, and its averager's driver. ``vector`` is the live model, float32, changed at
    step boundaries alone; the trainer may have computed steps that have not ended yet (see
    :mod:`sim.engine.training`)."""

    __slots__ = (
        "address", "armed", "averager", "behind_s", "behind_since", "behind_until", "boundary", "collecting", "cursor",
        "dialling", "ends", "events", "gone", "id", "index", "key", "liar", "lines", "links", "name", "offering",
        "peer", "pending", "perform", "ready", "released", "reported_at", "rest_until", "rng", "row",
        "samples_per_step", "silent", "since", "steps", "taken", "times", "vector", "visit_at", "visiting", "waiting",
        "watched",
    )  # fmt: skip

    def __init__(
        self, index: int, name: str, peer: Peer, vector: Floats, times: Times, samples_per_step: int,
        rng: random.Random, key: int, row: int, events: Events, performer: Callable[[Host, list[Effect]], None],
        liar: Liar | None = None,
    ) -> None:  # fmt: skip
        address = peer.record.address
        assert address is not None, "a simulated peer can be dialled"
        self.index, self.name, self.peer, self.address, self.id = index, name, peer, address, peer.id
        self.vector, self.samples_per_step = vector, samples_per_step
        self.row = row  # of the trainer
        self.events = events
        self.perform = partial(performer, self)
        self.liar = liar  # it attacks
        self.rng = rng  # the network's draws about what this host sends
        self.key = key  # 64 bits, for those about its lines
        self.gone = False  # killed, or it left
        self.silent = False  # and its machine with it: nobody says that its links are gone
        # links
        self.links: dict[PeerId, int] = {}  # and the number of each, later ones higher
        self.lines: dict[PeerId, Line] = {}  # to them, where the network has TCP
        self.watched = False  # its links are looked at now and then
        # What its messages wait behind a stream of its own, on average, and from when to when.
        self.behind_s, self.behind_since, self.behind_until = 0.0, -math.inf, -math.inf
        self.pending: dict[PeerId, deque[Message]] = {}  # for peers that are being dialled
        self.dialling: set[Address] = set()
        # sessions
        self.averager: Averager
        self.boundary: Boundary
        self.since: dict[int, float] = {}  # when a session wanted its snapshot
        self.collecting: dict[int, Collect] = {}
        self.offering = False  # an exchange has begun, and perhaps no mix of its own may begin beside it
        self.released = False  # one is over, and the next mix may be due sooner than it would look
        # steps
        self.times = times
        self.ends: list[float] = []  # when steps end, some already have
        self.cursor = 0  # the first of them that has not been counted
        self.steps = 0  # of this life, counted up to the cursor
        self.waiting: tuple[float, list[float]] | None = None  # since when the loop is held, and the ends behind it
        self.taken = 0  # of them, how many the vector holds
        self.ready = False  # as at the last boundary
        self.visit_at = math.inf  # the boundary at which something is to be done
        self.visiting = False  # it is at a boundary, and several things are performed there
        self.reported_at = -math.inf
        # timer
        self.armed = math.inf  # when the one timer that counts goes off
        self.rest_until = -math.inf  # no tick before this

    def make_averager(
        self, config: Config, wish: Callable[[Host], None], recall: Callable[[Host], bool], parameters: int | None,
        corrects: bool = False,
    ) -> None:  # fmt: skip
        """``wish``: the network wants something at the next boundary; ``recall``: whether the vector is what it was at
        the last one; ``parameters``: how many elements the outer step takes, all without it; ``corrects``: a trainer
        takes up what exchanges teach of the pull of own data."""
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
        """What finished exchanges taught since the last call."""
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
        """This life is over, and another begins: averager and driver know each other, and nobody searches for
        cycles meanwhile."""
        del self.averager, self.boundary, self.perform
        vars(self.peer).clear()


# What was added to the model, how far it counts, |Q(s)|^2, and the steps in an interval from then on
Lesson = tuple[Floats, float, float, int]


class Lessons(Correction):
    """What exchanges teach a simulated peer, until its next boundary. A trainer computes steps that have begun in one
    call, whoever looks, and so a correction must not change in the middle of a step."""

    __slots__ = ("_learned",)

    def __init__(self, size: int, parameters: int, kappa: float, every: int) -> None:
        super().__init__(size, parameters, kappa, every)
        self._learned: list[Lesson] = []

    def learn(self, difference: Floats, weight: float, credit: float, own_sq: float, every: int = 0) -> None:
        self._learned.append((np.float32(weight) * difference[: self.parameters], credit, own_sq, every))

    def reset(self) -> None:
        self._learned.clear()

    def take(self) -> list[Lesson]:
        """Return what exchanges have taught since the last call."""
        learned, self._learned = self._learned, []
        return learned
