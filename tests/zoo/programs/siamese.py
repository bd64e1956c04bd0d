"""A siamese network with a contrastive loss (Hadsell et al., 2006) over pairs of images."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class Pairs(Dataset):
    """Pairs of each image and another one, which has the same class every second time."""

    def __init__(self, x, y):
        self.x, self.y = x, y
        self.same = [torch.nonzero(y == label)[:, 0] for label in range(10)]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        rows = self.same[int(self.y[index])] if torch.rand(()) < 0.5 else torch.arange(len(self.x))
        other = int(rows[torch.randint(len(rows), ())])
        return self.x[index], self.x[other], float(self.y[index] == self.y[other])


@zoo("siamese network", "1-NN accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    loader = DataLoader(Pairs(x, y), 32, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(20, loader):
            for one, other, same in node.loader(loader):
                apart = (model(one) - model(other)).norm(dim=1)
                loss = (same * apart**2 + (1 - same) * F.relu(2 - apart) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    with torch.no_grad():
        return (y[torch.cdist(model(x_test), model(x)).argmin(1)] == y_test).float().mean()
