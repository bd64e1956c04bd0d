"""Training of many copies of an arbitrary module at once: torch.func's vmap over stacked parameters."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gossip.errors import ConfigError
from sim.arrays import F32, F64, I64
from sim.learning.dropout import KINDS, Dropouts

if TYPE_CHECKING:
    from sim.learning.datasets import Dataset
    from sim.learning.objectives import Function, Objective

# Small models are up to ten times faster than in a loop, with no more gain beyond 64 models in a call. Large models
# gain nothing, and activations take memory in proportion to the models.
MAX_MODELS = 64
MAX_ELEMENTS = 1 << 23  # Parameters in one call: 32 MiB, and as much for their gradients.
TESTED_AT_ONCE = 256  # Held-out samples in one forward pass.


class StackedModule:
    """Copies of one module, each a row of a matrix.

    A row contains the parameters in the module's order, and then its persistent floating-point buffers, such as
    BatchNorm's running statistics. Training moves the buffers without a gradient, and exchanges average them as on a
    node.

    The gradients are exact: each loss depends only on its own parameters, so the gradient of the sum has the single
    gradients as its parts. Raises ConfigError for a module that cannot be stacked. That is one with random numbers
    outside Dropout, with frozen parameters or parameters other than float32, or with an output that the loss rejects.
    """

    def __init__(
        self, module: nn.Module, dataset: Dataset, objective: Objective, batch_size: int, name: str
    ) -> None:  # fmt: skip
        self._dataset, self._objective, self._name = dataset, objective, name
        self._check_supported(module)
        try:
            self._module = copy.deepcopy(module).train()  # Its dropout layers will be replaced.
        except Exception as error:  # A user's module may contain anything.
            raise ConfigError(f"task.model = {name!r} cannot be copied ({_first_line(error)}).") from error
        self._dropouts = Dropouts(self._module)
        self.has_dropout = self._dropouts.exist  # A step needs a key for dropout.
        state = self._module.state_dict(keep_vars=True)
        parameters = dict(self._module.named_parameters())
        self._buffers = [
            name for name, buffer in self._module.named_buffers() if name in state and buffer.is_floating_point()
        ]
        named = parameters | {name: state[name] for name in self._buffers}
        self._shapes = {name: tensor.shape for name, tensor in named.items()}
        sizes = [tensor.numel() for tensor in named.values()]
        ends = np.cumsum(sizes).tolist()
        self._pieces = {name: slice(end - size, end) for name, size, end in zip(named, sizes, ends, strict=True)}
        self.parameters, self.elements = ends[len(parameters) - 1], ends[-1]  # Parameters come before buffers.
        self._initial = torch.cat([tensor.detach().flatten() for tensor in named.values()]).numpy().copy()
        self.models_at_once = min(max(1, MAX_ELEMENTS // self.elements), MAX_MODELS)  # In one call of gradients().
        self._losses = vmap(self._loss)
        self._try_step(batch_size)

    def initial(self) -> F32:
        """Return the module's own weights as a row, float32 (elements,)."""
        return self._initial

    def state_dict(self, row: F32) -> dict[str, torch.Tensor]:
        """Convert a row to the module's parameters and buffers by name."""
        return {name: stacked[0] for name, stacked in self._tensors(torch.from_numpy(row[None].copy())).items()}

    def gradients(self, models: F32, samples: I64, out: F32, keys: I64 | None = None) -> None:
        """Compute the gradients of each model's loss over its batch, for at most ``models_at_once`` models.

        Args:
            models: The models, float32 (models, elements). Their buffers are updated in place.
            samples: Rows of the training set, int64 (models, batch).
            out: Receives the gradients, float32 (models, parameters).
            keys: Keys for dropout, int64 (models,), or None for no dropout.
        """
        rows = torch.from_numpy(samples)
        x, y = self._dataset.x_train[rows], self._targets(self._dataset.y_train[rows])
        # Plain autograd around vmap is a fifth faster than vmap around grad, with the same gradients.
        stacked = self._tensors(torch.from_numpy(models))
        # A batched call may copy a buffer that is not contiguous, and update only the copy.
        for name in self._buffers:
            stacked[name] = stacked[name].clone(memory_format=torch.contiguous_format)
        trained = [tensor.requires_grad_() for name, tensor in stacked.items() if name not in self._buffers]
        dropout_keys = () if keys is None else (torch.from_numpy(keys),)
        with sdpa_kernel(SDPBackend.MATH):  # The fused attention kernels have no vmap rule.
            gradients = torch.autograd.grad(self._losses(stacked, x, y, *dropout_keys).sum(), trained)
        out_tensor, models_tensor = torch.from_numpy(out), torch.from_numpy(models)
        for piece, gradient in zip(self._pieces.values(), gradients, strict=False):
            out_tensor[:, piece] = gradient.flatten(1)
        for name in self._buffers:
            models_tensor[:, self._pieces[name]] = stacked[name].flatten(1)

    @torch.no_grad()
    def evaluate(self, models: F32) -> tuple[F64, F64, F64]:
        """Return mean loss, accuracy and the task's metric on the held-out samples, each (models,); NaN if missing.

        The module is in evaluation mode. Models are evaluated one by one, because a whole test set is a large call
        already.
        """
        scores = np.array([self._scores(self.state_dict(row)) for row in models]).reshape(-1, 3)
        return scores[:, 0], scores[:, 1], scores[:, 2]

    def _scores(self, tensors: dict[str, torch.Tensor]) -> tuple[float, float, float]:
        """Return loss, accuracy and metric of one model."""
        objective, x_test, y_test = self._objective, self._dataset.x_test, self._targets(self._dataset.y_test)
        loss, correct, outputs = 0.0, 0.0, list[torch.Tensor]()
        self._module.eval()
        try:
            for start in range(0, len(x_test), TESTED_AT_ONCE):
                piece = slice(start, start + TESTED_AT_ONCE)
                output = self._output(tensors, x_test[piece])
                if self._classifies:
                    logits, labels = output.flatten(0, -2), y_test[piece].flatten()
                    correct += (logits.argmax(1) == labels).sum().item()
                    if objective.classifies:
                        loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                if not objective.classifies or objective.metric is not None:
                    outputs.append(output)
        finally:
            self._module.train()
        accuracy = correct / y_test.numel() if self._classifies else float("nan")
        loss /= y_test.numel()
        if outputs:
            output = torch.cat(outputs)  # All at once, as a user's function need not be a mean over samples.
            loss = loss if objective.classifies else float(objective.loss(output, y_test))
            metric = float("nan") if objective.metric is None else float(objective.metric(output, y_test))
            return loss, accuracy, metric
        return loss, accuracy, float("nan")

    def _targets(self, y: torch.Tensor) -> torch.Tensor:
        return y.long() if self._dataset.labelled else y

    def _output(self, tensors: dict[str, torch.Tensor], x: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        self._dropouts.begin(key)
        return functional_call(self._module, tensors, (x.long() if self._dataset.tokens else x,))

    def _loss(
        self, tensors: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, key: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._objective.loss(self._output(tensors, x, key), y)

    def _tensors(self, models: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views (models, ...) of the parameters and buffers of stacked models, by name."""
        count = len(models)
        return {name: models[:, piece].view(count, *self._shapes[name]) for name, piece in self._pieces.items()}

    def _check_supported(self, module: nn.Module) -> None:
        """Raise ConfigError for a module whose parameters, buffers or random numbers cannot be stacked."""
        where = f"task.model = {self._name!r}"
        if not any(True for _ in module.parameters()):
            raise ConfigError(f"{where} has no parameters: there is nothing to train.")
        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32 or not parameter.requires_grad:
                state = "frozen" if parameter.dtype == torch.float32 else str(parameter.dtype).removeprefix("torch.")
                raise ConfigError(f"{where}: parameter {name} is {state}, and all must be float32 that is trained.")
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and buffer.dtype != torch.float32:
                kind = str(buffer.dtype).removeprefix("torch.")
                raise ConfigError(f"{where}: buffer {name} is {kind}, and all of floating point must be float32.")
        for layer in module.modules():
            kind = type(layer).__name__
            if getattr(layer, "track_running_stats", False) and getattr(layer, "momentum", 0.1) is None:
                raise ConfigError(
                    f"{where} has a {kind} of momentum = None, which averages by the number of batches that each peer "
                    "has seen: give it a momentum, as 0.1."
                )
            if isinstance(layer, nn.modules.dropout._DropoutNd) and type(layer) not in KINDS and layer.p > 0:
                raise ConfigError(
                    f"{where} has a {kind} of p = {layer.p}, whose random numbers no peer's seed decides: use "
                    f"{', '.join(each.__name__ for each in KINDS)}, or set p = 0."
                )

    def _try_step(self, batch_size: int) -> None:
        """Take one step of one model, so that a module that cannot be stacked fails before the run."""
        where, dataset, objective = f"task.model = {self._name!r}", self._dataset, self._objective
        x, y = dataset.x_train[:2], self._targets(dataset.y_train[:2])
        try:
            with torch.no_grad():
                output = self._output(self.state_dict(self._initial), x)
        except Exception as error:  # A user's module may raise anything.
            raise ConfigError(f"{where} fails on samples of {list(x.shape[1:])} ({_first_line(error)}).") from error
        if not isinstance(output, torch.Tensor):
            raise ConfigError(f"{where} gives {type(output).__name__} for a batch of 2, where a tensor is needed.")
        shape, logits = list(output.shape), [*y.shape, dataset.outputs]
        # The outputs may have more classes than the data.
        self._classifies = dataset.labelled and shape[:-1] == logits[:-1] and shape[-1:] >= logits[-1:]
        if objective.classifies and not self._classifies:
            raise ConfigError(f"{where} gives {shape} for a batch of 2, where logits of {logits} are needed.")
        if not objective.is_custom and not objective.classifies and shape not in (list(y.shape), [*y.shape, 1]):
            raise ConfigError(f"{where} gives {shape} for a batch of 2, where {list(y.shape)} is needed, as y has it.")
        for key, function in (("loss", objective.loss), ("metric", objective.metric)):
            self._try_function(key, function, output, y)
        row = self._initial[None].copy()
        keys = np.zeros(1, np.int64) if self.has_dropout else None
        try:
            drawn, out = np.zeros((1, batch_size), np.int64), np.empty((1, self.parameters), np.float32)
            self.gradients(row, drawn, out, keys)
        except Exception as error:
            raise ConfigError(
                f"{where} cannot be computed for many peers at once ({_first_line(error)}): "
                "use layers and a loss that torch.func.vmap supports, and random numbers in nn.Dropout alone."
            ) from error

    def _try_function(self, key: str, function: Function | None, output: torch.Tensor, y: torch.Tensor) -> None:
        """Raise ConfigError if the loss or the metric fails on an output, or gives no number."""
        if function is None:
            return
        try:
            value = function(output, y)
        except Exception as error:
            wrong = _first_line(error)
            raise ConfigError(
                f"The function of task.{key} fails on {list(output.shape)} and {list(y.shape)} ({wrong})."
            ) from error
        is_number = (
            value.numel() == 1 if isinstance(value, torch.Tensor) else key == "metric" and isinstance(value, float)
        )
        if not is_number:
            returned = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(
                f"The function of task.{key} gives {returned}, where one number is needed: a mean over the samples."
            )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
