"""Stacked models train exactly as one module at a time, whichever peers train with them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossip.errors import ConfigError, DataError
from sim.learning import datasets, partitions
from sim.learning.batches import Batches
from sim.learning.learners import Learners
from sim.scenario.scenario import Optimizer, Partition, Task
from tests.harness.marks import slow

SEED = 5
NAMES = ["ada", "bob", "cyd", "dan", "eve"]
# float32 sums of another order. After up to 20 steps a tensor's error is below 1e-5 of the distance that training has
# moved it, plus 1e-6 of its own length: eight roundings of what is stored.
TOLERANCE, ROUNDING = 1e-5, 1e-6

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


def torch_optimizer(module, optimizer: Optimizer):
    if optimizer.name == "adamw":
        return torch.optim.AdamW(
            module.parameters(), lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
        )
    return torch.optim.SGD(
        module.parameters(), lr=optimizer.lr, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay
    )


class Plainly:
    """One peer alone: an ordinary module, torch's optimizer, and the same batches."""

    def __init__(self, task: Task, learners: Learners, row: int) -> None:
        self.task, self.row, self.steps = task, row, 0
        self.module = copy.deepcopy(learners.module(learners.matrix[row]))
        self.optimizer = torch_optimizer(self.module, task.optimizer)
        self.data = datasets.load(task.dataset)
        self.batches = Batches(partitions.parts(task, self.data, NAMES, SEED), NAMES, SEED, task.batch_size)

    def train(self, count: int) -> None:
        for _ in range(count):
            rows = self.batches.draw(np.array([self.row]), np.array([self.steps]))[0]
            x, y = self.data.x_train[rows], self.data.y_train[rows].long()
            logits = self.module(x.long() if self.data.tokens else x)
            self.optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
            self.optimizer.step()
            self.steps += 1

    def restart(self) -> None:
        self.optimizer = torch_optimizer(self.module, self.task.optimizer)


def assert_equal_models(learners: Learners, plain: Plainly, start: dict[str, torch.Tensor]) -> None:
    ours = dict(learners.module(learners.matrix[plain.row]).named_parameters())
    for name, theirs in plain.module.named_parameters():
        moved = (theirs - start[name]).norm()
        assert moved > 1e-4
        assert (ours[name] - theirs).norm() <= TOLERANCE * moved + ROUNDING * theirs.norm(), name


def assert_trained_as_one_at_a_time(task: Task, kind: type[Plainly]) -> None:
    learners = Learners(task, NAMES, SEED)
    start = {k: v.detach().clone() for k, v in learners.module(learners.matrix[0]).named_parameters()}
    plain = [kind(task, learners, row) for row in range(len(NAMES))]
    # Neighbours with equal counts; rows that are not neighbours; mixed counts; neighbours again.
    for rows, counts in (
        ([0, 1, 2, 3, 4], [3] * 5),
        ([4, 0, 2], [2] * 3),
        ([3, 1, 4, 0], [1, 8, 3, 1]),
        ([1, 2], [9, 7]),
    ):
        learners.train(np.array(rows), np.array(counts))
        for row, count in zip(rows, counts, strict=True):
            plain[row].train(count)
    assert learners.steps_taken.tolist() == [one.steps for one in plain] == [6, 20, 12, 4, 8]
    for one in plain:
        assert_equal_models(learners, one, start)


def assert_reset_as_one_at_a_time(task: Task, kind: type[Plainly]) -> None:
    learners = Learners(task, NAMES, SEED)
    start = {k: v.detach().clone() for k, v in learners.module(learners.matrix[0]).named_parameters()}
    plain = [kind(task, learners, row) for row in (0, 1)]
    for again in (False, True):
        if again:
            learners.reset(1)
            plain[1].restart()
        learners.train(np.array([0, 1]), np.array([6, 6]))
        for one in plain:
            one.train(6)
    for one in plain:
        assert_equal_models(learners, one, start)


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
    assert_trained_as_one_at_a_time(task, Plainly)


