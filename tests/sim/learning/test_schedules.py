"""A falling learning rate: torch's arithmetic, by each peer's own steps."""

import numpy as np
import pytest

from sim.learning.learners import Learners
from sim.learning.optimizer.steppers import schedule
from sim.scenario.task import Optimizer, Task
from tests.sim.learning.alone import (
    NAMES,
    SEED,
    assert_reset_as_one_at_a_time,
    assert_trained_as_one_at_a_time,
    torch_rates,
)

COSINE = {"schedule": "cosine", "schedule_steps": 16, "warmup_steps": 3, "min_lr": 0.0005}
OPTIMIZERS = {
    "sgd": Optimizer(lr=0.05, **COSINE),
    "sgd, momentum, decay": Optimizer(lr=0.05, momentum=0.9, weight_decay=0.01, **COSINE),
    "adamw": Optimizer(name="adamw", lr=0.003, weight_decay=0.1, betas=(0.8, 0.99), **COSINE),
}


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("lowest", [0.0, 0.02])
def test_the_rates_are_those_of_torch_until_its_cosine_ends(warmup, lowest):
    spec = Optimizer(lr=0.1, schedule="cosine", schedule_steps=40, warmup_steps=warmup, min_lr=lowest)
    ours = schedule(spec)(np.arange(41))
    assert ours == pytest.approx(torch_rates(spec), rel=1e-9, abs=1e-12)
    assert ours.argmax() == warmup
    assert ours[warmup] == 0.1


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_stacked_models_of_any_age_follow_it_as_torch_does_one_at_a_time(model, optimizer):
    task = Task(batch_size=4, optimizer=optimizer, model=model, samples_per_peer=40)
    assert_trained_as_one_at_a_time(task)  # one of them beyond the end


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_who_comes_again_goes_on_at_the_rate_that_it_had(optimizer):
    task = Task(batch_size=4, optimizer=optimizer, model="linear", samples_per_peer=40)
    assert_reset_as_one_at_a_time(task)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_rate_that_has_come_to_zero_moves_nothing(name):
    optimizer = Optimizer(name=name, lr=0.01, weight_decay=0.1, schedule="cosine", schedule_steps=5)
    learners = Learners(Task(optimizer=optimizer, samples_per_peer=40), NAMES, SEED)
    learners.train(np.arange(5), np.full(5, 5))
    before = learners.matrix.copy()
    learners.train(np.arange(5), np.full(5, 3))
    assert np.isfinite(before).all()
    assert np.abs(learners.matrix - before).max() < 1e-25
