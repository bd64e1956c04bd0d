"""A scenario survives its own text, and its short forms and changes mean what they say."""

import dataclasses
import math
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.config import PRESETS, Config
from gossip.config.methods import METHODS
from sim.scenario import worlds
from sim.scenario.adversaries import AttackersSpec
from sim.scenario.conditions import ChurnSpec, Latency, MembershipSpec, NetworkCut, NetworkSpec, Rate
from sim.scenario.scenario import Compute, Distribution, PeerSpec, ReportSpec, Scenario, Stragglers
from sim.scenario.task import Optimizer, Partition, Task
from tests.sim.scenarios import AVERAGING, small

SHIPPED = sorted((Path(__file__).parents[3] / "examples" / "scenarios").glob("*.toml"))
FULL = """
name = "spot-fleet"
seed = 7
peers = 1000
duration_s = 3600

[task]
dataset = "digits"
model = "mlp"
partition = { kind = "dirichlet", alpha = 0.1 }
batch_size = 8
optimizer = { name = "sgd", lr = 0.1, momentum = 0.9 }

[gossip]
preset = "wan"
mix_every_steps = 8

[compute]
step_s = { kind = "lognormal", median = 0.1, sigma = 0.3 }
stragglers = { share = 0.1, slowdown = 4 }

[network]
latency = { kind = "quantiles", name = "internet" }
rate_mbit_s = { up = 100, down = 50 }
loss = 0.01
partitions = [ { at_s = 600, until_s = 900, groups = 3 } ]

[churn]
up = { kind = "weibull", shape = 0.59, scale_s = 6408 }
down = { kind = "weibull", shape = 0.71, scale_s = 4752 }

[membership]
mode = "ideal"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "full.toml"
    path.write_text(FULL)
    return path


def test_a_file_says_what_it_means(file):
    assert Scenario.from_toml(file) == Scenario(
        name="spot-fleet",
        seed=7,
        peers=1000,
        duration_s=3600.0,
        task=Task(
            partition=Partition(kind="dirichlet", alpha=0.1), optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.9)
        ),
        gossip=Config.wan(mix_every_steps=8),
        compute=Compute(
            step_s=Distribution.lognormal(0.1, 0.3), stragglers=Stragglers(share=0.1, slowdown=4.0)
        ),
        network=NetworkSpec(
            latency=Latency("quantiles", name="internet"),
            rate_mbit_s=Rate(100, 50),
            loss=0.01,
            partitions=(NetworkCut(at_s=600, until_s=900, groups=3),),
        ),
        churn=ChurnSpec(up=Distribution.weibull(0.59, 6408), down=Distribution.weibull(0.71, 4752)),
        membership=MembershipSpec(mode="ideal"),
    )  # fmt: skip


# -- round trips -----------------------------------------------------------------------------------------------------
durations = st.one_of(
    st.floats(0.001, 1e6).map(Distribution.constant),
    st.tuples(st.floats(0, 1), st.floats(1, 9)).map(lambda ends: Distribution.uniform(*ends)),
    st.tuples(st.floats(0.001, 1e6), st.floats(0, 3)).map(lambda both: Distribution.lognormal(*both)),
    st.floats(0.001, 1e6).map(Distribution.exponential),
    st.tuples(st.floats(0.3, 3), st.floats(0.001, 1e6)).map(lambda both: Distribution.weibull(*both)),
)
latencies = st.one_of(
    durations.map(Latency.of),
    st.sampled_from(worlds.names("quantiles_ms")).map(lambda name: Latency("quantiles", name=name)),
    st.sampled_from(worlds.names("matrix")).map(lambda name: Latency("matrix", name=name)),
    st.just(Latency("matrix", regions=("here", "there"), rtt_ms=((0, 30), (30, 2.5)))),
)
rates = st.floats(0.001, 1e6) | st.just(math.inf)
CUTS = (NetworkCut(at_s=1, until_s=2), NetworkCut(at_s=2, until_s=math.inf, groups=9))
networks = st.one_of(
    st.builds(
        NetworkSpec, latency=latencies, rate_mbit_s=st.builds(Rate, rates, rates), loss=st.floats(0, 0.9),
        congestion=st.sampled_from(["cubic", "bbr", None]), partitions=st.sampled_from([(), CUTS]),
    ),
    st.builds(NetworkSpec.of, st.sampled_from(worlds.names("network")), loss=st.floats(0, 0.9), tls=st.booleans()),
)  # fmt: skip
paths = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1).filter(lambda text: text != "none")
optimizers = [
    Optimizer(),
    Optimizer(momentum=0.9),
    Optimizer(name="adamw", lr=1e-3, betas=(0.8, 0)),
    Optimizer(schedule="cosine", schedule_steps=9, warmup_steps=2, min_lr=0.01),
    Optimizer(name="adamw", lr=1e-3, schedule="cosine", schedule_steps=9),
    Optimizer(name="muon", lr=0.02, adam_lr=0.01, clip_norm=1.0, betas=(0.9, 0.95)),
]
churns = st.one_of(
    st.none(),
    st.builds(ChurnSpec, up=durations, down=st.none() | durations, farewell=st.floats(0, 1)),
    st.builds(ChurnSpec, up=durations, down=durations, start=st.just("steady")),
    st.builds(ChurnSpec, trace=paths),
    st.builds(ChurnSpec.of, st.sampled_from(worlds.names("churn")), farewell=st.floats(0, 1)),
)
configs = st.one_of(
    st.sampled_from([Config(), Config.wan(), Config.datacentre(mix_every_steps=3)]),
    st.builds(Config, mix_every_steps=st.none(), mix_every_s=st.floats(0.1, 100), swarm=st.sampled_from(["a", '"é\\'])),
)
tasks = st.builds(
    Task,
    dataset=st.sampled_from(["digits", "averaging", "my.data:parts"]),
    partition=st.sampled_from([Partition(), Partition(kind="dirichlet", alpha=0.5), Partition(kind="natural")]),
    optimizer=st.sampled_from(optimizers),
    samples_per_peer=st.none() | st.integers(1, 99),
    hidden=st.none() | st.integers(1, 99),
)
FLEET = (
    PeerSpec(number=2, name="bob", rate_mbit_s=Rate(1, 2)),
    PeerSpec(number=3, to=4, latency_ms=5, step_s=Distribution.constant(0.5)),
)
anything = {
    "name": st.sampled_from(["a", "two words", '"quoted" \\ é']),
    "task": tasks,
    "gossip": configs,
    "compute": st.builds(Compute, step_s=durations, stragglers=st.none() | st.just(Stragglers(share=0.5, slowdown=2))),
    "network": networks,
    "churn": churns,
    "membership": st.sampled_from([MembershipSpec(), MembershipSpec(start="seed", join_every_s=0.5)]),
    "fleet": st.sampled_from([(), FLEET]),
    "attackers": st.sampled_from([None, AttackersSpec(share=0.1), AttackersSpec(share=0.2, kind="scaled", scale=3.0)]),
}
reports = st.builds(ReportSpec, every_s=st.none() | st.floats(25, 1e4))
scenarios = st.builds(Scenario, rounds=st.floats(0.5, 1e4), **anything) | st.builds(
    Scenario, duration_s=st.floats(3, 1e4), report=reports, **anything
)


@settings(deadline=None)
@given(scenarios)
def test_every_scenario_is_its_own_mapping(scenario):
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    assert scenario.replace() == scenario


@settings(deadline=None)
@given(scenarios.filter(lambda scenario: scenario.churn is None or scenario.churn.trace is None))
def test_every_scenario_is_its_own_text(tmp_path_factory, scenario):
    path = tmp_path_factory.getbasetemp() / "again.toml"
    path.write_text(scenario.to_toml(), encoding="utf-8")
    assert Scenario.from_toml(path) == scenario


def test_a_preset_is_named_again_with_what_differs():
    mapping = Scenario(
        rounds=1, gossip=Config.wan(mix_every_steps=5), network=NetworkSpec.of("home", loss=0.5),
        churn=ChurnSpec.of("spot_cpu_2023_04", start="steady"),
    ).to_mapping()  # fmt: skip
    assert mapping["gossip"] == {"preset": "wan", "mix_every_steps": 5}
    assert mapping["network"] == {
        "preset": "home", "loss": 0.5, "congestion": "cubic", "tls": False, "partitions": [],
    }  # fmt: skip
    assert mapping["churn"] == {
        "preset": "spot_cpu_2023_04", "start": "steady", "farewell": 0.0, "silent": 0.0,
    }  # fmt: skip


def test_a_constant_rate_is_written_without_the_keys_of_another():
    table = Scenario(rounds=1, task=Task(optimizer=Optimizer(lr=0.2))).to_mapping()["task"]["optimizer"]
    assert table["schedule"] == "constant"
    assert not {"schedule_steps", "warmup_steps", "min_lr"} & set(table)


# -- presets and short forms -----------------------------------------------------------------------------------------
def from_keys(**tables):
    return Scenario.from_mapping({"rounds": 1} | tables)


def test_other_keys_override_a_presets():
    network = from_keys(network={"preset": "wan", "loss": 0.25}).network
    assert network == dataclasses.replace(NetworkSpec.of("wan"), loss=0.25)
    assert (network.latency, network.rate_mbit_s) == (Latency.of(Distribution.constant(0.05)), Rate(100, 100))
    churn = from_keys(churn={"preset": "spot_v100_2023_02", "down": 60}).churn
    assert churn == ChurnSpec(up=Distribution.weibull(0.59, 6408), down=Distribution.constant(60))


@pytest.mark.parametrize("kind", ["network", "churn"])
def test_every_preset_can_be_named_alone(kind):
    for name in worlds.names(kind):
        assert getattr(from_keys(**{kind: name}), kind) == {"network": NetworkSpec, "churn": ChurnSpec}[kind].of(name)


def test_short_forms_mean_the_long_ones():
    short = from_keys(
        task={"partition": "natural", "optimizer": "sgd"}, compute={"step_s": 2}, network={"rate_mbit_s": "unlimited"}
    )
    assert short.task == Task(partition=Partition(kind="natural"), optimizer=Optimizer())
    assert short.compute.step_s == Distribution.constant(2.0)
    assert short.network.rate_mbit_s == Rate(math.inf, math.inf)
    assert short.network.rate_mbit_s.up_bytes_s == math.inf


def test_a_key_says_its_unit_and_a_megabit_is_125_000_bytes():
    in_ms = from_keys(network={"latency": {"kind": "lognormal", "median_ms": 50, "sigma": 0.5}})
    in_s = from_keys(network={"latency": {"kind": "lognormal", "median_s": 0.05, "sigma": 0.5}})
    assert in_ms == in_s
    assert (Rate(1, 8).up_bytes_s, Rate(1, 8).down_bytes_s) == (125_000, 1e6)


# -- changes ---------------------------------------------------------------------------------------------------------
def test_a_change_is_read_as_toml_or_as_text(file):
    changes = {
        "gossip.mix_every_steps": "4", "task.optimizer.lr": "0.2", "name": "a b", "task.model": "linear",
        "membership": "{ mode = 'protocol' }", "gossip.staleness_exponent": "0.5",
    }  # fmt: skip
    scenario = Scenario.from_toml(file, seed=9, changes=changes)
    assert (scenario.seed, scenario.name, scenario.task.model) == (9, "a b", "linear")
    assert scenario.gossip == Config.wan(mix_every_steps=4, staleness_exponent=0.5)
    assert scenario.task.optimizer == Optimizer(lr=0.2, momentum=0.9)
    assert scenario.membership == MembershipSpec(mode="protocol")


def test_a_change_of_one_key_leaves_the_others(file):
    whole = Scenario.from_toml(file)
    assert whole.replace(**{"network.loss": 0.5}).network == dataclasses.replace(whole.network, loss=0.5)
    assert whole.replace(**{"compute.step_s.sigma": 0.5}).compute.step_s == Distribution.lognormal(0.1, 0.5)
    assert whole.replace(gossip=Config()).gossip == Config()
    assert whole.replace(**{"gossip.preset": "lan"}).gossip == Config(mix_every_steps=8)
    assert whole.replace(churn=None).churn is None
    assert whole.replace(churn="none").churn is None


FILLING = {  # Keys whose values fill in others, and some of those values.
    "network.preset": worlds.names("network"), "churn.preset": worlds.names("churn"), "gossip.preset": PRESETS,
    "gossip.method": list(METHODS)[::3],
}  # fmt: skip


@pytest.mark.parametrize("key", FILLING)
def test_another_preset_or_method_means_what_it_means_in_the_file(key, tmp_path):
    path, (table, name) = tmp_path / "a.toml", key.split(".")
    whole = {}
    for value in (*FILLING[key], None):
        path.write_text("rounds = 1" if value is None else f'rounds = 1\n[{table}]\n{name} = "{value}"')
        whole[value] = Scenario.from_toml(path)
        for other in whole.keys() - {None}:
            changed = Scenario.from_toml(path, changes={key: other}), whole[value].replace(**{key: other})
            assert changed == (whole[other],) * 2


def test_keys_of_the_file_stay_beside_another_preset_and_beside_one_within_them(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        'rounds = 1\n[network]\npreset = "wan"\nlatency = { kind = "constant", value_ms = 20 }\nloss = 0.005'
    )
    changed = Scenario.from_toml(path, changes={"network.preset": "lan"}).network
    assert changed == NetworkSpec.of("lan", latency=Latency.of(Distribution.constant(0.02)), loss=0.005)
    path.write_text('rounds = 1\nnetwork = "home"')
    assert Scenario.from_toml(path, changes={"network.preset": "lan"}).network == NetworkSpec.of("lan")
    assert Scenario.from_toml(path, changes={"network.rate_mbit_s.up": "5"}).network.rate_mbit_s == Rate(5, 20)


def test_rounds_take_the_place_of_a_duration_and_the_other_way_round(file, tmp_path):
    assert Scenario.from_toml(file, changes={"rounds": "3"}) == Scenario.from_toml(file).replace(rounds=3)
    assert Scenario(rounds=3).replace(duration_s=5) == Scenario(duration_s=5)
    endless = tmp_path / "endless.toml"
    endless.write_text("peers = 3")
    assert Scenario.from_toml(endless, changes={"rounds": "3"}) == Scenario(peers=3, rounds=3)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ('churn = { trace = "own.file" }', "churn.trace"),
        ('gossip = { selection = "graph", graph = "own.file" }', "gossip.graph"),
    ],
)
def test_a_file_that_a_scenario_names_lies_beside_it(table, key, tmp_path, monkeypatch):
    path = tmp_path / "scenario.toml"
    path.write_text(f"rounds = 1\n{table}")
    monkeypatch.chdir("/")
    assert attrgetter(key)(Scenario.from_toml(path)) == str(tmp_path / "own.file")
    elsewhere = Scenario.from_toml(path, changes={key: "other.file"})  # set on the command line
    assert attrgetter(key)(elsewhere) == "other.file"
    saved = tmp_path / "out" / "scenario.toml"
    saved.parent.mkdir()
    saved.write_text(elsewhere.to_toml())
    assert attrgetter(key)(Scenario.from_toml(saved)) == "/other.file"


# -- what is shipped -------------------------------------------------------------------------------------------------
def test_every_world_can_be_used():
    for name in worlds.names("quantiles_ms"):
        figures = worlds.world("quantiles_ms", name, "name")
        assert list(figures.values()) == sorted(figures.values())
        assert {"p0", "p100"} <= set(figures)
    for name in worlds.names("matrix"):
        table = worlds.world("matrix", name, "name")
        Latency("matrix", regions=table["regions"], rtt_ms=table["rtt_ms"])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_scenario_can_be_read(path):
    assert Scenario.from_toml(path).name == path.stem


def test_the_scenarios_are_shipped():
    wanted = {"lan", "wan", "spot-fleet", "volunteers", "partition-heals", "stragglers", "non-iid", "ten-thousand"}
    assert wanted <= {path.stem for path in SHIPPED}


def test_what_a_scenario_leaves_open_of_the_outer_step_is_decided_as_a_node_decides_it():
    assert small().config.measures_momentum
    assert small(task=AVERAGING).config.plain, "nobody trains: the mean is wanted"
    assert small(gossip=Config(outer_momentum=0.0)).config.plain
