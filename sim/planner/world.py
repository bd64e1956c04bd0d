"""The links and machines of a plan, and the stand-in model that learns on them.

The user's model is not simulated. A small *stand-in* learns in its place, while links carry vectors of the user's size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossip.codecs import get_codec
from gossip.errors import ConfigError
from sim.scenario.scenario import Scenario
from sim.scenario.tables import changed
from sim.world.line import Line, line_key
from sim.world.network import NetworkModel, network_of
from sim.world.tcp import Back

STEPS = 400  # Steps per peer that the stand-in learns.
MIN_EXCHANGES = 16.0  # On slow links it learns for as long as this many exchanges take.
MAX_STEPS = 800  # It learns for at most this many steps, so that a plan ends in acceptable time.
MAX_PEERS = 32  # Peers whose pairs determine how long an exchange takes.
LEARNING_RATE = 0.1  # SGD's rate for STEPS steps; a longer run learns more slowly, so that all of it matters.
TASK: dict[str, Any] = {
    "dataset": "digits", "model": "mlp", "partition": {"kind": "dirichlet", "alpha": 0.3}, "model_mb": 10.0,
}  # fmt: skip
"""A perceptron of 4,810 parameters on handwritten digits, where each peer has its own classes, for a model of 10 MB.

Mixing too rarely or too coarsely costs accuracy, as with a large model.
"""
# The preset "datacentre" suits links with at most this one-way latency and at least this rate.
FAST_S, FAST_BYTES_S = 1e-3, 1.2e9
# The same limits of the preset "lan"; the rate is twelve times the slowest that the preset accepts.
NEAR_S, NEAR_BYTES_S = 5e-3, 6e6


@dataclass(frozen=True, slots=True)
class World:
    """The world of a plan.

    ``scenario`` has the task, links, machines and churn that all candidates share, and as ``gossip`` the settings that
    they are compared with. ``section`` is the file's ``[gossip]``. If it names no preset, candidates take the one that
    suits the links.
    """

    scenario: Scenario
    section: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_mapping(
        cls, tables: Mapping[str, Any], source: str, *, model_mb: float | None = None, step_s: float | None = None,
        nodes: int | None = None, seed: int | None = None,
    ) -> World:  # fmt: skip
        """Create the world from a scenario's tables, all of which may be missing.

        The defaults are 8 nodes, a step of 0.1 s, and the stand-in as the task. ``source`` names the tables in error
        messages. Raises :class:`ConfigError`.
        """
        table = dict(tables)
        for key in ("rounds", "fidelity", "attackers"):
            if key in table:
                raise ConfigError(f"{source}: {key} has no place in a plan: leave it out.")
        task = table.get("task", {})
        if not isinstance(task, dict):
            raise ConfigError(f"{source}: task must be a table, written [task].")
        name = Path(source).stem
        table = {"name": name, "peers": 8} | table | {"task": TASK | task}
        given = {"task.model_mb": model_mb, "compute.step_s": step_s, "peers": nodes, "seed": seed}
        length_s = table.pop("duration_s", None)
        try:
            # Candidates with groups or parts need the whole level, and all are compared at one level.
            ends = {"duration_s": 1.0 if length_s is None else length_s, "fidelity": "whole"}
            table = changed(table, {key: value for key, value in given.items() if value is not None})
            scenario = Scenario.from_mapping(table | ends)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        if scenario.peers < 2:
            raise ConfigError(f"{source}: a plan is for 2 nodes or more, which mix with each other.")
        if scenario.task.model_mb is None:
            raise ConfigError(f"{source}: a plan needs the size of a model: leave task.model_mb out, or give a number.")
        if not scenario.trains:
            raise ConfigError(f"{source}: a plan needs a task that is learned: leave task.dataset out.")
        section: Any = tables.get("gossip", {})
        world = cls(scenario, section)
        if length_s is not None:
            return world
        # The file names no duration: choose one that is long enough for exchanges in fp32, the largest codec.
        steps = min(max(STEPS, MIN_EXCHANGES * world.exchange_steps("fp32")), MAX_STEPS)
        changes: dict[str, Any] = {"duration_s": steps * scenario.compute.step_s.mean}
        if "optimizer" not in task:
            changes["task.optimizer.lr"] = LEARNING_RATE * STEPS / steps
        return cls(scenario.replace(**changes), world.section)

    @property
    def base_settings(self) -> dict[str, Any]:
        """Return the base of the candidates' section: the preset whose deadlines suit the links, and the file's keys.

        It is empty if the file names a preset or a method.
        """
        if "preset" in self.section or "method" in self.section:
            return {}
        return {"preset": self.preset, **self.section}

    @property
    def links(self) -> tuple[float, float, float]:
        """Return one-way latency (s), rate (bytes/s) and packet loss: medians over the pairs, both ways."""
        network = self.network()
        ways = [way for pair in self.pairs() for way in (pair, pair[::-1])]
        return (
            statistics.median(network.latency(sender, receiver) for sender, receiver in ways),
            statistics.median(rate_bytes_s(network, sender, receiver) for sender, receiver in ways),
            statistics.median(network.loss_of(sender, receiver) for sender, receiver in ways),
        )

    @property
    def preset(self) -> str:
        """Return the preset of :class:`gossip.Config` whose deadlines suit these links."""
        latency_s, rate_bytes_s, loss = self.links
        if loss or latency_s > NEAR_S or rate_bytes_s < NEAR_BYTES_S:
            return "wan"
        return "datacentre" if latency_s <= FAST_S and rate_bytes_s >= FAST_BYTES_S else "lan"

    def network(self) -> NetworkModel:
        """Return the links between the peers."""
        scenario = self.scenario
        network = network_of(
            scenario.network, scenario.seed, fleet=scenario.fleet, connections=scenario.gossip.connections
        )
        for number in range(scenario.peers):
            network.add(str(number))
        return network

    def pairs(self) -> list[tuple[int, int]]:
        """Return the pairs of at most MAX_PEERS peers."""
        return [(a, b) for a in range(min(self.scenario.peers, MAX_PEERS)) for b in range(a)]

    def exchange_steps(self, codec: str) -> float:
        """Return the local steps that pass while two whole vectors are exchanged with this codec.

        It is the median over the pairs, both ways at once, with nothing else on their links.
        """
        scenario, network = self.scenario, self.network()
        assert scenario.task.model_mb is not None
        size_bytes = get_codec(codec).encoded_bytes(round(1e6 * scenario.task.model_mb / 4))
        takes_s = statistics.median(pair_seconds(network, a, b, size_bytes) for a, b in self.pairs())
        return takes_s / scenario.compute.step_s.mean


def rate_bytes_s(network: NetworkModel, sender: int, receiver: int) -> float:
    return min(network.up_bytes_s(sender), network.down_bytes_s(receiver))


def pair_seconds(network: NetworkModel, a: int, b: int, size_bytes: float) -> float:
    """Return the time of the offer, the answer and the slower of the two streams."""
    latency_s, ways = network.latency(a, b), ((a, b), (b, a))
    rate_out, rate_back = (rate_bytes_s(network, *way) for way in ways)
    if network.transport is None:
        rate = min(rate_out, rate_back)
        return 3 * latency_s + (0.0 if math.isinf(rate) else size_bytes / rate)
    out, back = (Line(line_key(*way, 0.0), 0.0, network.loss_of(*way)) for way in ways)
    streams = ((out, rate_out, Back(back, rate_back)), (back, rate_back, Back(out, rate_out)))
    seconds = network.transport.seconds
    takes_s = [seconds(line, size_bytes, rate, 2 * latency_s, 0.0, reverse) for line, rate, reverse in streams]
    return 2 * latency_s + max(takes_s)
