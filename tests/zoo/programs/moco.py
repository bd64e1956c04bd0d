"""Momentum contrast (He et al., 2019): a queue of keys from a momentum encoder, judged by its nearest neighbours."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.data import digits
from tests.zoo.registry import zoo


class MoCo(nn.Module):
    def __init__(self, width=32, keys=256):
        super().__init__()
        self.query = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, width))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(keys, width)))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, a, b):
        query = F.normalize(self.query(a))
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
            key = F.normalize(self.key(b))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1) / 0.2
        rows = (self.place + torch.arange(len(key))) % len(self.queue)
        self.queue[rows] = key
        self.place.add_(len(key)).remainder_(len(self.queue))
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


def changed(images):
    """Shift a batch of images by one pixel at most, and add noise."""
    rows, columns = (int(by) - 1 for by in torch.randint(3, (2,)))
    return torch.roll(images, (rows, columns), (2, 3)) + 0.1 * torch.randn_like(images)


def neighbours_accuracy(encoder, x, y, x_test, y_test):
    with torch.no_grad():
        a, b = F.normalize(encoder(x)), F.normalize(encoder(x_test))
    return (y[(b @ a.T).topk(5).indices].mode(1).values == y_test).float().mean()


@zoo("MoCo (queue, momentum encoder)", "5-NN accuracy", "high", 0.02)
def run(Node, seed):
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = MoCo()
    optimizer = torch.optim.SGD(model.query.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(x), 64, shuffle=True, drop_last=True)
    with Node(model, optimizer, local=["queue", "place"], average=["key.*"]) as node:
        for _ in node.epochs(30, loader):
            for (images,) in node.loader(loader):
                loss = model(changed(images), changed(images))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    assert torch.allclose(model.queue.norm(dim=1), torch.ones(len(model.queue)), atol=1e-4), "keys have length 1"
    return neighbours_accuracy(model.key, x, y, x_test, y_test)
