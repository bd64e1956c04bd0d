"""Low-rank adaptation (Hu et al., 2021) of a frozen network to transposed images."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def pretrained(x, y):
    """Return a network that knows upright images, trained by full batches: the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


@zoo("LoRA on a frozen base", "accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = pretrained(x, y)
    for number in (1, 3, 5):
        model[number] = Adapted(model[number])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    loader = DataLoader(TensorDataset(x.transpose(2, 3), y), 32, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(45, loader):
            for images, labels in node.loader(loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    return (model(x_test.transpose(2, 3)).argmax(1) == y_test).float().mean()
