"""The level of detail at which a scenario is played, and what the fast level implements.

The *whole* level plays every message of every peer, and the fast level, "exchange", each exchange as one event.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Protocol

from gossip.codecs import AUTO, Bf16, Fp16, Fp32, Int4, Int8, get_codec
from gossip.codecs.choice import BYTES_SHARE
from gossip.config import PRESETS, Config, filters
from gossip.config.mixings import MIXINGS
from gossip.config.selections import SELECTIONS
from gossip.errors import ConfigError
from sim.scenario.adversaries import AttackersSpec
from sim.scenario.conditions import ChurnSpec, MembershipSpec, NetworkSpec
from sim.scenario.tables import KeyFault
from sim.scenario.task import Task


class Beyond(ConfigError):
    """The fast level found, while building or playing a scenario, that it cannot represent it.

    Attributes:
        reason: The same as :attr:`Fidelity.reason`.
    """

    def __init__(self, sentence: str, reason: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class Fidelity(NamedTuple):
    """The level that plays a scenario. ``reason`` completes "message by message, because ..."."""

    level: Literal["whole", "exchange"]
    reason: str = ""

    @property
    def sentence(self) -> str:
        """Return one sentence for reports and the terminal."""
        if self.level == "exchange":
            return (
                "It was played exchange by exchange (the fast level), which leaves out the membership protocol, links "
                "and their beginning, and what single messages do outside of exchanges; fidelity = 'whole' plays them."
            )
        return f"It was played message by message (the whole level), because {self.reason}."


class Playable(Protocol):
    """The parts of a :class:`sim.scenario.scenario.Scenario` on which its level depends."""

    @property
    def fidelity(self) -> Literal["auto", "whole", "exchange"]: ...
    @property
    def gossip(self) -> Config: ...
    @property
    def config(self) -> Config: ...
    @property
    def membership(self) -> MembershipSpec: ...
    @property
    def churn(self) -> ChurnSpec | None: ...
    @property
    def network(self) -> NetworkSpec: ...
    @property
    def attackers(self) -> AttackersSpec | None: ...
    @property
    def task(self) -> Task: ...


class Only(NamedTuple):
    """A key of which the fast level implements only some values; ``instead`` follows the key in an error."""

    key: str
    implements: Callable[[Playable], bool]
    instead: str


# -- what the fast level implements: all else is played message by message, as an extension or a new setting is --------
PAIRS, UNIFORM, FILTERS = ("pair:Pair",), ("rule:Uniform",), ("rule:Filter", "clip:Clip")  # The homes of their classes.
CODECS = (Fp32, Fp16, Bf16, Int8, Int4)  # These need no bound on how far partners are apart.
CODEC_NAMES = ", ".join(codec.name for codec in CODECS)

# Settings of gossip.Config of which it plays every value: settings of the schedule, the outer step, slots and
# connections, and settings that only act together with a value that FAST lacks.
PLAYED = (
    "swarm", "graph", "group_size", "mix_every_steps", "outer_momentum", "outer_rate", "correction", "filter_limit",
    "incoming_exchanges", "mix_state", "connections",
)  # fmt: skip

FAST = (
    Only("network.nat", lambda scenario: scenario.network.nat is None, "leave it out: all peers can be dialled"),
    Only(
        "membership.mode", lambda scenario: scenario.membership.mode != "protocol",
        "leave it out or set it to 'ideal', as no message of the protocol is played",
    ),
    Only("membership.start", lambda scenario: scenario.membership.start == "together", "set it to 'together'"),
    Only(
        "churn.farewell",
        lambda scenario: not (scenario.churn and scenario.churn.farewell and scenario.config.internal.grace_s),
        "set it to 0, as the last mixes of peers that leave are not played",
    ),
    Only("churn.silent", lambda scenario: scenario.churn is None or not scenario.churn.silent, "set it to 0"),
    Only("network.partitions", lambda scenario: not scenario.network.partitions, "leave them out"),
    Only(
        "network.congestion", lambda scenario: not scenario.network.loss or scenario.network.congestion is not None,
        "set it to 'cubic' or 'bbr', under which an exchange is late and never lost",
    ),
    Only("attackers", lambda scenario: scenario.attackers is None or not scenario.attackers.share, "leave them out"),
    Only("gossip.mixing", lambda scenario: MIXINGS[scenario.config.mixing].home in PAIRS, "set it to 'pair'"),
    Only("gossip.partners", lambda scenario: scenario.config.partners == 1, "set it to 1"),
    Only(
        "gossip.selection", lambda scenario: SELECTIONS[scenario.config.selection].home in UNIFORM,
        "set it to 'uniform'",
    ),
    Only("gossip.part", lambda scenario: scenario.config.part == "all", "set it to 'all'"),
    Only("gossip.codec", lambda scenario: has_known_codec(scenario.config), f"use {CODEC_NAMES} or {AUTO}"),
    # These refuse no finite vector, so no decision depends on values.
    Only(
        "gossip.filter", lambda scenario: filters.FILTERS[scenario.config.filter_name].home in FILTERS,
        "use 'clip' or 'none'",
    ),
    Only("gossip.max_version_gap", lambda scenario: scenario.config.max_version_gap is None, "leave it out"),
    Only("gossip.mix_every_s", lambda scenario: scenario.config.mix_every_s is None, "use mix_every_steps alone"),
    Only("gossip.staleness_exponent", lambda scenario: not scenario.config.staleness_exponent, "set it to 0"),
)  # fmt: skip


def has_known_codec(config: Config) -> bool:
    """Return True if the fast level implements every codec that the peers may choose."""
    names = tuple(BYTES_SHARE) if config.codec_name == AUTO else (config.codec_name,)
    return all(type(get_codec(name)) in CODECS for name in names)


def fidelity_of(scenario: Playable) -> Fidelity:
    """Return the level that plays a scenario: the requested one, or with "auto" the fast one where it can."""
    if scenario.fidelity == "exchange":
        return Fidelity("exchange")
    if scenario.fidelity == "whole":
        return Fidelity("whole", "fidelity = 'whole' is set")
    keys = [*(only.key for only in FAST if not only.implements(scenario)), *unplayed(scenario.gossip)]
    return Fidelity("whole", f"the fast level cannot represent {keys[0]}") if keys else Fidelity("exchange")


def check_exchanges(scenario: Playable) -> None:
    """Raise a :class:`KeyFault` for the first key that ``fidelity = "exchange"`` cannot represent."""
    for key, implements, instead in FAST:
        if not implements(scenario):
            raise KeyFault(key, f"is beyond fidelity = 'exchange': {instead}, or play it with fidelity = 'whole'.")


def unplayed(config: Config) -> Iterator[str]:
    """Yield each setting that differs from every preset and that has no effect at the fast level."""
    presets, checked = [getattr(Config, name)() for name in PRESETS], [only.key for only in FAST]
    for field in dataclasses.fields(Config):
        name, key = field.name, f"gossip.{field.name}"
        is_played = name in PLAYED or key in checked
        if not is_played and getattr(config, name) not in [getattr(preset, name) for preset in presets]:
            yield key
