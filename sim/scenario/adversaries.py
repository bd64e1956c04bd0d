"""Attacking peers, which train and mix like others but send something other than their model.

An attacker's own model follows the swarm's, so that a flipped sign points against all that was learned. It refuses
nothing and commits to every exchange. A *lie* is the vector that it sends in place of its model. It lies in exchanges
only: a newcomer gets its true weights.

The kinds are those of the literature on Byzantine learning: sign-flip (Li, Xu, Chen, Giannakis and Ling, "RSA:
Byzantine-robust stochastic aggregation methods for distributed learning from heterogeneous datasets", AAAI 2019),
random (Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine learning with adversaries", NeurIPS 2017), scaled
(Bagdasaryan, Veit, Hua, Estrin and Shmatikov, "How to backdoor federated learning", AISTATS 2020, who scale what a
plain mean would drown), and nan, which one division by zero sends without any malice.

Attackers of three kinds collude and know every honest model at the moment of sending, as their papers assume: alie
(Baruch, Baruch and Goldberg, "A little is enough", NeurIPS 2019), ipm (Xie, Koyejo and Gupta, "Fall of empires:
breaking Byzantine-tolerant SGD by inner product manipulation", UAI 2019) and dissensus (He, Karimireddy and Jaggi,
"Byzantine-robust decentralized learning via ClippedGossip", 2022). Papers that send gradients apply the first two to
those; here models travel, and they are applied to models, as ClippedGossip's experiments do.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from gossip.config import Config
from sim.arrays import F32
from sim.scenario import tables
from sim.scenario.tables import require
from sim.seeds import derive, generator

# Scales that pass the norm bound and do the most harm; that of ipm is He et al.'s (2022). alie's follows its share.
SCALES = {"sign-flip": 1.0, "scaled": 10.0, "random": 1.0, "ipm": 0.1, "dissensus": 1.0}
COLLUDING = ("alie", "ipm", "dissensus")  # Kinds that need to see the honest models.
ANY_NORM = 1e30  # A norm bound that every finite vector passes.


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackersSpec(tables.KeyTable):
    """The attack: a ``share`` of the peers, rounded, sends these vectors in the place of its models.

    With x for the attacker's own model, y for the receiver's, and mean and deviation element by element over the honest
    peers: "sign-flip", ``-scale x``; "scaled", ``scale x``; "random", N(0, scale^2) in each element; "nan", nothing
    that is a number; "alie", ``mean - scale deviation``; "ipm", ``-scale mean``; "dissensus",
    ``y - scale (honest / attackers) (mean - y)``, which takes from y what all honest partners together bring it.
    ``scale`` None: the kind's own scale, of SCALES or :func:`little_deviations`.
    """

    share: float
    kind: Literal["sign-flip", "scaled", "random", "nan", "alie", "ipm", "dissensus"] = "sign-flip"
    scale: float | None = None

    def __post_init__(self) -> None:
        tables.settle(self)
        require(0 <= self.share < 1, "share", self.share, "a share from 0 to below 1: at least one peer is honest")
        if self.kind == "nan":
            require(self.scale is None, "scale", self.scale, "left out: nan has none")
        else:
            is_valid = self.scale is None or 0 < self.scale < math.inf
            require(is_valid, "scale", self.scale, "a positive number")

    def count(self, peers: int) -> int:
        """Return how many of ``peers`` peers attack: the share, rounded half up."""
        return math.floor(self.share * peers + 0.5)

    def scale_for(self, peers: int) -> float:
        """Return the scale; if none is given, the kind's own for a swarm of ``peers`` peers."""
        if self.scale is not None:
            return self.scale
        return little_deviations(peers, self.count(peers)) if self.kind == "alie" else SCALES.get(self.kind, 1.0)


def little_deviations(peers: int, attackers: int) -> float:
    """Return how many standard deviations from the mean a lie of "alie" is, so that it looks like honest models.

    This is algorithm 3 of Baruch et al. (2019): the quantile of ``(n - m - s) / (n - m)`` of a normal distribution,
    with ``s = floor(n / 2 + 1) - m`` honest peers whose support the attackers need. It is 0.07 for 4 of 40 and 0.24 for
    8. ``n`` are all peers and ``m`` the attackers, which must be less than half.
    """
    supporters = peers // 2 + 1 - attackers
    below = (peers - attackers - supporters) / (peers - attackers)
    return max(0.0, NormalDist().inv_cdf(below)) if below > 0 else 0.0


class Sight(NamedTuple):
    """The knowledge of colluding attackers when one of them sends.

    Attributes:
        partner: The values that the receiver mixes, float32 (elements,).
        honest: The models of all honest peers that are there, float32 (peers, elements).
        attackers: The number of attackers.
    """

    partner: F32
    honest: F32
    attackers: int


class Attacker:
    """The values that one attacker sends in place of its model."""

    def __init__(self, spec: AttackersSpec, seed: int, name: str, peers: int) -> None:
        self.spec, self.seed, self.name, self.peers = spec, seed, name, peers
        self.scale = np.float32(spec.scale_for(peers))

    def false_values(self, values: F32, session: int, sight: Callable[[], Sight] | None = None) -> F32:
        """Return the lie, float32, of the size of ``values``, which stay as they are.

        Args:
            values: The attacker's true values, float32 (elements,).
            session: The exchange. A kind that draws at random draws the same for the same session.
            sight: Returns what the attacker knows of others; kinds that collude need it.
        """
        kind, scale = self.spec.kind, self.scale
        if kind in COLLUDING:
            assert sight is not None, f"a lie of {kind} depends on the partner that receives it"
            return colluding(kind, scale, sight())
        if kind == "random":
            rng = generator(self.seed, self.name, f"lie {session}")
            return scale * rng.standard_normal(values.size, np.float32)
        if kind == "nan":
            return np.full_like(values, np.nan)
        return values * (scale if kind == "scaled" else -scale)


def colluding(kind: str, scale: np.float32, sight: Sight) -> F32:
    """Return the lie of attackers that know every honest model."""
    partner, honest, attackers = sight
    mean: F32 = honest.mean(axis=0)
    lie: F32
    if kind == "alie":
        lie = mean - scale * honest.std(axis=0)
    elif kind == "ipm":
        lie = -scale * mean
    else:  # He et al. (2022), Dissensus, with equal weights for all partners, since each is met as often as any other.
        lie = partner - scale * np.float32(len(honest) / attackers) * (mean - partner)
    return lie


def draw_attackers(spec: AttackersSpec | None, names: Sequence[str], seed: int) -> dict[str, Attacker]:
    """Return the attackers, drawn by the seed: a larger share includes the attackers of a smaller one."""
    if spec is None:
        return {}
    drawn, peers = sorted(names, key=lambda name: derive(seed, name, "attacks")), len(names)
    return {name: Attacker(spec, seed, name, peers) for name in drawn[: spec.count(peers)]}


def unguarded(config: Config) -> Config:
    """Return the settings without the checks by which an honest peer refuses or clips."""
    return dataclasses.replace(config.unfiltered(), internal=dataclasses.replace(config.internal, norm_bound=ANY_NORM))
