"""Swarms of forty honest peers under ordinary troubles: none is said to misbehave."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gossip.effects import Notice
from sim.scenario.scenario import ChurnSpec, Distribution, Scenario
from sim.scenario.task import Optimizer
from sim.simulation import Simulation

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"
PEERS = 40
HIGH_RATE = Optimizer(lr=1.0, momentum=0.9)
LATE = ChurnSpec(up=Distribution.exponential(600), down=Distribution.exponential(60), farewell=0.0)


def scenario(file: str, **task) -> Scenario:
    """Return an example's scenario for fewer peers, with all parts of the protocol."""
    whole = Scenario.from_toml(SCENARIOS / f"{file}.toml")
    return replace(whole, peers=PEERS, fidelity="whole", duration_s=240.0, task=replace(whole.task, **task))


RUNS = {
    "even data": scenario("lan"),
    "uneven data": scenario("non-iid"),
    "machines that come and go": scenario("volunteers"),
    "slow machines": scenario("stragglers"),
    "a lossy network": scenario("wan"),
    "a high learning rate": scenario("lan", optimizer=HIGH_RATE),
    "late joins with uneven data": replace(scenario("non-iid"), churn=LATE),
    "a network that falls apart": scenario("partition-heals"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_no_honest_peer_is_said_to_misbehave(name):
    run, told = Simulation(RUNS[name]), []
    run.swarm.performers[Notice] = lambda host, effect: told.append(effect)
    for _ in run.slices():
        pass
    print(name, run.swarm.now, Counter(notice.kind for notice in told))
    assert [notice.sentence for notice in told if notice.kind == "suspicious"] == []
