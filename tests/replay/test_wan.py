"""The results of benchmarks/wan.py, and runs of our nodes and of DDP's ranks as it starts them."""

import importlib
import math
import sys

import pytest

from benchmarks.replay.links import missing


@pytest.fixture(scope="module")
def wan():
    path = list(sys.path)
    yield importlib.import_module("benchmarks.wan")  # It adds its own folder to the path.
    sys.path[:] = path


def run(seconds, reached, began_s=10.0, disturbed=False):
    return {
        "seconds": dict(zip(("0.8", "0.9", "0.95"), seconds, strict=True)), "reached": reached, "began_s": began_s,
        "disturbed": disturbed,
    }  # fmt: skip


def test_a_target_that_was_not_reached_has_no_seconds(wan):
    runs = [run((20.0, 60.0, math.inf), 0.94), run((30.0, 50.0, 90.0), 0.95), run((25.0, math.inf, math.inf), 0.9)]
    assert wan.learned(runs, 100.0) == ["15.0 (25.0)", "50.0 (60.0)", "not within 100 s (94%)"]


def test_a_run_that_never_began_is_written_down(wan):
    runs = [run((math.inf, math.inf, math.inf), 0.0, began_s=math.inf), *[run((2.0, 4.0, math.inf), 0.9, 1.0)] * 2]
    assert wan.learned(runs, 60.0) == ["1.0 (2.0)", "3.0 (4.0)", "not within 60 s (90%)"]
    assert wan.written({1.0: runs[:1]})["1.0"][0]["began_s"] is None


def test_disturbed_runs_count_where_there_are_no_others(wan):
    calm, disturbed = run((1.0, 2.0, 3.0), 0.95), run((9.0, 9.0, 9.0), 0.95, disturbed=True)
    assert wan.counted([disturbed, calm]) == [calm]
    assert wan.counted([disturbed]) == [disturbed]


def test_a_disturbed_run_is_played_again_with_other_losses(wan):
    seeds, saved, found = [], [], {}

    def job(seed):
        seeds.append(seed)
        return {"mb_s": 1.0, "late": 0.2, "disturbed": len(seeds) == 2}

    wan.in_turn(3, 1, {"one": job}, found, lambda: saved.append(len(found["one"])))
    assert seeds == [1, 2, 1_002, 3]
    assert saved == [1, 2, 3, 4]


def test_an_accuracy_is_of_all_four(wan, monkeypatch):
    rows = [[{"kind": "look", "at": at, "accuracy": 0.1 * rank}] for rank, at in enumerate((5.0, 2.0, 3.0, 4.0))]
    rows[1].append({"kind": "look", "at": 6.0, "accuracy": 0.5})
    monkeypatch.setattr(wan.Swarm, "rows", rows)
    swarm = wan.Swarm.__new__(wan.Swarm)
    ((first, before), (second, after)) = swarm.accuracies()
    assert (first, second) == (5.0, 6.0)
    assert before == pytest.approx(0.15)
    assert after == pytest.approx(0.25)


@pytest.mark.netns
@pytest.mark.parametrize("kind", ["gossip", "DDP bbr"])
def test_peers_run_over_the_links_and_learn(wan, kind, monkeypatch):
    if why := missing():
        pytest.skip(why)
    monkeypatch.setattr(wan, "TARGETS", (0.3,))
    seen = wan.race(kind, sys.executable, 0.1, 120.0, 0.02, 1)
    assert seen["reached"] >= 0.3
    assert 0.0 < seen["began_s"] < seen["seconds"]["0.3"] <= 120.0
    assert seen["steps"] > 0
