"""Muon and clipped gradients for many peers at once equal a module with a loop over its parameters."""

import numpy as np
import pytest
import torch
from torch import nn

from sim.learning.optimizer.steppers import SGD, Clipped, orthogonalised
from sim.scenario.task import Optimizer, Task
from tests.harness.marks import slow
from tests.sim.learning.alone import Alone, assert_reset_as_one_at_a_time, assert_trained_as_one_at_a_time
from tests.sim.learning.test_learners import MODELS

MUON = Optimizer(name="muon", lr=0.02, adam_lr=0.003, betas=(0.8, 0.99))
DECAYING = Optimizer(
    name="muon", lr=0.02, adam_lr=0.003, betas=(0.8, 0.99), weight_decay=0.1, clip_norm=0.5,
    schedule="cosine", schedule_steps=16, warmup_steps=3, min_lr=0.001,
)  # fmt: skip
# The iteration multiplies small singular values by up to 3.4445^5 = 485, and the rounding of the gradients with them.
# Seen: 1e-5 of the distance that training has moved a matrix.
TOLERANCE = 1e-4


class Reference:
    """The algorithm as published, one parameter at a time: a step for each matrix, torch's AdamW for the rest."""

    def __init__(self, module: nn.Module, spec: Optimizer) -> None:
        self.weight_decay = spec.weight_decay
        embeddings = [one.weight for one in module.modules() if isinstance(one, nn.Embedding)]
        every = list(module.parameters())
        self.matrices = [p for p in every if p.dim() == 2 and not any(p is one for one in embeddings)]
        rest = [p for p in every if not any(p is one for one in self.matrices)]
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.adamw = torch.optim.AdamW(rest, lr=spec.adam_lr, betas=spec.betas, weight_decay=spec.weight_decay)
        self.param_groups = [{"lr": spec.lr}, *self.adamw.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        rate = self.param_groups[0]["lr"]
        for matrix, momentum in zip(self.matrices, self.momenta, strict=True):
            momentum.mul_(0.95).add_(matrix.grad, alpha=0.05)
            update = newton_schulz(0.05 * matrix.grad + 0.95 * momentum)
            matrix.mul_(1 - rate * self.weight_decay)
            matrix.sub_(rate * max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5 * update)
        self.adamw.step()


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Iterate in float64 on a whole singular value decomposition: p(U S V) = U p(S) V for an odd polynomial."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (torch.linalg.vector_norm(s) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u @ torch.diag(s) @ vt).float()


class AloneWithMuon(Alone):
    """One peer alone, with the reference instead of torch's optimizer."""

    def make_optimizer(self) -> Reference:
        return Reference(self.module, self.task.optimizer)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        pytest.param("mlp", MUON, id="mlp-constant"),
        *(slow(model, MUON, id=f"{model}-constant") for model in ("cnn", "gpt", "tied weights")),
        *(
            pytest.param(model, DECAYING, id=f"{model}-decay, clipped, cosine")
            for model in ("mlp", "cnn", "gpt", "tied weights")
        ),
    ],
)
def test_stacked_models_move_as_the_published_algorithm_moves_one(model, optimizer):
    task = Task(batch_size=4, optimizer=optimizer, **MODELS[model])
    assert_trained_as_one_at_a_time(task, AloneWithMuon, TOLERANCE)


def test_a_reset_forgets_one_peers_momentum_and_not_the_others():
    assert_reset_as_one_at_a_time(Task(batch_size=4, optimizer=MUON, **MODELS["mlp"]), AloneWithMuon, TOLERANCE)


def test_a_gradient_within_the_norm_is_left_as_it_is_and_a_longer_one_keeps_its_direction():
    gradients = torch.tensor([[0.3, 0.4], [30.0, 40.0]])
    models = torch.zeros(2, 2)
    Clipped(SGD(0.0, 0.0), 1.0).step(models, gradients, (), np.zeros(2, np.int64), 1.0)
    assert torch.allclose(models, torch.tensor([[-0.3, -0.4], [-0.6, -0.8]]))


def test_a_gradient_of_zero_moves_nothing():
    assert orthogonalised(torch.zeros(1, 3, 5)).abs().max() == 0
