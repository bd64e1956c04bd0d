"""Muon (Jordan et al., 2024) for the matrices of hidden layers, and AdamW for all else."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


def orthogonal(matrix, steps=5):
    """Return the nearest orthogonal matrix, nearly, by Newton and Schulz's iteration of degree five."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr, momentum=0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                buffer = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                ahead = weight.grad.lerp(buffer, group["momentum"])
                scale = max(1, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.add_(orthogonal(ahead), alpha=-group["lr"] * scale)


@zoo("Muon and AdamW", "accuracy", "high", 0.02)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    layers = [layer for inputs in (64, 96, 96) for layer in (nn.Linear(inputs, 96), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(96, 10))
    hidden = [model[3].weight, model[5].weight]
    others = [parameter for parameter in model.parameters() if all(parameter is not one for one in hidden)]
    muon, adamw = Muon(hidden, 0.02), torch.optim.AdamW(others, 2e-3)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    with Node(model, [muon, adamw]) as node:
        for _ in node.epochs(15, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                model.zero_grad()
                loss.backward()
                muon.step()
                adamw.step()
                node.step(loss)
    return (model(x_test).argmax(1) == y_test).float().mean()
