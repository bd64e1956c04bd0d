"""Programs that defeat mixing or hold state without a mean: each works, or is told why in one sentence."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from gossip.errors import LayoutError
from node.model.inventory.constants import constants_of
from node.model.inventory.probe import MixProbe
from tests.node.conftest import until
from tests.node.loop.test_settling import settling
from tests.node.trainees import alive, linear, step_towards, towards


def sentences(trainee):
    return [str(event) for event in trainee.node._training.listeners.history()]


def told(trainee, text):
    return any(text in sentence for sentence in sentences(trainee))


def assert_loop_raises(trainee, sentence):
    until(lambda: trainee.error is not None)
    with pytest.raises(LayoutError, match=sentence):
        raise trainee.error
    trainee.error = None


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


def all_tensors(model):
    return [HiddenMasters(model.parameters())]


def the_smaller_tensor(model):
    return [torch.optim.SGD([model.weight], 0.001), HiddenMasters([model.bias])]


@pytest.mark.parametrize("build", [all_tensors, the_smaller_tensor])
def test_an_optimizer_that_undoes_every_mix_is_named_once(train, build):
    def hidden(target, seeds=()):
        model = linear(width=64)
        optimizers = build(model)
        return train(model, optimizers, step_towards(model, optimizers, target), seeds=seeds)

    first = hidden(1.0)
    hidden(-1.0, [first.node.address])
    until(lambda: told(first, "gone one step later"), 60)
    assert sum("gone one step later" in sentence for sentence in sentences(first)) == 1
    assert told(first, "HiddenMasters, or the program, keeps a copy of the weights")


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
    # Read between two steps, since each step changes every element in place.
    changed = first.do(lambda _: model["teacher"].weight.detach().clone())
    second = train(with_teacher(), seeds=[first.node.address])
    taken = second.at_entry["teacher.weight"]
    assert torch.allclose(taken / taken[0, 0], changed / changed[0, 0], rtol=1e-4)
    assert torch.all(taken.abs() < changed.abs() * 1.001)


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_loop_that_trains_a_copy_of_the_model_is_told_so(train, has_loss):
    step = towards(linear(1), 1.0)
    trainee = train(linear(), None, step if has_loss else lambda: step() and None)
    until(lambda: told(trainee, "No weight of this Node has changed in 32 steps"))


@pytest.mark.parametrize(
    ("begin", "way", "is_told"),
    [
        (torch.zeros(2), "rebind", True), (np.zeros(2), "rebind", True), (torch.zeros(2), "write", False),
        (torch.zeros(2), "copy", False), (torch.zeros(2), "unused", False), (torch.zeros(90, 90), "rebind", False),
        (torch.arange(2.0), "constant", False),
    ],
)  # fmt: skip
def test_a_tensor_that_a_program_computes_anew_beside_its_mapping_is_named(train, begin, way, is_told):
    weights = torch.ones(4, requires_grad=True)
    state = {"weights": weights, "mean": begin.clone() if isinstance(begin, torch.Tensor) else begin.copy()}
    mean = state["mean"].requires_grad_() if way == "unused" else state["mean"]

    def work():
        nonlocal mean
        with torch.no_grad():
            weights.mul_(0.9)
            if way == "rebind":
                mean = 0.9 * mean + 0.1
            elif way == "write":
                mean.add_(0.1)
        return weights.detach().sum()

    trainee = train(state, None, work, copy=["mean"] if way == "copy" else ())
    until(lambda: trainee.node.metrics().steps > 64)
    assert told(trainee, "Tensor 'mean' of the mapping has not changed in 32 steps") == is_told


def test_a_loop_whose_rate_begins_at_zero_is_not_told_that_nothing_changes(train):
    model, rates = linear(), iter([0.0] * 20 + [0.1] * 10**6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = step_towards(model, [optimizer], 1.0)

    def work():
        optimizer.param_groups[0]["lr"] = next(rates)
        return step()

    trainee = train(model, optimizer, work)
    until(lambda: trainee.node.metrics().steps > 60)
    assert not told(trainee, "No weight of this Node has changed")


class Late(nn.Module):
    """A module whose buffer and parameter are made in a later pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", None)
        self.register_parameter("bias", None)


def test_a_program_that_is_too_short_for_a_second_look_is_looked_at_before_it_settles(train, monkeypatch):
    monkeypatch.setattr("node.loop.training.OPTIMIZER_S", 3_600.0)
    model = Late()
    trainee = train(model)
    until(lambda: trainee.node.metrics().steps)
    trainee.do(lambda node: setattr(model, "mean", torch.zeros(2)))
    assert not told(trainee, "Tensor 'mean' is held")
    trainee.do(lambda node: node.settle(0.1))
    assert told(trainee, "Tensor 'mean' is held")


def test_a_buffer_that_is_made_later_is_told_and_a_parameter_is_refused(train, monkeypatch):
    monkeypatch.setattr("node.loop.training.OPTIMIZER_S", 0.05)
    model = Late()
    trainee = train(model)
    trainee.do(lambda node: setattr(model, "mean", torch.zeros(2)))
    until(lambda: told(trainee, "Tensor 'mean' is held by its module"))
    trainee.do(lambda node: setattr(model, "bias", nn.Parameter(torch.zeros(2))))
    assert_loop_raises(trainee, "Parameter 'bias' was added to a Late")


