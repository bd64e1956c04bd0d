"""The loss and the metric of a scenario: built-in ones by name, or the user's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from gossip.errors import ConfigError
from sim import plugins

if TYPE_CHECKING:
    from sim.learning.datasets import Dataset
    from sim.scenario.task import Task

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(the module's output for a batch, y) -> one number, a mean over the samples."""

CROSS_ENTROPY, SQUARED_ERROR = "cross-entropy", "mse"


class Objective:
    """The loss and the metric of a task on its data.

    By default ``loss`` is cross-entropy for class numbers and the mean squared error for real numbers. ``metric`` is
    the task's function, or None. Raises ConfigError for a loss that does not fit the data, and for a function that is
    not found.
    """

    def __init__(self, task: Task, dataset: Dataset) -> None:
        named = task.loss or (CROSS_ENTROPY if dataset.labelled else SQUARED_ERROR)
        self.classifies = named == CROSS_ENTROPY  # The module's outputs must then be logits of all classes.
        if self.classifies and not dataset.labelled:
            raise ConfigError(
                f"task.loss = 'cross-entropy' needs class numbers, and y of {dataset.name} are real numbers: "
                "use 'mse' or a function of your own."
            )
        if named == SQUARED_ERROR and dataset.labelled:
            raise ConfigError(
                f"task.loss = 'mse' needs real numbers, and y of {dataset.name} are class numbers: "
                "use 'cross-entropy', a function of your own, or y as float32."
            )
        custom = None if named in (CROSS_ENTROPY, SQUARED_ERROR) else plugins.find(named, "task.loss")
        self.is_custom = custom is not None
        self.loss: Function = custom or (cross_entropy if self.classifies else squared_error)
        self.metric: Function | None = None if task.metric is None else plugins.find(task.metric, "task.metric")


def cross_entropy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits (..., classes) and class numbers (...)."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def squared_error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of outputs (...) or (..., 1) and targets y (...).

    The reshape prevents broadcasting, which would compare every sample with every other.
    """
    return F.mse_loss(output.reshape(y.shape), y)
