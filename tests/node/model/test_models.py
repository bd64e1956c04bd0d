"""Models of all kinds: every kind of tensor mixes, and a model that cannot mix is refused with a reason."""

from __future__ import annotations

import queue

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossip.errors import ConfigError, LayoutError
from node import Node
from node.model import checkpoint
from tests.node.test_bad_input import model, one_sentence


class Everything(nn.Module):
    """A model with four float types, tied and frozen parameters, sparse gradients, and an occasional gradient."""

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
        one.work = None  # Settle on what both hold, without training.
    a.tasks.put((lambda node: node.settle(10.0, wait_s=20.0), queue.SimpleQueue()))
    assert b.do(lambda node: node.settle(10.0, wait_s=20.0)) == 0.0
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


@pytest.mark.parametrize("given", [{}, nn.Flatten(), 7, {"x": "text"}, {"x": torch.zeros(2, dtype=torch.int64)}])
def test_what_is_no_model_is_refused(given, quick):
    with pytest.raises(LayoutError) as error:
        Node(given, config=quick)
    one_sentence(error)


def test_an_optimizer_of_another_model_is_refused(quick):
    with pytest.raises(LayoutError) as error:
        Node(model(), torch.optim.SGD(model().parameters(), lr=0.1), config=quick)
    assert "optimizer" in one_sentence(error)


def test_a_parameter_replaced_while_running_is_named(train, until):
    given = model()
    first = train(given)
    second = train(model(), seeds=[first.node.address])
    until(lambda: first.node.metrics().exchanges_done > 2)
    first.do(lambda node: setattr(given, "weight", nn.Parameter(torch.zeros(2, 4))))
    until(lambda: first.error is not None)
    assert "'weight' was replaced" in str(first.error)
    first.error = None
    until(lambda: second.node.metrics().members_alive == 1)


@pytest.mark.parametrize("wrong", [lambda one: {"a": one}, lambda one: one.step, lambda one: [one, one.step]])
def test_what_is_no_optimizer_is_refused_in_one_sentence(wrong):
    given = model()
    with pytest.raises(ConfigError, match="optimizer") as error:
        Node(given, wrong(torch.optim.SGD(given.parameters(), lr=0.1)))
    one_sentence(error)


def test_a_layer_that_is_added_later_is_refused_and_not_left_out_in_silence(quick):
    given = nn.Sequential(nn.Linear(4, 4))
    with Node(given, config=quick) as node:
        node.step()
        given.add_module("activation", nn.ReLU())  # This layer has nothing to exchange.
        node._training.loop.visit(0.0, is_mix_due=True)
        node._training.live.state.buffer(1)
        given.add_module("head", nn.Linear(4, 2))
        with pytest.raises(LayoutError, match=r"head\.weight.*new Node") as error:
            node._training.live.state.buffer(1)
        one_sentence(error)


def test_a_model_inside_ddp_is_the_model_that_it_is(tmp_path, quick):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        given = model()
        wrapped = nn.parallel.DistributedDataParallel(given)
        with Node(wrapped, config=quick) as node:
            assert (
                node._training.live.state.layout.fingerprint
                == Node(model(), config=quick)._training.live.state.layout.fingerprint
            )
            node.step()
            node.save(tmp_path / "run")
        assert set(checkpoint.load(tmp_path / "run").tensors) == {"weight", "bias"}
    finally:
        torch.distributed.destroy_process_group()
