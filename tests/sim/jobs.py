"""Small data sets and models that tests name as "tests.sim.jobs:function"."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn


def vectors():
    """Three classes, linearly separable, 7 inputs; 5 clients."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(90, 7, generator=random)
    y = x[:, :3].argmax(1)
    return x[:60], y[:60], x[60:], y[60:], torch.arange(60) % 5


def text():
    """Windows of 12 bytes from a text of a few letters, with two clients."""
    tokens = torch.frombuffer(bytearray(b"to be, or not to be: that is the question. " * 40), dtype=torch.uint8)
    windows = tokens[: len(tokens) // 13 * 13].view(-1, 13)
    x, y = windows[:, :-1], windows[:, 1:]
    return x[:100], y[:100], x[100:], y[100:], torch.arange(100) % 2


def not_tensors():
    return 1, 2, 3, 4


def unequal():
    x_train, y_train, x_test, y_test, _ = vectors()
    return x_train, y_train[:-1], x_test, y_test


def real_valued_labels():
    x_train, y_train, x_test, y_test, _ = vectors()
    return x_train, y_train.float(), x_test, y_test.float()


def odd_test_shape():
    x_train, y_train, x_test, y_test, _ = vectors()
    return x_train, y_train, x_test[:, :3], y_test


def group_norm():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(144, 10)
    )


class Tied(nn.Module):
    """One matrix used twice, under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def three_layers():
    return nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 10))


def batch_norm():
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def dropout():
    return nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10))


def double():
    return nn.Sequential(nn.Linear(64, 10)).double()


def frozen():
    return nn.Sequential(nn.Tanh(), nn.Linear(64, 10).requires_grad_(False))


def no_parameters():
    return nn.Flatten()


def too_few_classes():
    return nn.Linear(64, 3)


def too_few_inputs():
    return nn.Sequential(nn.Linear(7, 10))


class Moody(nn.Module):
    """Looks at its values to decide what to do, which vmap cannot."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x) if self.layer(x).sum() > 0 else -self.layer(x)


def a_number():
    return 7


def deadly():
    """As the system ends a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)
