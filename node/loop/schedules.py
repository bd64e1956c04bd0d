"""Learning rates that follow the swarm's progress, whatever the steps of one node: it may start late, or again."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau

from gossip.errors import ConfigError, checked_whole
from node.data.sampler import Samplers

T = TypeVar("T")

OWN_CHANGES = 32  # Steps in a row at each of which a scheduler of the loop's own has changed the rate.
OWN_STEPS = (
    "A scheduler of torch counts this node's steps, which are a part of those of one process, so that the run ends "
    "in the middle of the schedule: give it to node.schedule, and leave calls of its step out."
)
ENDED_PART = 0.4  # Of the largest rate: schedules of a whole run end lower, and half of one higher.
OWN_RATE = (
    "The learning rate still changed at each step when the epochs of the swarm ended, and was {:.0%} of its largest. "
    "This node's steps are a part of those of one process: compute the rate from node.progress(), or use node.schedule."
)


class Schedules:
    """The schedules of one node.

    Args:
        optimizers: The node's optimizers, whose rates a function scales.
        progress: Returns the progress of a run of so many samples; of the running epochs if that is None.
    """

    def __init__(self, optimizers: Sequence[Optimizer], progress: Callable[[int | None], float]) -> None:
        self.optimizers, self.progress = optimizers, progress
        self.all: list[tuple[Factor | SchedulerSteps, int | None]] = []  # With the samples of the run.
        self.rates: list[Any] = []  # At the last step in epochs.
        self.largest = 0.0  # The largest rate of the first optimizer in epochs.
        self.own_changes = 0  # Steps in a row that have changed them.
        self.is_told = False
        self.is_read = False  # The program has read the progress since the last step: its rates may follow that.

    def add(self, schedule: Any, total: int | None, steps: int | None) -> None:
        """Let a torch scheduler, or a function of the progress, follow the swarm, in place of its optimizers' last."""
        schedule = getattr(schedule, "scheduler", schedule)  # Accelerate wraps it.
        if isinstance(schedule, LRScheduler):
            made: Factor | SchedulerSteps = SchedulerSteps(schedule, steps)
        elif callable(schedule):
            made = Factor(schedule, self.optimizers)
        else:
            raise ConfigError(
                f"A {type(schedule).__name__} is no schedule: give a scheduler of torch.optim, or a function from the "
                "run's progress (0 to 1) to a factor of the learning rates."
            )
        for earlier, _ in self.all:
            earlier.optimizers = [one for one in earlier.optimizers if not any(one is new for new in made.optimizers)]
        self.all = [*[entry for entry in self.all if entry[0].optimizers], (made, total)]

    def advance(self, must_know: bool = True) -> None:
        """Set all rates for the present progress; without ``must_know`` only those of runs whose samples are given."""
        for schedule, total in self.all:
            if must_know or total is not None:
                schedule.advance(self.progress(total))

    def look_at_own_steps(self, samplers: Samplers) -> None:
        """Tell once if the loop steps a scheduler itself where others train too. Each step in epochs calls it."""
        if not self.is_told:
            rates = [one.param_groups[0]["lr"] for one in self.optimizers]
            pairs = zip(rates, self.rates, strict=False)
            has_changed = not self.is_read and any(isinstance(rate, float) and rate != last for rate, last in pairs)
            self.is_read = False
            self.rates, self.own_changes = rates, self.own_changes + 1 if has_changed else 0
            self.largest = max([self.largest, *[rate for rate in rates[:1] if isinstance(rate, float)]])
            if any(hasattr(one.step, "_wrapped_by_lr_sched") for one in self.optimizers):
                self.tell_of_own_steps(samplers, OWN_STEPS)

    def tell_of_own_steps(self, samplers: Samplers, sentence: str) -> None:
        if self.own_changes >= OWN_CHANGES and not self.is_told and len(samplers.sharers.members()) > 1:
            self.is_told = True
            samplers.notify("rate", sentence)

    def followed(self, epochs: Iterator[T], samplers: Samplers) -> Iterator[T]:
        """Yield epochs, at each of which the rates are set: those of a late node are right in its first step."""
        for epoch in epochs:
            self.advance()
            yield epoch
        if not self.all and self.largest and self.rates[0] > ENDED_PART * self.largest:
            self.tell_of_own_steps(samplers, OWN_RATE.format(self.rates[0] / self.largest))


