"""Every tensor of a model and of its optimizers has one treatment, which decides how it travels."""

import math
import queue
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from gossip.errors import ConfigError, LayoutError
from node.model.inventory.items import Choices
from node.model.snapshot import ModelState
from tests.node.trainees import step_of
from tests.node.vectors import mlp, vector_of


def treatments(model, optimizer=None, **choices):
    state = ModelState(model, optimizer, Choices(**choices))
    return {item.name: item.treatment for item in state.inventory()}


class Parts(nn.Module):
    """A model with tensors of many kinds."""

    def __init__(self, seed=0):
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.trained = nn.Parameter(torch.randn(3, 2, generator=drawn))
        self.frozen = nn.Parameter(torch.randn(4, generator=drawn), requires_grad=False)
        self.base = nn.Parameter(torch.randint(-9, 9, (5,), dtype=torch.int8, generator=drawn), requires_grad=False)
        self.register_buffer("mean", torch.randn(2, generator=drawn))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("order", torch.randperm(6, generator=drawn))
        self.register_buffer("flags", torch.rand(3, generator=drawn) < 0.5)
        self.register_buffer("turns", torch.randn(3, dtype=torch.complex64, generator=drawn))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_each_tensor_has_the_treatment_of_its_kind():
    assert treatments(Parts()) == {
        "trained": "average", "frozen": "copy", "base": "copy", "mean": "average", "mask": "copy", "order": "copy",
        "flags": "copy", "turns": "copy", "cache": "local",
    }  # fmt: skip


def test_a_newcomer_takes_all_that_travels_bit_for_bit():
    donor, newcomer = Parts(0), Parts(1)
    donor.mask[0, 0] = math.inf
    ModelState(newcomer).adopt(vector_of(ModelState(donor), full=True), (), {})
    for name, tensor in donor.state_dict().items():
        assert torch.equal(newcomer.state_dict()[name], tensor), name


def test_a_mix_moves_only_what_is_averaged():
    model = Parts()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = ModelState(model)
    assert state.size() == 3 * 2 + 2
    state.add(np.ones(state.size(), np.float32))
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {"trained", "mean"}


def test_the_user_can_choose_by_pattern_tensor_and_module():
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1), "teacher": nn.Linear(2, 2)})
    model["teacher"].requires_grad_(False)
    assert treatments(model, local=["head.*"], copy=[model["body"].bias], average=model["teacher"]) == {
        "body.weight": "average", "body.bias": "copy", "head.weight": "local", "head.bias": "local",
        "teacher.weight": "average", "teacher.bias": "average",
    }  # fmt: skip


def test_local_tensors_stay_as_they_are_at_a_newcomer():
    donor, newcomer = mlp(), mlp()
    head = newcomer[2].weight.clone()
    for model in (donor, newcomer):
        model.state = ModelState(model, choices=Choices(local="2.*"))
    newcomer.state.adopt(vector_of(donor.state, full=True), (), {})
    assert torch.equal(newcomer[0].weight, donor[0].weight)
    assert torch.equal(newcomer[2].weight, head)


def not_finite():
    model = mlp()
    model[2].bias.data[1] = math.nan
    return model


def expanded():
    model = mlp()
    model.register_buffer("scale", torch.ones(1).expand(4))
    return model


MLP = mlp()


@pytest.mark.parametrize(
    ("model", "choices", "error", "sentence"),
    [
        (mlp(), {"local": ["haed.*"]}, ConfigError, r"local= names no tensor of the model by 'haed.\*'"),
        (mlp(), {"copy": "2.weigth"}, ConfigError, "did you mean '2.weight'"),
        (mlp(), {"average": [3]}, ConfigError, "average= has a int: give names"),
        (mlp(), {"average": [nn.Linear(2, 2)]}, ConfigError, "average= has a Linear of which the model has no tensor"),
        (MLP, {"copy": [MLP[0].weight.data]}, ConfigError, "copy= has a Tensor of which the model has no tensor"),
        (Parts(), {"average": ["order"]}, LayoutError, r"'order' is int64 and named in average=: .*leave it out"),
        (Parts(), {"average": ["mask"]}, LayoutError, r"'mask' is named in average= and is not finite: element 1 is"),
        (not_finite(), {}, LayoutError, r"'2.bias' is not finite before training \(element 1 is nan\)"),
        (expanded(), {}, LayoutError, "'scale' share one place in memory"),
    ],
)
def test_what_has_no_mean_and_a_choice_that_names_nothing_are_refused_by_name(model, choices, error, sentence):
    with pytest.raises(error, match=sentence):
        ModelState(model, choices=Choices(**choices))


