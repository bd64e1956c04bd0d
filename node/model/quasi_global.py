"""Quasi-global momentum: an optimizer whose momentum follows the mixed parameters, not the local gradients.

A node's own gradients follow its own data. On uneven data, a momentum built from them carries each node away from the
others between two mixes. A node's movement from one mix to the next, mixes included, is nearer to the swarm's
direction.

See T. Lin, S. P. Karimireddy, S. U. Stich, M. Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning
on Heterogeneous Data", ICML 2021, arXiv:2102.04761, algorithm 1, QG-DSGDm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gossip.errors import ConfigError

__all__ = ["QuasiGlobal"]

# Not SGD's "momentum_buffer": a swarm that averages optimizer state must not confuse the two.
KEY = "quasi_global"


@dataclass(slots=True)
class SinceMix:
    """One parameter's movement since the last mix. Kept outside the optimizer's ``state``, which a node may average."""

    before: Tensor
    """x_old, a copy of the parameter just after the last mix."""
    rate_sum: float = 0.0
    """The sum of the learning rates of the steps since then: for a constant rate, its product with their number."""


class QuasiGlobal(torch.optim.Optimizer):
    """SGD with quasi-global momentum ``m``, in the place of ``torch.optim.SGD(..., momentum=0.9)``.

    For a parameter ``x`` with the gradient ``g``, and the last mix's ``x_old``:

        step:   x <- x - lr (g + momentum m)        # g with weight decay, as in SGD
        mix:    m <- momentum m + (1 - momentum) (x_old - x_new) / (sum of lr over the steps since the last mix)

    A Node calls :meth:`mixed` and :meth:`joined` by itself. In another loop, call them after parameters were averaged
    and replaced. Before its first mix, this is SGD without momentum, bit for bit. Under a constant gradient ``m`` tends
    to g / (1 - momentum), as SGD's does, but over 1 / (1 - momentum)^2 mixes.

    Its ``state`` is ``m``, one tensor for each parameter, initially zero. ``x_old`` takes as much memory and is not
    saved: loading a state starts a new interval at the next step. A parameter without a gradient since the last mix
    keeps its momentum. Its movement counts at its next mix. The same holds for a mix without a step (accumulated
    gradients, settling).

    Args:
        params: Parameters or groups, as for any optimizer.
        lr: The learning rate, from 0 up.
        momentum: In [0, 1).
        weight_decay: From 0 up.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        if not 0.0 <= lr < float("inf"):
            raise ConfigError(f"lr is {lr:g} and must be a number from 0 up.")
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"momentum is {momentum:g} and must be at least 0 and below 1: 0.9 is the usual one.")
        if not 0.0 <= weight_decay < float("inf"):
            raise ConfigError(f"weight_decay is {weight_decay:g} and must be a number from 0 up.")
        self._since: dict[Tensor, SinceMix] = {}
        # Use SGD's names, so that schedulers that cycle the momentum find it.
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one local step; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            lr, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
            momenta = [self._momentum_of(parameter) for parameter in parameters]
            gradients: Any = [parameter.grad for parameter in parameters]
            if decay:
                gradients = torch._foreach_add(gradients, parameters, alpha=decay)
            # Add one after the other: a sum first would need another copy of the model, and four times the time.
            torch._foreach_add_(parameters, gradients, alpha=-lr)
            torch._foreach_add_(parameters, momenta, alpha=-lr * momentum)
            for parameter in parameters:
                self._since[parameter].rate_sum += lr
        return loss

    @torch.no_grad()
    def mixed(self) -> None:
        """Update the momentum from the parameters' movement, after they were averaged with others."""
        for group in self.param_groups:
            momentum = group["momentum"]
            moved: list[Tensor] = [parameter for parameter in group["params"] if self._rate_sum(parameter) > 0.0]
            if not moved:
                continue
            momenta: list[Tensor] = [self.state[parameter][KEY] for parameter in moved]
            # The distances are computed in the memory of the copies, which get the new parameters at the end.
            distances = [self._since[parameter].before for parameter in moved]
            torch._foreach_sub_(distances, moved)
            torch._foreach_mul_(distances, [(1.0 - momentum) / self._rate_sum(parameter) for parameter in moved])
            torch._foreach_mul_(momenta, momentum)
            torch._foreach_add_(momenta, distances)
            torch._foreach_copy_(distances, moved)
            for parameter in moved:
                self._since[parameter].rate_sum = 0.0

    @torch.no_grad()
    def joined(self, keep: bool = False) -> None:
        """Reset the momentum to zero after the parameters were replaced; with ``keep`` it was replaced too."""
        self._since.clear()
        if keep:
            return
        for state in self.state.values():
            if KEY in state:
                state[KEY].zero_()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state like any optimizer. Load the weights before the next step, where a new interval starts."""
        super().load_state_dict(dict(state_dict))
        self._since.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which torch makes without private attributes. Probes of an optimizer's state need copies."""
        super().__setstate__(state)
        self._since = {}

    def _momentum_of(self, parameter: Tensor) -> Tensor:
        """Return the parameter's momentum. Before the first step, create it and the copy of the parameter."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ConfigError("QuasiGlobal needs dense gradients: make the embedding with sparse=False.")
        if parameter not in self._since:
            self._since[parameter] = SinceMix(parameter.detach().clone())
        state = self.state[parameter]
        if KEY not in state:
            state[KEY] = torch.zeros_like(parameter)
        momentum: Tensor = state[KEY]
        return momentum

    def _rate_sum(self, parameter: Tensor) -> float:
        """Return the sum of the learning rates of the parameter's steps since the last mix; 0 without a step."""
        since = self._since.get(parameter)
        return 0.0 if since is None else since.rate_sum
