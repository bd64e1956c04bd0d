"""The level at which a scenario without a ``fidelity`` is played, and what a result says of it."""

import functools
import json

import numpy as np
import pytest

from gossip.codecs import CODECS, Int8
from gossip.config import Config
from gossip.config.filters import FILTERS, FilterRule
from gossip.config.mixings import MIXINGS, MixingRule
from gossip.config.selections import SELECTIONS, SelectionRule
from gossip.config.setting import settings_of
from gossip.errors import ConfigError
from sim.learning.datasets import load
from sim.report.describe import in_words
from sim.scenario.fidelity import FAST, PLAYED, Fidelity, fidelity_of
from sim.scenario.scenario import Scenario
from sim.simulation import ExchangeSimulation, Simulation, simulate
from sim.sweep import Sweep
from tests.harness.marks import slow
from tests.sim.learning.test_tasks import NORMED

SMALL = {"peers": 6, "duration_s": 4.0, "task": {"model": "linear"}, "gossip": {"mix_every_steps": 4}}
CUT = {"partitions": [{"at_s": 1.0, "until_s": 2.0}]}
DIED = {
    "churn": {
        "peers": 200, "duration_s": 300, "seed": 1, "task": {"dataset": "averaging"},
        "churn": {"up": {"kind": "exponential", "mean": 200}},
    },
    "churn and a cut": {
        "peers": 300, "duration_s": 300, "seed": 1, "task": {"dataset": "averaging"},
        "churn": {
            "up": {"kind": "weibull", "shape": 0.6, "scale": 200}, "down": {"kind": "exponential", "mean": 60},
        },
        "network": {"partitions": [{"at_s": 100, "until_s": 200, "groups": 3}]},
    },
}  # fmt: skip


def made(**tables) -> Scenario:
    return Scenario.from_mapping(SMALL | tables)


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"network": CUT}, "network.partitions"),
        ({"membership": {"mode": "protocol"}}, "membership.mode"),
        ({"membership": {"start": "seed"}}, "membership.start"),
        ({"attackers": {"share": 0.2}}, "attackers"),
        ({"gossip": {"codec": "moniqua4"}}, "gossip.codec"),
        ({"gossip": {"stall_s": 0.7}}, "gossip.stall_s"),
    ],
)
def test_what_the_fast_level_cannot_represent_is_played_message_by_message(tables, key):
    scenario = made(**tables)
    assert fidelity_of(scenario) == Fidelity("whole", f"the fast level cannot represent {key}")
    result = simulate(scenario, progress=False)
    assert result.summary["fidelity"] == "whole"
    assert in_words(scenario, result.fidelity).endswith(
        f"It was played message by message (the whole level), because the fast level cannot represent {key}."
    )
    assert result.summary["digest"] == simulate(made(**tables, fidelity="whole"), progress=False).summary["digest"]


def test_all_else_is_played_exchange_by_exchange():
    assert Scenario(rounds=1).fidelity == "auto"
    result = simulate(made(), progress=False)
    assert (result.summary["fidelity"], result.summary["fidelity_reason"]) == ("exchange", "")
    assert result.summary["digest"] == simulate(made(fidelity="exchange"), progress=False).summary["digest"]
    assert result.figures()["played"] == "exchange by exchange"
    whole = simulate(made(fidelity="whole"), progress=False)
    assert whole.figures()["played"] == "message by message"
    assert whole.fidelity.sentence.endswith("because fidelity = 'whole' is set.")


@pytest.mark.parametrize("preset", ["lan", "wan", "datacentre"])
def test_the_deadlines_of_a_preset_do_not_ask_for_the_whole_level(preset):
    assert fidelity_of(made(gossip={"preset": preset})).level == "exchange"


@functools.cache
def fast_digest() -> str:
    return simulate(made(fidelity="exchange"), progress=False).summary["digest"]


UNPLAYED = [
    key for key in settings_of(Config) if key not in PLAYED and f"gossip.{key}" not in [key for key, *_ in FAST]
]


@pytest.mark.parametrize("key", UNPLAYED)
def test_no_setting_is_without_effect_unless_the_whole_level_plays_it(key):
    """The fast level ignores the key: its digest is the same for every value, so a changed one rules it out."""
    value = getattr(Config(), key)
    other = "never" if isinstance(value, str) else value + 1 if isinstance(value, int) else 1.5 * value
    scenario = made(gossip={key: other, "mix_every_steps": 4})
    assert fidelity_of(scenario).reason == f"the fast level cannot represent gossip.{key}"
    fast = simulate(scenario.replace(fidelity="exchange"), progress=False).summary["digest"]
    assert fast == fast_digest()


class OwnInt8(Int8):
    """A user's own codec under a known name."""


OWN = {
    "gossip.mixing": (MIXINGS, "pair", MixingRule("own:Own", "another mean")),
    "gossip.selection": (SELECTIONS, "uniform", SelectionRule("own:Own")),
    "gossip.filter": (FILTERS, "clip", FilterRule("own:Own", pairs=True)),
    "gossip.codec": (CODECS, "int8", OwnInt8()),
}


@pytest.mark.parametrize("key", OWN)
def test_an_implementation_of_ones_own_is_never_played_as_the_known_one_of_its_name(monkeypatch, key):
    """tests/test_contributing.py plays implementations under new names."""
    table, name, own = OWN[key]
    monkeypatch.setitem(table, name, own)
    assert fidelity_of(made(gossip={})).reason == f"the fast level cannot represent {key}"
    with pytest.raises(ConfigError, match=rf"^{key} is beyond fidelity = 'exchange'.*fidelity = 'whole'\.$"):
        made(gossip={}, fidelity="exchange")


