"""An impossible scenario is refused in one sentence that names the key and a value that works."""

import math
import pickle

import pytest

from gossip.errors import ConfigError
from sim.scenario.scenario import Scenario
from sim.scenario.task import Optimizer


def sentence(table):
    with pytest.raises(ConfigError) as caught:
        Scenario.from_mapping({"rounds": 1} | table)
    said = str(caught.value)
    assert said.endswith((".", "?"))
    assert "\n" not in said
    return said


ATTACKS = ("sign-flip", "scaled", "random", "nan", "alie", "ipm", "dissensus")
CLOUD = {"network": {"latency": {"kind": "matrix", "name": "cloud"}}}
MATRIX = {"kind": "matrix", "regions": ["a", "b"]}


def nat(**keys):
    return {"network": {"nat": {"public": 0.5, "hard": 0.5} | keys}, "membership": {"start": "seed"}}


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
        ({"task": {"model": "linear", "hidden": 9}}, ["task.hidden = 9", "left out: only mlp has a width"]),
        ({"task": {"elements": 500}}, ["task.elements = 500", "left out", "averaging"]),
        ({"task": {"optimizer": {"betas": [0.5, 0.6]}}}, ["task.optimizer.betas", "left out: sgd has a momentum"]),
        ({"task": {"batch_size": 0}}, ["task.batch_size = 0", "1 or more"]),
        ({"task": {"partition": {"kind": "dirichlet"}}}, ["task.partition.alpha", "positive", "dirichlet"]),
        ({"task": {"partition": {"alpha": 1.0}}}, ["task.partition.alpha", "iid has none"]),
        ({"task": {"partition": "even"}}, ["task.partition.kind = 'even'", "iid, dirichlet, natural"]),
        ({"task": {"optimizer": "adamw"}}, ["task.optimizer.lr", "missing", "0.001"]),
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
        (
            {"rounds": "none", "duration_s": 9, "network": {"partitions": [{"at_s": 9, "until_s": 20}]}},
            ["network.partitions[0].at_s = 9.0", "below 9, the run's end"],
        ),
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
        (nat(public=-0.1), ["network.nat.public = -0.1", "from 0 to 1"]),
        (nat(hard=1.5), ["network.nat.hard = 1.5", "from 0 to 1"]),
        (nat(hard=0.2), ["network.nat has shares that come to 0.7: public, mapped, punchable and hard must come to 1"]),
        (nat(punch_success=1.1), ["network.nat.punch_success = 1.1", "from 0 to 1"]),
        (nat(punchabel=0.1), ["network.nat.punchabel", "did you mean 'punchable'"]),
        (nat(public=0.001, hard=0.999), ["network.nat.public = 0.001", "1 at least of 100 peers"]),
        (nat() | {"membership": {}}, ["membership.start = 'together'", "'seed' beside network.nat"]),
        (nat() | {"membership": {"mode": "ideal"}}, ["membership.mode = 'ideal'", "'protocol'", "network.nat"]),
        ({"network": nat()["network"] | {"congestion": "none"}}, ["network.congestion = 'none'", "'cubic' or 'bbr'"]),
        (nat() | {"fidelity": "exchange"}, ["network.nat is beyond fidelity = 'exchange'", "fidelity = 'whole'"]),
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
        ({"peers": 6, "fleet": [{"number": 6}]}, ["fleet[0].number = 6", "below peers = 6"]),
        ({"peers": 6, "fleet": [{"number": 2, "to": 9}]}, ["fleet[0].to = 9", "below peers = 6"]),
        ({"fleet": [{"number": 2, "to": 1}]}, ["fleet[0].to = 1", "2 or more"]),
        ({"fleet": [{"number": -1}]}, ["fleet[0].number = -1", "from 0 up"]),
        ({"fleet": [{"number": 0, "to": 3}, {"number": 3}]}, ["fleet[1].number = 3", "fleet[0]", "once"]),
        ({"fleet": [{}]}, ["fleet[0].number is missing"]),
        ({"fleet": [{"number": 1, "rate_mbit_s": 0}]}, ["fleet[0].rate_mbit_s.up = 0", "positive"]),
        ({"fleet": [{"number": 1, "loss": 1}]}, ["fleet[0].loss = 1.0", "below 1"]),
        ({"fleet": [{"number": 1, "latency_ms": -3}]}, ["fleet[0].latency_ms = -3.0", "from 0 up"]),
        ({"fleet": [{"number": 1, "step_s": 0}]}, ["fleet[0].step_s", "longer than 0 s"]),
        ({"fleet": [{"number": 1, "region": "mars"}]}, ["fleet[0].region", "matrix"]),
        ({"fleet": [{"number": 1, "region": "mars"}], **CLOUD}, ["fleet[0].region = 'mars'", "frankfurt"]),
        ({"attackers": {"share": 1.0}}, ["attackers.share = 1.0", "below 1", "at least one peer is honest"]),
        ({"attackers": {"share": -0.1}}, ["attackers.share = -0.1", "from 0"]),
        ({"peers": 10, "attackers": {"share": 0.01}}, ["attackers.share = 0.01", "1 at least of 10 peers"]),
        ({"peers": 10, "attackers": {"share": 0.96}}, ["attackers.share = 0.96", "leaves 1"]),
        ({"attackers": {"kind": "nan"}}, ["attackers.share", "missing"]),
        ({"attackers": {"share": 0.1, "kind": "flip"}}, ["attackers.kind = 'flip'", ", ".join(ATTACKS)]),
        ({"attackers": {"share": 0.5, "kind": "alie"}}, ["attackers.scale", "half of the peers"]),
        ({"attackers": {"share": 0.1, "kind": "nan", "scale": 2}}, ["attackers.scale = 2.0", "nan has none"]),
        ({"attackers": {"share": 0.1, "scale": 0}}, ["attackers.scale = 0.0", "positive"]),
        ({"attackers": {"share": 0.1, "scale": math.inf}}, ["attackers.scale = inf", "positive"]),
        (
            {"gossip": {"mixing": "group"}, "attackers": {"share": 0.1, "kind": "dissensus"}},
            ["attackers.kind", "beside groups"],
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_key_and_what_would(table, words):
    said = sentence(table)
    for word in words:
        assert word in said


TEN = {"schedule": "cosine", "schedule_steps": 10}
MUON = {"name": "muon", "lr": 0.02, "adam_lr": 0.01}


@pytest.mark.parametrize(
    ("optimizer", "key", "words"),
    [
        ({"momentum": 1.0}, "momentum = 1.0", "cannot work: it must be from 0 to below 1"),
        ({"name": "adamw", "lr": 0.001, "momentum": 0.9}, "momentum = 0.9", "adamw has betas"),
        ({"name": "muon", "adam_lr": 0.01}, "lr is missing", "muon needs one of its own"),
        ({"name": "muon", "lr": 0.02}, "adam_lr is missing", "it must be a positive number for muon"),
        (MUON | {"momentum": 0.9}, "momentum = 0.9", "muon has a momentum"),
        ({"name": "adamw", "lr": 0.01, "adam_lr": 0.01}, "adam_lr = 0.01", "only muon"),
        ({"clip_norm": 0.0}, "clip_norm = 0.0", "cannot work: it must be a positive number"),
        ({"schedule": "linear"}, "schedule = 'linear'", "cannot work: it must be one of constant, cosine"),
        ({"schedule": "cosine"}, "schedule_steps is missing", "as 3000"),
        (TEN | {"schedule_steps": 0}, "schedule_steps = 0", "1 to 1,000,000"),
        (TEN | {"schedule_steps": 10.5}, "schedule_steps = 10.5", "cannot work: it must be a whole number"),
        (TEN | {"warmup_steps": 10}, "warmup_steps = 10", "below schedule_steps = 10"),
        (TEN | {"warmup_steps": -1}, "warmup_steps = -1", "from 0"),
        (TEN | {"min_lr": 0.2}, "min_lr = 0.2", "cannot work: it must be from 0 to lr = 0.1"),
        (TEN | {"min_lr": -0.1}, "min_lr = -0.1", "cannot work"),
        ({"schedule_steps": 10}, "schedule_steps = 10", "or schedule = 'cosine'"),
        ({"schedule_steps": 0}, "schedule_steps = 0", "or schedule = 'cosine'"),
        ({"warmup_steps": 10}, "warmup_steps = 10", "or schedule = 'cosine'"),
        ({"min_lr": 0.01}, "min_lr = 0.01", "or schedule = 'cosine'"),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused_with_its_key_and_what_would(optimizer, key, words):
    said = sentence({"task": {"optimizer": optimizer}})
    assert said.startswith(f"task.optimizer.{key}")
    assert words in said


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
    keys = "preset, latency, rate_mbit_s, loss, congestion, tls, partitions, nat"
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


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("peers.x", r"peers.x cannot be set: peers = 100 is no table"),
        ("gossip..x", r"gossip..x is not a key: write table.key"),
    ],
)
def test_a_change_of_what_is_no_key_is_refused(key, said):
    with pytest.raises(ConfigError, match=said):
        Scenario(rounds=1).replace(**{key: 1})


def test_another_optimizer_does_not_inherit_a_rate_that_makes_it_diverge_or_a_momentum():
    with pytest.raises(ConfigError, match=r"task.optimizer.lr is missing: adamw needs one of its own"):
        Scenario(rounds=1).replace(**{"task.optimizer.name": "adamw"})
    chosen = Scenario(rounds=1).replace(**{"task.optimizer.name": "adamw", "task.optimizer.lr": 1e-3})
    assert chosen.replace(**{"task.optimizer.name": "sgd"}).task.optimizer == Optimizer()
    sgd = Scenario.from_mapping({"rounds": 1, "task": {"optimizer": {"lr": 0.1, "momentum": 0.9}}})
    adamw = sgd.replace(**{"task.optimizer.name": "adamw", "task.optimizer.lr": 0.001}).task.optimizer
    assert adamw == Optimizer(name="adamw", lr=0.001)


def test_a_fault_crosses_processes():
    with pytest.raises(ConfigError) as caught:
        Scenario(rounds=-1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
