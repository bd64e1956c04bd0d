"""Momentum contrast (He et al., 2019): a queue of keys from a momentum encoder, judged on images of the test.

A view of an image is the image shifted by up to a pixel, with noise. The metric counts the images of the test whose
nearest second view is their own, which is what the loss trains: a random encoder finds 11 %.
"""

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
        self.query = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, width))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(keys, width)))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, a, b, fresh=64):
        query = F.normalize(self.query(a))
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
            key = F.normalize(self.key(b))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1) / 0.2
        key = key[:fresh]  # The queue turns at one speed for any size of batch.
        rows = (self.place + torch.arange(len(key))) % len(self.queue)
        self.queue[rows] = key
        self.place.add_(len(key)).remainder_(len(self.queue))
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


def views(images):
    """Shift each image by up to a pixel, and add noise."""
    rows, columns = (torch.arange(8) + torch.randint(3, (len(images), 1)) for _ in range(2))
    padded = F.pad(images[:, 0], (1, 1, 1, 1))
    shifted = padded[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
    return shifted[:, None] + 0.02 * torch.randn_like(images)


def share_found(encoder, images, draws=20):
    """Return the share of images whose nearest second view is their own, over some draws of views."""
    with torch.no_grad():
        pairs = [[F.normalize(encoder(views(images))) for _ in range(2)] for _ in range(draws)]
    return torch.stack([((a @ b.T).argmax(1) == torch.arange(len(a))).float().mean() for a, b in pairs]).mean()


@zoo("MoCo (queue, momentum encoder)", "share of views found", "high", 0.02)
def run(Node, seed):
    torch.manual_seed(seed)
    x, _, x_test, _ = digits()
    model = MoCo()
    optimizer = torch.optim.SGD(model.query.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(x), 64, shuffle=True, drop_last=True)
    with Node(model, optimizer, local=["queue", "place"], average=["key.*"]) as node:
        for _ in node.epochs(100, loader):
            for (images,) in node.loader(loader):
                loss = model(views(images), views(images))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                node.step(loss)
    assert torch.allclose(model.queue.norm(dim=1), torch.ones(len(model.queue)), atol=1e-4), "keys have length 1"
    return share_found(model.key, x_test)
