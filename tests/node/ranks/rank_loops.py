"""Loops that all ranks of one node run alike, and helpers that inspect the ranks."""

import time

import torch
from torch import nn

from gossip.config import Config
from tests.node.ranks.rank_threads import MemoryGroup, RankThread, play
from tests.node.trainees import step_of

QUICK = Config(mix_every_steps=2, join_timeout_s=3.0)


def net(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(dtype)


def trained_by(node):
    """Return the object that holds this rank's state and optimizers."""
    return node._training.part


def flat(model):
    return torch.cat([value.reshape(-1).double() for value in model.state_dict().values()])


def trained(model, optimizer, step):
    """Take a step on inputs that are equal on every rank, which stands for all-reduced gradients."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 6, generator=generator, dtype=model[0].weight.dtype)
    return step_of(lambda: model(inputs).square().mean(), optimizer)()


def ranks(loop, size=2, make=None, dtype=torch.float32, **options):
    """Return a group and a thread for each rank, each with a different model at first."""
    group = MemoryGroup(size)
    options = {"config": QUICK} | options
    found = []
    for channel in group.channels:
        model = net(10 + channel.rank, dtype)
        optimizer = (make or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)))(model.parameters())
        found.append(RankThread(channel, model, optimizer, loop, options))
    return group, found


def no_errors(played):
    for rank in played:
        if rank.error is not None:
            raise rank.error
    return played


def results(loop, **options):
    """Run a loop on every rank of a node; return what it returned on each."""
    return [rank.result for rank in no_errors(play(ranks(loop, **options)[1]))]


def errors(loop, **options):
    """Run a loop on every rank of a node; return the errors with which the ranks ended."""
    return [rank.error for rank in play(ranks(loop, **options)[1])]


def model_of(node):
    return trained_by(node).state.live_tensors.model


def momenta_of(node):
    [optimizer] = trained_by(node).optimizers.all
    return [optimizer.state[parameter]["momentum_buffer"] for parameter in model_of(node).parameters()]


def looked(node):
    """Return everything on which a loop could base a decision."""
    return flat(model_of(node)), node.swarm_samples, node.finished, node.members, dict(node.metrics()), node.id


def run(node, count, pause_s=0.0):
    seen = []
    for step in range(count):
        node.step(trained(model_of(node), trained_by(node).optimizers.all[0], step), 4)
        time.sleep(pause_s)
        seen.append(looked(node))
    return seen


def same(one, other):
    return torch.equal(one[0], other[0]) and one[1:] == other[1:]