def test_the_table_says_why():
    table = str(ModelState(Parts()).inventory())
    assert table.splitlines()[0].split() == ["tensor", "shape", "type", "treatment", "reason"]
    assert re.search(r"^mask +2x2 +float32 +copy +a constant: element 1 is -inf$", table, re.MULTILINE)
    counts = ModelState(Parts()).inventory().counts()
    assert counts.startswith("Of the model 2 tensors averaged, 6 tensors copied to newcomers, 1 tensor kept local;")


# -- memory that two tensors share ------------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.first = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.second = tie(self.first)


def over_memory_of(view):
    """Return a function that makes a second parameter over some memory of the first."""
    return lambda first: nn.Parameter(view(first.data))


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize(
    "tie",
    [lambda w: w, *map(over_memory_of, (lambda w: w, lambda w: w.t(), lambda w: w.view(6), lambda w: w.unsqueeze(0)))],
    ids=["one parameter", "same", "t", "view", "1"],
)
def test_memory_under_two_names_is_mixed_once(tie, as_mapping):
    model = Tied(tie)
    given = model.state_dict() if as_mapping else model
    for name in ("first", "second"):
        with pytest.raises(ConfigError, match="local= has only one of 'first' and 'second', which are one tensor"):
            ModelState(given, choices=Choices(local=[name]))
    state = ModelState(given)
    assert state.size() == 6
    state.add(np.ones(6, np.float32))
    assert model.first.flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert [segment.name for segment in state.layout.segments] == ["first"]
    assert [item.reason for item in state.inventory()][1:] == ["the same memory as first"]


def test_a_module_that_holds_one_of_two_tied_weights_is_no_choice_of_both():
    model = nn.ModuleDict({"words": nn.Embedding(3, 2), "body": nn.Linear(2, 2), "head": nn.Linear(2, 3)})
    model["head"].weight = model["words"].weight
    with pytest.raises(ConfigError, match=r"local= has only one of 'words\.weight' and 'head\.weight'"):
        ModelState(model, choices=Choices(local=[model["head"]]))
    for both in ([model["head"], model["words"]], [model["head"], model["words"].weight], ["head.*", "words.*"]):
        assert [name for name, how in treatments(model, local=both).items() if how == "average"] == [
            "body.weight", "body.bias",
        ]  # fmt: skip


@pytest.mark.parametrize("tie", [lambda w: w[0], lambda w: w[:, :2], lambda w: w.view(6)[1:5]])
def test_memory_that_two_parameters_share_in_part_is_refused_by_name(tie):
    with pytest.raises(LayoutError, match="'first' and 'second' share a part of their memory"):
        ModelState(Tied(over_memory_of(tie)))


def test_views_of_other_columns_share_nothing():
    whole = torch.zeros(4, 6)
    model = nn.ParameterDict({"left": nn.Parameter(whole[:, :3]), "right": nn.Parameter(whole[:, 3:])})
    state = ModelState(model)
    state.add(np.append(np.ones(12), np.full(12, 2)).astype(np.float32))
    assert whole[0].tolist() == [1, 1, 1, 2, 2, 2]


# -- optimizers -------------------------------------------------------------------------------------------------------
def test_parameters_that_the_model_lacks_are_refused_unless_they_are_local():
    model, loss = mlp(), nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1)
    with pytest.raises(LayoutError, match=r"SGD trains 2 tensors \(2x3, 2\) that the model of this Node lacks"):
        ModelState(model, optimizer)
    assert ModelState(model, optimizer, Choices(local=[loss])).size() == ModelState(mlp()).size()
    assert ModelState(nn.ModuleList([model, loss]), optimizer).size() == ModelState(mlp()).size() + 8


class Custom(torch.optim.Optimizer):
    """An optimizer that keeps in its state, under ``key``, what ``keep`` returns for each parameter."""

    def __init__(self, params, keep, key="mine"):
        super().__init__(params, {"lr": 0.1})
        self.keep, self.key = keep, key

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault(self.key, self.keep(parameter))


def stepped(model, optimizer):
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "keep", [lambda p: p.detach().float().clone(), lambda p: 0.95 * p.detach().float()], ids=["copy", "near"]
)
def test_state_that_nearly_equals_the_weights_moves_with_them(keep, dtype):
    model = mlp().to(dtype)
    optimizer = stepped(model.float(), Custom(model.parameters(), keep))
    model.to(dtype)
    state = ModelState(model, optimizer)
    before = optimizer.state[model[0].weight]["mine"].clone()
    state.add(np.ones(state.size(), np.float32))
    torch.testing.assert_close(optimizer.state[model[0].weight]["mine"], before + 1, atol=0.01, rtol=0)
    assert {item.name: item.treatment for item in state.inventory()}["Custom.mine"] == "follow"


