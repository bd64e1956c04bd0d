"""Batched optimizers with torch.optim's arithmetic: SGD, AdamW and Muon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sim.arrays import F64, I64

if TYPE_CHECKING:
    from sim.scenario.task import Optimizer

Rates = float | F64
"""One learning rate for all models, or one for each, float64 (models,)."""

EPS = 1e-8  # The default of torch.optim.AdamW.
NORM_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds this to a norm.
MUON_MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic ``a x + b x^3 + c x^5``: five iterations bring singular values to about 0.7 to 1.2."""
ITERATIONS = 5
SPECTRAL_EPS = 1e-7  # torch.optim.Muon adds this to a norm.
SMALLEST_RATE = 1e-30  # The least of a schedule: too small to move a parameter, but AdamW can divide by it.


class Stepper(Protocol):
    """An optimizer for many models. All tensors are float32 (models, elements)."""

    moments: int
    """Number of state tensors of a model; all start at zero."""

    def step(
        self, models: torch.Tensor, gradients: torch.Tensor, moments: Sequence[torch.Tensor], ages: I64, rates: Rates
    ) -> None:
        """Take one step: change ``models`` and ``moments`` in place; ``gradients`` may be overwritten.

        ``ages`` (models,): steps that each model has taken since its moments were zero. ``rates``: the learning rates
        of this step.
        """


def stepper(optimizer: Optimizer, module: nn.Module) -> Stepper:
    """Return the optimizer for models whose rows hold the parameters of ``module`` in its order."""
    adamw = AdamW(optimizer.betas, optimizer.weight_decay)
    made: Stepper = adamw
    if optimizer.name == "sgd":
        made = SGD(optimizer.momentum, optimizer.weight_decay)
    elif optimizer.name == "muon":
        assert optimizer.adam_lr is not None, "the optimizer's table asks muon for it"
        made = Muon(matrices_of(module), adamw, optimizer.adam_lr / optimizer.lr)
    return made if optimizer.clip_norm is None else Clipped(made, optimizer.clip_norm)


def schedule(optimizer: Optimizer) -> Callable[[I64], Rates]:
    """Return the scenario's learning rate schedule: a function of the steps that each model has taken."""
    if optimizer.schedule == "constant":
        lr = optimizer.lr
        return lambda taken: lr
    assert optimizer.schedule_steps is not None, "the optimizer's table refuses a cosine of no length"
    return Cosine(optimizer.lr, optimizer.schedule_steps, optimizer.warmup_steps, optimizer.min_lr)


class Cosine:
    """A schedule with a linear warm-up over ``warmup`` steps and a cosine decay to ``lowest``.

    ``lowest`` is reached after ``steps`` steps in total and kept (I. Loshchilov and F. Hutter, arXiv:1608.03983,
    equation 5, without restarts). It equals torch's LinearLR from 1 / (warmup + 1), followed by CosineAnnealingLR, but
    does not rise again after its end. The warm-up starts above 0, so that the first step moves the model.
    """

    def __init__(self, highest: float, steps: int, warmup: int, lowest: float) -> None:
        self.highest, self.steps, self.warmup, self.lowest = highest, steps, warmup, lowest

    def __call__(self, taken: I64) -> F64:
        rising = self.highest * (taken + 1) / (self.warmup + 1)
        done = np.clip((taken - self.warmup) / (self.steps - self.warmup), 0.0, 1.0)
        falling = self.lowest + (self.highest - self.lowest) * (1 + np.cos(math.pi * done)) / 2
        return np.maximum(np.where(taken < self.warmup, rising, falling), SMALLEST_RATE)


