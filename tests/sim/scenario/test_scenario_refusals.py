"""An impossible scenario is refused in one sentence that names the key and a value that works."""

from __future__ import annotations

import math
import pickle

import pytest

from gossip.errors import ConfigError
from sim.scenario.scenario import Optimizer, Scenario


def sentence(table):
    with pytest.raises(ConfigError) as caught:
        Scenario.from_mapping({"rounds": 1} | table)
    said = str(caught.value)
    assert said.endswith((".", "?"))
    assert "\n" not in said
    return said


MATRIX = {"kind": "matrix", "regions": ["a", "b"]}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"peers": 0}, ["peers = 0", "1 or more"]),
        ({"peers": 10.5}, ["peers = 10.5", "a whole number"]),
        ({"peers": 10**12}, ["peers = 1000000000000", "1,000,000 at most"]),
        ({"peers": 1}, ["peers = 1", "2 or more", "duration_s", "rounds"]),
        ({"seed": True}, ["seed = True", "a whole number"]),
        ({"duration_s": 5}, ["duration_s", "rounds", "both"]),
        ({"rounds": "none"}, ["duration_s", "rounds", "neither"]),
        ({"rounds": -1}, ["rounds = -1.0", "positive"]),
        ({"name": ""}, ["name", "printable"]),
        ({"task": 5}, ["task = 5", "a table of dataset"]),
        ({"task": {"dataset": "digit"}}, ["task.dataset = 'digit'", "did you mean 'digits'", "module:function"]),
        ({"task": {"model": ".module:f"}}, ["task.model = '.module:f'", "module:function"]),
        ({"task": {"model": "my.module:"}}, ["task.model", "module:function"]),
        ({"task": {"hidden": 10**12}}, ["task.hidden = 1000000000000", "1,000,000 at most"]),
        ({"task": {"batch_size": 0}}, ["task.batch_size = 0", "1 or more"]),
        ({"task": {"partition": {"kind": "dirichlet"}}}, ["task.partition.alpha", "positive", "dirichlet"]),
        ({"task": {"partition": {"alpha": 1.0}}}, ["task.partition.alpha", "iid has none"]),
        ({"task": {"partition": "even"}}, ["task.partition.kind = 'even'", "iid, dirichlet, natural"]),
        ({"task": {"optimizer": "adamw"}}, ["task.optimizer.lr", "missing", "0.001"]),
        ({"task": {"optimizer": {"name": "adamw", "lr": 1e-3, "momentum": 0.9}}}, ["task.optimizer.momentum", "betas"]),
        ({"task": {"optimizer": {"betas": [0.9]}}}, ["task.optimizer.betas", "a list of 2"]),
        ({"task": {"optimizer": {"betas": [0.9, "x"]}}}, ["task.optimizer.betas[1] = 'x'", "a number"]),
        ({"task": {"optimizer": {"lr": math.nan}}}, ["task.optimizer.lr", "positive"]),
        ({"gossip": {"codec": "fp8"}}, ["gossip.codec = 'fp8' cannot work: there is no codec", "bf16"]),
        ({"gossip": {"mix_every_steps": "8"}}, ["gossip.mix_every_steps = '8'", "a whole number"]),
        ({"gossip": {"preset": "moon"}}, ["gossip.preset = 'moon'", "datacentre"]),
        ({"gossip": "wan"}, ["gossip = 'wan'", "a table"]),
        ({"compute": {"step_s": 0}}, ["compute.step_s", "longer than 0 s"]),
        ({"compute": {"step_s": "fast"}}, ["compute.step_s = 'fast'", "a number"]),
        ({"compute": {"step_s": {"kind": "normal"}}}, ["compute.step_s.kind = 'normal'", "lognormal"]),
        ({"compute": {"step_s": {"kind": "weibull", "shape": 1}}}, ["compute.step_s.scale_s", "given once", "shape"]),
        ({"compute": {"step_s": {"kind": "constant", "value": 1, "value_s": 1}}}, ["step_s.value_s", "once"]),
        ({"compute": {"step_s": {"kind": "constant", "value": 1, "sigma": 1}}}, ["step_s.sigma", "no parameter"]),
        ({"compute": {"step_s": {"kind": "uniform", "low": 2, "high": 1}}}, ["step_s.high = 1.0", "at least low"]),
        ({"compute": {"stragglers": {"share": 0.1}}}, ["compute.stragglers.slowdown", "missing", "a number"]),
        ({"compute": {"stragglers": {"share": 2, "slowdown": 2}}}, ["stragglers.share = 2.0", "from 0 to 1"]),
        ({"compute": {"stragglers": {"share": 0.2, "slowdown": 0.5}}}, ["stragglers.slowdown = 0.5", "1 or more"]),
        ({"compute": {"step_s": 1e-320}}, ["compute.step_s", "1e-06 s or longer"]),
        (
            {"compute": {"step_s": {"kind": "lognormal", "median_s": 1, "sigma": 100}}},
            ["step_s.sigma = 100", "endless"],
        ),
        (
            {"compute": {"step_s": {"kind": "weibull", "shape": 1e-4, "scale_s": 1}}},
            ["step_s.shape = 0.0001", "endless"],
        ),
        ({"network": "moon"}, ["network.preset = 'moon'", "lan, datacentre, fibre, wan, home"]),
        ({"network": {"loss": 1}}, ["network.loss = 1.0", "below 1"]),
        ({"network": {"congestion": "reno"}}, ["network.congestion = 'reno'", "cubic, bbr"]),
        ({"network": {"congestion": "none", "tls": True}}, ["network.tls", "no TCP"]),
        ({"fleet": [{"number": 0, "loss": 0.1}], "network": {"congestion": "none"}}, ["fleet[0].loss = 0.1", "no"]),
        ({"network": {"latency": 0.1}}, ["network.latency = 0.1", "value_ms"]),
        ({"network": {"latency": {"kind": "constant", "value": 1}}}, ["network.latency.value", "value_ms"]),
        ({"network": {"latency": {"kind": "constant", "value_ms": -1}}}, ["network.latency.value = -0.001", "0 up"]),
        ({"network": {"latency": {"kind": "quantiles"}}}, ["network.latency.name", "internet"]),
        ({"network": {"latency": {"kind": "quantiles", "nam": "x"}}}, ["network.latency.nam", "'name'"]),
        ({"network": {"latency": {"kind": "matrix", "name": "moon"}}}, ["network.latency.name = 'moon'", "cloud"]),
        ({"network": {"latency": MATRIX}}, ["network.latency.rtt_ms", "missing", "cloud"]),
        ({"network": {"latency": MATRIX | {"rtt_ms": [[0, 1]]}}}, ["network.latency.rtt_ms", "2 regions"]),
        ({"network": {"latency": MATRIX | {"rtt_ms": [[0, 1], [2, 0]]}}}, ["rtt_ms[0][1] = 1.0", "both ways"]),
        ({"network": {"latency": MATRIX | {"rtt_ms": [[0, 0], [0, 0]]}}}, ["rtt_ms[0][1] = 0.0", "positive"]),
        ({"network": {"rate_mbit_s": 0}}, ["network.rate_mbit_s.up = 0", "unlimited"]),
        ({"network": {"rate_mbit_s": "much"}}, ["network.rate_mbit_s = 'much'", "a number of Mbit/s", "unlimited"]),
        ({"network": {"rate_mbit_s": {"down": "much"}}}, ["network.rate_mbit_s.down = 'much'", "unlimited"]),
        ({"network": {"partitions": [{"at_s": 1}]}}, ["network.partitions[0].until_s", "missing"]),
        ({"network": {"partitions": [{"at_s": 5, "until_s": 1}]}}, ["partitions[0].until_s = 1.0", "above at_s = 5"]),
        ({"network": {"partitions": [{"at_s": 1, "until_s": 2, "groups": 1}]}}, ["partitions[0].groups = 1", "2 or"]),
        (
            {"network": {"partitions": [{"at_s": 1, "until_s": 3}, {"at_s": 2, "until_s": 4}]}},
            ["network.partitions[1].at_s = 2.0", "3 or more", "overlap"],
        ),
        ({"network": {"partitions": {"at_s": 1, "until_s": 3}}}, ["network.partitions", "a list, as [{ ... }]"]),
        ({"network": {"partitions": [{"from_s": 1}]}}, ["partitions[0].from_s", "there are at_s, until_s, groups"]),
        (
            {"peers": 8, "network": {"partitions": [{"at_s": 1, "until_s": 3, "groups": 9}]}},
            ["network.partitions[0].groups = 9", "8 at most"],
        ),
        ({"churn": {}}, ["churn.up", "missing", "preset", "trace"]),
        ({"churn": "moon"}, ["churn.preset = 'moon'", "spot_v100_2023_02"]),
        ({"churn": {"up": 0}}, ["churn.up", "longer than 0 s"]),
        ({"churn": {"up": 5, "start": "steady"}}, ["churn.down", "missing", "come back"]),
        ({"churn": {"up": 5, "trace": "a.csv"}}, ["churn.trace", "alone"]),
        ({"churn": {"trace": "a.csv", "start": "steady"}}, ["churn.start", "together"]),
        ({"churn": {"up": 5, "farewell": 2}}, ["churn.farewell = 2.0", "from 0 to 1"]),
        ({"membership": {"mode": "perfect"}}, ["membership.mode = 'perfect'", "protocol, ideal"]),
        ({"membership": {"join_every_s": 1}}, ["membership.join_every_s", "start = 'seed'"]),
        ({"report": {"every_s": 0}}, ["report.every_s = 0.0", "positive"]),
        ({"report": {"every_s": 5}}, ["report.every_s = 5.0", "left out", "rounds"]),
        (
            {"rounds": "none", "duration_s": 400, "report": {"every_s": 0.5}},
            ["report.every_s = 0.5", "1 or more", "400"],
        ),
        ({"report": {"evaluate_peers": 0}}, ["report.evaluate_peers = 0", "1 or more"]),
    ],
)
def test_what_cannot_work_is_refused_with_its_key_and_what_would(table, words):
    said = sentence(table)
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("table", "key", "near"),
    [
        ({"peer": 5}, "peer", "'peers'"),
        ({"task": {"modle": "mlp"}}, "task.modle", "'model'"),
        ({"gossip": {"mix_every_step": 4}}, "gossip.mix_every_step", "'mix_every_steps'"),
        ({"mix_every_steps": 4}, "mix_every_steps", "'gossip.mix_every_steps'"),
        ({"network": {"momentum": 0.5}}, "network.momentum", "'task.optimizer.momentum'"),
        ({"network": {"partitions": [{"at_s": 1, "untl_s": 2}]}}, "network.partitions[0].untl_s", "'until_s'"),
        ({"churn": {"preset": "p2p_debian", "farewel": 1}}, "churn.farewel", "'farewell'"),
        ({"latancy_ms": 5}, "latancy_ms", "'network.latency'"),
        ({"gossip": {"latancy_ms": 5}}, "gossip.latancy_ms", "'network.latency'"),
        ({"network": {"latancy_ms": 5}}, "network.latancy_ms", "'latency'"),
        ({"fleet": [{"number": 0, "latancy_ms": 5}]}, "fleet[0].latancy_ms", "'latency_ms'"),
        ({"stal_s": 5}, "stal_s", "'gossip.stall_s'"),
        ({"gossip": {"peers": 5}}, "gossip.peers", "'peers'"),
        ({"loss": 0.1}, "loss", "'task.loss' or 'network.loss'"),
        ({"network": {"rate": 5}}, "network.rate", "'rate_mbit_s'"),
        ({"network": {"preset_": "lan"}}, "network.preset_", "'preset'"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(table, key, near):
    assert sentence(table) == f"{key} is not a key here (did you mean {near}?)."


def test_a_key_that_is_like_no_other_gets_the_keys_of_its_table():
    keys = "preset, latency, rate_mbit_s, loss, congestion, tls, partitions"
    assert sentence({"network": {"bandwidth": 4}}) == f"network.bandwidth is not a key here: there are {keys}."
    assert sentence({"learning_rate": 4}) == "learning_rate is not a key here."


def test_an_unknown_keyword_is_refused_as_an_unknown_key_is():
    with pytest.raises(ConfigError, match=r"^peer is not a key here \(did you mean 'peers'\?\)\.$"):
        Scenario(rounds=1, peer=4)
    with pytest.raises(ConfigError, match=r"^nam is not a key here \(did you mean 'name'\?\)\.$"):
        Optimizer(nam="sgd")


def test_a_sentence_begins_with_the_file(tmp_path):
    path = tmp_path / "odd.toml"
    for text, words in [("rounds = 1\npeers = 0", "peers = 0"), ("peers =", "is not TOML"), ("[task]", "rounds")]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            Scenario.from_toml(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match=r"Cannot read the scenario .*absent.toml: No such file"):
        Scenario.from_toml(tmp_path / "absent.toml")


def test_a_key_below_a_number_is_refused():
    with pytest.raises(ConfigError, match=r"peers.x cannot be set: peers = 100 is no table"):
        Scenario(rounds=1).replace(**{"peers.x": 1})


def test_an_empty_word_in_a_key_is_refused():
    with pytest.raises(ConfigError, match=r"gossip..x is not a key: write table.key"):
        Scenario(rounds=1).replace(**{"gossip..x": 1})


def test_another_optimizer_does_not_inherit_a_rate_that_makes_it_diverge():
    with pytest.raises(ConfigError, match=r"task.optimizer.lr is missing: adamw needs one of its own"):
        Scenario(rounds=1).replace(**{"task.optimizer.name": "adamw"})
    chosen = Scenario(rounds=1).replace(**{"task.optimizer.name": "adamw", "task.optimizer.lr": 1e-3})
    assert chosen.replace(**{"task.optimizer.name": "sgd"}).task.optimizer == Optimizer()


def test_a_fault_crosses_processes():
    with pytest.raises(ConfigError) as caught:
        Scenario(rounds=-1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
