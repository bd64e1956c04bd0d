"""Quasi-global momentum: the equation, an ordinary torch optimizer around it, and nodes that tell it of their mixes."""

import copy
import pickle
import random

import pytest
import torch
from torch import nn

from gossip.config import Config
from gossip.errors import ConfigError
from node import Node
from node.model.quasi_global import QuasiGlobal
from tests.node.trainees import linear, step_towards

DECAY = 0.01


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def backward(model, seed):
    """Compute gradients that the seed alone decides."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 5, generator=generator).double(), torch.randint(0, 3, (8,), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def step_and_mix(model, optimizer, seed):
    """Take a step on a batch, and mix."""
    backward(model, seed)
    optimizer.step()
    shift(model, seed)
    optimizer.mixed()


@torch.no_grad()
def shift(model, seed):
    """Move the weights as an exchange does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator).double()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def momenta(optimizer):
    return [optimizer.state[one]["quasi_global"] for group in optimizer.param_groups for one in group["params"]]


def assert_close(ours, theirs):
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-14)


class Slowly:
    """The two equations, one tensor after another, each with the rates of its steps since the last mix."""

    def __init__(self, model, mu):
        self.model, self.mu = model, mu
        self.m = [torch.zeros_like(value) for value in values(model)]
        self.old, self.rates = [None] * len(self.m), [0.0] * len(self.m)

    @torch.no_grad()
    def step(self, lr_of_layer):
        for place, x in enumerate(self.model.parameters()):
            if x.grad is not None:
                lr = lr_of_layer[place // 2]
                self.old[place] = x.clone() if self.old[place] is None else self.old[place]
                self.rates[place] += lr
                x -= lr * (x.grad + DECAY * x + self.mu * self.m[place])

    def mixed(self):
        for place, x in enumerate(values(self.model)):
            if self.rates[place] > 0.0:
                moved = (self.old[place] - x) / self.rates[place]
                self.m[place] = self.mu * self.m[place] + (1 - self.mu) * moved
                self.old[place], self.rates[place] = x, 0.0


@pytest.mark.parametrize("seed", range(10))
def test_it_is_the_equation_whatever_the_order_of_steps_and_mixes(seed):
    """Each group's rates change and may be 0. Parameters may lack gradients. Mixes come before and without steps."""
    choose = random.Random(seed)
    ours, theirs = mlp(), mlp()
    groups = [{"params": ours[layer].parameters()} for layer in (0, 2)]
    optimizer = QuasiGlobal(groups, lr=1.0, momentum=0.8, weight_decay=DECAY)
    slow = Slowly(theirs, 0.8)
    for turn in range(40):
        if choose.random() < 0.6:
            rates, lacking = choose.choices([0.0, 0.05, 0.1], k=2), choose.choice([None, 0, 3])
            for model in (ours, theirs):
                backward(model, turn)
                if lacking is not None:
                    list(model.parameters())[lacking].grad = None
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            optimizer.step()
            slow.step(rates)
        else:
            for model in (ours, theirs):
                shift(model, turn)
            optimizer.mixed()
            slow.mixed()
        assert_close(values(ours), values(theirs))
    assert_close(momenta(optimizer), slow.m)
    assert all(m.norm() > 0.01 for m in slow.m)


def test_without_mixes_it_is_sgd_without_momentum_bit_for_bit():
    ours, theirs = mlp(), mlp()
    optimizer = QuasiGlobal(ours.parameters(), lr=0.1, momentum=0.9, weight_decay=DECAY)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, weight_decay=DECAY)
    for step in range(5):
        backward(ours, step)
        backward(theirs, step)
        optimizer.step()
        plain.step()
    assert all(map(torch.equal, values(ours), values(theirs)))


def test_weights_that_were_replaced_begin_without_momentum():
    model = mlp()
    optimizer = QuasiGlobal(model.parameters(), lr=0.1)
    for keep in (True, False):
        for seed in (1, 2):
            step_and_mix(model, optimizer, seed)
        held = copy.deepcopy(momenta(optimizer))
        assert held[0].norm() > 0
        shift(model, 1)
        optimizer.joined(keep=keep)
        expected = held if keep else [torch.zeros_like(m) for m in held]
        assert all(map(torch.equal, momenta(optimizer), expected))
        optimizer.mixed()  # The change from the old weights to the new is not a mix.
        assert all(map(torch.equal, momenta(optimizer), expected))


