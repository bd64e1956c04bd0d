"""The plan of a replay: lives, links and cuts; what real processes cannot play is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.replay.links import MOST_NODES
from gossip.errors import ConfigError
from sim.scenario.scenario import Scenario
from sim.world.churn import churn_of
from sim.world.network import NetworkModel, network_of

LONGEST_S = 3_600.0  # Real time passes.
MOST_LIVES = 64  # Processes, each with torch in its memory.
TARGETS = (0.8, 0.9, 0.93, 0.95)
PORT = 7700


@dataclass(frozen=True, slots=True)
class Life:
    """One node's session. It ends with a farewell, or as by kill -9; with ``silent`` its machine loses power."""

    node: int
    from_s: float
    until_s: float  # math.inf: to the end.
    farewell: bool
    silent: bool


@dataclass(frozen=True, slots=True)
class Separation:
    """A cut: for some time nothing passes between these groups of nodes."""

    at_s: float
    until_s: float
    groups: tuple[tuple[int, ...], ...]

    def pairs(self) -> list[tuple[int, int]]:
        """Return the separated pairs of nodes."""
        groups = self.groups
        return [(a, b) for i, one in enumerate(groups) for other in groups[i + 1 :] for a in one for b in other]


@dataclass(frozen=True, slots=True)
class Plan:
    """A scenario as processes play it; ``names[node]`` is the simulator's name of each."""

    scenario: Scenario
    names: tuple[str, ...]
    duration_s: float
    lives: tuple[Life, ...]  # In the order of their beginnings.
    cuts: tuple[Separation, ...]
    every_s: float  # The interval between two looks at all models.

    @classmethod
    def of(cls, scenario: Scenario) -> Plan:
        """Plan a scenario. Raises :class:`ConfigError`, a sentence that names the key, for what cannot be played."""
        check(scenario)
        assert scenario.duration_s is not None
        lives = tuple(lives_of(scenario))
        if len(lives) > MOST_LIVES:
            raise refused("churn", f"starts {len(lives)} processes within {scenario.duration_s:g} s", f"{MOST_LIVES}")
        cuts = tuple(
            Separation(cut.at_s, min(cut.until_s, scenario.duration_s), groups_of(scenario.peers, cut.groups))
            for cut in scenario.network.partitions
            if cut.at_s < scenario.duration_s
        )
        names = tuple(str(number) for number in range(scenario.peers))
        every_s = scenario.report.every_s or scenario.duration_s / 120
        return cls(scenario, names, scenario.duration_s, lives, cuts, every_s)

    @property
    def targets(self) -> tuple[float, ...]:
        """Return the accuracies whose times are reported."""
        return TARGETS if self.scenario.trains else ()

    def network(self) -> NetworkModel:
        """Return the simulator's own network, so that each pair has the same latency as there."""
        network = network_of(self.scenario.network, self.scenario.seed, fleet=self.scenario.fleet)
        for name in self.names:
            network.add(name)
        return network

    def up(self, node: int, at_s: float) -> bool:
        return any(life.node == node and life.from_s <= at_s <= life.until_s for life in self.lives)


def check(scenario: Scenario) -> None:
    spec = scenario.membership
    if scenario.duration_s is None:
        raise ConfigError("rounds cannot be replayed: real time needs an end, so give duration_s in its place.")
    if scenario.duration_s > LONGEST_S:
        raise refused("duration_s", f"{scenario.duration_s:g} passes in real time", f"{LONGEST_S:g}")
    if scenario.peers > MOST_NODES:
        raise refused("peers", f"{scenario.peers} are as many processes", f"{MOST_NODES}")
    if scenario.fidelity == "exchange":
        raise ConfigError("fidelity = 'exchange' cannot be replayed: it predicts less than is seen here; leave it out.")
    if spec.mode == "ideal":
        raise ConfigError("membership.mode = 'ideal' cannot be replayed: real nodes have the protocol alone.")
    if spec.start == "together" and scenario.peers > 1:
        raise ConfigError(
            "membership.start = 'together' cannot be replayed: processes find each other by joining, so say "
            "start = 'seed', and join_every_s."
        )
    if scenario.network.congestion is None:
        raise ConfigError("network.congestion = 'none' cannot be replayed: real nodes speak TCP, so name bbr or cubic.")
    if scenario.network.nat is not None:
        raise ConfigError("network.nat cannot be replayed: emulated links have no routers; leave it out.")
    if scenario.attackers is not None and scenario.attackers.share > 0:
        raise ConfigError("attackers cannot be replayed: no real node lies; leave the table out.")
    if scenario.task.model_mb is not None:
        raise ConfigError("task.model_mb cannot be replayed: real nodes send what they train; leave it out.")
    rates = {"network": scenario.network.rate_mbit_s} | {
        f"fleet[{place}]": each.rate_mbit_s for place, each in enumerate(scenario.fleet) if each.rate_mbit_s is not None
    }
    for key, rate in rates.items():
        if math.inf in (rate.up, rate.down):
            raise ConfigError(f"{key}.rate_mbit_s = 'unlimited' cannot be replayed: name a rate, up to 100 or so.")


def refused(key: str, why: str, most: str) -> ConfigError:
    return ConfigError(f"{key} cannot be replayed: {why}, and {most} is the most.")


def lives_of(scenario: Scenario) -> list[Life]:
    """Return the lives as sim.simulation starts and ends them."""
    assert scenario.duration_s is not None
    churn = churn_of(scenario.churn, scenario.seed, scenario.peers)
    lives = []
    for node in range(scenario.peers):
        for number, session in enumerate(churn.sessions(str(node), node)):
            from_s = session.from_s if number else max(session.from_s, node * scenario.membership.join_every_s)
            if from_s >= scenario.duration_s:
                break
            lives.append(Life(node, from_s, session.until_s, session.farewell, session.silent))
            if len(lives) > MOST_LIVES:
                break
    return sorted(lives, key=lambda life: (life.from_s, life.node))


def groups_of(peers: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """Return groups of consecutive numbers, as sim.simulation cuts them."""
    return tuple(tuple(node for node in range(peers) if node * groups // peers == group) for group in range(groups))
