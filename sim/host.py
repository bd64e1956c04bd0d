"""What a node would hold beside its Peer: the vector it trains, its links, and the sessions under way."""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
from numpy.typing import NDArray

from gossip.codecs import Codec
from gossip.effects import Collect
from gossip.ids import Address, PeerId
from gossip.messages import Message
from gossip.mixing import OuterStep
from gossip.peer import Peer

__all__ = ["Floats", "Host"]

Floats = NDArray[np.float32]


class Host:
    """One simulated member. ``vector`` is the live model, float32, changed at step boundaries alone."""

    __slots__ = (
        "address", "adopting", "armed", "collecting", "dialling", "differences", "gone", "id", "index",
        "joining_vector", "links", "outer", "peer", "pending", "requests", "rest_until", "rng", "samples",
        "samples_per_step", "shifts", "snapshots", "step_s", "steps", "transfers", "vector",
    )  # fmt: skip

    def __init__(
        self, index: int, peer: Peer, vector: Floats, outer: OuterStep, step_s: float, samples_per_step: int,
        rng: random.Random,
    ) -> None:  # fmt: skip
        address = peer.membership.me.address
        assert address is not None, "a simulated peer can be dialled"
        self.index, self.peer, self.address, self.id = index, peer, address, peer.id
        self.vector, self.outer, self.step_s, self.samples_per_step = vector, outer, step_s, samples_per_step
        self.rng = rng  # the network's draws about what this host sends
        self.steps = self.samples = 0
        self.gone = False  # killed, or it left
        # links
        self.links: dict[PeerId, None] = {}
        self.pending: dict[PeerId, deque[Message]] = {}  # for peers that are being dialled
        self.dialling: set[Address] = set()
        # sessions
        self.requests: dict[int, None] = {}  # snapshots wanted at the next boundary
        self.snapshots: dict[int, Floats] = {}
        self.transfers: dict[int, tuple[PeerId, Codec]] = {}
        self.differences: dict[int, Floats] = {}
        self.collecting: dict[int, Collect] = {}
        self.joining_vector: Floats | None = None
        # wishes for the next boundary
        self.shifts: list[Floats] = []
        self.adopting = False
        # time
        self.armed = math.inf  # when the one timer that counts goes off
        self.rest_until = -math.inf  # no tick before this
