"""The level of detail at which a scenario is played, and the keys that the fast level cannot represent.

The *whole* level plays every message of every peer, and the fast level, "exchange", each exchange as one event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

from gossip.config import PRESETS, Config
from gossip.config.internal import Internal
from gossip.errors import ConfigError
from sim.scenario.adversaries import AttackersSpec
from sim.scenario.conditions import ChurnSpec, MembershipSpec, NetworkSpec
from sim.scenario.tables import KeyFault
from sim.scenario.task import Task

__all__ = ["Beyond", "Fidelity", "check_exchanges", "fidelity_of"]

FILTERS = ("none", "clip")  # These refuse no finite vector, so no decision depends on values.
CODECS = ("fp32", "fp16", "bf16", "int8", "int4", "auto")  # These need no bound on how far partners are apart.

# Settings of gossip.Config that act through messages, links or failures, which the fast level does not play.
UNPLAYED = ("boundary_patience_s", "slowest_rate_mb_s", "stall_s", "join_timeout_s", "merge")


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


def fidelity_of(scenario: Playable) -> Fidelity:
    """Return the level that plays a scenario: the requested one, or with "auto" the fast one where it can."""
    if scenario.fidelity == "exchange":
        return Fidelity("exchange")
    if scenario.fidelity == "whole":
        return Fidelity("whole", "fidelity = 'whole' is set")
    keys = [*(key for key, _ in unrepresented(scenario)), *unplayed(scenario.gossip)]
    return Fidelity("whole", f"the fast level cannot represent {keys[0]}") if keys else Fidelity("exchange")


def check_exchanges(scenario: Playable) -> None:
    """Raise a :class:`KeyFault` for the first key that ``fidelity = "exchange"`` cannot represent."""
    for key, instead in unrepresented(scenario):
        raise KeyFault(key, f"is beyond fidelity = 'exchange': {instead}, or play it with fidelity = 'whole'.")


def unplayed(config: Config) -> Iterator[str]:
    """Yield each setting that differs from every preset and that has no effect at the fast level."""
    presets = [getattr(Config, name)() for name in PRESETS]
    for name in UNPLAYED:
        if getattr(config, name) not in [getattr(preset, name) for preset in presets]:
            yield f"gossip.{name}"
    if config.internal != Internal():
        yield "gossip.internal"


def unrepresented(scenario: Playable) -> Iterator[tuple[str, str]]:
    """Yield each key whose value the fast level cannot represent, with the advice that follows it in an error."""
    config, membership = scenario.config, scenario.membership
    if membership.mode == "protocol":
        yield "membership.mode", "leave it out or set it to 'ideal', as no message of the protocol is played"
    if membership.start != "together":
        yield "membership.start", "set it to 'together'"
    if scenario.churn is not None and scenario.churn.silent:
        yield "churn.silent", "set it to 0"
    if scenario.network.partitions:
        yield "network.partitions", "leave them out"
    if scenario.network.loss and scenario.network.congestion is None:
        yield "network.congestion", "set it to 'cubic' or 'bbr', under which an exchange is late and never lost"
    if scenario.attackers is not None and scenario.attackers.share > 0:
        yield "attackers", "leave them out"
    if scenario.task.optimizer.quasi_global:
        yield "task.optimizer.quasi_global", "use momentum"
    if not config.paired:
        yield "gossip.mixing", "set it to 'pair'"
    if config.partners != 1:
        yield "gossip.partners", "set it to 1"
    if config.selection != "uniform":
        yield "gossip.selection", "set it to 'uniform'"
    if config.part != "all":
        yield "gossip.part", "set it to 'all'"
    if config.codec_name not in CODECS:
        yield "gossip.codec", f"use {', '.join(CODECS[:-1])} or {CODECS[-1]}"
    if config.filter_name not in FILTERS:
        yield "gossip.filter", "use 'clip' or 'none'"
    if config.max_version_gap is not None:
        yield "gossip.max_version_gap", "leave it out"
    if config.mix_every_s is not None:
        yield "gossip.mix_every_s", "use mix_every_steps alone"
    if config.staleness_exponent:
        yield "gossip.staleness_exponent", "set it to 0"
