"""A language model of characters whose output layer is its embedding (Press and Wolf, 2016)."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import LETTERS, text
from tests.zoo.registry import zoo

CONTEXT = 12


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), width)
        self.hidden = nn.Sequential(nn.Linear(CONTEXT * width, 128), nn.Tanh(), nn.Linear(128, width))
        self.output = nn.Linear(width, len(LETTERS))
        self.output.weight = self.embedding.weight

    def forward(self, context):
        return self.output(self.hidden(self.embedding(context).flatten(1)))


@zoo("char-LM with tied weights", "nats per character", "low", 0.06)
def run(Node, seed):
    torch.manual_seed(seed)
    windows = text(16_000).unfold(0, CONTEXT + 1, 1)
    train, test = windows[:14_000], windows[14_000:]
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = DataLoader(TensorDataset(train), 64, shuffle=True)
    with Node(model, optimizer) as node:
        for _ in node.epochs(6, loader):
            for (rows,) in node.loader(loader):
                loss = F.cross_entropy(model(rows[:, :-1]), rows[:, -1])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    with torch.no_grad():
        return F.cross_entropy(model(test[:, :-1]), test[:, -1])
