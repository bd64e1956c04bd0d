"""The average over a node's mixes by itself: what it comes to, and that the training weights come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gossip.arithmetic.layout import Layout, Segment
from gossip.errors import LayoutError, LocalError
from node.loop.average import FACTOR, Average
from node.model.snapshot import ModelState
from tests.node.test_state import Plain, drawn

WHOLE = [None]


def kept(model):
    return Average(model if not isinstance(model, nn.Module | dict) else ModelState(model), is_kept=True)


def expected(weights, factor=FACTOR):
    """The same, slowly: ``weights`` just after each mix."""
    average = None
    for number, one in enumerate(weights, 1):
        one = np.asarray(one, np.float64)
        average = one if average is None else average + max(1 - factor, 1 / number) * (one - average)
    return average


def trains(model, seed):
    """A step of some training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def fail(seen, model):
    """An evaluation that ends in an error."""
    seen.update(state_of(model))
    raise ZeroDivisionError


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


class Net(nn.Module):
    """Tied and frozen weights, BatchNorm's statistics, and an integer that counts its batches."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.to(dtype)

    def forward(self, x):
        return self.second(self.norm(self.base(self.first(x))))


def test_it_is_the_mean_of_the_first_mixes_and_exponential_from_then_on():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    average, seen = kept(model), []
    for mix in range(12):
        trains(model, mix)
        average.on_mixed(WHOLE)
        seen.append(model.weight.detach().clone().numpy())
        with average.shown():
            np.testing.assert_allclose(model.weight.detach().numpy(), expected(seen), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(expected(seen[:4]), np.mean(seen[:4], axis=0), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_training_weights_come_back_bit_for_bit_also_after_an_error(dtype):
    torch.manual_seed(0)
    model = Net(dtype)
    average = kept(model)
    for mix in range(3):
        trains(model, mix)
        model(torch.randn(8, 4, dtype=dtype))  # moves the statistics
        average.on_mixed(WHOLE)
    trains(model, 9)
    before, shown = state_of(model), {}
    for _ in range(2):  # and the second block shows what the first did
        with pytest.raises(ZeroDivisionError), average.shown():
            fail(shown, model)
        assert same(state_of(model), before)
    with average.shown():
        assert same(state_of(model), shown)
    moved = {name for name in before if not torch.equal(before[name], shown[name])}
    assert moved == {
        "first.weight", "first.bias", "second.weight", "second.bias", "norm.weight", "norm.bias", "norm.running_mean",
        "norm.running_var",
    }  # fmt: skip
    assert model.second.weight is model.first.weight


def test_statistics_are_averaged_and_an_integer_is_left_alone():
    torch.manual_seed(0)
    model = nn.BatchNorm1d(2)
    average, means = kept(model), []
    for mix in range(4):
        model(torch.randn(8, 2) + mix)
        average.on_mixed(WHOLE)
        means.append(model.running_mean.numpy().copy())
    with average.shown():
        np.testing.assert_allclose(model.running_mean.numpy(), expected(means), rtol=1e-5)
        assert (model.running_var > 0).all()
        assert model.num_batches_tracked == 4


def test_a_mix_of_a_part_is_averaged_by_itself():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)  # 15 elements, of which the first 12 are the weight
    slow, fast = [[] for _ in range(15)], kept(model)
    parts = [np.arange(0, 15, 3), np.arange(1, 15, 3), np.arange(2, 15, 3)]
    trains(model, 0)
    first = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()
    order = [segment.name for segment in ModelState(model).layout.segments]
    assert order == ["weight", "bias"]
    for mix in range(24):
        part = parts[mix % 3]
        part.setflags(write=False)
        fast.on_mixed([part])
        now = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()
        for element in part.tolist():
            slow[element].append(now[element])
        trains(model, mix + 1)
    with fast.shown():
        shown = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()
    wanted = [expected(seen) for seen in slow]
    np.testing.assert_allclose(shown, wanted, rtol=1e-4, atol=1e-5)
    assert first.shape == shown.shape


def trained_after_a_mix():
    """A model with an average that local steps have left, and its state."""
    model = nn.Linear(3, 2)
    average = kept(model)
    average.on_mixed(WHOLE)
    trains(model, 1)
    return model, average, state_of(model)


def test_blocks_in_one_another_are_one():
    model, average, before = trained_after_a_mix()
    with average.shown():
        shown = state_of(model)
        with average.shown():
            assert same(state_of(model), shown)
        assert same(state_of(model), shown)
    assert same(state_of(model), before)
    assert not same(before, shown)


def test_it_works_where_inference_mode_is_on():
    model, average, before = trained_after_a_mix()
    with torch.inference_mode(), average.shown():
        model(torch.ones(1, 3))
    average.on_mixed(WHOLE)
    model(torch.ones(1, 3)).sum().backward()  # the parameters are no inference tensors
    assert same(state_of(model), before)


def test_what_is_no_number_goes_when_it_begins_anew():
    model = nn.Linear(3, 2)
    average = kept(model)
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    average.on_mixed(WHOLE)
    average.forget()
    trains(model.requires_grad_(), 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
    average.on_mixed(WHOLE)
    with average.shown():
        assert (model.weight == 2.0).all()


@pytest.mark.parametrize("at", range(1, 9))
def test_a_signal_between_two_tensors_leaves_the_training_weights(monkeypatch, at):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    average = kept(model)
    average.on_mixed(WHOLE)
    trains(model, 1)
    before, copies, copy = state_of(model), [], torch.Tensor.copy_

    def interrupted(*arguments):
        copies.append(None)
        if len(copies) == at:  # four of them show the average, and four bring the weights back
            raise KeyboardInterrupt
        return copy(*arguments)

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
    with pytest.raises(KeyboardInterrupt), average.shown():
        pass
    monkeypatch.undo()
    assert same(state_of(model), before)
    average.check_not_shown("step")


def test_what_goes_on_training_is_refused_inside_the_block():
    average = kept(nn.Linear(3, 2))
    average.check_not_shown("step")
    # Of no mix yet, too: a rule that holds sometimes is none.
    with average.shown(), pytest.raises(LocalError, match=r"node\.step was called inside `with node\.averaged\(\):`"):
        average.check_not_shown("step")
    average.check_not_shown("step")


def test_without_one_there_is_a_sentence_and_nothing_else():
    model = nn.Linear(3, 2)
    average = Average(ModelState(model), is_kept=False)
    average.on_mixed(WHOLE)
    assert average.mixes == 0
    with pytest.raises(LocalError, match="keep_average=True"):
        average.check_kept()
    with average.in_checkpoint() as training:
        assert training == {}


def test_a_model_that_was_changed_meanwhile_is_told():
    model = nn.Linear(3, 2)
    average = kept(model)
    average.on_mixed(WHOLE)
    with pytest.raises(LayoutError, match="was replaced"), average.shown():
        model.weight = nn.Parameter(torch.zeros(2, 3))
    average.check_not_shown("step")


def test_a_model_that_brings_its_own_state_has_one():
    state = Plain(*drawn(0))
    average, seen = Average(state, is_kept=True), []
    for mix in range(8):
        state.add(np.random.default_rng(mix).standard_normal(22).astype(np.float32))
        average.on_mixed(WHOLE if mix < 7 else [np.arange(0, 22, 2)])
        seen.append(state.w.copy())
    state.add(np.ones(22, np.float32))
    w, h = state.w.copy(), state.h.copy()
    with average.shown():
        shown = state.w.reshape(-1)
    np.testing.assert_allclose(shown[::2], expected(seen).reshape(-1)[::2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(shown[1::2], expected(seen[:7]).reshape(-1)[1::2], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(state.w, w)
    np.testing.assert_array_equal(state.h, h)


def test_a_state_that_would_round_its_weights_is_refused():
    state = Plain(*drawn(0))
    state.layout = Layout([Segment("w", (3, 5), "float64", "parameter"), Segment("h", (7,), "float16", "parameter")])
    with pytest.raises(LayoutError, match="'w' is float64"):
        Average(state, is_kept=True)
