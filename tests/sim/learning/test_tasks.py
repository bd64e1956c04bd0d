"""Tasks other than classification, custom losses and metrics, and modules with statistics or dropout."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossip.errors import ConfigError, DataError
from sim import Scenario, simulate
from sim.learning import datasets
from sim.learning.dropout import Dropouts, StepKeys
from sim.learning.learners import Learners
from sim.scenario.task import Optimizer, Partition, Task
from sim.simulation import Simulation
from tests.sim.learning.alone import NAMES, SEED, Alone, OneStepAtATime, assert_trained_as_one_at_a_time

JOBS = "tests.sim.jobs:"
REAL = {"dataset": JOBS + "curve", "model": JOBS + "regressor"}
TOKENS = {"dataset": JOBS + "tokens", "model": JOBS + "language_model"}
SMOOTHED = {"model": "mlp", "loss": JOBS + "smoothed", "samples_per_peer": 40}
NORMED = {"model": JOBS + "Normed", "samples_per_peer": 40}
OWN = {
    "real": REAL,
    "one real number": {"dataset": JOBS + "one_number", "model": "mlp", "hidden": 8},
    "tokens": TOKENS,
    "own loss": SMOOTHED,
    "batch norm": NORMED,
}


class OfAnyLoss(Alone):
    """A peer alone whose task may be one of real numbers or have a loss of its own."""

    def loss(self, output, y):
        if self.task.loss is not None:
            return F.cross_entropy(output, y, label_smoothing=0.1)
        return F.mse_loss(output.reshape(y.shape), y) if y.is_floating_point() else super().loss(output, y)


@pytest.mark.parametrize("what", OWN.values(), ids=OWN)
@pytest.mark.parametrize(
    "optimizer", [Optimizer(lr=0.05, momentum=0.9, weight_decay=0.01), Optimizer(name="adamw", lr=0.003)], ids=str
)
def test_each_peer_trains_and_is_evaluated_as_a_plain_loop_of_torch_does(what, optimizer):
    task = Task(optimizer=optimizer, **what)
    assert_trained_as_one_at_a_time(task, OfAnyLoss, tolerance=1e-4)
    learners = Learners(task, NAMES, SEED)
    learners.train(np.array([1]), np.array([7]))
    loss, accuracy, metric = learners.evaluate(learners.matrix[1:2])
    expected_loss, expected_accuracy = OfAnyLoss(task, learners, 1).evaluate()
    assert loss[0] == pytest.approx(expected_loss, rel=1e-3)
    assert accuracy[0] == pytest.approx(expected_accuracy, abs=0.02, nan_ok=True)
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
    together, alone = Learners(task, NAMES, SEED), OneStepAtATime(task, NAMES, SEED)
    together.train(np.arange(3), np.array([4, 4, 4]))
    alone.train(np.array([2, 0, 1]), np.array([4, 4, 4]))
    assert np.allclose(together.matrix, alone.matrix, rtol=0, atol=1e-6)
    fewer = Learners(task, NAMES[:2], SEED)
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


VECTORS = JOBS + "vectors"
TEXT = JOBS + "text"
FAULTS = {
    "gpt on pictures": (Task(model="gpt"), "'gpt' reads text"),
    "mlp on text": (Task(dataset=TEXT, model="mlp"), "'mlp' cannot read text: use gpt"),
    "cnn on vectors": (Task(dataset=VECTORS, model="cnn"), "'cnn' needs pictures"),
    "natural digits": (Task(partition=Partition(kind="natural")), "names its clients.*use iid or dirichlet"),
    "dirichlet text": (
        Task(dataset=TEXT, model="gpt", partition=Partition(kind="dirichlet", alpha=0.1)),
        "is text: use natural or iid",
    ),
    "no module": (Task(model="no_such_module:f"), "task.model .* cannot be imported"),
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
    with pytest.raises((ConfigError, DataError), match=said) as raised:
        Learners(task, NAMES, SEED)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


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
