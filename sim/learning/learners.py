"""The models of all peers, stacked in one matrix, and their training in batched calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from gossip.arithmetic.mixing import is_finite
from gossip.arithmetic.moments import MomentForm, Role
from gossip.config import Config
from gossip.errors import ConfigError
from sim.arrays import F32, F64, I64
from sim.learning import datasets, models, partitions
from sim.learning.batches import Batches
from sim.learning.corrections import Corrections
from sim.learning.dropout import StepKeys
from sim.learning.modules import StackedModule
from sim.learning.objectives import Objective
from sim.learning.optimizer.moments import MomentPlan
from sim.learning.optimizer.steppers import SGD, AdamW, Clipped, Muon, schedule, stepper
from sim.learning.perceptrons import StackedLinear, linear_layers
from sim.seeds import derive, generator

if TYPE_CHECKING:
    from sim.scenario.task import Task

DRAWN_AT_ONCE = 4096  # Rows whose batches are drawn in one call; with batches of 8, a step takes 256 KiB of indices.


Stack = StackedLinear | StackedModule  # Models of one kind, one per row.


class Learners:
    """The learners of the peers ``names``, in that order: ``names[row]``'s model is ``matrix[row]``.

    ``matrix``, float32 (peers, elements), C-contiguous, is live: a change of a row between two calls changes that
    peer's model. All models start with the same weights, which depend on ``seed``. With the data set "averaging" each
    starts with its own vector from N(0, 1), and nothing trains. A peer's samples and batches depend on (seed, name).

    Batching changes no result: every model's arithmetic is that of torch.optim on one module, up to float32 rounding.
    Raises ConfigError or DataError for a task that cannot be run.
    """

    is_lazy = True
    """Accepts steps that have begun but not ended, so that one call can take many."""

    matrix: F32
    elements: int
    parameters: int
    """Number of leading elements that are trained; the others are buffers, which are averaged plainly."""
    samples_per_step: int
    steps_taken: I64
    """Steps taken by each row, shape (peers,)."""

    corrections: Corrections | None = None
    """The peers' drift corrections, if ``config`` uses them."""

    moment_plan: MomentPlan | None = None
    """The optimizer's moments, if ``config`` mixes them."""

    def __init__(self, task: Task, names: Sequence[str], seed: int, config: Config | None = None) -> None:
        peers = len(names)
        self.samples_per_step = task.batch_size
        self.steps_taken = np.zeros(peers, np.int64)
        self._ages = np.zeros(peers, np.int64)  # Steps since the optimizer's state was zero, (peers,).
        self._rates = schedule(task.optimizer)
        self._stack: Stack | None = None  # None if nothing trains.
        if task.dataset == "averaging":
            self.elements = self.parameters = task.elements
            self.matrix = np.empty((peers, self.elements), np.float32)
            for row, name in zip(self.matrix, names, strict=True):
                row[:] = generator(seed, name, "vector").standard_normal(self.elements, np.float32)
            return
        dataset = datasets.load(task.dataset)
        torch_seed = int.from_bytes(derive(seed, "", "model")[:8], "little") >> 1  # torch takes 63 bits.
        self._module = models.build(task, dataset, torch_seed)
        self._optimizer = stepper(task.optimizer, self._module)
        self._stack = stack_of(self._module, task, dataset)
        self._keys = StepKeys(names, seed) if self._stack.has_dropout else None
        self._batches = Batches(partitions.parts(task, dataset, names, seed), names, seed, task.batch_size)
        self.elements, self.parameters = self._stack.elements, self._stack.parameters
        self.matrix = np.empty((peers, self.elements), np.float32)
        self.matrix[:] = self._stack.initial()
        if config is not None and config.kappa:
            self.corrections = Corrections(peers, self.parameters, config)
        self._moments = [np.zeros((peers, self.parameters), np.float32) for _ in range(self._optimizer.moments)]
        if config is not None and config.mix_state != "off":
            self.moment_plan = self._plan_moments(config.mix_state == "on")
        at_once = min(self._stack.models_at_once, peers)
        # Work arrays for a block of rows: gradients, and copies of rows that are not adjacent.
        self._gradients = np.empty((at_once, self.parameters), np.float32)
        self._copies = [np.empty((at_once, live.shape[1]), np.float32) for live in (self.matrix, *self._moments)]

    def _plan_moments(self, mixes_all: bool) -> MomentPlan | None:
        """Return the moments of this optimizer, by the names of torch's state; None if they are not mixed."""
        optimizer = self._optimizer.inner if isinstance(self._optimizer, Clipped) else self._optimizer
        named: dict[str, tuple[Role, int]] = {}  # The role of each moment, and its array.
        if isinstance(optimizer, AdamW | Muon):
            named = {"exp_avg": ("first", 0), "exp_avg_sq": ("second", 1)}
        if isinstance(optimizer, Muon) or (mixes_all and isinstance(optimizer, SGD) and optimizer.moments):
            named["momentum_buffer"] = ("plain", 0)
        if not named:
            return None
        form = MomentForm(tuple(named), tuple(role for role, _ in named.values()), self.parameters)
        matrices = {matrix.piece.start for matrix in optimizer.matrices} if isinstance(optimizer, Muon) else set()
        tensors, start = [], 0
        for parameter in self._module.parameters():
            is_plain = start in matrices or "exp_avg" not in named
            places = tuple(place if (role == "plain") is is_plain else None for role, place in named.values())
            tensors.append((start, start + parameter.numel(), places))
            start += parameter.numel()
        return MomentPlan(form, self._moments, tensors)

    # -- training in place ---------------------------------------------------------------------------------------
    def train(self, rows: I64, counts: I64) -> None:
        """Take the next ``counts[i]`` steps of row ``rows[i]``, in place. ``rows`` are unique, in any order.

        The cost is that of sum(counts) steps. Rows that are not adjacent are also copied twice.
        """
        self.steps_taken[rows] += counts
        if self._stack is None:
            return
        # Sort by falling number of steps, so that the rows that still train are always a prefix.
        order = np.lexsort((rows, -counts))
        rows, counts = rows[order], counts[order]
        with np.errstate(all="ignore"):  # A diverging model is a result, not an error.
            for start in range(0, len(rows), DRAWN_AT_ONCE):
                self._train_sorted(rows[start : start + DRAWN_AT_ONCE], counts[start : start + DRAWN_AT_ONCE])

    def _train_sorted(self, rows: I64, counts: I64) -> None:
        """Train rows whose counts are in falling order; a block takes all of its steps while it is in cache."""
        assert self._stack is not None
        first = self.steps_taken[rows] - counts
        samples: list[I64] = []  # One array per step, (rows that take the step, batch).
        for step in range(int(counts[0]) if len(counts) else 0):
            remaining = int(np.searchsorted(-counts, -step))  # The number of rows with counts > step.
            samples.append(self._batches.draw(rows[:remaining], first[:remaining] + step))
        size = self._stack.models_at_once
        for start in range(0, len(rows), size):
            stop = start + size
            self._train_block(rows[start:stop], counts[start:stop], [drawn[start:stop] for drawn in samples])

    def _train_block(self, rows: I64, counts: I64, samples: list[I64]) -> None:
        """Train one block: in place if its rows are adjacent, else on copies that are written back."""
        assert self._stack is not None
        live = (self.matrix, *self._moments)  # The rows of all peers: models, then the optimizer's state.
        count, first_row = len(rows), int(rows[0])
        are_adjacent = int(rows[-1]) - first_row == count - 1 and bool((np.diff(rows) == 1).all())
        if are_adjacent:
            block = [whole[first_row : first_row + count] for whole in live]
        else:
            block = [copy[:count] for copy in self._copies]
            for whole, copy in zip(live, block, strict=True):
                whole.take(rows, axis=0, out=copy, mode="clip")
        model_rows = block[0]
        block_models, *block_moments = [torch.from_numpy(part)[:, : self.parameters] for part in block]
        block_gradients = torch.from_numpy(self._gradients[:count])
        ages, taken = self._ages[rows], self.steps_taken[rows] - counts
        for step in range(int(counts[0])):
            remaining = len(samples[step])  # The number of rows that take this step; they are the first ones.
            steps = taken[:remaining] + step
            keys = None if self._keys is None else self._keys.of(rows[:remaining], steps)
            self._stack.gradients(model_rows[:remaining], samples[step], self._gradients[:remaining], keys)
            models, gradients, moments = block_models, block_gradients, block_moments
            if remaining < count:
                models, gradients = block_models[:remaining], block_gradients[:remaining]
                moments = [moment[:remaining] for moment in block_moments]
            self._optimizer.step(models, gradients, moments, ages[:remaining] + step, self._rates(steps))
            if self.corrections is not None:  # These models have just taken a step after ``steps`` earlier ones.
                rates = self._rate_of_each(steps)
                self.corrections.apply(model_rows[:remaining], rows[:remaining], steps + 1, rates)
        self._ages[rows] = ages + counts
        if not are_adjacent:
            for whole, copy in zip(live, block, strict=True):
                whole[rows] = copy

    @property
    def models_at_once(self) -> int:
        """Return the most models of one call; 0 if nothing trains."""
        return 0 if self._stack is None else len(self._gradients)

    def _rate_of_each(self, taken: I64) -> F64:
        """Return the learning rate of each model after ``taken`` steps, shape (models,)."""
        return np.broadcast_to(np.asarray(self._rates(taken), np.float64), taken.shape)

    # -- exchanges and restarts ----------------------------------------------------------------------------------
    def learn_correction(
        self, rows: I64, shifts: F32, credits: F64, own_sq: F64, interval_steps: I64 | None = None
    ) -> None:
        """Let the drift corrections of unique rows learn from exchanges; see :meth:`Corrections.learn`."""
        if self.corrections is not None:
            rates = self._rate_of_each(np.maximum(self.steps_taken[rows] - 1, 0))
            self.corrections.learn(rows, shifts, credits, own_sq, rates, interval_steps)

    def on_weights_replaced(self, row: int) -> None:
        """Reset the optimizer after a row's weights were replaced, if its state would spoil them: it is not finite."""
        if self.corrections is not None:
            self.corrections.reset(row)
        if self._stack is not None and not all(is_finite(moment[row]) for moment in self._moments):
            self.reset(row)

    def reset(self, row: int) -> None:
        """Reset the optimizer's state of a peer that restarts.

        Its batches and its learning rate schedule continue. Otherwise a peer that was briefly gone would take large
        steps among models that are nearly converged.
        """
        self._ages[row] = 0
        if self.corrections is not None:
            self.corrections.reset(row)
        for moment in self._moments if self._stack else ():
            moment[row] = 0

    # -- evaluation ----------------------------------------------------------------------------------------------
    def evaluate(self, vectors: F32) -> tuple[F64, F64, F64]:
        """Return mean loss, accuracy and the task's metric on the held-out samples, each of shape (k,).

        Cross-entropy is in nats; for text, loss and accuracy are per predicted byte. A missing value is NaN, such as
        the accuracy if y holds real numbers. For "averaging" the loss is half the mean square.

        Args:
            vectors: Models, float32 (k, elements).
        """
        if self._stack is None:
            unknown = np.full(len(vectors), np.nan)
            return 0.5 * np.square(vectors, dtype=np.float64).mean(1), unknown, unknown
        return self._stack.evaluate(vectors)

    def module(self, vector: F32) -> nn.Module:
        """Return an ordinary module with the weights of a vector (elements,); it is always the same object."""
        if self._stack is None:
            raise ConfigError("task.dataset = 'averaging' has no model: its vectors are all there is.")
        self._module.load_state_dict(self._stack.state_dict(vector), strict=False)  # Other buffers keep their values.
        return self._module


def stack_of(module: nn.Module, task: Task, dataset: datasets.Dataset) -> Stack:
    """Return the fastest stack of models that can train the module on this task."""
    objective, layers = Objective(task, dataset), linear_layers(module)
    is_plain = objective.classifies and objective.metric is None and dataset.y_train.dim() == 1
    # Muon needs matrices without biases, which those of StackedLinear contain.
    if layers is not None and is_plain and task.optimizer.name != "muon":
        return StackedLinear(module, layers, dataset, task.batch_size, task.model)
    return StackedModule(module, dataset, objective, task.batch_size, task.model)
