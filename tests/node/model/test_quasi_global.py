"""A node tells quasi-global momentum of its mixes, and knows its state as it knows any optimizer's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossip.config import Config
from node import Node
from node.model.quasi_global import QuasiGlobal
from tests.node.trainees import linear


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def momenta(optimizer):
    found = [optimizer.state[p].get("quasi_global", torch.zeros_like(p)) for p in optimizer.param_groups[0]["params"]]
    return torch.cat([one.flatten() for one in found]).clone()


class Watched(QuasiGlobal):
    """An optimizer that records at each mix how far the parameters are from where the last step left them."""

    def __init__(self, model, **options):
        super().__init__(model.parameters(), **{"lr": 0.1} | options)
        self.model, self.jumps, self.joins = model, [], []
        self.after_step = flat(model)

    def mixed(self):
        self.jumps.append(flat(self.model) - self.after_step)
        self.after_step = flat(self.model)
        super().mixed()

    def joined(self, keep=False):
        super().joined(keep)
        self.joins.append((flat(self.model), momenta(self)))


def pulled(model, optimizer, target):
    """Return a training step towards a number, with noise, so that two nodes never agree exactly."""

    def work():
        optimizer.zero_grad()
        noise = 0.1 * torch.randn(1)
        loss = sum(((parameter - target - noise) ** 2).sum() for parameter in model.parameters()) / 2
        loss.backward()
        optimizer.step()
        optimizer.after_step = flat(model)
        return loss

    return work


def with_a_past(model, gradient=1.0):
    """Return an optimizer with momentum from a life in another swarm."""
    optimizer = Watched(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    QuasiGlobal.mixed(optimizer)
    assert momenta(optimizer).norm() > 0
    return optimizer


def watched(train, target, *, seed=0, optimizer=None, **options):
    model = linear(seed)
    optimizer = Watched(model) if optimizer is None else optimizer(model)
    return train(model, optimizer, pulled(model, optimizer, target), **options)


def test_the_optimizer_hears_of_every_mix_when_it_is_in_the_parameters(train, until):
    first = watched(train, -1.0)
    second = watched(train, 1.0, seeds=[first.node.address])
    both = (first, second)
    until(lambda: all(len(one.optimizer.jumps) >= 10 for one in both))
    for one in both:
        heard, done = one.do(
            lambda node: (list(node._training.live.optimizers.all[0].jumps), node.metrics().exchanges_done)
        )
        assert all(jump.norm() > 0 for jump in heard)
        assert len(heard) <= done  # Two mixes at one boundary are reported as one.
        assert momenta(one.optimizer).norm() > 0
    # Each is pulled to its own number, and mixes pull it to the other's.
    assert sum(float(jump.sum()) for jump in first.optimizer.jumps) > 0
    assert sum(float(jump.sum()) for jump in second.optimizer.jumps) < 0


def test_a_newcomer_among_other_optimizers_begins_without_momentum_where_the_swarm_is(train):
    donor_model = linear()
    sgd = torch.optim.SGD(donor_model.parameters(), lr=0.1, momentum=0.9)
    sgd.after_step = None
    donor = train(donor_model, sgd, pulled(donor_model, sgd, 5.0))
    donor.do(lambda node: node._training.visit())  # it reports what its optimizer keeps
    newcomer = watched(train, 5.0, seed=1, optimizer=with_a_past, seeds=[donor.node.address])
    ((weights, momentum),) = newcomer.optimizer.joins
    assert torch.equal(weights, torch.cat([value.flatten() for value in newcomer.at_entry.values()]))
    assert not torch.equal(weights, flat(linear(1)))
    assert momentum.norm() == 0  # neither of a former life, nor SGD's, which is as long


def test_a_newcomer_takes_over_the_momentum_of_its_donor(train, until):
    first = watched(train, -1.0)
    second = watched(train, 1.0, seeds=[first.node.address])
    until(lambda: all(len(one.optimizer.jumps) >= 3 for one in (first, second)))
    second.stop()
    # No other node is left to move it.
    held = first.do(lambda node: (node._training.visit(), momenta(first.optimizer))[1])
    model = linear(2)
    optimizer = Watched(model)
    train(model, optimizer, seeds=[first.node.address])  # It takes no steps.
    ((_, momentum),) = optimizer.joins
    assert held.norm() > 0
    assert torch.equal(momentum, held)


@pytest.mark.parametrize("has_momentum", [True, False])
def test_after_a_checkpoint_is_loaded_the_momentum_is_that_of_its_weights_or_none(train, tmp_path, has_momentum):
    saved = linear(1)
    before = train(saved, with_a_past(saved, gradient=3.0) if has_momentum else None)  # Neither takes a step.
    before.do(lambda node: node.save(tmp_path / "run"))
    before.stop()
    model = linear(2)
    optimizer = with_a_past(model)
    train(model, optimizer).do(lambda node: node.load(tmp_path / "run"))
    assert torch.equal(flat(model), flat(saved))
    assert torch.equal(momenta(optimizer), momenta(before.optimizer) if has_momentum else torch.zeros(10))


def test_mixes_take_the_outer_step_whatever_optimizes_unless_it_has_a_momentum_over_them():
    model, left_open = linear(), Config()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    quasi_global = QuasiGlobal(model.parameters(), lr=0.1)

    def outer(optimizer, config=left_open):
        step = Node(model, optimizer, config=config)._training.live.outer
        return step.measures, step.is_plain

    assert outer(sgd) == outer(None) == outer([]) == outer((sgd,)) == outer([sgd, sgd]) == (True, False)
    assert outer(quasi_global) == outer([sgd, quasi_global]) == outer(None, Config(outer_momentum=0.0)) == (False, True)
