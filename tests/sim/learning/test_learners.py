"""Stacked models train exactly as one module at a time, whichever peers train with them."""

import numpy as np
import pytest
import torch

from gossip.errors import ConfigError
from sim.learning.learners import Learners
from sim.learning.perceptrons import linear_layers
from sim.scenario.task import Optimizer, Task
from tests.harness.marks import slow
from tests.sim.learning.alone import (
    NAMES,
    SEED,
    Alone,
    OneStepAtATime,
    assert_reset_as_one_at_a_time,
    assert_trained_as_one_at_a_time,
)

DIGITS = {"samples_per_peer": 40}
TEXT = {"dataset": "tests.sim.jobs:text", "model": "gpt"}
MODELS = {
    "linear": {"model": "linear", **DIGITS},
    "mlp": {"model": "mlp", **DIGITS},
    "mlp of three layers": {"model": "tests.sim.jobs:three_layers", **DIGITS},
    "cnn": {"model": "cnn", **DIGITS},
    "gpt": TEXT,
    "group norm": {"model": "tests.sim.jobs:group_norm", **DIGITS},
    "tied weights": {"model": "tests.sim.jobs:Tied", **DIGITS},
}
OPTIMIZERS = {
    "sgd": Optimizer(lr=0.05),
    "sgd, momentum": Optimizer(lr=0.05, momentum=0.9),
    "sgd, momentum, decay": Optimizer(lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": Optimizer(name="adamw", lr=0.003, weight_decay=0.1, betas=(0.8, 0.99)),
}


def ones(rows):
    return np.ones(len(rows), np.int64)


# One model with handwritten gradients and one with torch's meet every optimizer; all models meet the two longest.
EVERY_OPTIMIZER, MOST_TERMS = ("linear", "cnn"), ("sgd, momentum, decay", "adamw")


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (pytest.param if model in EVERY_OPTIMIZER or rule in MOST_TERMS else slow)(
            MODELS[model], OPTIMIZERS[rule], id=f"{model}-{rule}"
        )
        for model in MODELS
        for rule in OPTIMIZERS
    ],
)
def test_stacked_models_train_as_torch_trains_one_at_a_time(model, optimizer):
    task = Task(batch_size=4, optimizer=optimizer, **model)
    assert_trained_as_one_at_a_time(task)


@pytest.mark.parametrize("optimizer", [OPTIMIZERS["sgd, momentum"], OPTIMIZERS["adamw"]], ids=["sgd", "adamw"])
def test_a_reset_forgets_one_peers_optimizer_and_neither_its_place_in_the_data_nor_the_others(optimizer):
    task = Task(batch_size=4, optimizer=optimizer, **MODELS["linear"])
    assert_reset_as_one_at_a_time(task)


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_who_trains_and_mixes_in_the_same_call_changes_no_bit_of_a_hand_written_model(model):
    task = Task(model=model, samples_per_peer=16, optimizer=OPTIMIZERS["sgd, momentum"])
    names = [f"peer {number}" for number in range(300)]  # more than one block
    together, alone = Learners(task, names, SEED), OneStepAtATime(task, names, SEED)
    random = np.random.default_rng(0)
    for _ in range(3):
        counts = random.integers(0, 4, len(names))
        order = random.permutation(len(names))
        together.train(order, counts[order])
        alone.train(np.arange(len(names)), counts)
        for row in random.choice(len(names), 50, replace=False).tolist():
            for learners in (together, alone):
                learners.matrix[row] *= np.float32(0.99)
    assert np.array_equal(together.matrix, alone.matrix)


def test_all_peers_begin_with_the_weights_that_the_seed_decides():
    first, again, other = (Learners(Task(), NAMES, seed) for seed in (1, 1, 2))
    assert (first.matrix == first.matrix[0]).all()
    assert np.array_equal(first.matrix, again.matrix)
    assert not np.array_equal(first.matrix, other.matrix)


