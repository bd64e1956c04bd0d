"""The optimizer's part of a model's vector: averaged, and handed to a joiner whose optimizer is fresh."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from gossip.errors import LayoutError
from node.model.snapshot import ModelState
from tests.node.model.test_snapshot import _same_weights  # noqa: F401  (a fixture of every test here)
from tests.node.vectors import mlp, slow_vector, train, vector_of

OPTIMIZERS = {
    "momentum": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), ("momentum_buffer",)),
    "adam": (lambda p: torch.optim.Adam(p, 0.01, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "adamw": (lambda p: torch.optim.AdamW(p, 0.01), ("exp_avg", "exp_avg_sq")),
    "fused": (lambda p: torch.optim.AdamW(p, 0.01, fused=True), ("exp_avg", "exp_avg_sq")),
    "nadam": (lambda p: torch.optim.NAdam(p, 0.01), ("exp_avg", "exp_avg_sq")),
    "adagrad": (lambda p: torch.optim.Adagrad(p, 0.1), ("sum",)),
}


def adam(parameters):
    return torch.optim.Adam(parameters, 0.01)


def trained(steps, make=adam):
    """Return a model, its optimizer after some steps, and the state of both."""
    model = mlp()
    optimizer = make(model.parameters())
    train(model, optimizer, steps, seed=1)
    return model, optimizer, ModelState(model, optimizer)


def options_of(optimizer):
    """Return what the groups of an optimizer hold beside parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize(("build", "keys"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_joiner_with_a_fresh_optimizer_continues_exactly_as_the_original(build, keys):
    model, optimizer, state = trained(5, build)
    assert state.optimizer_keys == keys
    full = vector_of(state, full=True)
    assert full.size == state.optimizer_range().stop == state.layout.size * (1 + len(keys))

    joiner = mlp()
    fresh = build(joiner.parameters())
    groups = copy.deepcopy(options_of(fresh))
    joined = ModelState(joiner, fresh)
    with torch.inference_mode():
        joined.write(full, state.optimizer_keys, state.optimizer_scalars())
    np.testing.assert_array_equal(vector_of(joined, full=True), full)
    assert options_of(fresh) == groups
    for mine, theirs in zip(joiner.parameters(), model.parameters(), strict=True):
        ours, its = fresh.state[mine], optimizer.state[theirs]
        assert ours.keys() == its.keys()
        for key in ours:
            assert (ours[key].dtype, ours[key].device) == (its[key].dtype, its[key].device)
            assert torch.equal(ours[key], its[key])
    assert train(joiner, fresh, 6, seed=2) == train(model, optimizer, 6, seed=2)


def test_state_that_exists_is_overwritten_in_place():
    model, optimizer, state = trained(3)
    kept = optimizer.state[model[0].weight]["exp_avg"]
    state.write(np.full(state.optimizer_range().stop, 0.25, np.float32), state.optimizer_keys, {"step": 40.0})
    assert optimizer.state[model[0].weight]["exp_avg"] is kept
    assert torch.all(kept == 0.25)
    assert state.optimizer_scalars() == {"step": 40.0}


def test_parameters_without_a_gradient_so_far_have_no_state_at_the_newcomer_either():
    model, optimizer, state = trained(0)
    assert state.optimizer_keys == ()
    assert not state.optimizer_range()
    assert state.optimizer_scalars() == {}
    model[0].weight.grad = torch.ones(16, 8)
    optimizer.step()
    assert len(optimizer.state) == 1
    assert state.optimizer_keys == ("exp_avg", "exp_avg_sq")
    joiner = mlp()
    fresh = adam(joiner.parameters())
    given = vector_of(state, full=True), state.optimizer_keys, state.optimizer_scalars()
    ModelState(joiner, fresh).adopt(*given)
    assert list(fresh.state) == [joiner[0].weight]
    assert train(joiner, fresh, 3, seed=1) == train(model, optimizer, 3, seed=1)


def test_frozen_parameters_have_no_share_in_the_optimizers_part():
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    state = ModelState(model, optimizer)
    train(model, optimizer, 1, seed=1)
    moved = [model[0].bias, model[2].weight, model[2].bias]
    moments = [optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq") for p in moved]
    np.testing.assert_array_equal(vector_of(state, full=True), slow_vector([*moved, model[0].weight, *moments]))


def test_a_parameter_that_requires_no_gradient_for_a_while_keeps_its_share():
    """The loop of a GAN freezes its discriminator for some steps."""
    model, _, state = trained(2)
    whole = vector_of(state, full=True)
    model[0].requires_grad_(False)
    np.testing.assert_array_equal(vector_of(state, full=True), whole)


def test_once_the_optimizer_holds_other_parameters_it_gives_no_state():
    """The state would be in other places at a newcomer than at its donor."""
    model = mlp()
    optimizer = torch.optim.Adam(model[2].parameters(), 0.01)
    state = ModelState(model, optimizer)
    state.optimizer_state.begin()
    train(model, optimizer, 2, seed=1)
    assert state.optimizer_range()
    optimizer.add_param_group({"params": list(model[0].parameters())})
    assert not state.optimizer_range()
    assert state.optimizer_keys == ()


def test_scalars_of_a_parameter_that_is_a_scalar_are_told_from_its_state():
    def scaled():
        model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.0)), "w": nn.Parameter(torch.ones(3))})
        return model, torch.optim.NAdam(model.parameters(), 0.01)

    (model, optimizer), (joiner, fresh) = scaled(), scaled()
    (model["scale"] * model["w"].square().sum()).backward()
    for _ in range(5):
        optimizer.step()
    state = ModelState(model, optimizer)
    assert state.optimizer_keys == ("exp_avg", "exp_avg_sq")
    ModelState(joiner, fresh).adopt(vector_of(state, full=True), state.optimizer_keys, state.optimizer_scalars())
    for name, parameter in model.items():
        for key, value in optimizer.state[parameter].items():
            torch.testing.assert_close(fresh.state[joiner[name]][key], value)


