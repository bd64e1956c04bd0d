"""The correction of a node's own data covers each step once, however long an addition takes."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from node.loop.training import TrainingSide

INTERVAL = 8
CORRECTION = SimpleNamespace(
    interval_steps=INTERVAL, version=1, pull=np.ones(1, np.float32), step_factor=lambda steps: steps / INTERVAL
)


def loop(boundaries, error=None):
    """Return a loop whose device needs ``boundaries`` calls for each addition, and the factors of finished ones."""
    left, added = [boundaries], []

    def add_scaled(pull, factor, version):
        left[0] -= 1
        if left[0]:
            if error is not None:
                raise error
            return False
        left[0] = boundaries
        added.append(factor)
        return True

    live = SimpleNamespace(outer_lock=threading.Lock(), state=SimpleNamespace(add_scaled=add_scaled))
    run = SimpleNamespace(steps=0)
    return SimpleNamespace(live=live, run=run, correcting_steps=0, corrected_at_step=0, current_rate=lambda: 0.1), added


@pytest.mark.parametrize("error", [None, MemoryError("the device is full")])
@pytest.mark.parametrize("boundaries", [1, 2, 3, 5])
def test_each_step_is_corrected_once_however_many_boundaries_an_addition_takes(boundaries, error):
    training, added = loop(boundaries, error)
    until = 0
    for training.run.steps in range(1, 121):
        TrainingSide.apply_correction(training, CORRECTION)
        if not training.correcting_steps:
            until = training.corrected_at_step
    assert until >= 120 - 2 * max(boundaries, INTERVAL)
    assert sum(added) * INTERVAL == until


def test_steps_while_an_exchange_changes_the_correction_are_corrected_afterwards():
    training, added = loop(1)
    with training.live.outer_lock:
        for training.run.steps in range(1, 6):
            TrainingSide.apply_correction(training, CORRECTION)
    assert added == []
    TrainingSide.apply_correction(training, CORRECTION)
    assert added == [5 / INTERVAL]
