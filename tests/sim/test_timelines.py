"""Tests of the simulator's timelines."""

import json

import pytest

from gossip.errors import ConfigError
from sim import Scenario, simulate

TABLES = {
    "peers": 4, "duration_s": 20.0, "task": {"dataset": "averaging"}, "compute": {"step_s": 0.5},
    "gossip": {"mix_every_steps": 4},
}  # fmt: skip


def scenario(**changes):
    return Scenario.from_mapping(TABLES | changes)


def test_steps_and_exchanges_of_all_peers_are_in_the_file(tmp_path):
    result = simulate(scenario(), progress=False, trace=tmp_path / "all.json")
    assert result.summary["fidelity"] == "whole"
    found = json.loads((tmp_path / "all.json").read_text())
    assert {one["pid"] for one in found} == {1, 2, 3, 4}
    steps = [one for one in found if one["name"] == "train"]
    assert len(steps) == pytest.approx(4 * 40, abs=8)
    assert {round(one["dur"]) for one in steps} == {500_000}
    done = [one for one in found if one["name"].startswith("exchange with")]
    assert len(done) == result.summary["node_updates"]
    assert all(one["ts"] + one["dur"] <= 20e6 for one in done)


def test_a_timeline_changes_nothing(tmp_path):
    without = simulate(scenario(fidelity="whole"), progress=False)
    recorded = simulate(scenario(fidelity="whole"), progress=False, trace=tmp_path / "all.json")
    assert recorded.summary["digest"] == without.summary["digest"]


def test_peers_that_die_are_marked_and_come_again(tmp_path):
    churned = scenario(churn={"up": {"kind": "exponential", "mean": 6.0}, "down": 1.0})
    simulate(churned, progress=False, trace=tmp_path / "all.json")
    names = [one["name"] for one in json.loads((tmp_path / "all.json").read_text())]
    assert names.count("is gone") >= 4
    assert "starts again" in names


def test_the_fast_level_has_none_and_says_so(tmp_path):
    with pytest.raises(ConfigError, match="A timeline needs the whole level"):
        simulate(scenario(fidelity="exchange"), progress=False, trace=tmp_path / "all.json")