@pytest.mark.parametrize("optimizer", [OPTIMIZERS["sgd, momentum"], OPTIMIZERS["adamw"]], ids=["sgd", "adamw"])
def test_a_reset_forgets_one_peers_optimizer_and_neither_its_place_in_the_data_nor_the_others(optimizer):
    task = Task(batch_size=4, optimizer=optimizer, **MODELS["linear"])
    assert_reset_as_one_at_a_time(task, Plainly)


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_who_trains_in_the_same_call_changes_no_bit_of_a_hand_written_model(model):
    task = Task(model=model, samples_per_peer=16, optimizer=OPTIMIZERS["sgd, momentum"])
    names = [f"peer {number}" for number in range(300)]  # more than one block
    together, alone = Learners(task, names, SEED), Learners(task, names, SEED)
    random = np.random.default_rng(0)
    counts = random.integers(1, 4, len(names))
    order = random.permutation(len(names))
    together.train(order, counts[order])
    for row, count in enumerate(counts):
        for _ in range(count):
            alone.train(np.array([row]), np.array([1]))
    assert np.array_equal(together.matrix, alone.matrix)


@pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])
def test_steps_on_copies_are_those_on_the_rows_themselves(model):
    """Rows without steps lie between the others, so that some calls have neighbouring rows and some have none."""
    task = Task(batch_size=8, **MODELS[model])
    rows, counts = np.array([3, 0, 4, 1]), np.array([2, 0, 3, 1])
    plain, copied = Learners(task, NAMES, SEED), Learners(task, NAMES, SEED)
    for _ in range(2):
        plain.train(rows[counts > 0], counts[counts > 0])
        copies = copied.matrix[rows]
        copied.train_copies(copies, copied.draw_steps(rows, counts), 0)
        copied.matrix[rows] = copies
    np.testing.assert_allclose(copied.matrix, plain.matrix, rtol=0, atol=1e-6)
    assert np.array_equal(copied.steps_taken, plain.steps_taken)
    assert (copied.matrix[3] != copied.matrix[0]).any()


def test_what_is_added_to_a_row_between_calls_is_trained_on():
    task = Task(batch_size=4, **MODELS["mlp"])
    learners = Learners(task, NAMES, SEED)
    learners.train(np.arange(5), ones(NAMES))
    learners.matrix[2] += 0.01
    plain = Plainly(task, learners, 2)
    plain.steps = 1
    start = {k: v.detach().clone() for k, v in plain.module.named_parameters()}
    learners.train(np.array([1, 2]), np.array([5, 5]))
    plain.train(5)
    assert_equal_models(learners, plain, start)


def test_all_peers_begin_with_the_weights_that_the_seed_decides():
    first, again, other = (Learners(Task(), NAMES, seed) for seed in (1, 1, 2))
    assert (first.matrix == first.matrix[0]).all()
    assert np.array_equal(first.matrix, again.matrix)
    assert not np.array_equal(first.matrix, other.matrix)


def test_one_more_peer_changes_no_other_peers_training():
    task = Task(samples_per_peer=16)
    few, more = Learners(task, NAMES, SEED), Learners(task, ["zoe", *NAMES], SEED)
    few.train(np.arange(5), np.full(5, 7))
    more.train(np.arange(6), np.full(6, 7))
    assert np.array_equal(few.matrix, more.matrix[1:])


def test_torchs_own_generator_stays_as_it_was():
    before = torch.get_rng_state()
    learners = Learners(Task(**MODELS["cnn"]), NAMES, SEED)
    learners.train(np.arange(5), ones(NAMES))
    assert torch.equal(before, torch.get_rng_state())


