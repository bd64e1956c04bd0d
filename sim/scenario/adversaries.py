"""Peers that attack: they train and mix as the others do, and send something else than what they hold.

An attacker is as strong as its lie: its own model follows the swarm's, so that a flipped sign points against all that
was learned. It refuses nothing, and commits to whatever comes. To a newcomer it gives what it holds: a lie is told in
exchanges alone.

The kinds are those of the literature on Byzantine learning: sign-flip (Li, Xu, Chen, Giannakis and Ling, "RSA:
Byzantine-robust stochastic aggregation methods for distributed learning from heterogeneous datasets", AAAI 2019),
random (Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine learning with adversaries", NeurIPS 2017), scaled
(Bagdasaryan, Veit, Hua, Estrin and Shmatikov, "How to backdoor federated learning", AISTATS 2020, who scale what a
plain mean would drown), and nan, which one division by zero sends without any malice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gossip.config import Config
from sim.scenario import tables
from sim.scenario.tables import require
from sim.seeds import derive, generator

__all__ = ["AttackersSpec", "Liar", "liars", "unguarded"]

Floats = NDArray[np.float32]

SCALES = {"sign-flip": 1.0, "scaled": 10.0, "random": 1.0}  # what passes the norm bound and does the most harm
ANY_NORM = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackersSpec:
    """A ``share`` of the peers, rounded, sends "sign-flip": ``-scale x`` for its model x; "scaled": ``scale x``;
    "random": N(0, scale^2) in each element; "nan": nothing that is a number. ``scale`` None: 1, 10, 1."""

    share: float
    kind: Literal["sign-flip", "scaled", "random", "nan"] = "sign-flip"
    scale: float | None = None

    def __post_init__(self) -> None:
        tables.settle(self)
        require(0 <= self.share < 1, "share", self.share, "a share from 0 to below 1: somebody is honest")
        if self.kind == "nan":
            require(self.scale is None, "scale", self.scale, "left out: nan has none")
        else:
            right = self.scale is None or 0 < self.scale < math.inf
            require(right, "scale", self.scale, "a positive number")

    def count(self, peers: int) -> int:
        """How many of so many peers attack."""
        return math.floor(self.share * peers + 0.5)

    @property
    def size(self) -> float:
        """The scale, or the kind's own."""
        return SCALES.get(self.kind, 1.0) if self.scale is None else self.scale


class Liar:
    """What one attacker sends in the place of its model."""

    def __init__(self, spec: AttackersSpec, seed: int, name: str) -> None:
        self.spec, self.seed, self.name = spec, seed, name

    def sends(self, values: Floats, session: int) -> Floats:
        """float32, as many as ``values``, which stay as they are; in each session the same when asked again."""
        kind, scale = self.spec.kind, np.float32(self.spec.size)
        if kind == "random":
            rng = generator(self.seed, self.name, f"lie {session}")
            return scale * rng.standard_normal(values.size, np.float32)
        if kind == "nan":
            return np.full_like(values, np.nan)
        return values * (scale if kind == "scaled" else -scale)


def liars(spec: AttackersSpec | None, names: Sequence[str], seed: int) -> dict[str, Liar]:
    """Who attacks, drawn by the seed: a larger share has those of a smaller one among it."""
    if spec is None:
        return {}
    drawn = sorted(names, key=lambda name: derive(seed, name, "attacks"))
    return {name: Liar(spec, seed, name) for name in drawn[: spec.count(len(names))]}


def unguarded(config: Config) -> Config:
    """The same without what an honest peer refuses or cuts off."""
    return dataclasses.replace(config.unfiltered(), norm_bound=ANY_NORM)
