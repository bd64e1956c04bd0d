"""Tests of the parts of `make accelerator`: they end in time, whatever the device's pace is."""

import math
from collections import Counter

import pytest

from benchmarks import accelerator_equal, accelerator_nodes


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
