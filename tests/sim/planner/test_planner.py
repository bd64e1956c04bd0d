"""`gossip plan`: a small model stands for a large one, and the cheapest good settings of those tried are named."""

import json
import math
import tomllib

import numpy as np
import pytest

from benchmarks.replay.plan import Plan
from gossip.config import Config
from gossip.errors import ConfigError, LocalError
from sim.planner import command as planner
from sim.planner.candidates import GIVEN, Candidate, candidates, parse, with_candidate
from sim.planner.study import Study, first_at
from sim.planner.world import STEPS, World
from sim.scenario.scenario import Compute, Scenario
from sim.simulation import simulate
from tests.harness.marks import slow
from tests.sim.fake_results import fake_result

SLOW = {"network": {"latency": {"kind": "constant", "value_ms": 25}, "rate_mbit_s": 20, "loss": 0.01}}
WORLD = {
    "peers": 6, "duration_s": 20.0, "task": {"dataset": "averaging"},
    "churn": {"up": {"kind": "exponential", "mean": 20}, "down": {"kind": "exponential", "mean": 2}}, **SLOW,
}  # fmt: skip


def world_of(**tables) -> World:
    return World.from_mapping(tables, "links.toml", model_mb=1.0)


@pytest.mark.parametrize(
    ("fidelity", "codec"), [("whole", "fp32"), slow("whole", "int8"), ("whole", "auto"), ("exchange", "fp32")]
)
def test_a_model_that_stands_for_a_larger_one_takes_as_long_and_as_many_bytes(fidelity, codec):
    """Compare exchanges, joins and the protocol's waits, with packets lost and nodes that come and go.

    In this seed no donor dies in the middle of its piece. A newcomer keeps whole chunks of such a piece, and a large
    piece has more of them.
    """
    every = {"mix_every_steps": "auto"} if codec == "auto" else {}
    base = Scenario.from_mapping(
        {**WORLD, "seed": 0, "fidelity": fidelity, "gossip": {"codec": codec} | every,
         "membership": {"mode": "ideal" if fidelity == "exchange" else "protocol"}}
    )  # fmt: skip
    large = simulate(base.replace(**{"task.elements": 256_000}), progress=False)
    small = simulate(base.replace(**{"task.elements": 2_560, "task.model_mb": 1.024}), progress=False)
    assert len(large.exchange_s) > 20
    assert np.allclose(large.exchange_s, small.exchange_s, rtol=1e-6)
    said = ("exchanges_done", "exchanges_failed", "interval_steps")
    assert [large.summary[key] for key in said] == [small.summary[key] for key in said]
    assert small.summary["bytes_sent"] == pytest.approx(large.summary["bytes_sent"], rel=1e-4)


def test_a_world_may_have_routers():
    nat = {"public": 0.25, "punchable": 0.5, "hard": 0.25}
    world = world_of(network={"nat": nat}, membership={"start": "seed"})
    assert with_candidate(world.scenario, parse("codec=int8")).network.nat == world.scenario.network.nat is not None


def test_what_does_not_go_with_a_stand_in_is_refused():
    with pytest.raises(ConfigError, match="model_mb = 0"):
        Scenario.from_mapping({**WORLD, "task": {"model_mb": 0}})
    with pytest.raises(ConfigError, match="needs the size of a model"):
        World.from_mapping({"task": {"model_mb": "none"}}, "links.toml")
    with pytest.raises(ConfigError, match="cannot be replayed"):
        Plan.of(Scenario.from_mapping({"peers": 2, "duration_s": 5, "membership": {"start": "seed"},
                                       "task": {"model_mb": 1.0}}))  # fmt: skip


def tried_in(world):
    """Return the settings tried in a world, each with what it makes of the file's."""
    tried = candidates(world.scenario, world.exchange_steps, world.base_settings)
    return tried, [with_candidate(world.scenario, one).config for one in tried]


