"""Tasks other than classification, custom losses and metrics, and modules with statistics or dropout."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossip.errors import ConfigError, DataError
from sim import Scenario, simulate
from sim.learning import datasets, partitions
from sim.learning.batches import Batches
from sim.learning.dropout import Dropouts, StepKeys
from sim.learning.learners import Learners
from sim.scenario.task import Optimizer, Partition, Task
from sim.simulation import Simulation

JOBS = "tests.sim.jobs:"
NAMES = ["ada", "bob", "cyd"]
SEED = 5
REAL = {"dataset": JOBS + "curve", "model": JOBS + "regressor"}
TOKENS = {"dataset": JOBS + "tokens", "model": JOBS + "language_model"}
SMOOTHED = {"model": "mlp", "loss": JOBS + "smoothed", "samples_per_peer": 40}
NORMED = {"model": JOBS + "Normed", "samples_per_peer": 40}


def cross_entropy(output, y):
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def loss_of(task):
    if task.loss is not None:
        return lambda output, y: F.cross_entropy(output, y, label_smoothing=0.1)
    return F.mse_loss if task.dataset == JOBS + "curve" else cross_entropy


@pytest.mark.parametrize("what", [REAL, TOKENS, SMOOTHED, NORMED], ids=["real", "tokens", "own loss", "batch norm"])
@pytest.mark.parametrize(
    "optimizer", [Optimizer(lr=0.05, momentum=0.9, weight_decay=0.01), Optimizer(name="adamw", lr=0.003)], ids=str
)
def test_each_peer_trains_as_a_plain_loop_of_torch_does(what, optimizer):
    task = Task(optimizer=optimizer, **what)
    learners = Learners(task, NAMES, SEED)
    data = datasets.load(task.dataset)
    plain = [copy.deepcopy(learners.module(learners.matrix[0])).train() for _ in NAMES]
    decay, rate = task.optimizer.weight_decay, task.optimizer.lr
    torch_optimizers = [
        torch.optim.SGD(each.parameters(), lr=rate, momentum=0.9, weight_decay=decay) if optimizer.name == "sgd"
        else torch.optim.AdamW(each.parameters(), lr=rate, weight_decay=decay) for each in plain
    ]  # fmt: skip
    batches = Batches(partitions.parts(task, data, NAMES, SEED), NAMES, SEED, task.batch_size)
    for row, steps in ((0, 3), (1, 7), (2, 5)):
        for step in range(steps):
            drawn = batches.draw(np.array([row]), np.array([step]))[0]
            torch_optimizers[row].zero_grad()
            loss_of(task)(plain[row](data.x_train[drawn]), data.y_train[drawn]).backward()
            torch_optimizers[row].step()
    learners.train(np.array([0, 1]), np.array([3, 4]))
    learners.train(np.array([2, 1]), np.array([5, 3]))
    for row, each in enumerate(plain):
        ours, theirs = learners.module(learners.matrix[row]).state_dict(), each.state_dict()
        for name, value in theirs.items():
            if value.is_floating_point():
                assert torch.allclose(ours[name], value, rtol=1e-4, atol=1e-5), name
        each.eval()
        with torch.no_grad():
            output = each(data.x_test)
            expected = loss_of(task)(output, data.y_test).item()
        loss, accuracy, metric = learners.evaluate(learners.matrix[row : row + 1])
        assert loss[0] == pytest.approx(expected, rel=1e-3)
        right = float("nan") if what is REAL else (output.argmax(-1) == data.y_test).float().mean().item()
        assert accuracy[0] == pytest.approx(right, abs=0.02, nan_ok=True)
        assert np.isnan(metric[0])


def test_running_statistics_are_moved_by_steps_and_lie_behind_the_parameters():
    learners = Learners(Task(**NORMED, optimizer=Optimizer(lr=0.1, weight_decay=0.1)), NAMES, SEED)
    module = learners.module(learners.matrix[0])
    trained = sum(p.numel() for p in module.parameters())
    assert (learners.parameters, learners.elements) == (trained, trained + 2 * 4 + 2 * 10 + 1)
    before = learners.matrix.copy()
    learners.train(np.array([1]), np.array([2]))
    moved = learners.matrix[1] != before[1]
    assert (~moved[trained:]).nonzero()[0].tolist() == [0]  # "scale" comes first: no gradient moves it, nor does decay
    assert (learners.matrix[[0, 2]] == before[[0, 2]]).all()


def test_the_outer_step_is_for_parameters_and_statistics_are_averaged_plainly():
    scenario = Scenario.from_mapping(
        {"peers": 4, "duration_s": 3.0, "task": {**NORMED}, "gossip": {"mix_every_steps": 4}, "network": "lan"}
    )
    result = simulate(scenario, progress=False)
    assert result.summary["exchanges_done"] > 0
    simulation = Simulation(scenario)
    outers = [host.averager.outer_step for host in simulation.swarm.hosts]
    assert {outer.parameters for outer in outers} == {simulation.learners.parameters}


def test_what_is_dropped_out_is_the_peers_own_whoever_trains_in_the_same_call():
    task = Task(model=JOBS + "channel_dropout", samples_per_peer=40)
    together = Learners(task, NAMES, SEED)
    together.train(np.arange(3), np.array([4, 4, 4]))
    alone = Learners(task, NAMES, SEED)
    for row in (2, 0, 1):
        for _ in range(4):
            alone.train(np.array([row]), np.array([1]))
    assert np.allclose(together.matrix, alone.matrix, rtol=0, atol=1e-6)
    fewer = Learners(Task(model=JOBS + "channel_dropout", samples_per_peer=40), NAMES[:2], SEED)
    fewer.train(np.arange(2), np.array([4, 4]))
    assert np.allclose(together.matrix[:2], fewer.matrix, rtol=0, atol=1e-6)
    again = [learners.evaluate(learners.matrix)[0].tolist() for learners in (together, together)]
    assert again[0] == again[1]  # evaluation uses no dropout


def test_as_many_are_dropped_out_as_p_says_others_at_each_step_and_what_stays_is_as_much_larger():
    module = nn.Sequential(nn.Dropout(0.3))
    dropouts = Dropouts(module)
    keys = StepKeys(["ada", "bob"], 7)
    x, masks = torch.ones(50, 40), []
    for row, step in ((0, 0), (0, 1), (1, 0)):
        dropouts.begin(torch.tensor(int(keys.of(np.array([row]), np.array([step]))[0])))
        first, second = module(x), module(x)
        assert first.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
        masks += [first == 0, second == 0]
    error = (0.3 * 0.7 / x.numel()) ** 0.5
    for one in masks:
        assert abs(one.float().mean().item() - 0.3) < 4 * error
    for place, one in enumerate(masks):
        for other in masks[place + 1 :]:  # independent masks drop the same element in 9 of 100 places
            assert abs((one & other).float().mean().item() - 0.09) < 4 * (0.09 * 0.91 / x.numel()) ** 0.5
    dropouts.begin(None)
    assert (module(x) == x).all()


def test_whole_channels_go_where_the_layer_says_so():
    module = nn.Sequential(nn.Dropout2d(0.5))
    dropouts = Dropouts(module)
    dropouts.begin(torch.tensor(12345))
    kept = module(torch.ones(16, 8, 3, 3)).flatten(2)
    assert (kept == kept[..., :1]).all()
    assert 0 < (kept[..., 0] == 0).float().mean() < 1


def test_a_metric_of_ones_own_is_told_in_every_row_and_is_of_the_whole_test_set():
    scenario = Scenario.from_mapping(
        {
            "peers": 4, "duration_s": 20.0, "network": "lan", "gossip": {"mix_every_steps": 4},
            "task": {**REAL, "metric": JOBS + "largest_error"},
        }
    )  # fmt: skip
    result = simulate(scenario, progress=False)
    first, last = result.history[0], result.history[-1]
    assert last["loss_mean"] < 0.2 * first["loss_mean"]
    assert last["metric_mean"] < first["metric_mean"]
    assert last["metric_min"] <= last["metric_mean"] <= last["metric_max"]
    assert np.isnan(last["accuracy_mean"])
    assert result.summary["metric"]["average_model"] == last["metric_average_model"]
    assert "metric, mean of peers" in result.figures()
    assert "accuracy" not in str(result)
    learners = Learners(scenario.task, NAMES, SEED)
    data = datasets.load(scenario.task.dataset)
    with torch.no_grad():
        output = learners.module(learners.matrix[0]).eval()(data.x_test)
    assert learners.evaluate(learners.matrix[:1])[2][0] == pytest.approx((output - data.y_test).abs().max().item())


def test_a_language_model_of_ones_own_learns_in_a_swarm():
    scenario = Scenario.from_mapping(
        {
            "peers": 3, "duration_s": 25.0, "network": "lan", "gossip": {"mix_every_steps": 8},
            "task": {
                **TOKENS, "metric": JOBS + "perplexity",
                "optimizer": {"name": "adamw", "lr": 0.02},
            },
        }
    )  # fmt: skip
    result = simulate(scenario, progress=False)
    first, last = result.history[0], result.history[-1]
    assert last["metric_mean"] == pytest.approx(np.exp(last["loss_mean"]), rel=0.3)
    assert last["accuracy_mean"] > 0.25 > 0.05 > first["accuracy_mean"]  # chance is one in 300


def test_a_named_model_meets_real_numbers_too_of_one_dimension_or_several():
    for dataset in ("curve", "one_number"):
        learners = Learners(Task(dataset=JOBS + dataset, model="mlp", hidden=8), NAMES, SEED)
        before = learners.evaluate(learners.matrix)[0].mean()
        learners.train(np.arange(3), np.full(3, 60))
        assert learners.evaluate(learners.matrix)[0].mean() < 0.5 * before


FAULTS = {
    "mse of classes": (Task(loss="mse"), "'mse' needs real numbers"),
    "cross-entropy of numbers": (Task(**REAL, loss="cross-entropy"), "needs class numbers"),
    "shape": (Task(dataset=JOBS + "one_number", model=JOBS + "regressor"), r"gives \[2, 2\] .* \[2\] is needed"),
    "no mean": (Task(**REAL, loss=JOBS + "no_mean"), r"task.loss gives \[2, 2\], where one number is needed"),
    "metric": (Task(**TOKENS, metric=JOBS + "largest_error"), "function of task.metric fails"),
    "no function": (Task(loss=JOBS + "nowhere"), "task.loss .* has no function nowhere"),
    "tokens": (Task(dataset=JOBS + "tokens", model="gpt"), "'gpt' reads bytes.* tokens of 256"),
    "dirichlet": (Task(**REAL, partition=Partition(kind="dirichlet", alpha=1.0)), "needs one class a sample"),
    "momentum": (Task(model=JOBS + "counting_norm"), "BatchNorm1d of momentum = None.*as 0.1"),
    "one sample": (Task(**NORMED, batch_size=1), "Expected more than 1 value per channel"),
    "alpha": (Task(model=JOBS + "alpha_dropout"), "AlphaDropout of p = 0.5.*use Dropout, Dropout1d"),
    "functional": (Task(model=JOBS + "Functional"), "random numbers in nn.Dropout alone"),
}


@pytest.mark.parametrize(("task", "said"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_is_refused_in_one_sentence(task, said):
    with pytest.raises((ConfigError, DataError), match=said):
        Learners(task, NAMES, SEED)


def test_statistics_are_beyond_the_fast_level_and_a_loss_is_beyond_averaging():
    scenario = Scenario.from_mapping(
        {
            "peers": 8, "rounds": 2, "fidelity": "exchange", "task": NORMED, "membership": {"mode": "ideal"},
            "network": {"loss": 0.0},
        }
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"has buffers.*fidelity = 'exchange'"):
        simulate(scenario, progress=False)
    with pytest.raises(ConfigError, match=r"task.metric .* averaging trains nothing"):
        Scenario.from_mapping({"rounds": 2, "task": {"dataset": "averaging", "metric": JOBS + "perplexity"}})


def test_what_the_page_says_of_ones_own_data_model_and_losses_is_played(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()
    section = page.partition("### Data, models and losses of your own")[2]
    toml, python = (section.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("toml", "python"))
    (tmp_path / "study.py").write_text(python)
    (tmp_path / "study.toml").write_text('name = "study"\npeers = 4\nduration_s = 10\n' + toml)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "study", raising=False)
    result = simulate(Scenario.from_toml("study.toml"), progress=False)
    first, last = result.history[0], result.history[-1]
    assert last["exchanges_done"] > 0
    assert last["loss_mean"] < first["loss_mean"]
    assert np.isfinite([last["metric_mean"], last["metric_average_model"]]).all()
