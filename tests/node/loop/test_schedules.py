"""Learning rates follow the swarm's progress: at each progress the rate that a plain loop of one process has there."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, TensorDataset

from gossip.errors import ConfigError
from node import Node
from node.loop.schedules import Schedules

STEPS = 100  # Of one process, in all of the run.
TOTAL = 100 * STEPS

MAKERS = {
    "one cycle": (lambda sgd: lr.OneCycleLR(sgd, 0.4, total_steps=STEPS), None),
    "cosine": (lambda sgd: lr.CosineAnnealingLR(sgd, STEPS), None),
    "polynomial": (lambda sgd: lr.PolynomialLR(sgd, STEPS, power=2.0), None),
    "steps": (lambda sgd: lr.StepLR(sgd, 30), np.int64(STEPS)),
    "milestones": (lambda sgd: lr.MultiStepLR(sgd, [10, 80]), 1e2),
    "exponential": (lambda sgd: lr.ExponentialLR(sgd, 0.97), STEPS),
    "lambda": (lambda sgd: lr.LambdaLR(sgd, lambda step: min(1.0, (step + 1) / 20)), STEPS),
    "restarts": (lambda sgd: lr.CosineAnnealingWarmRestarts(sgd, 25), STEPS),
    "warm-up": (
        lambda sgd: lr.SequentialLR(
            sgd, [lr.LinearLR(sgd, 0.1, total_iters=20), lr.CosineAnnealingLR(sgd, STEPS - 20)], milestones=[20]
        ),
        None,
    ),
    "warm-up to a cycle": (
        lambda sgd: lr.SequentialLR(
            sgd,
            [lr.LinearLR(sgd, 0.1, total_iters=20), lr.OneCycleLR(sgd, 0.4, STEPS - 20, anneal_strategy="linear")],
            milestones=[20],
        ),
        None,
    ),
    "chained cycle": (
        lambda sgd: lr.ChainedScheduler([lr.ConstantLR(sgd, 0.5, 10), lr.OneCycleLR(sgd, 0.4, total_steps=STEPS)]),
        None,
    ),
    "chained": (lambda sgd: lr.ChainedScheduler([lr.ConstantLR(sgd, 0.5, 10), lr.CosineAnnealingLR(sgd, STEPS)]), None),
}


def optimizer(rate=0.1):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate, momentum=0.9)


def rates_of(sgd):
    return [group["lr"] for group in sgd.param_groups]


def plain_rates(make, steps=STEPS):
    """Return the rate with which a plain loop takes each of its steps."""
    sgd = optimizer()
    scheduler, rates = make(sgd), []
    for _ in range(steps):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    return rates


class Run:
    """A run whose progress a test sets."""

    def __init__(self, make, steps):
        self.sgd, self.samples = optimizer(), 0
        self.schedules = Schedules([self.sgd], lambda total: min(1.0, self.samples / TOTAL))
        self.schedules.add(make(self.sgd), TOTAL, steps)

    def rate_at(self, samples):
        self.samples = samples
        self.schedules.advance()
        rate = self.sgd.param_groups[0]["lr"]
        self.sgd.step()
        return rate


each_scheduler = pytest.mark.parametrize(("make", "steps"), MAKERS.values(), ids=MAKERS)


@each_scheduler
def test_the_rate_is_that_of_a_plain_loop_at_every_step_of_the_run(make, steps):
    run, want = Run(make, steps), plain_rates(make)
    assert [run.rate_at(100 * step) for step in range(STEPS)] == pytest.approx(want, rel=1e-9, abs=1e-12)


@each_scheduler
def test_a_late_or_resumed_node_has_at_once_the_rate_of_the_others(make, steps):
    want = plain_rates(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 37, 99):
            run = Run(make, steps)
            run.sgd.param_groups[0]["lr"] = 77.0  # A checkpoint's rate, loaded after the scheduler was made.
            assert run.rate_at(100 * step + 50) == pytest.approx(want[step], rel=1e-9, abs=1e-12)


@each_scheduler
def test_a_schedule_goes_neither_back_nor_beyond_its_end(make, steps):
    run = Run(make, steps)
    late = run.rate_at(9000)
    assert run.rate_at(100) == late, "the count falls when the nodes settle"
    end = run.rate_at(TOTAL)
    assert end >= 0
    assert run.rate_at(7 * TOTAL) == end
    for _ in range(STEPS):
        assert run.rate_at(8 * TOTAL) == end


def test_a_function_scales_the_rates_of_all_groups_and_optimizers():
    first, second = optimizer(0.1), optimizer(torch.tensor(4.0))
    first.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5})
    kept = second.param_groups[0]["lr"]
    schedules = Schedules([first, second], lambda total: 0.25)
    schedules.add(lambda progress: 1 - progress, None, None)
    for _ in range(2):  # twice makes no difference
        schedules.add(lambda progress: 1 - progress, None, None)
        schedules.advance()
        assert rates_of(first) == pytest.approx([0.075, 0.375])
        assert rates_of(second)[0] is kept
        assert float(kept) == 3.0


def test_a_later_schedule_takes_the_place_of_an_earlier_one_for_its_optimizers_alone():
    first, second = optimizer(0.1), optimizer(0.1)
    schedules = Schedules((first, second), lambda total: 0.25)
    schedules.add(lambda progress: 0.5, None, None)
    schedules.add(lr.StepLR(first, 10, gamma=0.1), None, 40)
    for _ in range(3):
        schedules.advance()
        assert rates_of(first) == pytest.approx([0.01])
        assert rates_of(second) == pytest.approx([0.05])
    schedules.add(lambda progress: 2.0, None, None)
    schedules.advance()
    assert rates_of(first) == rates_of(second) == pytest.approx([0.2])
    assert len(schedules.all) == 1


@pytest.mark.parametrize(
    ("schedule", "options", "said"),
    [
        (lambda sgd: lr.StepLR(sgd, 30), {}, "StepLR does not say for how many steps"),
        (lambda sgd: lr.StepLR(sgd, 30), {"steps": 0}, "steps is 0"),
        (lr.ReduceLROnPlateau, {}, "node.reduce"),
        (lambda sgd: 0.1, {}, "A float is no schedule"),
        (lambda sgd: lambda progress: -1.0, {}, "factor at progress 0.000 is -1"),
        (lambda sgd: lambda progress: 1.0, {"total": -5}, "total is -5"),
        (lambda sgd: lambda progress: 1.0, {"total": "many"}, "total is 'many'"),
    ],
    ids=["unknown steps", "no steps", "plateau", "no schedule", "no factor", "negative", "text"],
)
def test_a_schedule_that_cannot_follow_is_refused_in_a_sentence(quick, schedule, options, said):
    model = nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with Node(model, sgd, config=quick) as node, pytest.raises(ConfigError, match=said) as caught:
        node.schedule(schedule(sgd), **({"total": 100} | options))
    assert "\n" not in str(caught.value)


def test_without_a_total_or_an_optimizer_a_sentence_says_what_to_do(quick):
    model = nn.Linear(4, 2)
    with Node(model, torch.optim.SGD(model.parameters(), lr=0.1), config=quick) as node:
        node.schedule(lambda progress: 1.0)
        with pytest.raises(ConfigError, match="give total=, or loop over"):
            node.step()
        with pytest.raises(ConfigError, match="give total="):
            node.progress()
        assert node.progress(4) == 0.25
    with Node(model, config=quick) as node, pytest.raises(ConfigError, match="no torch optimizer to schedule"):
        node.schedule(lambda progress: 1.0)


def test_in_a_loop_of_epochs_one_cycle_ends_with_the_run_and_a_second_life_goes_on(quick, tmp_path):
    loader, seen, progress = DataLoader(TensorDataset(torch.zeros(96, 4)), 16), [], []

    def one_cycle(sgd):
        return lr.OneCycleLR(sgd, 0.4, epochs=4, steps_per_epoch=len(loader))

    for stop_at in (15, 10**6):
        model = nn.Linear(4, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with Node(model, sgd, config=quick) as node:
            node.schedule(one_cycle(sgd))
            if (tmp_path / "run.safetensors").exists():
                node.load(tmp_path / "run")
            for _ in node.epochs(4, loader):
                for _ in node.loader(loader):
                    seen.append(sgd.param_groups[0]["lr"])
                    sgd.step()
                    node.step()
                    progress.append(node.progress())
                    if len(seen) == stop_at:
                        break
                if len(seen) == stop_at:
                    break
            node.save(tmp_path / "run")
    assert seen == pytest.approx(plain_rates(one_cycle, 24))
    assert progress == pytest.approx([(step + 1) / 24 for step in range(24)])


def told_in_epochs(quick, sgd, members, after_step):
    """Train an epoch of 64 steps with ``after_step(number, node)`` after each, and return what is told of the rate."""
    loader = DataLoader(TensorDataset(torch.zeros(256, 4)), 4)
    with Node({"w": sgd.param_groups[0]["params"][0]}, sgd, config=quick) as node:
        samplers = node._share.samplers
        samplers.sharers = replace(samplers.sharers, members=lambda: [samplers.sharers.me()] * members)
        for _ in node.epochs(1, loader):
            for number, _ in enumerate(node.loader(loader)):
                sgd.step()
                after_step(number, node)
                node.step()
        return [str(event) for event in node.history() if event.kind == "rate"]


@pytest.mark.parametrize(("every", "members", "is_told"), [(1, 2, True), (1, 1, False), (8, 2, False)])
def test_a_scheduler_that_the_loop_steps_itself_is_told_once_where_others_train_too(every, members, is_told, quick):
    sgd = optimizer()
    scheduler = lr.OneCycleLR(sgd, 0.4, total_steps=STEPS)
    told = told_in_epochs(quick, sgd, members, lambda number, _: number % every or scheduler.step())
    assert ["counts this node's steps" in sentence for sentence in told] == [True] * is_told


def test_a_scheduler_whose_rate_reads_the_progress_is_told_nothing(quick):
    sgd, progress = optimizer(), [0.0]
    scheduler = lr.LambdaLR(sgd, lambda _: 1 - progress[0])

    def after_step(_, node):
        progress[0] = node.progress()
        scheduler.step()

    assert not told_in_epochs(quick, sgd, 2, after_step)


@pytest.mark.parametrize(
    ("end", "members", "is_told"), [(0.5, 2, True), (0.5, 1, False), (0.1, 2, False), (1.0, 2, False)]
)
def test_a_rate_of_the_programs_own_that_is_half_way_when_the_epochs_end_is_told(end, members, is_told, quick):
    sgd = optimizer()

    def after_step(number, _):
        sgd.param_groups[0]["lr"] = 0.1 * (1 - (1 - end) * number / 63)

    told = told_in_epochs(quick, sgd, members, after_step)
    assert ["and was 50% of its largest" in sentence for sentence in told] == [True] * is_told


def test_a_finished_run_is_at_its_end(quick):
    with Node({"w": torch.zeros(4)}, config=quick) as node:
        node.step(samples=5)
        node.finish(0)
        assert node.progress(10**6) == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("loss", value) for value in (torch.ones(3), "0.5", [1.0], object(), torch.tensor(1j))],
        *[("lr", value) for value in ("0.1", float("nan"), -1.0, torch.ones(2))],
    ],
    ids=range(9),
)
def test_a_loss_or_a_rate_that_is_no_number_is_refused_in_a_sentence(quick, name, value):
    with Node({"w": torch.zeros(4)}, config=quick) as node, pytest.raises(ConfigError, match=f"{name} is ") as caught:
        node.step(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loss", [None, 1, 0.5, torch.tensor(2.0), torch.ones(1, 1), torch.tensor(3), float("nan")])
def test_a_scalar_of_any_kind_is_a_loss(quick, loss):
    with Node({"w": torch.zeros(4)}, config=quick) as node:
        node.step(loss=loss)
