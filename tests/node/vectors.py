"""A small model, its training, and the vectors of models, read in the fast way and in the obvious way."""

import numpy as np
import torch
from torch import nn

from tests.node.trainees import step_of


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def train(model, optimizers, steps, seed):
    """Train with one optimizer or several on batches that the seed draws. Return the losses."""
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    generator = torch.Generator().manual_seed(seed)

    def loss_of():
        x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        return nn.functional.cross_entropy(model(x), y)

    step = step_of(loss_of, *optimizers)
    return [step().item() for _ in range(steps)]


def vector_of(state, full=False):
    """Return the exchanged weights or, with ``full``, all weights and the optimizer's state, as for a newcomer."""
    if not full:
        out = np.full(state.size(), np.nan, np.float32)
        state.begin_read(out)
        return out
    place = state.optimizer_range()
    out = np.full(place.stop, np.nan, np.float32)
    state.read(out[: place.start])
    state.begin_read_optimizer(out[place.start :], place.start)
    return out


def slow_vector(tensors):
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors]).numpy()
