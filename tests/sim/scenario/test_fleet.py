"""Single peers have their own settings, and all others the common ones."""

import math
from pathlib import Path

import numpy as np
import pytest

from gossip.errors import ConfigError
from sim.scenario.scenario import NetworkSpec, PeerSpec, Scenario
from sim.simulation import Simulation, simulate
from sim.world.network import network_of
from sim.world.step_times import StepTimes

FLEET = Path(__file__).parents[3] / "examples" / "scenarios" / "fleet.toml"


def scenario(*fleet, peers=6, **tables):
    task = {"dataset": "averaging", "elements": 8}
    given = {"peers": peers, "duration_s": 10, "fidelity": "whole", "task": task}
    return Scenario.from_mapping(given | tables | {"fleet": list(fleet)})


def network(made, order=None):
    built = network_of(made.network, made.seed, fleet=made.fleet)
    for number in order or range(made.peers):
        built.add(str(number))
    return built


def test_a_peer_has_its_own_rates_latency_and_loss_and_the_others_everybodys():
    made = scenario(
        {"number": 2, "rate_mbit_s": {"up": 8, "down": 80}, "latency_ms": 30, "loss": 0.1},
        {"number": 3, "to": 4, "latency_ms": 5},
        network={"loss": 0.01},
    )
    built = network(made)
    assert [built.up_bytes_s(peer) * 8e-6 for peer in range(4)] == [100, 100, 8, 100]
    assert [built.down_bytes_s(peer) * 8e-6 for peer in range(4)] == [100, 100, 80, 100]
    assert built.latency(0, 1) == 0.02
    assert built.latency(0, 2) == built.latency(2, 0) == pytest.approx(0.05)
    assert built.latency(2, 4) == pytest.approx(0.055)
    assert built.longest_s == pytest.approx(0.055)
    assert built.loss_of(0, 1) == pytest.approx(0.01)
    assert built.loss_of(0, 2) == built.loss_of(2, 0) == pytest.approx(1 - 0.99 * 0.9)


def test_who_comes_first_has_no_part_in_it():
    made = scenario({"number": 2, "rate_mbit_s": 8})
    assert network(made, order=[2, 0, 1]).up_bytes_s(0) == 1e6


def test_a_peer_has_steps_of_its_own():
    made = scenario({"number": 1, "step_s": 0.7}, compute={"step_s": 0.1, "stragglers": {"share": 1, "slowdown": 3}})
    times = StepTimes(made.compute, made.seed, made.fleet)
    assert times.durations("0")(2) == pytest.approx([0.3, 0.3])
    assert times.durations("1")(2) == pytest.approx([0.7, 0.7])
    run = Simulation(scenario({"number": 1, "step_s": 0.5}, compute={"step_s": 0.1}))
    run.swarm.run_until(10.0)
    for host in run.swarm.hosts:
        run.swarm.training.report_steps(host)
    steps = [host.steps for host in run.swarm.hosts]
    assert steps[1] == pytest.approx(20, abs=1)
    assert steps[0] == pytest.approx(100, abs=1)


def test_a_region_is_where_a_peer_is_and_nobody_else_moves():
    latency = {"kind": "matrix", "regions": ["here", "there"], "rtt_ms": [[2, 90], [90, 4]]}
    few = network(
        scenario({"number": 0, "region": "here"}, {"number": 1, "region": "there"}, network={"latency": latency})
    )
    assert few.latency(0, 1) == 0.045
    free = network(scenario(network={"latency": latency}))
    pairs = [(a, b) for a in range(2, 6) for b in range(2, 6) if a != b]
    assert [few.latency(*pair) for pair in pairs] == [free.latency(*pair) for pair in pairs]


def test_loss_of_one_peer_gives_the_network_tcp_even_for_a_perfect_sampler():
    ideal = network_of(NetworkSpec(), 1, ideal=True, fleet=[PeerSpec(number=1, loss=0.1)])
    assert ideal.transport is not None
    assert network_of(NetworkSpec(), 1, ideal=True, fleet=[PeerSpec(number=1, latency_ms=9)]).transport is None


def test_where_nothing_is_ones_own_the_run_is_the_same():
    plain, named = scenario(), scenario({"number": 1, "name": "bob"})
    assert simulate(plain, progress=False).summary["digest"] == simulate(named, progress=False).summary["digest"]


def test_the_slow_line_is_the_one_whose_exchanges_take_long():
    fleet = Scenario.from_toml(FLEET)
    run = Simulation(fleet)
    assert [spec.name for spec in fleet.fleet] == ["home", "far"]
    built = run.swarm.network
    assert built.latency(0, 1) == 0.0002
    assert built.latency(3, 4) == pytest.approx(0.1022)
    assert math.isclose(built.loss_of(0, 4), 0.005)
    took = []
    for own in ((), ({"number": 0, "rate_mbit_s": 1},)):
        task = {"dataset": "averaging", "elements": 5000}
        took.append(np.median(simulate(scenario(*own, peers=2, task=task), progress=False).exchange_s))
    assert took[1] > took[0] + 0.15  # 20 kB at 1 Mbit/s


def test_latencies_that_a_dial_cannot_take_are_refused():
    with pytest.raises(ConfigError, match="stall_s"):
        Simulation(scenario({"number": 1, "latency_ms": 3000}))
