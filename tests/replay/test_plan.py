"""The plan of a replay: the parts of a scenario that it plays, and the ones that it refuses."""

import math
from pathlib import Path

import pytest

from benchmarks.replay import __main__ as command
from benchmarks.replay import links
from benchmarks.replay.plan import Plan
from gossip.errors import ConfigError
from sim.scenario.scenario import Scenario

BASE = {
    "peers": 4, "duration_s": 30, "network": {"latency": {"kind": "constant", "value_ms": 25}, "rate_mbit_s": 20},
    "membership": {"start": "seed", "join_every_s": 1},
}  # fmt: skip
SCENARIOS = Path(__file__).parents[2] / "benchmarks" / "replay" / "scenarios"
TOGETHER = {"membership.start": "together", "membership.join_every_s": 0}


def plan(**changes):
    return Plan.of(Scenario.from_mapping(BASE).replace(**changes))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rounds": 10}, "rounds"),
        ({"duration_s": 7200}, "duration_s"),
        ({"peers": 33}, "peers"),
        ({"membership.mode": "ideal"}, "membership.mode"),
        ({"fidelity": "exchange", "membership.mode": "ideal", **TOGETHER}, "fidelity"),
        (TOGETHER, "membership.start"),
        ({"attackers.share": 0.25}, "attackers"),
        ({"network.congestion": "none"}, "network.congestion"),
        ({"network.nat": {"public": 0.5, "hard": 0.5}}, "network.nat"),
        ({"network.rate_mbit_s": "unlimited"}, "network.rate_mbit_s"),
        ({"fleet": [{"number": 1, "rate_mbit_s": "unlimited"}]}, "fleet[0].rate_mbit_s"),
        ({"churn": {"up": {"kind": "constant", "value": 0.2}, "down": {"kind": "constant", "value": 0.2}}}, "churn"),
    ],
)
def test_a_setting_that_no_process_can_play_is_refused_by_its_key(changes, key):
    with pytest.raises(ConfigError) as refused:
        plan(**changes)
    assert str(refused.value).startswith(key)
    assert "cannot be replayed" in str(refused.value)


def test_nodes_join_one_after_the_other_and_stay():
    found = plan()
    assert [(life.node, life.from_s, life.until_s) for life in found.lives] == [
        (0, 0.0, math.inf), (1, 1.0, math.inf), (2, 2.0, math.inf), (3, 3.0, math.inf),
    ]  # fmt: skip
    assert found.up(2, 2.0)
    assert not found.up(2, 1.9)


def test_a_return_is_another_life_of_the_same_node(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("peer,from_s,until_s\n0,0,\n1,0,10\n1,15,\n2,0,\n3,0,50\n")
    found = plan(churn={"trace": str(trace)})
    assert [(life.node, life.from_s) for life in found.lives] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (1, 15.0)]
    assert [life.until_s for life in found.lives if life.node == 1] == [10.0, math.inf]


def test_a_cut_is_between_the_groups_of_the_simulator():
    found = plan(**{"network.partitions": [{"at_s": 5, "until_s": 90, "groups": 2}]})
    (cut,) = found.cuts
    assert cut.groups == ((0, 1), (2, 3))
    assert sorted(cut.pairs()) == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert (cut.at_s, cut.until_s) == (5, 30)


def test_links_have_the_latencies_of_the_simulated_network():
    uneven = plan(**{"network.latency": {"kind": "quantiles", "name": "internet"}})
    network = uneven.network()
    assert network.latency(0, 1) == network.latency(1, 0) != network.latency(0, 2)


def test_single_peers_may_have_their_own_links_and_steps():
    found = plan(fleet=[{"number": 2, "latency_ms": 60, "loss": 0.01, "rate_mbit_s": 5, "step_s": 0.4}])
    network = found.network()
    assert network.latency(0, 1) == 0.025
    assert network.latency(0, 2) == pytest.approx(0.085)
    assert (network.loss_of(0, 1), network.loss_of(2, 1)) == (0.0, pytest.approx(0.01))
    assert network.up_bytes_s(2) == 5e6 / 8


@pytest.mark.parametrize("file", sorted(SCENARIOS.glob("*.toml")), ids=lambda file: file.stem)
def test_the_scenarios_of_the_gap_table_can_be_played(file):
    scenario = Scenario.from_toml(file)
    assert scenario.name == file.stem
    assert Plan.of(scenario).duration_s == 60


def test_without_links_nothing_is_played(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(links, "missing", lambda: "emulated links need root.")
    file = tmp_path / "any.toml"
    file.write_text("duration_s = 5\npeers = 2\nmembership = { start = 'seed' }\n")
    assert command.main([str(file)]) == 3
    assert capsys.readouterr().err == "A replay plays real processes, and emulated links need root.\n"
