"""Metric learning by a loss that has weights of its own: a proxy for each class (Movshovitz-Attias et al., 2017)."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class Proxies(nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(classes, width))

    def forward(self, x, y):
        return F.cross_entropy(10 * F.normalize(x) @ F.normalize(self.centres).T, y)


@zoo("metric learning, a loss with weights", "1-NN accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16))
    criterion = Proxies(10, 16)
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], 2e-3)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    with Node(nn.ModuleList([model, criterion]), optimizer) as node:
        for _ in node.epochs(20, loader):
            for images, labels in node.loader(loader):
                loss = criterion(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    with torch.no_grad():
        near = F.normalize(model(x_test)) @ F.normalize(model(x)).T
    return (y[near.argmax(1)] == y_test).float().mean()
