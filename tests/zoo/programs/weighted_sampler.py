"""Classes of unequal size, drawn by weights so that each is seen equally often."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.zoo.data import digits
from tests.zoo.registry import zoo


@zoo("weighted sampler", "accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    kept = (y < 5) | (torch.arange(len(y)) % 6 == 0)  # a sixth of the classes from 5 on
    x, y = x[kept], y[kept]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    weights = (1 / y.bincount().float())[y]
    loader = DataLoader(TensorDataset(x, y), 32, sampler=WeightedRandomSampler(weights.tolist(), len(y)))
    drawn = torch.zeros(10)
    with Node(model, optimizer) as node:
        for _ in node.epochs(25, loader):
            for images, labels in node.loader(loader):
                drawn += labels.bincount(minlength=10)
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    assert drawn.min() > 0.7 * drawn.mean(), f"classes are drawn equally often: {drawn}"
    return (model(x_test).argmax(1) == y_test).float().mean()
