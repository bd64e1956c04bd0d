"""A network under torch.compile whose blocks are computed again in the backward pass (gradient checkpointing)."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 96), nn.Linear(96, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)) for _ in range(2)
        )

    def forward(self, x):
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x)


@zoo("gradient checkpointing and torch.compile", "accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = torch.compile(Model(), backend="eager", dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(8, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    with torch.no_grad():
        return (model(x_test).argmax(1) == y_test).float().mean()
