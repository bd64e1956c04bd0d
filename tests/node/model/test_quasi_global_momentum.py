"""Quasi-global momentum: the equation, and an ordinary torch optimizer around it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from gossip.errors import ConfigError
from node.model.quasi_global import QuasiGlobal

DECAY = 0.01


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def backward(model, seed):
    """Compute gradients that the seed alone decides."""
    random = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 5, generator=random).double(), torch.randint(0, 3, (8,), generator=random)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def step_and_mix(model, optimizer, seed, shifted=False):
    """Take a step on a batch and report a mix. With ``shifted``, the mix moves the weights."""
    backward(model, seed)
    optimizer.step()
    if shifted:
        shift(model, seed)
    optimizer.mixed()


@torch.no_grad()
def shift(model, seed):
    """Move the weights as an exchange does."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=random).double()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def momenta(optimizer):
    return [optimizer.state[parameter]["quasi_global"] for parameter in optimizer.param_groups[0]["params"]]


def assert_close(ours, theirs):
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-14)


class Slowly:
    """The two equations, one tensor after another. ``rates`` has the rate of each step since the last mix."""

    def __init__(self, model, mu):
        self.model, self.mu, self.rates = model, mu, []
        self.old, self.m = values(model), [torch.zeros_like(value) for value in values(model)]

    @torch.no_grad()
    def step(self, lr):
        self.rates.append(lr)
        for x, m in zip(self.model.parameters(), self.m, strict=True):
            g = x.grad + DECAY * x
            x -= lr * (g + self.mu * m)

    def mixed(self):
        new = values(self.model)
        self.m = [
            self.mu * m + (1 - self.mu) * (x_old - x_new) / sum(self.rates)
            for m, x_old, x_new in zip(self.m, self.old, new, strict=True)
        ]
        self.old, self.rates = new, []


@pytest.mark.parametrize("rates", [[0.1] * 12, [0.3 / (1 + step) for step in range(12)]], ids=["constant", "falling"])
def test_it_is_the_equation_and_a_changing_rate_counts_as_the_sum_of_the_rates_of_the_steps(rates):
    ours, theirs = mlp(), mlp()
    optimizer = QuasiGlobal(ours.parameters(), lr=1.0, momentum=0.8, weight_decay=DECAY)
    slow = Slowly(theirs, 0.8)
    for step, lr in enumerate(rates):
        backward(ours, step)
        backward(theirs, step)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        slow.step(lr)
        if step in (0, 3, 4, 9):  # Mix after 1, 3, 1 and 5 steps.
            shift(ours, step)
            shift(theirs, step)
            optimizer.mixed()
            slow.mixed()
            assert_close(momenta(optimizer), slow.m)
    assert_close(values(ours), values(theirs))
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


def test_a_steady_gradient_builds_the_momentum_that_sgd_would_have():
    x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = QuasiGlobal([x], lr=0.1, momentum=0.5)
    for _ in range(100):
        x.grad = torch.ones_like(x)
        optimizer.step()
        optimizer.mixed()  # The partner has the same weights.
    assert momenta(optimizer)[0].item() == pytest.approx(1 / (1 - 0.5), rel=1e-9)


def test_two_nodes_that_differ_only_in_their_gradients_hold_one_momentum_after_each_complete_mix():
    """Both start at one point and end at another, so that no local movement remains in the momentum."""
    models = [mlp(), mlp()]
    optimizers = [QuasiGlobal(model.parameters(), lr=0.1) for model in models]
    for mix in range(3):
        for node, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for step in range(4):
                backward(model, 100 * node + 10 * mix + step)
                optimizer.step()
        means = [(a + b) / 2 for a, b in zip(*map(values, models), strict=True)]
        for model, optimizer in zip(models, optimizers, strict=True):
            with torch.no_grad():
                for parameter, mean in zip(model.parameters(), means, strict=True):
                    assert not torch.equal(parameter, mean)
                    parameter.copy_(mean)
            optimizer.mixed()
        assert all(map(torch.equal, *map(momenta, optimizers)))


