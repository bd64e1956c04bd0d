"""Tests of the parts of `make accelerator`: they end in time, whatever the device's pace is."""

import math
from collections import Counter

import pytest

from benchmarks import accelerator, accelerator_equal, accelerator_nodes, accelerator_run


@pytest.mark.parametrize(
    ("step_s", "limit_s", "steps"),
    [(0.01, 18.0, 192), (0.125, 18.0, 128), (0.2, 18.0, 64), (5.0, 18.0, 64), (5.0, math.inf, 192)],
    ids=["all", "two mixes", "one", "slow", "simulated"],
)
def test_a_slow_step_leaves_fewer_mixes_and_always_one(monkeypatch, step_s, limit_s, steps):
    taken = []

    def seconds(work):
        before = len(taken)
        work()
        return step_s * (len(taken) - before)

    monkeypatch.setattr(accelerator_nodes, "seconds", seconds)
    counted, took_s = accelerator_nodes.timed(lambda: taken.append(1), 192, 64, limit_s)
    assert counted == len(taken) == steps
    assert took_s == pytest.approx(steps * step_s)


@pytest.mark.parametrize("step_s", [0.02, 0.1, 0.2])
def test_the_largest_model_is_measured_first_and_within_the_parts_time(step_s):
    """A join takes 10 s, and the start of the partner 15 s."""
    sizes = [shape.layers * shape.width**2 for shape in accelerator.LARGE.values()]
    assert sizes == sorted(sizes, reverse=True)
    most = 15.0
    for row in accelerator.ROWS:
        alone = min(accelerator_nodes.ALONE_S + step_s, accelerator_nodes.ALONE_STEPS * step_s)
        steps = min(max(accelerator_nodes.MEASURED_S, row.every * step_s), row.steps * step_s)
        most += 2 * alone + 10.0 + 2 * row.every * step_s + steps
    (limit_s,) = [part.limit_s for part in accelerator_run.parts(False) if part.name == "nodes"]
    assert most <= limit_s, "all figures of the largest model, before those of the next one"


def test_every_swarm_runs_once_and_those_of_a_turn_fit_the_cores():
    names = [name for turn in accelerator_equal.TURNS for name in turn]
    assert sorted(names) == sorted(accelerator_equal.SWARMS)
    for turn in accelerator_equal.TURNS:
        processes = sum(len(accelerator_equal.SWARMS[name][1]) * accelerator_equal.seeds_of(name) for name in turn)
        assert processes < accelerator_equal.CORES
        devices = [{device for device, _ in accelerator_equal.SWARMS[name][1]} for name in turn]
        assert len(turn) == 1 or sorted(map(list, devices)) == [["cpu"], ["cuda"]], "neither slows the other"


@pytest.mark.parametrize(("cores", "expected"), [(2, 1), (16, 3)])
def test_fewer_cores_run_fewer_seeds(cores, expected, monkeypatch, capsys):
    played = Counter()

    def play(task, nodes, simulated, seed):
        played[task, tuple(nodes)] += 1
        row = {"device": "cpu", "pause_s": 0.0, "longest_step_s": 0.0, "score": 1.0}
        return [row | dict.fromkeys(("steps", "exchanges", "alone_steps_s", "together_steps_s"), 1)] * len(nodes)

    monkeypatch.setattr(accelerator_equal, "play", play)
    monkeypatch.setattr(accelerator_equal.os, "cpu_count", lambda: cores)
    accelerator_equal.measure(simulated=False)
    assert {count for (task, _), count in played.items() if task == "digits"} == {expected}
    assert {count for (task, _), count in played.items() if task == "gpt"} == {1}
    assert capsys.readouterr().out.count('"figure": "equal"') == 5
