"""Models as people have them: every kind of tensor in one that mixes, and what is said of those that cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossip.errors import LayoutError
from node import Node


class Everything(nn.Module):
    """Four types of floats, tied and frozen parameters, gradients that are sparse, one that comes now and then."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 8, sparse=True)
        self.fp16, self.bf16, self.fp64 = (
            nn.Linear(8, 8).half(),
            nn.Linear(8, 8).bfloat16(),
            nn.Linear(8, 8).double(),
        )
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 16, bias=False)
        self.tied.weight = nn.Parameter(torch.zeros(16, 8))
        self.again = nn.Linear(8, 16, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = self.words(x)
        for layer in (self.fp16, self.bf16, self.fp64):
            x = layer(x.to(layer.weight.dtype))
        x = self.norm(x.float())
        return self.frozen(self.tied(x) + self.again(x))


def job():
    model = Everything()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)

    def work():
        x = torch.randint(0, 16, (32,))
        loss = F.cross_entropy(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, work


def test_a_model_of_every_kind_of_tensor_mixes(train, until):
    a = train(*job())
    b = train(*job(), seeds=[a.node.address])
    types = {name: value.dtype for name, value in a.model.state_dict().items()}
    until(lambda: all(one.node.metrics().exchanges_done >= 5 for one in (a, b)))
    for one in (a, b):
        one.work = None  # settle on what both hold, without training
    until(lambda: b.do(lambda node: node.settle(1.0)) < 1e-2)
    assert {name: value.dtype for name, value in b.model.state_dict().items()} == types
    assert b.model.again.weight is b.model.tied.weight


SPARSE = nn.Module()
SPARSE.w = nn.Parameter(torch.eye(4).to_sparse())
COMPLEX = nn.Module()
COMPLEX.w = nn.Parameter(torch.zeros(4, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (SPARSE, "'w' is sparse, and only dense ones can be averaged: keep it as to_dense"),
        (COMPLEX, "'w' is complex64, and only real numbers are averaged: keep it as torch.view_as_real gives it"),
        (nn.Linear(4, 4, device="meta"), "'weight' has no memory, being on the device meta: give the model some"),
        (nn.LazyLinear(4), "'weight' has no shape yet: run one batch through the model first"),
    ],
)
def test_what_cannot_be_averaged_is_told_with_what_to_do(model, sentence):
    with pytest.raises(LayoutError, match=sentence):
        Node(model)
