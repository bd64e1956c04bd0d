"""One peer alone, as an ordinary module that torch trains: the reference for models that are trained together."""

import copy
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from sim.learning import datasets, partitions
from sim.learning.batches import Batches
from sim.learning.learners import Learners
from sim.scenario.task import Optimizer, Task

SEED = 5
NAMES = ["ada", "bob", "cyd", "dan", "eve"]
# float32 sums of another order. After up to 20 steps a tensor's error is below 1e-5 of the distance that training has
# moved it, plus 1e-6 of its own length: eight roundings of what is stored.
TOLERANCE, ROUNDING = 1e-5, 1e-6


def torch_optimizer(module: nn.Module, spec: Optimizer) -> torch.optim.Optimizer:
    common = {"params": module.parameters(), "lr": spec.lr, "weight_decay": spec.weight_decay}
    if spec.name == "adamw":
        return torch.optim.AdamW(**common, betas=spec.betas)
    return torch.optim.SGD(**common, momentum=spec.momentum)


def torch_rates(spec: Optimizer) -> list[float]:
    """Return the rate of each step by torch's schedulers, to the one at which the schedule ends."""
    if spec.schedule == "constant":
        return [spec.lr]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=spec.lr)
    warmup, rates = spec.warmup_steps, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its own deprecated argument.
        scheduler = CosineAnnealingLR(optimizer, T_max=spec.schedule_steps - warmup, eta_min=spec.min_lr)
        if warmup:
            rising = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
            scheduler = SequentialLR(optimizer, [rising, scheduler], milestones=[warmup])
        for _ in range(spec.schedule_steps + 1):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
    return rates


def whole(values: torch.Tensor) -> torch.Tensor:
    """Return classes and tokens as torch's layers want them, and real numbers as they are."""
    return values if values.is_floating_point() else values.long()


class Alone:
    """One peer with the batches that it has among the others, and rates by the number of its own steps.

    Subclasses have another optimizer or loss.
    """

    def __init__(self, task: Task, learners: Learners, row: int) -> None:
        self.task, self.row, self.steps = task, row, 0
        self.module = copy.deepcopy(learners.module(learners.matrix[row])).train()
        self.data = datasets.load(task.dataset)
        self.batches = Batches(partitions.parts(task, self.data, NAMES, SEED), NAMES, SEED, task.batch_size)
        self.rates = torch_rates(task.optimizer)
        self.restart()

    def make_optimizer(self) -> Any:
        return torch_optimizer(self.module, self.task.optimizer)

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, -2), y.flatten())

    def restart(self) -> None:
        """Begin with a new optimizer, whose state is zero. The steps and the rates go on."""
        self.optimizer = self.make_optimizer()
        self.highest = [group["lr"] for group in self.optimizer.param_groups]

    def train(self, count: int) -> None:
        for _ in range(count):
            share = self.rates[min(self.steps, len(self.rates) - 1)] / self.task.optimizer.lr
            for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
                group["lr"] = share * highest
            rows = self.batches.draw(np.array([self.row]), np.array([self.steps]))[0]
            x, y = whole(self.data.x_train[rows]), whole(self.data.y_train[rows])
            self.module.zero_grad()
            self.loss(self.module(x), y).backward()
            if self.task.optimizer.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.module.parameters(), self.task.optimizer.clip_norm)
            self.optimizer.step()
            self.steps += 1

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return the loss and the accuracy on the held-out samples, NaN for one of real numbers."""
        y = whole(self.data.y_test)
        output = self.module.eval()(whole(self.data.x_test))
        right = (output.argmax(-1) == y).float().mean() if not y.is_floating_point() else torch.tensor(torch.nan)
        return self.loss(output, y).item(), right.item()


class OneStepAtATime(Learners):
    """Learners that play each step by itself, once it has ended and its result is needed."""

    is_lazy = False

    def train(self, rows: np.ndarray, counts: np.ndarray) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            for _ in range(count):
                Learners.train(self, np.array([row]), np.array([1]))


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters and of the statistics that training moves."""
    return {name: value.clone() for name, value in module.state_dict().items() if value.is_floating_point()}


def assert_equal_models(
    learners: Learners, alone: Alone, start: dict[str, torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    ours, theirs = values_of(learners.module(learners.matrix[alone.row])), values_of(alone.module)
    for name, _ in alone.module.named_parameters():
        assert (theirs[name] - start[name]).norm() > 1e-4
    for name, value in theirs.items():
        moved = (value - start[name]).norm()
        assert (ours[name] - value).norm() <= tolerance * moved + ROUNDING * value.norm(), name


def assert_trained_as_one_at_a_time(task: Task, kind: type[Alone] = Alone, tolerance: float = TOLERANCE) -> None:
    learners = Learners(task, NAMES, SEED)
    start = values_of(learners.module(learners.matrix[0]))
    alone = [kind(task, learners, row) for row in range(len(NAMES))]
    # Neighbours with equal counts; rows that are not neighbours; mixed counts; neighbours again.
    for rows, counts in (
        ([0, 1, 2, 3, 4], [3] * 5),
        ([4, 0, 2], [2] * 3),
        ([3, 1, 4, 0], [1, 8, 3, 1]),
        ([1, 2], [9, 7]),
    ):
        learners.train(np.array(rows), np.array(counts))
        for row, count in zip(rows, counts, strict=True):
            alone[row].train(count)
    assert learners.steps_taken.tolist() == [one.steps for one in alone] == [6, 20, 12, 4, 8]
    for one in alone:
        assert_equal_models(learners, one, start, tolerance)


def assert_reset_as_one_at_a_time(task: Task, kind: type[Alone] = Alone, tolerance: float = TOLERANCE) -> None:
    learners = Learners(task, NAMES, SEED)
    start = values_of(learners.module(learners.matrix[0]))
    alone = [kind(task, learners, row) for row in (0, 1)]
    for again in (False, True):
        if again:
            learners.reset(1)
            alone[1].restart()
        learners.train(np.array([0, 1]), np.array([6, 6]))
        for one in alone:
            one.train(6)
    for one in alone:
        assert_equal_models(learners, one, start, tolerance)
