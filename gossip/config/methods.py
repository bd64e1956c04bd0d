"""Methods as their papers publish them, each one a configuration for ``Config.published(name)``."""

from dataclasses import dataclass, field
from typing import Any

from gossip.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Method:
    """One published method.

    Attributes:
        changes: Settings of :class:`~gossip.config.Config`.
        needs: What the training loop must provide in addition.
        differs: Differences from the paper.
    """

    name: str
    title: str
    paper: str
    changes: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    differs: str = ""


EVERY_STEP = {"mix_every_steps": 1, "staleness_exponent": 0.0}
RING = {"selection": "ring", "partners": 0}

METHODS = {
    method.name: method
    for method in (
        Method(
            "d-psgd",
            "D-PSGD",
            "Lian et al., NeurIPS 2017, arXiv:1705.09056",
            {**EVERY_STEP, **RING, "max_version_gap": 0.0},
            differs="a ring unless a graph is given; a node does not wait for a neighbour that is gone",
        ),
        Method(
            "ad-psgd",
            "AD-PSGD",
            "Lian et al., ICML 2018, arXiv:1710.06952",
            {**EVERY_STEP},
            differs="both sides commit, so that a failed exchange does not move the mean",
        ),
        Method(
            "sgp",
            "SGP",
            "Assran et al., ICML 2019, arXiv:1811.10792",
            {**EVERY_STEP, "selection": "exponential", "mixing": "push-sum", "max_version_gap": 0.0},
            differs="the model is the de-biased vector, and local steps are taken on it",
        ),
        Method(
            "osgp",
            "Overlap SGP",
            "Assran et al., ICML 2019, arXiv:1811.10792",
            {**EVERY_STEP, "selection": "exponential", "mixing": "push-sum", "max_version_gap": 1.0},
            differs="as SGP; a push may be in flight for one step",
        ),
        Method(
            "gosgd",
            "GoSGD",
            "Blot et al., 2016, arXiv:1611.09726",
            {"mix_every_steps": 8, "mixing": "push-sum"},
            differs="pushes at intervals jittered by a quarter, not with a probability at each step",
        ),
        Method(
            "epidemic",
            "Epidemic Learning",
            "de Vos et al., NeurIPS 2023, arXiv:2310.01972",
            {"mix_every_steps": 8, "mixing": "row-stochastic", "partners": 7, "max_version_gap": 0.0},
            differs="7 partners, log2 of a hundred nodes: set partners to log2 of your swarm's size",
        ),
        Method(
            "moshpit",
            "Moshpit SGD",
            "Ryabinin et al., NeurIPS 2021, arXiv:2103.03239",
            {"mix_every_steps": 8, "selection": "grid", "mixing": "group", "group_size": 4},
            differs="late members are left out; groups follow from the sorted ids, without a DHT",
        ),
        Method(
            "diloco",
            "DiLoCo",
            "Douillard et al., 2023, arXiv:2311.08105",
            {"mix_every_steps": 50, "mixing": "group", "group_size": 0, "outer_momentum": 0.9, "outer_rate": 0.7},
            needs="an inner AdamW, as published",
            differs="at most 16 nodes mix together; heavy-ball momentum instead of Nesterov's",
        ),
        Method(
            "noloco",
            "NoLoCo",
            "Kolehmainen et al., 2025, arXiv:2506.10911",
            {"mix_every_steps": 50, "outer_momentum": 0.5, "outer_rate": 0.7},
            needs="an inner Adam, as published",
            differs="one rate in place of its two outer rates, so that one vector travels instead of two",
        ),
        Method(
            "streaming-diloco",
            "Streaming DiLoCo",
            "Douillard et al., 2025, arXiv:2501.18512",
            {
                "mix_every_steps": 10,
                "part": "fragments 4",
                "outer_momentum": 0.5,
                "outer_rate": 0.7,
                "codec": "int4",
                "max_version_gap": 0.5,
            },
            needs="an inner Adam, as published",
            differs="random pairs instead of all nodes; fragments are ranges of elements instead of layers",
        ),
        Method(
            "sparta",
            "SPARTA",
            "Baioumy and Cheema, 2025",
            {**EVERY_STEP, "part": "mask 0.005"},
            differs="random pairs instead of all nodes",
        ),
        Method(
            "qg-dsgdm",
            "QG-DSGDm",
            "Lin et al., ICML 2021, arXiv:2102.04761",
            {**EVERY_STEP, **RING, "max_version_gap": 0.0},
            needs="the optimizer of examples/quasi_global.py",
        ),
        Method(
            "proxskip",
            "ProxSkip",
            "Guo et al., 2023, arXiv:2310.07983",
            {"mix_every_steps": 8, "correction": 0.2},
            differs="random pairs instead of a graph; the correction takes 0.2 of a mix's displacement, and is limited",
        ),
        Method(
            "moniqua",
            "Moniqua",
            "Lu and De Sa, ICML 2020, arXiv:2002.11787",
            {**EVERY_STEP, "codec": "moniqua4"},
            differs="4 bits; the bound is learned, and a vector that exceeds it is detected and not averaged",
        ),
        Method(
            "clippedgossip",
            "ClippedGossip",
            "He, Karimireddy and Jaggi, 2022, arXiv:2202.01545",
            {**EVERY_STEP, **RING, "filter": "clip", "filter_limit": 1.0, "max_version_gap": 0.0},
        ),
        Method(
            "balance",
            "BALANCE",
            "Fang et al., CCS 2024, arXiv:2406.10416",
            {**EVERY_STEP, **RING, "filter": "balance", "max_version_gap": 0.0},
            differs="if one side refuses a vector, neither side averages",
        ),
        Method(
            "local-sgd",
            "Local SGD without averaging",
            "Stich, ICLR 2019, arXiv:1805.09767",
            {"mix_every_steps": 1_000_000_000},
            differs="no node mixes: the baseline that averaging must beat",
        ),
    )
}


def method(name: str) -> Method:
    """Return the method of this name; raise :class:`ConfigError` with the known names."""
    if isinstance(name, str) and name in METHODS:  # A file may hold any value.
        return METHODS[name]
    raise ConfigError(f"No method is called {name!r}{did_you_mean(name, METHODS)}: there are {', '.join(METHODS)}.")
