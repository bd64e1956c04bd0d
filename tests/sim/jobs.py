"""Small data sets and models that tests name as "tests.sim.jobs:function"."""

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


def drawn():
    """Return numbers from torch's generator, which has no seed here."""
    x = torch.randn(40, 4)
    return x[:30], x[:30, 0], x[30:], x[30:, 0]


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


def half_real_labels():
    x_train, y_train, x_test, y_test, _ = vectors()
    return x_train, y_train.float(), x_test, y_test


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


class Masked(nn.Module):
    """A linear model with an infinite constant, as causal masks have."""

    def __init__(self, constant):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        infinite = torch.tensor([0.0] * 9 + [-torch.inf])
        if constant:
            self.register_buffer("mask", infinite)
        else:
            self.mask = nn.Parameter(infinite)

    def forward(self, x):
        return self.layer(x) + torch.where(self.mask.isinf(), -9.0, self.mask)


def masked():
    return Masked(constant=True)


def masked_parameter():
    return Masked(constant=False)


def three_layers():
    return nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 10))


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
    """A model that looks at its values to decide what to do, which vmap cannot."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x) if self.layer(x).sum() > 0 else -self.layer(x)


def a_number():
    return 7


def deadly():
    """End this process as the system ends one that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def curve():
    """Return a regression task with two targets for each sample, of which 80 are trained on."""
    random = torch.Generator().manual_seed(4)
    x = torch.randn(120, 5, generator=random)
    y = torch.stack([x[:, 0] - 0.5 * x[:, 1], torch.tanh(x[:, 2] + x[:, 3])], 1)
    return x[:80], y[:80], x[80:], y[80:]


def one_number():
    """Return the same task with one target for each sample, of one dimension."""
    return tuple(part if part.shape[1] == 5 else part[:, 0] for part in curve())


def regressor():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def tokens():
    """Return sequences of 9 of 300 tokens, each the one before plus one, so that the next is known."""
    random = torch.Generator().manual_seed(6)
    first = torch.randint(0, 300, (80, 1), generator=random)
    whole = (first + torch.arange(10)) % 300
    x, y = whole[:, :-1], whole[:, 1:]
    return x[:60], y[:60], x[60:], y[60:]


def language_model():
    return nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300))


def smoothed(output, y):
    """A custom loss, of logits and class numbers."""
    return nn.functional.cross_entropy(output.flatten(0, -2), y.flatten(), label_smoothing=0.1)


def largest_error(output, y):
    """Return the largest error, which is no mean over samples."""
    return (output - y).abs().max()


def perplexity(output, y):
    return nn.functional.cross_entropy(output.flatten(0, -2), y.flatten()).exp()


def no_mean(output, y):
    return (output - y).square()


class Normed(nn.Module):
    """A model of pictures with BatchNorm's statistics and a buffer that never moves."""

    def __init__(self):
        super().__init__()
        # No biases: those before a norm have gradients of rounding errors, of which AdamW makes steps.
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.last, self.last_norm = nn.Linear(144, 10, bias=False), nn.BatchNorm1d(10)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x):
        x = torch.relu(self.norm(self.convolution(x.view(-1, 1, 8, 8))))
        return self.last_norm(self.last(x.flatten(1))) * self.scale


def counting_norm():
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 10))


def alpha_dropout():
    return nn.Sequential(nn.Linear(64, 8), nn.AlphaDropout(0.5), nn.Linear(8, 10))


class Functional(nn.Module):
    """A model that draws random numbers which no seed decides."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(nn.functional.dropout(x, 0.5, self.training))


def channel_dropout():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.Dropout2d(0.25), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1),
        nn.Linear(144, 10),
    )  # fmt: skip