@pytest.mark.parametrize("dataset", ["vectors", "curve"])
def test_both_levels_train_on_a_data_set_of_ones_own_to_the_same_bits(dataset):
    scenario = made(task={"dataset": f"tests.sim.jobs:{dataset}"}, gossip={"mix_every_steps": 10_000})
    assert fidelity_of(scenario).level == "exchange"
    models = []
    for run in (ExchangeSimulation(scenario), Simulation(scenario)):
        for _ in run.slices():
            pass
        run.row()  # Brings the models up to date.
        models.append(run.learners.matrix)
    assert np.array_equal(*models)
    assert not np.array_equal(models[0][0], models[0][1])


def test_a_data_set_of_ones_own_that_is_drawn_from_torch_is_the_same_each_time():
    """The points of a sweep and their processes load it again."""
    one, other = (load("tests.sim.jobs:drawn") for _ in range(2))
    assert one.x_train.equal(other.x_train)
    assert one.y_test.equal(other.y_test)


def test_buffers_are_found_while_the_models_are_built_and_played_message_by_message():
    scenario = made(peers=3, duration_s=1.0, task=NORMED)
    assert fidelity_of(scenario).level == "exchange"
    result = simulate(scenario, progress=False)
    assert result.summary["fidelity"] == "whole"
    assert "buffers of task.model" in result.fidelity.sentence


def test_a_run_of_which_nobody_is_left_is_begun_anew_at_the_whole_level(tmp_path):
    """Both peers with weights die, and later ones find no donor."""
    (tmp_path / "trace.csv").write_text("peer,from_s,until_s\n0,0,5\n1,0,5\n2,6,\n3,6,\n")
    scenario = made(
        peers=4, duration_s=60.0, churn={"trace": str(tmp_path / "trace.csv")}, task={"dataset": "averaging"}
    )
    result = simulate(scenario, progress=False)
    assert result.summary["fidelity"] == "whole"
    assert "begins no new run" in result.fidelity.sentence
    assert result.history[-1]["ready"] == 2
    stuck = simulate(scenario.replace(fidelity="exchange"), progress=False)
    assert stuck.history[-1]["ready"] == 0


def test_links_that_take_too_long_to_open_are_refused_at_either_level():
    for fidelity in ("auto", "whole", "exchange"):
        with pytest.raises(ConfigError, match=r"set gossip\.stall_s above"):
            simulate(made(fidelity=fidelity, network={"latency": {"kind": "constant", "value_s": 2}}), progress=False)


def test_the_points_of_a_sweep_are_played_at_one_level(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(made().to_toml())
    fast = Sweep.from_file(path, {"gossip.codec": ["fp32", "int8"]})
    assert [fidelity_of(point.scenario).level for point in fast.points] == ["exchange", "exchange"]
    assert [level.level for level in fast.levels] == ["exchange"]
    mixed = Sweep.from_file(path, {"gossip.codec": ["fp32", "moniqua4"]})
    assert [fidelity_of(point.scenario).level for point in mixed.points] == ["whole", "whole"]
    assert mixed.levels == [Fidelity("whole", "the fast level cannot represent gossip.codec")]
    asked = Sweep.from_file(path, {"fidelity": ["whole", "exchange"]})
    assert [level.level for level in asked.levels] == ["whole", "exchange"]


def test_the_terminal_says_which_level_was_played(gossip, tmp_path):
    fast, whole = tmp_path / "fast.toml", tmp_path / "whole.toml"
    fast.write_text(made(name="fast").to_toml())
    whole.write_text(made(name="slow", network=CUT).to_toml())
    alone = " ".join(gossip("sim", fast, "--quiet").out.split())
    assert "It was played exchange by exchange (the fast level)" in alone
    both = " ".join(gossip("sim", fast, whole, "--quiet", "--jobs", "1").out.split())
    assert "fast: It was played exchange by exchange" in both
    assert "slow: It was played message by message (the whole level), because the fast level cannot" in both
    told = json.loads(gossip("sim", whole, "--quiet", "--json").out)
    assert told["fidelity_reason"] == "the fast level cannot represent network.partitions"


# -- scenarios that ended with a traceback once ----------------------------------------------------------------------
WHOLE = {"fidelity": "whole"}
SHORT_LIVES = {
    "peers": 50, "duration_s": 5.0, "network.partitions": [{"at_s": 1.7, "until_s": 2.5}],
    "churn": {"up": {"kind": "exponential", "mean": 20}, "down": {"kind": "exponential", "mean": 5}, "farewell": 0.2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "changes", "level"),
    [
        ("churn", {"peers": 50}, "exchange"),
        slow("churn", {}, "exchange"),
        slow("churn", WHOLE, "whole"),
        ("churn and a cut", SHORT_LIVES | WHOLE, "whole"),
        slow("churn and a cut", SHORT_LIVES | WHOLE | {"peers": 200}, "whole"),
        slow("churn and a cut", WHOLE, "whole"),
        slow("churn and a cut", {"network.partitions": []}, "exchange"),  # The fast level has no cuts.
    ],
)
def test_peers_with_churn_play_to_their_end(case, changes, level):
    scenario = Scenario.from_mapping(DIED[case]).replace(**changes)
    summary = simulate(scenario, progress=False).summary
    assert summary["fidelity"] == level
    assert summary["virtual_s"] == scenario.duration_s
    assert summary["node_updates"] > 2 * scenario.peers
