"""A falling learning rate: torch's arithmetic, by each peer's own steps."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from gossip.errors import ConfigError
from sim.learning.learners import Learners
from sim.learning.optimizer.steppers import Cosine, schedule
from sim.scenario.scenario import MembershipSpec, Optimizer, Scenario, Task
from tests.sim.learning.test_exactness import assert_exact_with_churn
from tests.sim.learning.test_learners import (
    NAMES,
    SEED,
    Plainly,
    assert_reset_as_one_at_a_time,
    assert_trained_as_one_at_a_time,
    torch_optimizer,
)
from tests.sim.scenarios import played, small

COSINE = {"schedule": "cosine", "schedule_steps": 16, "warmup_steps": 3, "min_lr": 0.0005}
OPTIMIZERS = {
    "sgd": Optimizer(lr=0.05, **COSINE),
    "sgd, momentum, decay": Optimizer(lr=0.05, momentum=0.9, weight_decay=0.01, **COSINE),
    "adamw": Optimizer(name="adamw", lr=0.003, weight_decay=0.1, betas=(0.8, 0.99), **COSINE),
}


def torch_schedule(optimizer: torch.optim.Optimizer, spec: Optimizer) -> LRScheduler:
    warmup, steps = spec.warmup_steps, spec.schedule_steps
    falling = CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=spec.min_lr)
    if not warmup:
        return falling
    rising = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its own deprecated argument
        return SequentialLR(optimizer, [rising, falling], milestones=[warmup])


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("lowest", [0.0, 0.02])
def test_the_rates_are_those_of_torch_until_its_cosine_ends(warmup, lowest):
    spec = Optimizer(lr=0.1, schedule="cosine", schedule_steps=40, warmup_steps=warmup, min_lr=lowest)
    theirs = []
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=spec.lr)
    scheduler = torch_schedule(optimizer, spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(41):
            theirs.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
    ours = schedule(spec)(np.arange(41))
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    assert ours.argmax() == warmup
    assert ours[warmup] == 0.1


def test_behind_its_end_the_rate_stays_where_it_is():
    rates = Cosine(0.1, 40, 0, 0.02)(np.array([39, 40, 41, 80, 1_000_000]))
    assert rates[0] > 0.02
    assert rates[1:].tolist() == [0.02] * 4


def test_a_constant_rate_is_one_number_for_all():
    assert schedule(Optimizer(lr=0.3))(np.array([0, 5])) == 0.3


class Scheduled(Plainly):
    """One peer alone, with torch's scheduler."""

    def __init__(self, task: Task, learners: Learners, row: int) -> None:
        super().__init__(task, learners, row)
        self.scheduler = torch_schedule(self.optimizer, task.optimizer)

    def train(self, count: int) -> None:
        for _ in range(count):
            super().train(1)
            if self.steps < self.task.optimizer.schedule_steps:
                self.scheduler.step()
            else:
                self.set_rate(self.task.optimizer.min_lr)

    def set_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def restart(self) -> None:
        """Restart as a node does: its momentum is lost, its scheduler was kept."""
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer = torch_optimizer(self.module, self.task.optimizer)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = self.task.optimizer.lr
        self.scheduler.optimizer = self.optimizer
        for inner in getattr(self.scheduler, "_schedulers", []):
            inner.optimizer = self.optimizer
        self.set_rate(lr)


