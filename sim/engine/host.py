"""What a node would hold beside its Peer: the vector it trains, its links, and the sessions under way."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.mixing import OuterStep
from gossip.arithmetic.movement import Movement
from gossip.codecs import Spread
from gossip.ids import Address, PeerId
from gossip.peer import Peer
from gossip.wire.messages import Message
from sim.engine.shifts import Shift
from sim.scenario.adversaries import Liar

__all__ = ["Floats", "Host", "Times"]

Floats = NDArray[np.float32]
Times = Callable[[int], NDArray[np.float64]]
"""How long the next so many steps of one peer take, in seconds: asked again, it goes on where it ended."""


class Host:
    """One life of one simulated member. ``vector`` is the live model, float32, changed at step boundaries alone; the
    trainer may have computed steps that have not ended yet (see :mod:`sim.engine.training`)."""

    __slots__ = (
        "address", "adopting", "armed", "cursor", "dialling", "ends", "gone", "id", "index", "joining_vector", "kept",
        "liar", "links", "mass", "name", "offering", "outer", "peer", "pending", "progress", "ready", "reported_at",
        "requests", "rest_until", "restoring", "rng", "row", "samples_per_step", "sessions", "shifts",
        "spread", "steps", "taken", "times", "trial", "vector", "visit_at", "waiting", "wanted",
    )  # fmt: skip

    def __init__(
        self, index: int, name: str, peer: Peer, vector: Floats, outer: OuterStep, times: Times,
        samples_per_step: int, rng: random.Random, row: int, liar: Liar | None = None,
    ) -> None:  # fmt: skip
        address = peer.record.address
        assert address is not None, "a simulated peer can be dialled"
        self.index, self.name, self.peer, self.address, self.id = index, name, peer, address, peer.id
        self.vector, self.outer, self.samples_per_step = vector, outer, samples_per_step
        self.row = row  # of the trainer
        self.liar = liar  # it attacks
        self.mass = 1.0  # of push-sum: how much of the swarm's sum this vector is
        self.progress: Movement | None = None  # of local steps, where a peer wants to know
        self.spread: Spread | None = None  # how far others are from us, where a codec must know
        self.rng = rng  # the network's draws about what this host sends
        self.gone = False  # killed, or it left
        # links
        self.links: dict[PeerId, None] = {}
        self.pending: dict[PeerId, deque[Message]] = {}  # for peers that are being dialled
        self.dialling: set[Address] = set()
        # sessions
        self.sessions: dict[int, Any] = {}  # Session of sim.sessions, by number
        self.requests: list[int] = []  # those that want a snapshot at the next boundary
        self.joining_vector: Floats | None = None
        # wishes for the next boundary
        self.shifts: list[Shift] = []
        self.adopting = False
        self.trial = False  # what is adopted may have to be put back
        self.kept: Floats | None = None  # to be put back then
        self.restoring = False
        self.wanted = False  # any of these, or a snapshot
        self.offering = False  # an exchange of its own is under way, and the next is not yet due
        # steps
        self.times = times
        self.ends: list[float] = []  # when steps end, some already have
        self.cursor = 0  # the first of them that has not been counted
        self.steps = 0  # of this life, counted up to the cursor
        self.waiting: tuple[float, list[float]] | None = None  # since when the loop is held, and the ends behind it
        self.taken = 0  # of them, how many the vector holds
        self.ready = False  # as at the last boundary
        self.visit_at = math.inf  # the boundary at which something is to be done
        self.reported_at = -math.inf
        # timer
        self.armed = math.inf  # when the one timer that counts goes off
        self.rest_until = -math.inf  # no tick before this
