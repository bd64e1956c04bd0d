"""Nodes whose programs defeat mixing, or hold what has no mean: each is right, or told in one sentence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gossip.errors import LayoutError
from tests.node.conftest import until
from tests.node.test_settling import settling
from tests.node.trainees import alive, linear, towards


def sentences(trainee):
    return [str(event) for event in trainee.node._training.listeners.history()]


def told(trainee, text):
    return any(text in sentence for sentence in sentences(trainee))


class Permuted(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.register_buffer("order", torch.randperm(8))
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))


def test_a_newcomer_takes_whole_numbers_and_nodes_with_infinite_constants_mix(train):
    models = [Permuted(0), Permuted(1)]
    models[0].norm.num_batches_tracked.fill_(70_000)
    first = train(models[0])
    second = train(models[1], seeds=[first.node.address])
    assert second.at_entry["order"].tolist() == first.at_entry["order"].tolist()
    assert second.at_entry["norm.num_batches_tracked"].item() == 70_000
    until(lambda: second.node.metrics().exchanges_done >= 3)
    assert torch.equal(models[1].mask, torch.full((3, 3), -math.inf).triu(1))
    assert told(first, "Of the model 6 tensors averaged")


def test_a_tensor_that_is_not_finite_any_more_is_named_with_the_step(train):
    model = linear()
    first = train(model)
    second = train(linear(1), seeds=[first.node.address])
    until(lambda: second.node.metrics().exchanges_done)
    first.do(lambda node: model.bias.data.fill_(math.nan))
    until(lambda: told(first, "The weights are not finite any more (bias, step "))


class HiddenMasters(torch.optim.Optimizer):
    """SGD on copies of the weights that it keeps outside of ``state``."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.001})
        self.copies = {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.copies.setdefault(parameter, parameter.detach().clone())
                parameter.copy_(master.sub_(0.001 * parameter.grad))


def test_an_optimizer_that_undoes_every_mix_is_named_once(train):
    def hidden(target, seeds=()):
        model = linear(width=64)
        optimizer = HiddenMasters(model.parameters())

        def work():
            loss = sum(((parameter - target) ** 2).sum() for parameter in model.parameters())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        return train(model, optimizer, work, seeds=seeds)

    first = hidden(1.0)
    hidden(-1.0, [first.node.address])
    until(lambda: told(first, "gone one step later"), 60)
    assert sum("gone one step later" in sentence for sentence in sentences(first)) == 1
    assert told(first, "HiddenMasters keeps a copy of the weights")


def test_uneven_data_are_not_called_an_undone_mix(train):
    one, other = linear(width=64), linear(width=64)
    first = train(one, None, towards(one, 1.0, rate=0.2))
    second = train(other, None, towards(other, -1.0, rate=0.2), seeds=[first.node.address])
    until(lambda: first.side.live.state.probe.verdicts >= 1, 60)
    assert not told(first, "gone one step later")
    assert not told(second, "gone one step later")


def test_a_teacher_is_told_once_and_a_newcomer_takes_it_as_it_is_now(train, monkeypatch):
    monkeypatch.setattr("node.loop.training.OPTIMIZER_S", 0.2)

    def with_teacher():
        model = nn.ModuleDict({"student": nn.Linear(4, 2), "teacher": nn.Linear(4, 2)})
        model["teacher"].requires_grad_(False)
        return model

    model = with_teacher()
    first = train(model, None, lambda: model["teacher"].weight.data.mul_(0.999).sum())
    until(lambda: told(first, "'teacher.weight' requires no gradient and changes"))
    changed = model["teacher"].weight.detach().clone()
    second = train(with_teacher(), seeds=[first.node.address])
    taken = second.at_entry["teacher.weight"]
    assert torch.allclose(taken / taken[0, 0], changed / changed[0, 0], rtol=1e-4)
    assert torch.all(taken.abs() < changed.abs() * 1.001)


class Observed(nn.Linear):
    """A layer with the range of what it has seen, which begins as infinite."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("low", torch.tensor(math.inf))

    def observe(self):
        self.low.copy_(torch.randn(()))
        return self.low


def test_ranges_that_each_node_observes_for_itself_are_told_once_all_have_settled(train):
    first = train(model := Observed(), None, model.observe)
    second = train(model := Observed(), None, model.observe, seeds=[first.node.address])
    until(lambda: alive(first) == 2)
    answers = [settling(node) for node in (first, second)]
    assert [answer.get(timeout=60) for answer in answers] == [0.0, 0.0]
    until(lambda: all(told(node, "'low' has no mean") for node in (first, second)))
    for node in (first, second):
        node.leave.set()


def test_ranges_that_the_user_has_named_are_not_told(train):
    first = train(model := Observed(), None, model.observe, copy=["low"])
    second = train(model := Observed(), None, model.observe, seeds=[first.node.address], copy=["low"])
    until(lambda: alive(first) == 2)
    answers = [settling(node) for node in (first, second)]
    assert [answer.get(timeout=60) for answer in answers] == [0.0, 0.0]
    assert not told(first, "has no mean")
    for node in (first, second):
        node.leave.set()


def test_parameters_that_an_optimizer_gets_later_must_be_in_the_model_too(train, monkeypatch):
    monkeypatch.setattr("node.loop.training.OPTIMIZER_S", 0.05)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainee = train(model, optimizer)
    trainee.do(lambda node: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}))
    until(lambda: trainee.error is not None)
    assert isinstance(trainee.error, LayoutError)
    with pytest.raises(LayoutError, match=r"SGD trains 1 tensor \(3\) that the model of this Node lacks"):
        raise trainee.error
    trainee.error = None
