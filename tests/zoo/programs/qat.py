"""Quantisation-aware training (Jacob et al., 2017), by hand: observers begin at infinity, gradients pass through."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class FakeQuantised(nn.Module):
    """A module that rounds to 16 levels between the least and the largest value seen in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(math.inf))
        self.register_buffer("high", torch.tensor(-math.inf))

    def forward(self, x):
        if self.training:
            self.low.copy_(torch.minimum(self.low, x.detach().amin()))
            self.high.copy_(torch.maximum(self.high, x.detach().amax()))
        scale = (self.high - self.low).clamp_min(1e-6) / 15
        rounded = ((x - self.low) / scale).round().clamp(0, 15) * scale + self.low
        return x + (rounded - x).detach()


class Linear(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.rounds_weight, self.rounds_output = FakeQuantised(), FakeQuantised()

    def forward(self, x):
        return self.rounds_output(F.linear(x, self.rounds_weight(self.weight), self.bias))


@zoo("quantisation-aware training", "accuracy", "high", 0.03, notices=("ranges",))
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(nn.Flatten(), Linear(64, 96), nn.ReLU(), Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(25, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    model.eval()
    return (model(x_test).argmax(1) == y_test).float().mean()