ANOTHER = "Adam keeps exp_avg, exp_avg_sq, step for each parameter and was given"


@pytest.mark.parametrize(
    ("keys", "scalars", "sentence"),
    [
        (("a", "b", "c", "d", "e"), {}, "at most 4 different keys"),
        (("a", "a"), {}, "at most 4 different keys"),
        ((), dict.fromkeys("abcde", 1.0), "and as many scalars"),
        (("not a name",), {}, "is not a name"),
        ((b"bytes",), {}, "is not a name"),
        ((), {"../x": 1.0}, "is not a name"),
        ((), {"step": float("nan")}, "negative or not finite"),
        ((), {"step": -1.0}, "negative or not finite"),
        (("momentum_buffer",), {}, ANOTHER),
        (("exp_avg",), {"step": 1.0}, ANOTHER),
        (("exp_avg", "exp_avg_sq"), {}, ANOTHER),
        (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), {"step": 1.0}, ANOTHER),
        ((), {"step": 1.0}, ANOTHER),
    ],
)
def test_state_that_does_not_fit_is_refused_and_training_goes_on(keys, scalars, sentence):
    model, optimizer, state = trained(0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    before = vector_of(state)
    with pytest.raises(LayoutError, match=sentence):
        state.write(np.ones(state.size() * (1 + len(keys)), np.float32), keys, scalars)
    np.testing.assert_array_equal(vector_of(state), before)
    assert not optimizer.state
    assert not steps
    train(model, optimizer, 2, seed=1)
    assert len(steps) == 2


class Odd(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("only on Sundays")


def test_an_optimizer_that_cannot_be_tried_takes_weights_alone():
    model = mlp()
    state = ModelState(model, Odd(model.parameters(), 0.1))
    with pytest.raises(LayoutError, match="only on Sundays"):
        state.write(np.ones(2 * state.size(), np.float32), ("momentum_buffer",))
    state.write(np.ones(state.size(), np.float32))
    assert np.all(vector_of(state) == 1)


def test_a_vector_too_short_for_its_keys_creates_no_state():
    _, optimizer, state = trained(0)
    with pytest.raises(LayoutError, match="elements where"):
        state.write(np.ones(state.size(), np.float32), ("exp_avg", "exp_avg_sq"), {"step": 1.0})
    assert not optimizer.state


def test_optimizer_state_without_an_optimizer_is_refused():
    state = ModelState(mlp())
    with pytest.raises(LayoutError, match="There is no optimizer"):
        state.write(np.ones(state.size(), np.float32), (), {"step": 1.0})


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_any_stretch_of_the_weights_and_of_the_state_is_what_lies_there(layout):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=layout)
    optimizer = adam(model.parameters())
    model(torch.randn(2, 3, 5, 5)).square().sum().backward()
    optimizer.step()
    state = ModelState(model, optimizer)
    full, place = vector_of(state, full=True), state.optimizer_range()
    for read, whole in ((state.begin_read_piece, range(state.size())), (state.begin_read_optimizer, place)):
        for start in whole[::7]:
            for stop in (start, start + 1, start + 50, whole.stop):
                out = np.full(max(min(stop, whole.stop) - start, 0), np.nan, np.float32)
                read(out, start).wait()
                np.testing.assert_array_equal(out, full[start : start + out.size])
