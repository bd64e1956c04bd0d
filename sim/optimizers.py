"""torch.optim's SGD and AdamW, and quasi-global momentum, for many models at once, with the same arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sim.scenario import Optimizer

__all__ = ["SGD", "AdamW", "QuasiGlobal", "Stepper", "stepper"]

F32 = NDArray[np.float32]

EPS = 1e-8  # torch.optim.AdamW's default


class Stepper(Protocol):
    """One step of an optimizer. All tensors are float32 (models, elements)."""

    moments: int
    """How many tensors of state a model has beside its parameters; all begin at zero."""

    def step(
        self, models: torch.Tensor, gradients: torch.Tensor, moments: Sequence[torch.Tensor], ages: NDArray[np.int64]
    ) -> None:
        """Change ``models`` and ``moments`` in place; ``gradients`` may be overwritten. ``ages``: steps taken before by
        each model."""


def stepper(optimizer: Optimizer) -> Stepper:
    """What a scenario's [task] optimizer stands for."""
    if optimizer.name == "adamw":
        return AdamW(optimizer.lr, optimizer.betas, optimizer.weight_decay)
    if optimizer.quasi_global:
        return QuasiGlobal(optimizer.lr, optimizer.quasi_global, optimizer.weight_decay)
    return SGD(optimizer.lr, optimizer.momentum, optimizer.weight_decay)


class SGD:
    """torch.optim.SGD without dampening and Nesterov's step."""

    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.moments = 1 if momentum else 0

    def step(
        self, models: torch.Tensor, gradients: torch.Tensor, moments: Sequence[torch.Tensor], ages: NDArray[np.int64]
    ) -> None:
        if self.weight_decay:
            gradients.add_(models, alpha=self.weight_decay)
        if self.moments:
            # Beginning at zero, the buffer is the gradient itself after a model's first step, as torch has it.
            gradients = torch.add(gradients, moments[0], alpha=self.momentum, out=moments[0])
        models.sub_(gradients, alpha=self.lr)


class QuasiGlobal:
    """:class:`gossip.quasi_global.QuasiGlobal`: a step uses the momentum, and only a mix moves it."""

    moments = 1

    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def step(
        self, models: torch.Tensor, gradients: torch.Tensor, moments: Sequence[torch.Tensor], ages: NDArray[np.int64]
    ) -> None:
        if self.weight_decay:
            gradients.add_(models, alpha=self.weight_decay)
        models.sub_(gradients.add_(moments[0], alpha=self.momentum), alpha=self.lr)

    def mixed(self, model: F32, before: F32, momentum: F32, steps: int) -> None:
        """Of one model, all (elements,): ``before`` is the model just after its last mix, so many ``steps`` ago, and
        becomes the model now. (T. Lin et al., arXiv:2102.04761, algorithm 1, with the steps counted.)"""
        before -= model
        before *= np.float32((1 - self.momentum) / (self.lr * steps))
        momentum *= np.float32(self.momentum)
        momentum += before
        before[:] = model


class AdamW:
    """Decoupled weight decay, I. Loshchilov and F. Hutter, arXiv:1711.05101, algorithm 2, in torch.optim.AdamW's order.

    Each model corrects its bias by its own age, so that one that restarted and one that did not share a call.
    """

    moments = 2

    def __init__(self, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay

    def step(
        self, models: torch.Tensor, gradients: torch.Tensor, moments: Sequence[torch.Tensor], ages: NDArray[np.int64]
    ) -> None:
        first, second = moments
        beta1, beta2 = self.betas
        if self.weight_decay:
            models.mul_(1 - self.lr * self.weight_decay)
        first.lerp_(gradients, 1 - beta1)
        second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        steps = ages + 1.0  # float64 (models,)
        step_size, root = self.lr / (1 - beta1**steps), np.sqrt(1 - beta2**steps)
        # models -= step_size first / (sqrt(second) / root + EPS), the factors moved into the denominator: a pass less
        denominator = (
            torch.sqrt(second, out=gradients).mul_(_column(1 / (root * step_size))).add_(_column(EPS / step_size))
        )
        models.addcdiv_(first, denominator, value=-1)


def _column(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))[:, None]