@pytest.mark.parametrize("call", ["add_weighted", "add_read", "merge", "add_at", "add_scaled", "write", "load"])
def test_every_way_of_moving_the_weights_moves_their_copies(call):
    model = mlp()
    optimizer = stepped(model, Custom(model.parameters(), lambda p: p.detach().clone()))
    state = ModelState(model, optimizer)
    ones = np.ones(state.size(), np.float32)
    arguments = {
        "add_weighted": (ones, 0.5), "add_read": (ones, 0.5), "merge": (ones, 0.5), "write": (ones,),
        "add_at": (ones[:5].copy(), np.arange(5)), "add_scaled": (ones, 0.5, 1),
        "load": ({name: value + 1 for name, value in model.state_dict().items()},),
    }  # fmt: skip
    getattr(state, call)(*arguments[call])
    for parameter in model.parameters():
        torch.testing.assert_close(optimizer.state[parameter]["mine"], parameter.detach())


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_weights_that_tell_nothing_do_not_decide_what_follows_and_leave_no_state(value):
    model = mlp()
    optimizer = stepped(model, Custom(model.parameters(), lambda p: p.detach().clone()))
    state = ModelState(model, optimizer)
    sound = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    empty = {name: torch.full_like(tensor, value) for name, tensor in sound.items()}
    model.load_state_dict(empty)
    assert not state.optimizer_state.followed_keys()
    model.load_state_dict(sound)
    state.add(np.ones(state.size(), np.float32))
    torch.testing.assert_close(optimizer.state[model[0].weight]["mine"], model[0].weight.detach())
    model.load_state_dict(empty)
    state.load(sound)
    assert all(bool(torch.isfinite(kept["mine"]).all()) for kept in optimizer.state.values() if kept)


def test_state_moves_with_the_weights_that_have_it_though_the_first_have_none():
    """Only half-precision weights have masters, and an optimizer may also keep a number in its state."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state["steps"] = 7
    optimizer.state[model[0].weight] = {"count": 1}
    optimizer.state[model[2].weight] = {"mine": model[2].weight.detach().clone()}
    state = ModelState(model, optimizer)
    state.add(np.ones(state.size(), np.float32))
    torch.testing.assert_close(optimizer.state[model[2].weight]["mine"], model[2].weight.detach())


def test_a_mask_is_copied_since_zeros_and_ones_have_no_mean():
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    assert treatments(model)["0.weight_mask"] == "copy"


def test_momentum_that_happens_to_equal_the_weights_does_not_move():
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)
    model.weight.square().sum().div(2).backward()  # The gradient is the weight.
    optimizer.step()
    state = ModelState(model, optimizer)
    before = optimizer.state[model.weight]["momentum_buffer"].clone()
    state.add(np.ones(4, np.float32))
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], before)


class Lookahead(torch.optim.Optimizer):
    """A wrapper with slow weights of its own, as it is often written."""

    def __init__(self, inner):
        self.optimizer, self.param_groups = inner, inner.param_groups
        self.defaults, self.state = inner.defaults, {}

    def step(self):
        self.optimizer.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state.setdefault(parameter, {"slow_param": parameter.detach().clone()})


def test_a_wrapping_optimizer_and_the_wrapped_one_both_travel():
    model = mlp()
    optimizer = stepped(model, Lookahead(torch.optim.Adam(model.parameters(), 0.01)))
    state = ModelState(model, optimizer)
    assert set(state.optimizer_keys) == {"exp_avg", "exp_avg_sq", "slow_param"}
    state.add(np.ones(state.size(), np.float32))
    torch.testing.assert_close(optimizer.state[model[2].bias]["slow_param"], model[2].bias.detach())
    fresh_model = mlp()
    fresh = Lookahead(torch.optim.Adam(fresh_model.parameters(), 0.01))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    joined = ModelState(fresh_model, fresh)
    joined.adopt(vector_of(state, full=True), state.optimizer_keys, state.optimizer_scalars())
    assert joined.state_refusal == ""
    for ours, theirs, old in zip(fresh_model.parameters(), model.parameters(), before, strict=True):
        assert torch.equal(theirs, old), "telling what the optimizer keeps has stepped it"
        assert torch.equal(fresh.optimizer.state[ours]["exp_avg"], optimizer.optimizer.state[theirs]["exp_avg"])
        assert torch.equal(fresh.state[ours]["slow_param"], optimizer.state[theirs]["slow_param"])


def test_a_parameter_that_is_its_own_state_moves_once():
    model = nn.Linear(4, 1, bias=False)
    optimizer = Custom(model.parameters(), lambda p: p.data, key="old_p")  # As after SAM's second step.
    stepped_once = ModelState(model, optimizer)
    optimizer.step()
    before = model.weight.detach().clone()
    stepped_once.add(np.ones(4, np.float32))
    assert torch.equal(model.weight.detach(), before + 1)


def test_a_default_device_of_the_program_does_not_matter():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    stepped(model, optimizer)
    torch.set_default_device("meta")  # On it nothing can be read: an allocation without a device would show.
    try:
        state = ModelState(model, optimizer)
        vector = state.buffer(state.optimizer_range().stop)
        state.read(vector[: state.layout.size])
        state.begin_read_optimizer(vector[state.layout.size :], state.layout.size)
        state.add(np.zeros(state.size(), np.float32))
        state.adopt(vector, state.optimizer_keys, state.optimizer_scalars())
        assert state.state_refusal == ""
    finally:
        torch.set_default_device(None)


# -- nodes -------------------------------------------------------------------------------------------------------------
class Everything(nn.Module):
    """A model with four float types, tied and frozen parameters, sparse gradients, whole numbers and infinities."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 8, sparse=True)
        self.fp16 = nn.Linear(8, 8).half()
        self.bf16 = nn.Linear(8, 8).bfloat16()
        self.fp64 = nn.Linear(8, 8).double()
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 16, bias=False)
        self.tied.weight = nn.Parameter(torch.zeros(16, 8))
        self.again = nn.Linear(8, 16, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.register_buffer("order", torch.randperm(16))
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

    def forward(self, x):
        x = self.words(x)
        for layer in (self.fp16, self.bf16, self.fp64):
            x = layer(x.to(layer.weight.dtype))
        x = self.norm(x.float())
        return self.frozen(self.tied(x) + self.again(x))


def job():
    model = Everything()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)

    def loss_of():
        x = torch.randint(0, 16, (32,))
        return F.cross_entropy(model(x), x)

    return model, optimizer, step_of(loss_of, optimizer)