@pytest.mark.filterwarnings("ignore:.*scheduler.*:UserWarning", "ignore:.*epoch parameter.*:UserWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_stacked_models_of_any_age_follow_it_as_torch_does_one_at_a_time(model, optimizer):
    task = Task(batch_size=4, optimizer=optimizer, model=model, samples_per_peer=40)
    assert_trained_as_one_at_a_time(task, Scheduled)  # one of them beyond the end


@pytest.mark.filterwarnings("ignore:.*scheduler.*:UserWarning", "ignore:.*epoch parameter.*:UserWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_who_comes_again_goes_on_at_the_rate_that_it_had(optimizer):
    task = Task(batch_size=4, optimizer=optimizer, model="linear", samples_per_peer=40)
    assert_reset_as_one_at_a_time(task, Scheduled)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_rate_that_has_come_to_zero_moves_nothing(name):
    optimizer = Optimizer(name=name, lr=0.01, weight_decay=0.1, schedule="cosine", schedule_steps=5)
    learners = Learners(Task(optimizer=optimizer, samples_per_peer=40), NAMES, SEED)
    learners.train(np.arange(5), np.full(5, 5))
    before = learners.matrix.copy()
    learners.train(np.arange(5), np.full(5, 3))
    assert np.isfinite(before).all()
    assert np.abs(learners.matrix - before).max() < 1e-25


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_cosine_that_ends_where_it_began_is_a_constant_rate(name):
    constant = Optimizer(name=name, lr=0.01, weight_decay=0.1)
    flat = Optimizer(name=name, lr=0.01, weight_decay=0.1, schedule="cosine", schedule_steps=5, min_lr=0.01)
    one, other = (Learners(Task(optimizer=each, samples_per_peer=40), NAMES, SEED) for each in (constant, flat))
    for learners in (one, other):
        learners.train(np.arange(5), np.full(5, 10))
    assert np.allclose(one.matrix, other.matrix, rtol=1e-5, atol=1e-6)
    assert not np.allclose(one.matrix, Learners(Task(samples_per_peer=40), NAMES, SEED).matrix, atol=1e-3)


def test_batched_steps_are_exact_where_peers_come_and_go(monkeypatch):
    optimizer = Optimizer(name="adamw", lr=0.003, schedule="cosine", schedule_steps=150, warmup_steps=10)
    task = Task(model="mlp", samples_per_peer=20, batch_size=4, optimizer=optimizer)
    scenario = small(task=task, membership=MembershipSpec(mode="ideal"))
    assert_exact_with_churn(scenario, monkeypatch)


def test_peers_come_together_as_the_rate_falls():
    """Only local steps drive models apart between two mixes."""
    apart = {}
    for name, more in (("constant", {}), ("cosine", {"schedule": "cosine", "schedule_steps": 80})):
        run = played(
            small(task=Task(model="mlp", samples_per_peer=20, batch_size=4, optimizer=Optimizer(lr=0.1, **more)))
        )
        matrix = run.learners.matrix
        apart[name] = np.linalg.norm(matrix - matrix.mean(0))
    assert apart["cosine"] < 0.5 * apart["constant"]


# -- the scenario's table ----------------------------------------------------------------------------------------------
def from_table(**optimizer) -> Scenario:
    return Scenario.from_mapping({"duration_s": 1.0, "task": {"optimizer": optimizer}})


def test_a_scenario_names_it_and_is_written_as_it_was_read():
    table = {"name": "adamw", "lr": 0.003, "schedule": "cosine", "schedule_steps": 3000, "warmup_steps": 100}
    scenario = from_table(**table)
    assert scenario.task.optimizer == Optimizer(**table)
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    assert scenario.replace(**{"task.optimizer.min_lr": 0.0003}).task.optimizer == Optimizer(**table, min_lr=0.0003)


def test_a_constant_rate_is_written_without_the_keys_of_another():
    table = from_table(lr=0.2).to_mapping()["task"]["optimizer"]
    assert table["schedule"] == "constant"
    assert not {"schedule_steps", "warmup_steps", "min_lr"} & set(table)


TEN = {"schedule": "cosine", "schedule_steps": 10}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"schedule": "linear"}, "schedule = 'linear' cannot work: it must be one of constant, cosine"),
        ({"schedule": "cosine"}, "schedule_steps is missing: .* as 3000"),
        (TEN | {"schedule_steps": 0}, "schedule_steps = 0 cannot work: .* 1 to 1,000,000"),
        (TEN | {"schedule_steps": 10.5}, "schedule_steps = 10.5 cannot work: it must be a whole number"),
        (TEN | {"warmup_steps": 10}, "warmup_steps = 10 cannot work: .* below schedule_steps = 10"),
        (TEN | {"warmup_steps": -1}, "warmup_steps = -1 cannot work: .* from 0"),
        (TEN | {"min_lr": 0.2}, "min_lr = 0.2 cannot work: it must be from 0 to lr = 0.1"),
        (TEN | {"min_lr": -0.1}, "min_lr = -0.1 cannot work"),
        (TEN | {"quasi_global": 0.9}, "schedule = 'cosine' cannot work: it must be constant with quasi_global"),
        ({"schedule_steps": 10}, "schedule_steps = 10 cannot work: .* or schedule = 'cosine'"),
        ({"schedule_steps": 0}, "schedule_steps = 0 cannot work: .* or schedule = 'cosine'"),
        ({"warmup_steps": 10}, "warmup_steps = 10 cannot work: .* or schedule = 'cosine'"),
        ({"min_lr": 0.01}, "min_lr = 0.01 cannot work: .* or schedule = 'cosine'"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(table, said):
    with pytest.raises(ConfigError, match=f"task.optimizer.{said}") as raised:
        from_table(**table)
    assert "\n" not in str(raised.value)