def test_the_matrix_is_what_the_swarm_works_on():
    learners = Learners(Task(batch_size=4), NAMES, SEED)
    assert learners.matrix.shape == (5, learners.elements) == (5, 4810)
    assert learners.matrix.dtype == np.float32
    assert learners.matrix.flags.c_contiguous
    assert learners.samples_per_step == 4
    assert learners.is_lazy


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_evaluation_is_the_loss_and_accuracy_on_the_held_out_samples(model):
    learners = Learners(Task(batch_size=4, **model), NAMES, SEED)
    learners.train(np.arange(5), np.arange(5))
    losses, accuracies, _ = learners.evaluate(learners.matrix[[4, 0]])
    data = datasets.load(Task(**model).dataset)
    for row, loss, accuracy in zip((4, 0), losses, accuracies, strict=True):
        with torch.no_grad():
            x = data.x_test.long() if data.tokens else data.x_test
            logits = learners.module(learners.matrix[row])(x).flatten(0, -2)
        labels = data.y_test.long().flatten()
        assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
        assert accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item(), abs=1e-6)


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


@pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])
def test_peers_learn_the_digits(model):
    learners = Learners(Task(model=model, optimizer=Optimizer(name="adamw", lr=0.005)), NAMES, SEED)
    learners.train(np.arange(5), np.full(5, 400))
    losses, accuracies, _ = learners.evaluate(learners.matrix)
    assert accuracies.min() > 0.8
    assert losses.max() < 1.0


def test_a_model_that_diverges_is_no_error():
    learners = Learners(Task(optimizer=Optimizer(lr=1e30)), NAMES, SEED)
    learners.train(np.arange(5), np.full(5, 5))
    assert not np.isfinite(learners.matrix).all()


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


JOBS = "tests.sim.jobs:"
FAULTS = {
    "gpt on pictures": (Task(model="gpt"), "'gpt' reads text"),
    "mlp on text": (Task(dataset=JOBS + "text", model="mlp"), "'mlp' cannot read text: use gpt"),
    "cnn on vectors": (Task(dataset=JOBS + "vectors", model="cnn"), "'cnn' needs pictures"),
    "natural digits": (Task(partition=Partition(kind="natural")), "names its clients.*use iid or dirichlet"),
    "dirichlet text": (
        Task(partition=Partition(kind="dirichlet", alpha=0.1), **TEXT),
        "is text: use natural or iid",
    ),
    "no module": (Task(model="no_such_module:f"), "task.model .* cannot be imported"),
    "no function": (Task(dataset=JOBS + "no_such"), "has no function no_such"),
    "no model": (Task(model=JOBS + "a_number"), "returned int: return a torch.nn.Module"),
    "no tensors": (Task(dataset=JOBS + "not_tensors"), "must return the tensors"),
    "unequal": (Task(dataset=JOBS + "unequal"), "as many labels as samples"),
    "half real": (Task(dataset=JOBS + "half_real_labels"), "of one kind or shape for training and of another"),
    "test shape": (Task(dataset=JOBS + "odd_test_shape"), r"shape \[7\] and others for the test"),
    "float64": (Task(model=JOBS + "double"), "0.weight is float64"),
    "frozen": (Task(model=JOBS + "frozen"), "1.weight is frozen"),
    "no parameters": (Task(model=JOBS + "no_parameters"), "nothing to train"),
    "classes": (Task(model=JOBS + "too_few_classes"), r"gives \[2, 3\] .* logits of \[2, 10\] are needed"),
    "inputs": (Task(model=JOBS + "too_few_inputs"), "turns 7 inputs into 10 classes, and digits has 64 and 10"),
    "no vmap": (Task(model=JOBS + "Moody"), "cannot be computed for many peers at once"),
    "too many samples": (Task(samples_per_peer=2000), "digits has 1437 training samples"),
}


@pytest.mark.parametrize(("task", "said"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_learned_is_said_in_one_sentence(task, said):
    with pytest.raises((ConfigError, DataError), match=said) as raised:
        Learners(task, NAMES, SEED)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    source = "from torch import nn\n\ndef model():\n    return nn.Linear(64, 10)\n"
    (tmp_path / "beside_the_scenario.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert Learners(Task(model="beside_the_scenario:model"), NAMES, SEED).elements == 650


def test_another_device_is_refused():
    with pytest.raises(ConfigError, match="'cpu' alone"):
        Learners(Task(), NAMES, SEED, device="cuda")