def test_candidates_are_around_the_pace_that_the_links_allow():
    slow, fast = world_of(**SLOW), world_of(network="datacentre")
    longest = []
    for world in (slow, fast):
        tried, configs = tried_in(world)
        assert tried[0].name == GIVEN
        assert len(tried) == 12
        assert all(configs.count(one) == 1 for one in configs), "each is tried once"
        longest.append(max(one.interval_steps for one in configs))
    assert slow.exchange_steps("fp32") > 3 * slow.exchange_steps("int8") > 9 * fast.exchange_steps("fp32")
    assert longest[0] > longest[1]


HOMES = {"network": {"latency": {"kind": "quantiles", "name": "internet"}, "rate_mbit_s": {"up": 20, "down": 100}}}
NEAR = {"network": {"latency": {"kind": "constant", "value_ms": 0.2}, "rate_mbit_s": 100}}


@pytest.mark.parametrize(
    ("tables", "preset"), [(SLOW, "wan"), (HOMES, "wan"), (NEAR, "lan"), ({"network": "datacentre"}, "datacentre")]
)
def test_the_preset_that_is_advised_suits_the_links(tables, preset):
    world = world_of(**tables)
    tried, configs = tried_in(world)
    assert {one.changes.get("preset") for one in tried[1:]} == {preset}
    assert configs[1].stall_s == getattr(Config, preset)().stall_s
    study = Study(world, tried[:2], 1)
    for outcome, accuracy in zip(study.outcomes, (0.5, 0.9), strict=True):
        outcome.accuracy, outcome.sent, outcome.mixes = [accuracy], [1e6], [30.0]
    assert study.settings() == dict(tried[1].changes)
    assert study.sentences[-1].startswith(f'preset = "{preset}" has deadlines for links of')


def test_a_preset_that_the_file_names_stays():
    world = world_of(gossip={"preset": "lan", "stall_s": 7.0}, **HOMES)
    assert world.base_settings == {}
    tried, configs = tried_in(world)
    assert {config.stall_s for config in configs} == {7.0}
    assert all("preset" not in one.changes for one in tried)


def test_what_the_file_says_beside_a_preset_holds_for_every_candidate():
    _, configs = tried_in(world_of(gossip={"stall_s": 3.0, "join_timeout_s": 4.0}, **HOMES))
    assert {(config.stall_s, config.join_timeout_s) for config in configs} == {(3.0, 4.0)}
    assert {config.codec for config in configs[1:]} >= {"bf16"}, "that of wan"


def test_what_does_not_go_with_the_file_is_not_tried():
    world = world_of(gossip={"selection": "nearest"}, **SLOW)
    for one in candidates(world.scenario, world.exchange_steps):
        config = with_candidate(world.scenario, one).config
        assert "nearest" in str(config.selection) or one.changes.get("selection")


def test_slow_links_are_watched_for_longer_and_learned_on_more_slowly():
    fast, slow = world_of(network="lan"), world_of(network={"rate_mbit_s": 1})
    lengths = [world.scenario.duration_s / world.scenario.compute.step_s.mean for world in (fast, slow)]
    assert lengths[0] == STEPS < lengths[1]
    rates = [world.scenario.task.optimizer.lr for world in (fast, slow)]
    assert rates[0] * lengths[0] == pytest.approx(rates[1] * lengths[1])


@pytest.mark.parametrize("tables", [{"rounds": 3}, {"peers": 1}, {"task": {"dataset": "averaging"}}, {"task": 3},
                                    {"attackers": {"share": 0.1}}, {"network": {"rate": 3}}])  # fmt: skip
def test_what_is_no_world_is_one_sentence(tables):
    with pytest.raises(ConfigError, match=r"^links\.toml: "):
        world_of(**tables)


# -- what follows ----------------------------------------------------------------------------------------------------
def studied(accuracies, sent, seeds=3):
    """Return a study of these candidates, each with accuracies by seed and MB a minute."""
    study = Study(
        world_of(**SLOW), [Candidate(name, {"mix_every_steps": 4 + n}) for n, name in enumerate(accuracies)], seeds
    )
    for outcome in study.outcomes:
        name = outcome.candidate.name
        outcome.accuracy = list(accuracies[name])
        outcome.sent = [1e6 * sent[name]] * seeds
        outcome.curves = [(np.array([0.0, 10.0, 20.0]), np.array([0.1, a - 0.1, a])) for a in accuracies[name]]
        outcome.exchange_s, outcome.mixes, outcome.distance = [0.5] * seeds, [30.0] * seeds, [1.0] * seeds
    return study


