"""At which level a scenario can be played: what the fast one cannot represent is refused, key by key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sim.scenario.tables import KeyFault

if TYPE_CHECKING:
    from sim.scenario.scenario import Scenario

__all__ = ["check_exchanges"]

FILTERS = ("none", "clip")  # they refuse nothing that is a number, and so nothing that a decision follows from
CODECS = ("fp32", "fp16", "bf16")  # each element by itself, so that many vectors are one call


def check_exchanges(scenario: Scenario) -> None:
    """Raise a :class:`KeyFault` for the first key that ``fidelity = "exchange"`` cannot represent."""
    for key, instead in beyond(scenario):
        raise KeyFault(key, f"is beyond fidelity = 'exchange': {instead}, or play it with fidelity = 'whole'.")


def beyond(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """(key, what would do) of each that is not represented."""
    gossip, membership = scenario.config, scenario.membership
    if membership.mode != "ideal":
        yield "membership.mode", "set it to 'ideal', a perfect sampler, as no message of the protocol is played"
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
    if not gossip.paired:
        yield "gossip.mixing", "set it to 'pair'"
    if gossip.partners != 1:
        yield "gossip.partners", "set it to 1"
    if gossip.selection != "uniform":
        yield "gossip.selection", "set it to 'uniform'"
    if gossip.part != "all":
        yield "gossip.part", "set it to 'all'"
    if gossip.codec not in CODECS:
        yield "gossip.codec", f"use {', '.join(CODECS[:-1])} or {CODECS[-1]}"
    if gossip.filtering not in FILTERS:
        yield "gossip.filter", "use 'clip' or 'none'"
    if gossip.consensus_target is not None:
        yield "gossip.consensus_target", "leave it out, as no decision may depend on values"
    if gossip.max_version_gap is not None:
        yield "gossip.max_version_gap", "leave it out"
    if gossip.mix_every_s is not None or gossip.mix_every_steps is None:
        yield "gossip.mix_every_s", "use mix_every_steps alone"
    if gossip.staleness_exponent:
        yield "gossip.staleness_exponent", "set it to 0"
