"""A convolutional network with BatchNorm on small images."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


@zoo("CNN with BatchNorm", "accuracy", "high", 0.02)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(12, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    model.eval()
    return (model(x_test).argmax(1) == y_test).float().mean()
