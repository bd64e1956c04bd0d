"""Any other module, many models at once: torch.func's vmap over stacked parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gossip.errors import ConfigError

if TYPE_CHECKING:
    from sim.learning.datasets import Dataset

__all__ = ["StackedModule"]

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

# Small models gain up to about 64 in one call, ten times over a loop; large ones gain nothing, and activations take
# memory in proportion.
MOST_MODELS = 64
MOST_ELEMENTS = 1 << 23  # parameters of the models in one call: 32 MiB, and their gradients as much
TESTED_AT_ONCE = 256  # held-out samples


class StackedModule:
    """Copies of one module, each a row of a matrix: its parameters one after the other, in the module's order.

    Exact, since a sum of losses of which each depends on its own parameters has their gradients as its parts. Raises
    ConfigError for a module that cannot be stacked: one that keeps statistics, draws random numbers, has parameters
    other than float32, or whose output is not logits.
    """

    def __init__(self, module: nn.Module, dataset: Dataset, name: str) -> None:
        self._module, self._dataset, self._name = module.train(), dataset, name
        self._refuse()
        named = dict(module.named_parameters())
        self._names, self._shapes = list(named), [parameter.shape for parameter in named.values()]
        sizes = [parameter.numel() for parameter in named.values()]
        ends = np.cumsum(sizes).tolist()
        self._pieces = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self.elements = ends[-1]
        self.models_at_once = min(max(1, MOST_ELEMENTS // self.elements), MOST_MODELS)
        self._losses = vmap(self._loss)
        self._try()

    def initial(self) -> F32:
        """The weights that the module came with, as a row."""
        whole: F32 = nn.utils.parameters_to_vector(self._module.parameters()).detach().numpy().copy()
        return whole

    def state_dict(self, row: F32) -> dict[str, torch.Tensor]:
        """A row as the module's parameters by name."""
        return {name: t[0] for name, t in self._tensors(torch.from_numpy(row[None].copy())).items()}

    def gradients(self, models: F32, samples: I64, out: F32) -> None:
        """Gradients of each model's mean cross-entropy over its batch: models and ``out`` (models, elements), samples
        (models, batch) rows of the training set; at most ``models_at_once``."""
        rows = torch.from_numpy(samples)
        x, y = self._dataset.x_train[rows], self._dataset.y_train[rows].long()
        # Plain autograd around vmap, not vmap around grad: a fifth faster, and its gradients are the same.
        stacked = {name: tensor.requires_grad_() for name, tensor in self._tensors(torch.from_numpy(models)).items()}
        with sdpa_kernel(SDPBackend.MATH):  # the fused attentions have no batching rule
            gradients = torch.autograd.grad(self._losses(stacked, x, y).sum(), list(stacked.values()))
        whole = torch.from_numpy(out)
        for piece, gradient in zip(self._pieces, gradients, strict=True):
            whole[:, piece] = gradient.flatten(1)

    @torch.no_grad()
    def evaluate(self, models: F32) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean cross-entropy and accuracy of each on the held-out samples: one model at a time, because a whole test
        set is a large call already. Modules are in training mode, having nothing that differs in the other."""
        losses, accuracies = np.zeros(len(models)), np.zeros(len(models))
        x_test, y_test = self._dataset.x_test, self._dataset.y_test.long()
        pieces = [slice(start, start + TESTED_AT_ONCE) for start in range(0, len(x_test), TESTED_AT_ONCE)]
        for index, row in enumerate(models):
            tensors = self.state_dict(row)
            for piece in pieces:
                logits, labels = self._logits(tensors, x_test[piece]), y_test[piece].flatten()
                losses[index] += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                accuracies[index] += (logits.argmax(1) == labels).sum().item()
        return losses / y_test.numel(), accuracies / y_test.numel()

    def _logits(self, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """(predictions, classes): one for each sample, or for each place of each."""
        x = x.long() if self._dataset.tokens else x
        output: torch.Tensor = functional_call(self._module, tensors, (x,))
        return output.flatten(0, -2)

    def _loss(self, tensors: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self._logits(tensors, x), y.flatten())

    def _tensors(self, models: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views (models, ...) of the parameters of stacked models."""
        count = len(models)
        return {
            name: models[:, piece].view(count, *shape)
            for name, piece, shape in zip(self._names, self._pieces, self._shapes, strict=True)
        }

    def _refuse(self) -> None:
        where = f"task.model = {self._name!r}"
        if not any(True for _ in self._module.parameters()):
            raise ConfigError(f"{where} has no parameters: there is nothing to train.")
        for name, parameter in self._module.named_parameters():
            if parameter.dtype != torch.float32 or not parameter.requires_grad:
                state = "frozen" if parameter.dtype == torch.float32 else str(parameter.dtype).removeprefix("torch.")
                raise ConfigError(f"{where}: parameter {name} is {state}, and all must be float32 that is trained.")
        for module in self._module.modules():
            kind = type(module).__name__
            if getattr(module, "track_running_stats", False):
                raise ConfigError(
                    f"{where} has a {kind}, whose running statistics are no parameters and would not be averaged: "
                    "use GroupNorm or LayerNorm."
                )
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise ConfigError(
                    f"{where} has a {kind} of p = {module.p}, whose random numbers no peer's seed decides: set p = 0."
                )

    def _try(self) -> None:
        """One step of one model, so that what cannot be stacked is said before the run."""
        where, dataset = f"task.model = {self._name!r}", self._dataset
        x, y = dataset.x_train[:2], dataset.y_train[:2]
        shape = (*y.shape, dataset.classes)
        try:
            with torch.no_grad():
                logits = self._module(x.long() if dataset.tokens else x)
        except Exception as error:  # a module may raise anything
            raise ConfigError(f"{where} fails on samples of {list(x.shape[1:])} ({_first_line(error)}).") from error
        if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != y.shape or logits.shape[-1] < dataset.classes:
            given = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise ConfigError(f"{where} gives {given} for a batch of 2, where logits of {list(shape)} are needed.")
        row = self.initial()[None]
        try:
            self.gradients(row, np.zeros((1, 2), np.int64), np.empty_like(row))
        except Exception as error:
            raise ConfigError(
                f"{where} cannot be computed for many peers at once ({_first_line(error)}): "
                "use layers that torch.func.vmap supports, without random numbers."
            ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
