"""The example of quasi-global momentum: its optimizer has the paper's two equations, and its loop follows the mixes."""

import copy
import random
import runpy

import pytest
import torch
from torch import nn

from tests.node.test_examples import EXAMPLES, results_of_two

DECAY = 0.01
QuasiGlobal = runpy.run_path(str(EXAMPLES / "quasi_global.py"))["QuasiGlobal"]


def models():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, copy.deepcopy(model)


def backward(model, seed):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)).double()
    model.zero_grad()
    nn.functional.cross_entropy(model(x), torch.arange(8) % 3).backward()


@pytest.mark.parametrize("seed", range(5))
def test_the_momentum_has_the_equations_in_any_order_of_steps_and_mixes(seed):
    choose, mu = random.Random(seed), 0.8
    ours, theirs = models()
    optimizer = QuasiGlobal(ours.parameters(), lr=1.0, momentum=mu, weight_decay=DECAY)
    xs = list(theirs.parameters())
    m, old, rates = [torch.zeros_like(x) for x in xs], [None] * len(xs), [0.0] * len(xs)
    for turn in range(40):
        if choose.random() < 0.6:
            lr = optimizer.param_groups[0]["lr"] = choose.choice([0.0, 0.05, 0.1])
            for model in (ours, theirs):
                backward(model, turn)
                list(model.parameters())[turn % 4].grad = None  # a parameter without a step
            optimizer.step()
            for place, x in enumerate(xs):
                if x.grad is not None:
                    old[place] = x.detach().clone() if old[place] is None else old[place]
                    rates[place] += lr
                    x.data -= lr * (x.grad + DECAY * x.data + mu * m[place])
        else:
            for mine, x in zip(ours.parameters(), xs, strict=True):
                shift = 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(turn)).double()
                mine.data, x.data = mine.data + shift, x.data + shift
            optimizer.mixed()
            for place, x in enumerate(xs):
                if rates[place] > 0.0:
                    m[place] = mu * m[place] + (1 - mu) * (old[place] - x.detach()) / rates[place]
                    old[place], rates[place] = x.detach().clone(), 0.0
        torch.testing.assert_close(list(ours.parameters()), xs, rtol=1e-12, atol=1e-14)
    assert all(momentum.norm() > 0.01 for momentum in m)
    optimizer.joined()
    optimizer.mixed()  # The change from the old weights to the new is not a mix.
    assert not any(state["quasi_global"].any() for state in optimizer.state.values())


def test_two_nodes_learn_the_digits_and_follow_their_mixes():
    results = results_of_two("quasi_global.py", "--samples", "30000", "--settle", "1", "--step-delay", "0.002")
    assert all(result["mixes"] > 10 and result["accuracy"] > 0.9 for result in results), results