def test_the_cheapest_within_a_point_of_the_best_is_taken():
    study = studied(
        {
            GIVEN: [0.80, 0.81, 0.82],
            "best": [0.91, 0.93, 0.92],
            "lean": [0.91, 0.925, 0.915],
            "poor": [0.85, 0.9, 0.86],
        },
        {GIVEN: 50, "best": 40, "lean": 10, "poor": 1},
    )
    assert (study.best.candidate.name, study.choice.candidate.name) == ("best", "lean")
    assert study.seeds_within_point == 3
    assert study.settings()["mix_every_steps"] == 6
    text = " ".join(study.sentences)
    assert "Take lean" in text
    assert "4 times as much" in text
    assert "10.7 ± 0.6 points better than the given settings" in text
    heads, rows = study.table()
    assert [row[0].strip() for row in rows] == ["best", "> lean", "poor", GIVEN]
    assert heads[2] == "to 90 %"
    assert rows[-1][2] == "–"  # noqa: RUF001


@pytest.mark.parametrize(("sent", "said"), [
    (10.2, "which send as much."), (12, "which send 1.2 times as much."), (1234, "which send 120 times as much."),
    (5, "which send 0.5 times as much."),
])  # fmt: skip
def test_how_much_the_given_settings_send_reads_as_a_sentence(sent, said):
    study = studied({GIVEN: [0.8] * 3, "lean": [0.91] * 3}, {GIVEN: sent, "lean": 10})
    assert any(sentence.endswith(said) for sentence in study.sentences)


def test_settings_with_which_nobody_mixed_are_not_advised():
    study = studied({GIVEN: [0.8] * 3, "never": [0.9] * 3}, {GIVEN: 9, "never": 0})
    study.outcomes[1].mixes = [0.0] * 3
    assert study.best is study.choice is study.given


def test_how_sure_it_is_follows_from_the_seeds():
    torn = studied({GIVEN: [0.5] * 3, "a": [0.90, 0.94, 0.92], "b": [0.93, 0.90, 0.92]}, {GIVEN: 9, "a": 8, "b": 1})
    assert torn.choice.candidate.name == "b"
    assert torn.seeds_within_point == 2
    assert torn.certainty == "How sure: within a point of the best in 2 of 3 seeds; so on average are a."
    assert "one seed says little" in studied({GIVEN: [0.5], "a": [0.9]}, {GIVEN: 1, "a": 1}, 1).certainty


def test_one_that_diverged_is_never_taken_and_all_of_them_are_a_sentence():
    study = studied({GIVEN: [0.8] * 3, "wild": [math.nan] * 3}, {GIVEN: 9, "wild": 1})
    assert study.choice is study.given
    assert json.dumps(study.to_mapping(), allow_nan=False)
    nobody = Study(world_of(**SLOW), [Candidate(GIVEN, {})], 1)
    diverged = fake_result(nobody.runs[0][1])
    diverged.summary["accuracy"]["mean"] = None
    with pytest.raises(LocalError, match="None of the settings learned"):
        nobody.take({0: diverged})


def test_nothing_is_advised_where_nothing_mixed():
    study = Study(world_of(**SLOW), [Candidate(GIVEN, {})], 1)
    alone = fake_result(study.runs[0][1])
    alone.history[-1]["mixes"] = 0.0
    with pytest.raises(LocalError, match="No setting mixed even once"):
        study.take({0: alone})


def test_what_nodes_send_counts_while_they_are_there():
    for there in (1000.0, 250.0):
        study = Study(world_of(**SLOW), [Candidate(GIVEN, {})], 2)
        results = {place: fake_result(scenario) for place, (_, scenario) in enumerate(study.runs)}
        for row in results[0].history:
            row["alive"] = there
        results[1].exchange_s = results[1].exchange_s[:0]  # No exchange of this seed finished.
        study.take(results)
        summary, [outcome] = results[0].summary, study.outcomes
        assert outcome.sent[0] == pytest.approx(summary["bytes_sent"] / (summary["virtual_s"] / 60 * there))
        assert outcome.median_exchange_s == float(np.median(results[0].exchange_s))