def test_its_state_is_the_momentum_alone_and_a_copy_goes_on_as_the_original():
    model = mlp()
    optimizer = QuasiGlobal(model.parameters(), lr=0.1, weight_decay=DECAY)
    for seed in range(3):
        step_and_mix(model, optimizer, seed)
    assert all(state.keys() == {"quasi_global"} for state in optimizer.state.values())

    twin = mlp(seed=1)
    other = QuasiGlobal(twin.parameters(), lr=0.9, momentum=0.1)
    backward(twin, 9)
    other.step()  # It starts from other weights and has to forget them.
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    twin.load_state_dict(model.state_dict())
    assert [other.param_groups[0][key] for key in ("lr", "momentum", "weight_decay")] == [0.1, 0.9, DECAY]
    for one, its in ((model, optimizer), (twin, other)):
        step_and_mix(one, its, 7)
    assert all(map(torch.equal, values(model), values(twin)))
    assert all(map(torch.equal, momenta(optimizer), momenta(other)))


def test_a_deep_copy_of_model_and_optimizer_trains_alike():
    model = mlp()
    optimizer = QuasiGlobal(model.parameters(), lr=0.1)
    step_and_mix(model, optimizer, 1)
    twin, other = copy.deepcopy((model, optimizer))
    for one, its in ((model, optimizer), (twin, other)):
        step_and_mix(one, its, 2)
    assert all(map(torch.equal, momenta(optimizer), momenta(other)))


def test_one_cycle_turns_its_momentum_as_sgds():
    model = mlp()
    optimizer = QuasiGlobal(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, base_momentum=0.7, max_momentum=0.8)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.8)


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    x = nn.Parameter(torch.ones(3))
    optimizer = QuasiGlobal([x], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (x**2).sum() / 2
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.5
    assert torch.equal(x, torch.full((3,), 0.5))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "lr is -1 and must"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum is 1 and must be .* below 1"),
        ({"lr": 0.1, "weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(options, said):
    with pytest.raises(ConfigError, match=said):
        QuasiGlobal(mlp().parameters(), **options)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        QuasiGlobal(embedding.parameters(), lr=0.1).step()


# -- nodes -------------------------------------------------------------------------------------------------------------
def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def flat_momenta(optimizer):
    found = [optimizer.state[p].get("quasi_global", torch.zeros_like(p)) for p in optimizer.param_groups[0]["params"]]
    return torch.cat([one.flatten() for one in found]).clone()


class Watched(QuasiGlobal):
    """An optimizer that records at each mix how far the parameters are from where the last step left them."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)
        self.model, self.jumps, self.joins = model, [], []
        self.after_step = flat(model)

    def mixed(self):
        self.jumps.append(flat(self.model) - self.after_step)
        self.after_step = flat(self.model)
        super().mixed()

    def joined(self, keep=False):
        super().joined(keep)
        self.joins.append((flat(self.model), flat_momenta(self)))


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
    assert flat_momenta(optimizer).norm() > 0
    return optimizer


def watched(train, target, **options):
    model = linear()
    optimizer = Watched(model)
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
        assert flat_momenta(one.optimizer).norm() > 0
    # Each is pulled to its own number, and mixes pull it to the other's.
    assert sum(float(jump.sum()) for jump in first.optimizer.jumps) > 0
    assert sum(float(jump.sum()) for jump in second.optimizer.jumps) < 0


def test_a_newcomer_among_other_optimizers_begins_without_momentum_where_the_swarm_is(train):
    model, other = linear(), linear(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    donor = train(model, sgd, step_towards(model, [sgd], 5.0))
    donor.do(lambda node: node._training.visit())  # It reports what its optimizer keeps.
    newcomer = train(other, with_a_past(other), seeds=[donor.node.address])
    ((weights, momentum),) = newcomer.optimizer.joins
    assert torch.equal(weights, torch.cat([value.flatten() for value in newcomer.at_entry.values()]))
    assert not torch.equal(weights, flat(linear(1)))
    assert momentum.norm() == 0  # neither of a former life, nor SGD's, which is as long


def test_a_newcomer_takes_over_the_momentum_of_its_donor(train):
    model, other = linear(), linear(2)
    donor = train(model, with_a_past(model))  # Neither takes a step.
    donor.do(lambda node: node._training.visit())  # It reports what its optimizer keeps.
    newcomer = train(other, Watched(other), seeds=[donor.node.address])
    ((_, momentum),) = newcomer.optimizer.joins
    assert torch.equal(momentum, flat_momenta(donor.optimizer))


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
    assert torch.equal(flat_momenta(optimizer), flat_momenta(before.optimizer) if has_momentum else torch.zeros(10))


def test_mixes_take_the_outer_step_whatever_optimizes_unless_it_has_a_momentum_over_them():
    model, left_open = linear(), Config()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    quasi_global = QuasiGlobal(model.parameters(), lr=0.1)

    def outer(optimizer, config=left_open):
        step = Node(model, optimizer, config=config)._training.live.outer
        return step.measures, step.is_plain

    assert outer(sgd) == outer(None) == outer([]) == outer((sgd,)) == outer([sgd, sgd]) == (True, False)
    assert outer(quasi_global) == outer([sgd, quasi_global]) == outer(None, Config(outer_momentum=0.0)) == (False, True)
