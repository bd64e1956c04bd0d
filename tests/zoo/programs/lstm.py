"""An LSTM that reads an image row by row."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 48, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


@zoo("LSTM", "accuracy", "high", 0.03)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    loader = DataLoader(TensorDataset(x.squeeze(1), y), 32, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(24, loader):
            for rows, labels in node.loader(loader):
                loss = F.cross_entropy(model(rows), labels)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                node.step(loss)
    return (model(x_test.squeeze(1)).argmax(1) == y_test).float().mean()