class SGD:
    """The arithmetic of torch.optim.SGD, without dampening and Nesterov momentum."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.moments = 1 if momentum else 0

    def step(
        self, models: torch.Tensor, gradients: torch.Tensor, moments: Sequence[torch.Tensor], ages: I64, rates: Rates
    ) -> None:
        if self.weight_decay:
            gradients.add_(models, alpha=self.weight_decay)
        if self.moments:
            # The buffer starts at zero, so after a model's first step it is the gradient itself, as in torch.
            gradients = torch.add(gradients, moments[0], alpha=self.momentum, out=moments[0])
        if isinstance(rates, float):
            models.sub_(gradients, alpha=rates)
        else:
            models.addcmul_(gradients, _column(rates), value=-1)


class AdamW:
    """Adam with decoupled weight decay, I. Loshchilov and F. Hutter, arXiv:1711.05101, algorithm 2.

    Operations have the order of torch.optim.AdamW. The bias correction uses each model's own age, so that restarted
    models and others share a call.
    """

    moments = 2

    def __init__(self, betas: tuple[float, float], weight_decay: float) -> None:
        self.betas, self.weight_decay = betas, weight_decay

    def step(
        self, models: torch.Tensor, gradients: torch.Tensor, moments: Sequence[torch.Tensor], ages: I64, rates: Rates
    ) -> None:
        first, second = moments
        beta1, beta2 = self.betas
        if self.weight_decay:
            decay = 1 - rates * self.weight_decay
            models.mul_(decay if isinstance(decay, float) else _column(decay))
        first.lerp_(gradients, 1 - beta1)
        second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        steps = ages + 1.0  # float64, (models,)
        step_size, root = rates / (1 - beta1**steps), np.sqrt(1 - beta2**steps)
        # Compute models -= step_size first / (sqrt(second) / root + EPS). The factors move into the denominator, which
        # saves a pass over the models.
        denominator = (
            torch.sqrt(second, out=gradients).mul_(_column(1 / (root * step_size))).add_(_column(EPS / step_size))
        )
        models.addcdiv_(first, denominator, value=-1)


class Matrix(NamedTuple):
    """The position of one matrix in the row of a model."""

    piece: slice
    shape: tuple[int, int]  # (outputs, inputs)


def matrices_of(module: nn.Module) -> list[Matrix]:
    """Return the matrices that Muon trains, in a row that holds the parameters of ``module`` in its order.

    These are the two-dimensional parameters except embeddings and outputs tied to an embedding.
    """
    embeddings = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    matrices, start = [], 0
    for parameter in module.parameters():
        piece = slice(start, start + parameter.numel())
        if parameter.dim() == 2 and id(parameter) not in embeddings:
            matrices.append(Matrix(piece, (parameter.shape[0], parameter.shape[1])))
        start = piece.stop
    return matrices


class Muon:
    """Muon for matrices, whose momentum is orthogonalised, and AdamW for all other parameters.

    K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. The first moment holds the
    momentum of both optimizers; only AdamW uses the second.
    """

    moments = 2

    def __init__(self, matrices: Sequence[Matrix], adamw: AdamW, adam_share: float) -> None:
        """Create the optimizer.

        Args:
            matrices: Positions of Muon's matrices in a row, in order.
            adamw: The optimizer of everything between them.
            adam_share: AdamW's learning rate divided by Muon's.
        """
        self.matrices, self.adamw, self.adam_share = matrices, adamw, adam_share
        # AdamW's pieces of a row: those between the matrices, and from the last one to the end.
        ends = [0, *(matrix.piece.stop for matrix in matrices)]
        starts = [*(matrix.piece.start for matrix in matrices), None]
        self.other_pieces = [slice(end, start) for end, start in zip(ends, starts, strict=True) if end != start]

    def step(
        self, models: torch.Tensor, gradients: torch.Tensor, moments: Sequence[torch.Tensor], ages: I64, rates: Rates
    ) -> None:
        for piece in self.other_pieces:
            if models[:, piece].shape[1]:
                parts = [moment[:, piece] for moment in moments]
                self.adamw.step(models[:, piece], gradients[:, piece], parts, ages, rates * self.adam_share)
        lr = rates if isinstance(rates, float) else _column(rates)
        for piece, (outputs, inputs) in self.matrices:
            momentum, gradient = moments[0][:, piece], gradients[:, piece]
            momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
            nesterov = gradient.lerp_(momentum, MUON_MOMENTUM)
            update = orthogonalised(nesterov.reshape(-1, outputs, inputs)).flatten(1)
            if self.adamw.weight_decay:
                models[:, piece].mul_(1 - lr * self.adamw.weight_decay)
            models[:, piece].sub_(update * (lr * max(1.0, outputs / inputs) ** 0.5))


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices with the same singular vectors and singular values near 1, by the Newton-Schulz iteration.

    Args:
        matrices: float32 (..., rows, columns).
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # The Gram matrix of the transpose is smaller.
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + SPECTRAL_EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.mT if tall else x
    return result


class Clipped:
    """An optimizer with gradient clipping as in torch.nn.utils.clip_grad_norm_, by the norm of a model's gradient."""

    def __init__(self, inner: Stepper, max_norm: float) -> None:
        self.inner, self.max_norm, self.moments = inner, max_norm, inner.moments

    def step(
        self, models: torch.Tensor, gradients: torch.Tensor, moments: Sequence[torch.Tensor], ages: I64, rates: Rates
    ) -> None:
        norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)  # (models, 1)
        gradients.mul_((self.max_norm / (norms + NORM_EPS)).clamp_(max=1.0))
        self.inner.step(models, gradients, moments, ages, rates)


def _column(values: NDArray[Any]) -> torch.Tensor:
    """Convert one number for each model to a float32 tensor (models, 1)."""
    return torch.from_numpy(values.astype(np.float32))[:, None]