def test_a_mix_without_a_step_moves_no_momentum_and_counts_at_the_next():
    ours, theirs = mlp(), mlp()
    once, twice = (QuasiGlobal(model.parameters(), lr=0.1) for model in (ours, theirs))
    for model, optimizer in ((ours, once), (theirs, twice)):
        step_and_mix(model, optimizer, 1)
    before = copy.deepcopy(momenta(twice))
    shift(ours, 1)
    shift(theirs, 1)
    twice.mixed()
    assert all(map(torch.equal, momenta(twice), before))
    for model, optimizer in ((ours, once), (theirs, twice)):
        step_and_mix(model, optimizer, 2)
    assert all(map(torch.equal, momenta(once), momenta(twice)))
    assert not torch.equal(momenta(twice)[0], before[0])


def test_a_mix_before_the_first_step_counts_for_nothing():
    ours, theirs = mlp(), mlp()
    shift(ours, 1)
    shift(theirs, 1)
    early, late = (QuasiGlobal(model.parameters(), lr=0.1) for model in (ours, theirs))
    early.mixed()
    for model, optimizer in ((ours, early), (theirs, late)):
        step_and_mix(model, optimizer, 1)
    assert all(map(torch.equal, momenta(early), momenta(late)))


def test_a_rate_of_zero_divides_by_nothing():
    model = mlp()
    optimizer = QuasiGlobal(model.parameters(), lr=0.0)
    step_and_mix(model, optimizer, 1, shifted=True)
    assert all((m == 0).all() for m in momenta(optimizer))


def test_a_parameter_without_gradients_keeps_still_and_the_steps_of_others_are_not_its():
    model = mlp()
    optimizer = QuasiGlobal(model.parameters(), lr=0.1, momentum=0.5)
    first = model[0].weight
    backward(model, 0)
    gradient = first.grad.clone()
    optimizer.step()
    for seed in (1, 2):
        backward(model, seed)
        first.grad = None
        before = first.detach().clone()
        optimizer.step()
        assert torch.equal(first, before)
    optimizer.mixed()
    torch.testing.assert_close(momenta(optimizer)[0], 0.5 * gradient)  # One step of its own, and not a third of it.


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
        step_and_mix(model, optimizer, seed, shifted=True)
    assert all(state.keys() == {"quasi_global"} for state in optimizer.state.values())

    twin = mlp(seed=1)
    other = QuasiGlobal(twin.parameters(), lr=0.9, momentum=0.1)
    backward(twin, 9)
    other.step()  # It starts from other weights and has to forget them.
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    twin.load_state_dict(model.state_dict())
    assert [other.param_groups[0][key] for key in ("lr", "momentum", "weight_decay")] == [0.1, 0.9, DECAY]
    for one, its in ((model, optimizer), (twin, other)):
        step_and_mix(one, its, 7, shifted=True)
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


def test_groups_have_their_own_rate_and_schedulers_change_it():
    """Without other nodes, two parameters in two groups change as each would in an optimizer of its own."""
    together, apart = mlp(), mlp()
    rates = [0.1, 0.02]
    halves = [list(together[0].parameters()), list(together[2].parameters())]
    optimizer = QuasiGlobal([{"params": half, "lr": lr} for half, lr in zip(halves, rates, strict=True)], lr=1.0)
    others = [QuasiGlobal(apart[i].parameters(), lr=lr) for i, lr in zip((0, 2), rates, strict=True)]
    optimizers = [optimizer, *others]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, step_size=2, gamma=0.5) for one in optimizers]
    for step in range(6):
        backward(together, step)
        backward(apart, step)
        for one in optimizers:
            one.step()
        if step % 3 == 2:
            for one in optimizers:
                one.mixed()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.02 / 8)
    assert all(map(torch.equal, values(together), values(apart)))
    assert optimizer.state[together[2].bias]["quasi_global"].norm() > 0


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