class Factor:
    """A schedule that scales each learning rate by a function of the progress.

    Args:
        function: Takes the progress, 0 to 1, and returns the factor.
        optimizers: The optimizers. Their rates at this moment, or "initial_lr" if a group has it, count as 1.

    Raises:
        ConfigError: There are no optimizers.
    """

    def __init__(self, function: Callable[[float], float], optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise ConfigError("Node has no torch optimizer to schedule: read node.progress() in the loop instead.")
        self.function, self.optimizers = function, optimizers
        self.base_rates = {one: [base_rate(group) for group in one.param_groups] for one in optimizers}
        self.progress = 0.0

    def advance(self, progress: float) -> None:
        """Set the rates for this progress of the run, 0 to 1. A smaller one than before changes nothing."""
        self.progress = max(self.progress, progress)
        factor = float(self.function(self.progress))
        if not 0 <= factor < math.inf:
            raise ConfigError(f"The schedule's factor at progress {self.progress:.3f} is {factor}: return at least 0.")
        for optimizer in self.optimizers:
            rates = self.base_rates[optimizer]
            rates += [base_rate(group) for group in optimizer.param_groups[len(rates) :]]  # Groups added since.
            for group, rate in zip(optimizer.param_groups, rates, strict=False):
                set_rate(group, rate * factor)


class SchedulerSteps:
    """A torch scheduler that was made for ``steps`` steps of one process, at the step of the swarm's progress.

    A node makes as many steps of the scheduler in a whole run as one process would. A late one makes many at once.

    Args:
        scheduler: The scheduler. Steps by others count: only what is missing is added.
        steps: Its steps in a whole run; None: what it says itself.

    Raises:
        ConfigError: The steps are unknown, or the scheduler follows something else.
    """

    def __init__(self, scheduler: LRScheduler, steps: int | None) -> None:
        kind = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                f"{kind} follows a figure and not the progress: call its step with node.reduce({{...}}) instead."
            )
        known = steps_of(scheduler) if steps is None else steps
        if known is None:
            raise ConfigError(
                f"{kind} does not say for how many steps it was made: give node.schedule steps=, how often one process "
                "would call its step() in the whole run (the epochs, or the batches of all epochs)."
            )
        self.steps = checked_whole("steps", known, "give a whole number of at least 1.")
        self.last = last_step(scheduler, self.steps)
        self.scheduler = scheduler
        self.counter = scheduler._schedulers[0] if isinstance(scheduler, ChainedScheduler) else scheduler
        self.optimizers: Sequence[Optimizer] = [self.counter.optimizer]

    def advance(self, progress: float) -> None:
        position = min(int(progress * self.steps + 1e-6), self.last)
        if position <= self.counter.last_epoch:
            return
        for group, rate in zip(self.counter.optimizer.param_groups, self.scheduler.get_last_lr(), strict=False):
            set_rate(group, rate)  # A checkpoint may have brought another, from which some schedulers would go on.
        with warnings.catch_warnings():
            if not self.counter.last_epoch:  # torch warns of steps before the optimizer's first.
                warnings.simplefilter("ignore", UserWarning)
            while self.counter.last_epoch < position:
                self.scheduler.step()


def steps_of(scheduler: Any) -> int | None:
    """Return the number of steps for which a scheduler was made; None if it does not say."""
    match scheduler:
        case OneCycleLR():
            return int(scheduler.total_steps)
        case lr_scheduler.CosineAnnealingLR():
            return int(scheduler.T_max)
        case lr_scheduler.PolynomialLR():
            return int(scheduler.total_iters)
        case lr_scheduler.SequentialLR():
            last = steps_of(scheduler._schedulers[-1])
            return None if last is None else int(scheduler._milestones[-1]) + last
        case ChainedScheduler():
            return max(filter(None, map(steps_of, scheduler._schedulers)), default=None)
        case lr_scheduler.LambdaLR():  # The schedules of transformers are functions with their numbers.
            given = [function.keywords for function in scheduler.lr_lambdas if isinstance(function, partial)]
            return next((int(known["num_training_steps"]) for known in given if "num_training_steps" in known), None)
    return None


def last_step(scheduler: Any, steps: int) -> int:
    """Return the last of ``steps`` steps. OneCycleLR ends at the last batch, and has no rate after it."""
    match scheduler:
        case OneCycleLR():
            return min(steps, scheduler.total_steps - 1)
        case lr_scheduler.SequentialLR():
            start = int(scheduler._milestones[-1])
            return start + last_step(scheduler._schedulers[-1], steps - start)
        case ChainedScheduler():
            return min(last_step(one, steps) for one in scheduler._schedulers)
    return steps


def base_rate(group: dict[str, Any]) -> float:
    """Return the rate of a parameter group that counts as 1, and keep it where torch's schedulers do."""
    return float(group.setdefault("initial_lr", float(group["lr"])))


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a group's rate, in place if it is a tensor, which a captured graph reads."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