class Featured(nn.Module):
    """A model with a buffer of orthogonal directions, and with constants outside its state."""

    def __init__(self, seed):
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("directions", torch.linalg.qr(torch.randn(8, 8, generator=drawn))[0])
        self.register_buffer("cache", torch.randn(3, generator=drawn), persistent=False)
        self.order = torch.randperm(4_000, generator=drawn)
        self.sizes = [4, 2]


def test_directions_that_mixes_make_shorter_are_told(train, monkeypatch):
    monkeypatch.setattr("node.loop.training.OPTIMIZER_S", 0.05)

    def drawing(seed, seeds=()):
        model = Featured(0)
        step = towards(model, 1.0)
        draws = torch.Generator().manual_seed(seed)

        def work():
            model.directions = torch.linalg.qr(torch.randn(8, 8, generator=draws))[0]
            return step()

        return train(model, None, work, seeds=seeds)

    first = drawing(1)
    assert not told(first, "of one length")
    drawing(2, [first.node.address])
    until(lambda: told(first, "The rows or columns of buffer 'directions' were of one length and are not any more"))


def test_models_that_were_made_with_other_constants_are_told(train):
    first = train(Featured(0))
    second = train(Featured(0), seeds=[first.node.address])
    until(lambda: second.node.metrics().exchanges_done >= 3)
    assert not told(first, "do not travel") + told(second, "do not travel")
    train(Featured(1), seeds=[first.node.address])
    until(lambda: told(first, "tensors that do not travel ('cache', 'order', 'sizes')"))


def test_constants_that_machines_compute_with_other_last_bits_are_the_same():
    one, other = Featured(0), Featured(0)
    other.cache = one.cache * (1 + 2e-7)
    one.betas = other.betas = np.arange(10.0)[::-1]
    one.table = other.table = np.arange(10, dtype=">i4")
    mine = constants_of(one)
    assert not mine.differ(constants_of(other).mark)
    other.order[3:5] = one.order[3:5].flip(0)
    assert not mine.differ(constants_of(other).mark)  # Only some of the values are looked at.
    other.order = one.order.flip(0)
    assert mine.differ(constants_of(other).mark)
    assert constants_of(linear()) is None
    assert constants_of(nn.utils.spectral_norm(linear())) is None, "a weight that is computed from others"


class Kept(nn.Linear):
    """A layer with state that it saves by itself."""

    def get_extra_state(self):
        return torch.ones(2)


def test_state_that_a_module_saves_by_itself_is_told(train, monkeypatch):
    monkeypatch.setattr("node.loop.training.OPTIMIZER_S", 0.05)
    trainee = train(Kept(4, 2))
    until(lambda: told(trainee, "Tensor '_extra_state' is held by its module"))


class Observed(nn.Linear):
    """A layer with a buffer of which it sets a value at each step."""

    def __init__(self, begin):
        super().__init__(4, 2)
        self.register_buffer("low", torch.as_tensor(begin))

    def observe(self):
        values = self.low.view(-1)
        values[torch.randint(len(values), ())] = torch.randint(2, ()) if len(values) > 1 else torch.randn(())


@pytest.mark.parametrize(
    ("begin", "options"),
    [(math.inf, {}), (torch.zeros(2_000, dtype=torch.bool), {}), (torch.arange(64), {}), (math.inf, {"copy": ["low"]})],
)
def test_what_each_node_keeps_for_itself_is_told_once_all_have_settled_unless_it_is_named(train, begin, options):
    first = train(model := Observed(begin), None, model.observe, **options)
    second = train(model := Observed(begin), None, model.observe, seeds=[first.node.address], **options)
    until(lambda: alive(first) == 2)
    answers = [settling(node) for node in (first, second)]
    assert [answer.get(timeout=60) for answer in answers] == [0.0, 0.0]
    for node in (first, second):
        if options:
            assert not told(node, "has no mean")
        else:
            until(lambda node=node: told(node, "'low' has no mean"))
        node.leave.set()


def test_parameters_that_an_optimizer_gets_later_must_be_in_the_model_too(train, monkeypatch):
    monkeypatch.setattr("node.loop.training.OPTIMIZER_S", 0.05)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainee = train(model, optimizer)
    trainee.do(lambda node: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}))
    assert_loop_raises(trainee, r"SGD trains 1 tensor \(3\) that the model of this Node lacks")


def verdict_of(seed, step, undoes, mixes=65):
    """Return True if a probe says that steps of this length undo so many mixes, which have the length 1."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.zeros(64)
    probe = MixProbe(lambda: [weight], lambda tensors: [0])
    for _ in range(mixes):
        mix = torch.randn(64, generator=draw)
        with probe.mixing():
            weight += mix
        weight += step * torch.randn(64, generator=draw) - (mix if undoes else 0.0)
        if probe.on_step():
            return True
    return False


@pytest.mark.parametrize(
    ("step", "undoes"), [(0.1, False), (1.0, False), (2.0, False), (10.0, False), (0.1, True), (1.0, True)]
)
def test_mixes_that_steps_undo_are_seen_and_no_others(step, undoes):
    assert {verdict_of(seed, step, undoes) for seed in range(40)} == {undoes}
    assert undoes or {verdict_of(seed, step, undoes, 31) for seed in range(40, 80)} == {False}


def test_a_short_run_has_enough_mixes_to_see_that_steps_undo_all_of_them():
    assert all(verdict_of(seed, 0.1, True, 9) for seed in range(40))
