"""A scenario in a few sentences, and the differences between several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gossip.ids import quantity
from sim.report.units import ABSENT, count_text, duration_text
from sim.scenario.conditions import NetworkCut
from sim.scenario.fidelity import Fidelity, fidelity_of
from sim.scenario.fleet import PeerSpec
from sim.world.network import has_tcp

if TYPE_CHECKING:
    from sim.scenario.scenario import Scenario


def in_words(scenario: Scenario, played: Fidelity | None = None) -> str:
    """Say what is trained and for how long, what is modelled and what is not; a table has the settings.

    Args:
        scenario: The scenario.
        played: The level that played it, if it has been played.
    """
    task = scenario.task
    does = f"train {task.model} on {task.dataset}"
    if not scenario.trains:
        does = f"average vectors of {quantity(task.elements, 'number')} each"
    if scenario.duration_s is not None:
        end = f"for {duration_text(scenario.duration_s)} of virtual time"
    else:
        end = f"until each has mixed {scenario.rounds:g} times on average"
    sentences = [
        f"{quantity(scenario.peers, 'peer')} {does} {end}.",
        attackers_sentence(scenario),
        transport_sentence(scenario),
        (played or fidelity_of(scenario)).sentence,
    ]
    return " ".join(filter(None, sentences))


def attackers_sentence(scenario: Scenario) -> str:
    spec = scenario.attackers
    if spec is None or spec.share == 0:
        return ""
    scale = spec.scale_for(scenario.peers)
    return (
        f"{count_text(spec.count(scenario.peers))} of the peers attack ({spec.kind}, scale {scale:.3g}); figures are "
        "of the honest ones."
    )


def transport_sentence(scenario: Scenario) -> str:
    """Say which properties of real links are modelled, and which are not."""
    spec, ideal = scenario.network, scenario.membership.mode == "ideal"
    if not has_tcp(spec, ideal, scenario.fleet):
        return "There is no TCP: a message takes the latency, and a stream its bytes over the rate from the first one."
    assert spec.congestion is not None
    is_lossy, is_cubic = spec.loss > 0 or any(peer.loss for peer in scenario.fleet), spec.congestion == "cubic"
    connections = scenario.gossip.connections
    effects = [
        "streams begin slowly" + (", and again after a pause" if is_cubic else ""),
        "lost packets come late" + (" and narrow a sender's window" if is_cubic else "") if is_lossy else "",
        f"a link that loses much gets {connections} connections" if is_cubic and is_lossy and connections > 1 else "",
        "" if is_cubic else "every 10 s of use a link nearly stops for 0.2 s",
    ]
    tls = " and TLS" if spec.tls and not ideal else ""
    return (
        f"Links are TCP's, with {spec.congestion}{tls}: {'; '.join(filter(None, effects))}. Not modelled are queues "
        "that several links share, and what exchanges and encryption cost the machines."
    )


def differences(scenarios: Sequence[Scenario]) -> dict[str, list[str]]:
    """Return the dotted keys in which scenarios differ, except names, with the value in each scenario."""
    tables = [dict(flat_keys(scenario)) for scenario in scenarios]
    keys = dict.fromkeys(key for table in tables for key in table)
    values_of = {key: [table.get(key, ABSENT) for table in tables] for key in keys if key != "name"}
    return {key: values for key, values in values_of.items() if len(set(values)) > 1}


def flat_keys(table: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield every dotted key of a scenario and its tables with its value as text; presets are spelled out."""
    for field in dataclasses.fields(table):
        value, key = getattr(table, field.name), above + field.name
        if dataclasses.is_dataclass(value) and type(value).__str__ is object.__str__:
            yield from flat_keys(value, f"{key}.")
        elif value is not None:
            yield key, value_text(value)


def value_text(value: Any) -> str:
    match value:
        case PeerSpec():
            return str(value)
        case NetworkCut():
            return f"{value.groups} groups {value.at_s:g} to {value.until_s:g} s"
        case tuple():
            return ", ".join(map(value_text, value)) or "none"
        case float():
            return f"{value:g}"
    return str(value)