def test_torchs_own_generator_stays_as_it_was():
    before = torch.get_rng_state()
    learners = Learners(Task(**MODELS["cnn"]), NAMES, SEED)
    learners.train(np.arange(5), ones(NAMES))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_evaluation_is_the_loss_and_accuracy_on_the_held_out_samples(model):
    learners = Learners(Task(batch_size=4, **model), NAMES, SEED)
    learners.train(np.arange(5), np.arange(5))
    losses, accuracies, _ = learners.evaluate(learners.matrix[[4, 0]])
    for row, loss, accuracy in zip((4, 0), losses, accuracies, strict=True):
        expected_loss, expected_accuracy = Alone(Task(**model), learners, row).evaluate()
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert accuracy == pytest.approx(expected_accuracy, abs=1e-6)


def test_evaluating_many_models_is_evaluating_each(monkeypatch):
    monkeypatch.setattr("sim.learning.perceptrons.LOGITS_AT_ONCE", 50_000)  # two models at a time
    learners = Learners(Task(samples_per_peer=16), NAMES, SEED)
    learners.train(np.arange(5), np.arange(5) * 10)
    losses, accuracies, _ = learners.evaluate(learners.matrix)
    for row in range(5):
        loss, accuracy, _ = learners.evaluate(learners.matrix[row : row + 1])
        assert loss[0] == pytest.approx(losses[row], rel=1e-6)
        assert accuracy[0] == accuracies[row]
    assert len(set(losses.tolist())) == 5


@pytest.mark.parametrize("optimizer", ["sgd, momentum", "adamw"])
def test_with_weights_of_others_an_optimizers_state_that_is_no_number_goes_and_any_other_stays(optimizer):
    learners = Learners(Task(optimizer=OPTIMIZERS[optimizer], **MODELS["linear"]), NAMES, SEED)
    rows = np.arange(len(NAMES))
    learners.train(rows, 3 * ones(rows))
    sound = learners.matrix[2].copy()
    learners.matrix[1, 0] = np.nan
    learners.train(rows, ones(rows))
    assert not np.isfinite(learners.matrix[1]).any()
    before = [moment[2].copy() for moment in learners._moments]
    for row in (1, 2):
        learners.matrix[row] = sound
        learners.on_weights_replaced(row)
    learners.train(rows, ones(rows))
    assert np.isfinite(learners.matrix).all()
    assert learners._ages[1] == 1
    assert learners._ages[2] == 5
    assert any(moment.any() for moment in before)


def test_averaging_trains_nothing_and_draws_each_vector_from_its_peers_name():
    task = Task(dataset="averaging", elements=1000)
    learners, more = Learners(task, NAMES, SEED), Learners(task, ["zoe", *NAMES], SEED)
    before = learners.matrix.copy()
    learners.train(np.array([3, 1]), np.array([2, 5]))
    learners.reset(3)
    assert np.array_equal(learners.matrix, before)
    assert np.array_equal(before, more.matrix[1:])
    assert learners.steps_taken.tolist() == [0, 5, 0, 2, 0]
    assert abs(before.mean()) < 0.05  # 5,000 draws: standard error 0.014
    assert abs(before.std() - 1) < 0.05
    losses, accuracies, _ = learners.evaluate(before)
    assert losses == pytest.approx((before.astype(np.float64) ** 2).mean(1) / 2)
    assert np.isnan(accuracies).all()
    with pytest.raises(ConfigError, match="has no model"):
        learners.module(before[0])


def test_no_rows_is_no_work():
    learners = Learners(Task(), NAMES, SEED)
    before = learners.matrix.copy()
    learners.train(np.zeros(0, np.int64), np.zeros(0, np.int64))
    learners.train(np.array([2]), np.array([0]))
    assert np.array_equal(learners.matrix, before)


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    source = "from torch import nn\n\ndef model():\n    return nn.Linear(64, 10)\n"
    (tmp_path / "beside_the_scenario.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert Learners(Task(model="beside_the_scenario:model"), NAMES, SEED).elements == 650


def test_a_layer_that_is_there_twice_or_frozen_makes_no_perceptron_of_a_model():
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    assert linear_layers(torch.nn.Sequential(one, torch.nn.ReLU(), other)) == [one, other]
    assert linear_layers(torch.nn.Sequential(one, torch.nn.ReLU(), one)) is None
    other.bias.requires_grad_(False)
    assert linear_layers(torch.nn.Sequential(one, torch.nn.ReLU(), other)) is None