def test_a_model_of_every_kind_of_tensor_mixes(train, until):
    model, optimizer, work = job()
    model.norm.num_batches_tracked.fill_(70_000)
    a = train(model, optimizer, work)
    b = train(*job(), seeds=[a.node.address])
    assert torch.equal(b.at_entry["order"], a.at_entry["order"])
    assert b.at_entry["norm.num_batches_tracked"] >= 70_000
    types = {name: value.dtype for name, value in a.model.state_dict().items()}
    until(lambda: all(one.node.metrics().exchanges_done >= 5 for one in (a, b)))
    assert any("Of the model 14 tensors averaged, 5 tensors copied" in str(event) for event in a.node.history())
    for one in (a, b):
        one.work = None  # Settle on what both hold, without training.
    a.tasks.put((lambda node: node.settle(10.0, wait_s=20.0), queue.SimpleQueue()))
    assert b.do(lambda node: node.settle(10.0, wait_s=20.0)) == 0.0
    assert {name: value.dtype for name, value in b.model.state_dict().items()} == types
    assert b.model.again.weight is b.model.tied.weight
    for one in (a, b):  # What is only copied stays as it is.
        assert torch.equal(one.model.mask, torch.full((3, 3), -math.inf).triu(1))
        assert torch.equal(one.model.order, a.at_entry["order"])
        assert torch.equal(one.model.frozen.weight, a.at_entry["frozen.weight"])
        assert one.model.norm.num_batches_tracked >= 70_000


# Modules that save and hold tensors in ways of their own -------------------------------------------------------------
class Wrapped(nn.Module):
    """A module that saves what is inside it alone, and holds trained tensors outside its state."""

    def __init__(self):
        super().__init__()
        self.inner, self.layers, self.alphas = nn.BatchNorm1d(2), [nn.Linear(2, 2)], torch.zeros(2, requires_grad=True)
        self.loop = []
        self.loop.append(self.loop)  # As a registry that holds itself.

    def state_dict(self):
        return self.inner.state_dict()


def test_buffers_are_found_whatever_a_model_saves_and_what_is_trained_outside_is_named():
    model = Wrapped()
    assert treatments(model)["inner.running_mean"] == "average"
    assert sorted(ModelState(model).live_tensors.unshared()) == ["alphas", "layers"]
    assert ModelState(model, None, Choices(local=[model.alphas, *model.layers])).live_tensors.unshared() == []
    assert ModelState(nn.LSTM(2, 2)).live_tensors.unshared() == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_of_torchs_jit_is_refused_in_a_sentence():
    with pytest.raises(LayoutError, match="give Node the module that was scripted or traced"):
        ModelState(torch.jit.script(nn.Linear(2, 2)))


def test_other_threads_find_the_parameters_while_a_call_of_torch_func_replaces_them():
    class Asking(nn.Linear):
        def forward(self, inputs):
            state.buffer(4)
            state.read_frozen(frozen, 6)
            return super().forward(inputs)

    model, frozen = Asking(3, 2), np.zeros(2, np.float32)
    model.bias.requires_grad_(False)
    state = ModelState(model)
    others = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    torch.func.functional_call(model, others, torch.zeros(1, 3))
    assert frozen.tolist() == model.bias.tolist() != [0.0, 0.0]
