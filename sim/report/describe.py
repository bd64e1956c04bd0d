"""A scenario in plain sentences, and the differences between several."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossip.codecs import AUTO
from gossip.config.mixings import MIXINGS
from gossip.config.selections import SELECTIONS
from gossip.wire.messages import MAX_GROUP
from sim.report.units import ABSENT, count_text, duration_text
from sim.scenario.conditions import NetworkCut
from sim.scenario.fidelity import Fidelity, fidelity_of
from sim.scenario.fleet import PeerSpec
from sim.world.network import has_tcp

if TYPE_CHECKING:
    from gossip.config import Config
    from sim.scenario.distribution import Distribution
    from sim.scenario.scenario import Scenario

__all__ = ["differences", "in_words"]

MODELS = {"linear": "a linear model", "mlp": "an MLP", "cnn": "a CNN", "gpt": "a small GPT"}
WORLDS = {"internet": "the internet", "cloud": "a cloud"}
MAX_NAMED_PEERS = 5  # Peers that a sentence names at most.

DATASETS = {
    "digits": "digits", "fashion-mnist": "Fashion-MNIST", "mnist": "MNIST", "shakespeare": "Shakespeare's plays",
}  # fmt: skip


def in_words(scenario: Scenario, played: Fidelity | None = None) -> str:
    """Describe the scenario in a paragraph; its file has every detail.

    Args:
        scenario: The scenario.
        played: The level that played it, if it has been played.
    """
    fidelity = played or fidelity_of(scenario)
    is_ideal = scenario.membership.mode == "ideal" or fidelity.level == "exchange"
    sentences = [
        task_sentence(scenario),
        mixing_sentence(scenario),
        compute_sentence(scenario),
        network_sentence(scenario),
        fleet_sentence(scenario),
        transport_sentence(scenario),
        churn_sentence(scenario, is_ideal),
        attackers_sentence(scenario),
        ending_sentence(scenario),
        fidelity.sentence,
    ]
    return " ".join(filter(None, sentences))


def task_sentence(scenario: Scenario) -> str:
    task, peers = scenario.task, count_text(scenario.peers)
    peers += " peer" if scenario.peers == 1 else " peers"
    if task.dataset == "averaging":
        numbers = "one number" if task.elements == 1 else f"{count_text(task.elements)} numbers"
        return f"{peers} average vectors of {numbers} each, and train nothing."
    divided = {
        "iid": "dealt out evenly",
        "dirichlet": f"divided unevenly by class (Dirichlet, alpha {task.partition.alpha})",
        "natural": "divided by who made it",
    }[task.partition.kind]
    model, dataset = MODELS.get(task.model, task.model), DATASETS.get(task.dataset, task.dataset)
    share = f", {count_text(task.samples_per_peer)} samples each" if task.samples_per_peer is not None else ""
    optimizer = task.optimizer
    momentum = f", momentum {optimizer.momentum:g}" if optimizer.momentum else ""
    if optimizer.quasi_global:
        momentum = f", quasi-global momentum {optimizer.quasi_global:g}"
    schedule = f", a cosine over {optimizer.schedule_steps:,} steps" if optimizer.schedule == "cosine" else ""
    adam_rate = f", AdamW's {optimizer.adam_lr:g}" if optimizer.adam_lr is not None else ""
    clipping = f", gradients clipped to {optimizer.clip_norm:g}" if optimizer.clip_norm is not None else ""
    name = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}[optimizer.name]
    rule = f"{name} (learning rate {optimizer.lr:g}{adam_rate}{schedule}{momentum}{clipping})"
    width = f" of width {task.hidden}" if task.hidden is not None else ""
    loss = f", to make {task.loss} small" if task.loss is not None else ""
    metric = f", and are measured by {task.metric}" if task.metric is not None else ""
    return (
        f"{peers} train {model}{width} on {dataset}, {divided}{share}, "
        f"in batches of {task.batch_size} with {rule}{loss}{metric}."
    )


def mixing_sentence(scenario: Scenario) -> str:
    config = scenario.config
    steps = None if config.interval_steps is None else quantity_text(config.interval_steps, "step")
    seconds = None if config.mix_every_s is None else duration_text(config.mix_every_s)
    when = "every " + " or ".join(each for each in (steps, seconds) if each is not None)
    if config.auto_interval:
        when = "as often as each can afford"
    outer = "" if config.plain else f" with an outer step {outer_text(config)}"
    partners = partners_text(config, scenario.peers)
    codec = "the codec that suits each link" if config.codec_name == AUTO else config.codec_name
    return f"Each {MIXINGS[config.mixing].does}{part_text(config)} {partners} {when}{outer}, in {codec}."


def outer_text(config: Config) -> str:
    if config.measures_momentum:
        return "whose momentum it measures"
    return "(momentum {:g}, rate {:g})".format(*config.outer)


def part_text(config: Config) -> str:
    """Return the part of the model that is mixed; empty text for a pair that mixes all of it."""
    kind, _, amount = config.part.partition(" ")
    if kind == "mask":
        return f" a random {100 * float(amount):g} % of its elements"
    if kind == "fragments":
        return f" one of {amount} fragments in turn"
    return " its model" if config.pushes else ""


def partners_text(config: Config, peers: int) -> str:
    """Return the partners of a peer: its groups, neighbours or random members."""
    if config.grouped:
        size = config.group_size
        if config.selection == "grid":
            return f"in groups of up to {size} on a grid"
        return f"in random groups of up to {size}" if size else f"with all peers, in groups of up to {MAX_GROUP}"
    rule = SELECTIONS[config.selection]
    where = f"on the graph in {Path(config.graph).name}" if rule.file else rule.where
    preposition = "to" if config.pushes else "with"
    if config.partners == 0:
        return f"{preposition} all its neighbours {where} at once"
    singular, plural = ("a random partner", "random partners") if not where else ("a neighbour", "neighbours")
    if peers == 2:
        return f"{preposition} the other"
    partners = singular if config.partners == 1 else f"{config.partners} {plural}"
    return f"{preposition} {partners}" if not where else f"{preposition} {partners} {where}"


def compute_sentence(scenario: Scenario) -> str:
    spec = scenario.compute
    once = " drawn once for each peer" if spec.per == "peer" else ""
    stragglers = spec.stragglers
    slow = ""
    if stragglers is not None and stragglers.share > 0:
        slow = f"; {100 * stragglers.share:g} % of the peers are {stragglers.slowdown:g} times slower"
    return f"A step takes {distribution_text(spec.step_s)}{once}{slow}."


def network_sentence(scenario: Scenario) -> str:
    spec = scenario.network
    latency = spec.latency
    if latency.distribution is not None:
        latencies = f"Messages take {distribution_text(latency.distribution)}"
    elif latency.kind == "quantiles":
        latencies = f"Latencies are those measured on {WORLDS.get(str(latency.name), latency.name)}"
    else:
        where = WORLDS.get(latency.name, latency.name) if latency.name else ", ".join(latency.regions or ())
        latencies = f"Latencies are those between the regions of {where}"
    up, down = spec.rate_mbit_s.up, spec.rate_mbit_s.down
    if math.isinf(up) and math.isinf(down):
        rate = "rates are unlimited"
    elif up == down:
        rate = f"each peer has {up:g} Mbit/s each way"
    else:
        rate = f"each peer has {rate_text(up)} up and {rate_text(down)} down"
    lost = "messages and streams are lost" if spec.congestion is None else "packets are lost and sent again"
    losses = f", and {100 * spec.loss:g} % of {lost}" if spec.loss else ""
    cuts = "".join(
        f" From {duration_text(cut.at_s)} to {duration_text(cut.until_s)} the network is cut into {cut.groups} groups."
        for cut in spec.partitions[:3]
    )
    more = f" {len(spec.partitions) - 3} more cuts follow." if len(spec.partitions) > 3 else ""
    return f"{latencies}; {rate}{losses}.{cuts}{more}"


def fleet_sentence(scenario: Scenario) -> str:
    """Describe the peers that differ from the others."""
    specs = [
        spec for spec in scenario.fleet if spec.has_own_links or spec.step_s is not None or spec.region is not None
    ]
    if not specs:
        return ""
    more = f"; and {len(specs) - MAX_NAMED_PEERS} more" if len(specs) > MAX_NAMED_PEERS else ""
    return f"Some have their own: {'; '.join(map(str, specs[:MAX_NAMED_PEERS]))}{more}."


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


def churn_sentence(scenario: Scenario, is_ideal: bool) -> str:
    """Describe when peers come and go; with ``is_ideal`` the others know it at once."""
    spec = scenario.churn
    if spec is None:
        going = "All peers stay"
    elif spec.trace is not None:
        going = f"Peers come and go as {spec.trace} says"
    else:
        assert spec.up is not None, "a churn without a trace has times"
        rest = f"then gone for {distribution_text(spec.down)}" if spec.down is not None else "then gone for good"
        going = f"A peer is up for {distribution_text(spec.up)}, {rest}"
    knowledge = (
        "a perfect sampler knows which peers are up"
        if is_ideal
        else "the membership protocol finds out which peers are up"
    )
    joining = "; all but the first join through it" if scenario.membership.start == "seed" else ""
    return f"{going}; {knowledge}{joining}."


def attackers_sentence(scenario: Scenario) -> str:
    spec = scenario.attackers
    if spec is None or spec.share == 0:
        return ""
    count = spec.count(scenario.peers)
    scale = spec.scale_for(scenario.peers)
    times = "" if scale == 1 else f" times {scale:.3g}"
    sent = {
        "sign-flip": f"their models with the sign flipped{times}",
        "scaled": f"their models{times}",
        "random": f"noise of standard deviation {scale:g} in place of their models",
        "nan": "models of which nothing is a number",
        "alie": f"the mean of the honest models less {scale:.2g} standard deviations",
        "ipm": f"the mean of the honest models times {-scale:g}",
        "dissensus": f"each partner's own model, moved away from the honest mean{times}",
    }[spec.kind]
    send = "1 of the peers attacks and sends" if count == 1 else f"{count_text(count)} of the peers attack and send"
    return f"{send} {sent}; figures are of the honest ones."


def ending_sentence(scenario: Scenario) -> str:
    if scenario.duration_s is not None:
        return f"The run lasts {duration_text(scenario.duration_s)} of virtual time."
    return f"The run lasts until each peer has mixed {scenario.rounds:g} times on average."


def quantity_text(number: int, noun: str) -> str:
    return noun if number == 1 else f"{count_text(number)} {noun}s"


def rate_text(mbit_s: float) -> str:
    return "no limit" if math.isinf(mbit_s) else f"{mbit_s:g} Mbit/s"


def distribution_text(times: Distribution) -> str:
    """Describe a distribution of seconds."""
    first, *others = times.parameters
    match times.kind:
        case "constant":
            return duration_text(first)
        case "uniform":
            return f"{duration_text(first)} to {duration_text(others[0])}"
        case "lognormal":
            return f"{duration_text(first)} in the median (log-normal, sigma {others[0]:g})"
        case "exponential":
            return f"{duration_text(first)} on average (exponential)"
    return f"{duration_text(times.mean)} on average (Weibull, shape {first:g})"


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
