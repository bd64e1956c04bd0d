"""The correction of a node's own data covers each step once, however long an addition takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from node.loop.training import TrainingSide

INTERVAL = 8


class Correction:
    """A correction that notes the steps that it is asked about."""

    interval_steps, version, rate = INTERVAL, 1, 0.0

    def __init__(self):
        self.pull, self.asked = np.ones(1, np.float32), []

    def step_factor(self, steps):
        self.asked.append(steps)
        return steps / INTERVAL


def loop(boundaries):
    """Return a loop whose device needs ``boundaries`` calls for each addition, and the factors of finished ones."""
    left, added = [boundaries], []

    def add_scaled(pull, factor, version):
        left[0] -= 1
        if left[0]:
            return False
        left[0] = boundaries
        added.append(factor)
        return True

    live = SimpleNamespace(outer_lock=threading.Lock(), state=SimpleNamespace(add_scaled=add_scaled))
    run = SimpleNamespace(steps=0)
    return SimpleNamespace(live=live, run=run, correcting_steps=0, corrected_at_step=0, current_rate=lambda: 0.1), added


@pytest.mark.parametrize("boundaries", [1, 2, 3, 5])
def test_each_step_is_corrected_once_however_many_boundaries_an_addition_takes(boundaries):
    training, added = loop(boundaries)
    correction, until = Correction(), 0
    for training.run.steps in range(1, 121):
        TrainingSide.apply_correction(training, correction)
        if not training.correcting_steps:
            until = training.corrected_at_step
    assert until >= 120 - 2 * max(boundaries, INTERVAL)
    assert sum(added) * INTERVAL == until


def test_steps_while_an_exchange_changes_the_correction_are_corrected_afterwards():
    training, added = loop(1)
    correction = Correction()
    with training.live.outer_lock:
        for training.run.steps in range(1, 6):
            TrainingSide.apply_correction(training, correction)
    assert added == []
    TrainingSide.apply_correction(training, correction)
    assert added == [5 / INTERVAL]