def test_when_an_accuracy_was_there_is_read_between_two_looks():
    seconds, accuracies = np.array([0.0, 10.0, 20.0]), np.array([0.1, 0.5, 0.9])
    assert first_at(seconds, accuracies, 0.7) == pytest.approx(15.0)
    assert first_at(seconds, accuracies, 0.1) == 0.0
    assert first_at(seconds, accuracies, 0.95) == math.inf


@pytest.mark.parametrize("text", ["", "8", "mix_every=4", "mix_every_steps"])
def test_what_cannot_be_tried_is_one_sentence(text):
    with pytest.raises(ConfigError, match=r"--try .*mix_every_steps=4 codec=int8"):
        parse(text)
    assert parse("codec=int8", {"preset": "wan"}).changes == {"preset": "wan", "codec": "int8"}
    assert parse("gossip.mix_every_steps=4 codec=int8").changes == {"mix_every_steps": 4, "codec": "int8"}


# -- the command -----------------------------------------------------------------------------------------------------
LINKS = 'name = "two homes"\npeers = 2\nduration_s = 2\n[task]\nmodel = "linear"\n[network]\nrate_mbit_s = 20\n'


def test_the_command_plays_names_and_writes(tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "links.toml", tmp_path / "plan.toml"
    path.write_text(LINKS)
    monkeypatch.setattr(
        planner, "candidates", lambda *_: [Candidate(GIVEN, {}), Candidate("rarely", {"mix_every_steps": 16})]
    )
    assert planner.plan(path, model_mb=0.1, seeds=2, more=["codec=int8"], out=out, jobs=1) == 0
    printed = capsys.readouterr().out
    assert "two homes: 2 nodes, a model of 0.1 MB, 2 seeds" in printed
    assert all(name in printed for name in (GIVEN, "rarely", "codec=int8", "How sure"))
    for bad in (path, tmp_path / "nowhere" / "plan.toml"):  # Found before anything is played.
        with pytest.raises(LocalError, match="The plan cannot be written"):
            planner.plan(path, model_mb=0.1, seeds=1, out=bad)
    assert path.read_text() == LINKS
    section = tomllib.loads(out.read_text())["gossip"]
    assert Config.from_toml(out) == Config.from_mapping(section)
    assert planner.plan(path, model_mb=0.1, seeds=1, as_json=True, jobs=1) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["choice"] in [one["name"] for one in told["tried"]]
    assert told["virtual_s"] == 2.0


@pytest.mark.parametrize("words", [["plan"], ["plan", "links.toml", "--measure", "127.0.0.1:1"]])
def test_the_command_wants_a_file_or_nodes(words, gossip):
    assert "one of the two" in gossip(*words, code=2).err
    assert "is for --measure" in gossip("plan", "links.toml", "--secret-file", "nowhere", code=2).err


@pytest.mark.parametrize(("changes", "seeds"), [({}, {1, 2}), ({"seed": 7}, {7, 8}), ({"seed": 7, "seeds": 1}, {7})])
def test_the_command_plays_every_setting_in_the_files_world_with_each_seed(
    changes, seeds, monkeypatch, tmp_path, capsys
):
    played = []

    def results_of(assignments, *_):
        played.extend(assignments)
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "results_of", results_of)
    path = tmp_path / "links.toml"
    path.write_text('duration_s = 5\ntask.model_mb = 3\ncompute = { step_s = 2, per = "peer" }\nchurn.trace = "a.csv"')
    assert planner.plan(path, **({"step_s": 0.5, "seeds": 2} | changes)) == 130
    assert {assignment.scenario.seed for assignment in played} == seeds
    world = played[0].scenario
    assert (world.task.model_mb, world.churn.trace, world.peers) == (3, str(tmp_path / "a.csv"), 8)
    assert world.compute == Compute(step_s=0.5, per="peer")
    assert "stopped before all was played" in capsys.readouterr().err
