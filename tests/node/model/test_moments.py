"""The moments of real optimizers: which are mixed, in which role, and what a partner can do to them."""

import numpy as np
import pytest
import torch
from torch import nn

from gossip import Config
from gossip.arithmetic.moments import MomentForm
from gossip.averaging.vectors import Moments, Vector
from node.model.snapshot import ModelState
from sim.learning.optimizer.moments import MomentPlan
from tests.node.loop.test_settling import sharing
from tests.node.storage.stores import notices
from tests.node.trainees import step_of

ADAM = (("exp_avg", "exp_avg_sq"), ("first", "second"))


def trained(make, steps: int = 3, model: nn.Module | None = None, mix_state: str = "auto") -> ModelState:
    """Return the state of a model after a few steps of an optimizer, or of several."""
    torch.manual_seed(1)
    model = model or nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))
    made = make(model)
    optimizers = list(made) if isinstance(made, tuple) else [made]
    step = step_of(lambda: model(torch.randn(8, 20)).square().mean(), *optimizers)
    for _ in range(steps):
        step()
    state = ModelState(model, optimizers)
    state.mix_state = mix_state
    return state


def with_params(kind, **options):
    return lambda model: kind(model.parameters(), **options)


class OwnAdam(torch.optim.Optimizer):
    """A user's optimizer, whose state has names of its own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in ("mean_of_gradients", "mean_of_squares"):
                    state.setdefault(name, torch.zeros_like(parameter))
                state["mean_of_gradients"].lerp_(parameter.grad, 0.1)
                state["mean_of_squares"].lerp_(parameter.grad.square(), 0.1)
                parameter.sub_(0.01 * state["mean_of_gradients"] / (state["mean_of_squares"].sqrt() + 1e-8))


@pytest.mark.parametrize(
    ("make", "names", "roles"),
    [
        (with_params(torch.optim.Adam), *ADAM),
        (with_params(torch.optim.AdamW), *ADAM),
        (with_params(torch.optim.NAdam), *ADAM),
        (with_params(torch.optim.RAdam), *ADAM),
        (with_params(torch.optim.Adam, amsgrad=True), (*ADAM[0], "max_exp_avg_sq"), (*ADAM[1], "second")),
        (with_params(torch.optim.Adamax), ("exp_avg", "exp_inf"), ("plain", "second")),
        (with_params(torch.optim.RMSprop), ("square_avg",), ("second",)),
        (with_params(torch.optim.RMSprop, momentum=0.9), ("momentum_buffer", "square_avg"), ("plain", "second")),
        (with_params(torch.optim.Adagrad), ("sum",), ("second",)),
        (with_params(torch.optim.Adadelta), ("acc_delta", "square_avg"), ("second", "second")),
        (with_params(OwnAdam), ("mean_of_gradients", "mean_of_squares"), ("plain", "second")),
    ],
    ids=[
        "Adam", "AdamW", "NAdam", "RAdam", "amsgrad", "Adamax", "RMSprop", "RMSprop, momentum", "Adagrad", "Adadelta",
        "a user's",
    ],
)  # fmt: skip
def test_moments_of_normalised_steps_are_mixed(make, names, roles):
    state = trained(make)
    assert state.moment_form() == MomentForm(names, roles, 20 * 16 + 16 + 16 * 4 + 4)


def test_the_momentum_of_muon_is_mixed_beside_the_moments_of_adam():
    def both(model):
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        return torch.optim.Muon(matrices), torch.optim.AdamW(others)

    form = trained(both).moment_form()
    assert form is not None
    assert (form.names, form.roles) == (("exp_avg", "exp_avg_sq", "momentum_buffer"), ("first", "second", "plain"))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (with_params(torch.optim.SGD, lr=0.1), {}),
        (with_params(torch.optim.SGD, lr=0.1, momentum=0.9), {}),
        (with_params(torch.optim.ASGD), {}),
        (with_params(torch.optim.Adam), {"mix_state": "off"}),
        (with_params(torch.optim.Adam), {"steps": 0}),
    ],
    ids=["SGD", "SGD, momentum", "ASGD", "off", "before the first step"],
)
def test_each_node_keeps_its_own_moments(make, options):
    assert trained(make, **options).moment_form() is None


def test_sgd_mixes_its_momentum_if_it_is_told_to():
    state = trained(with_params(torch.optim.SGD, lr=0.1, momentum=0.9), mix_state="on")
    assert state.moment_form() == MomentForm(("momentum_buffer",), ("plain",), 404)


@pytest.mark.parametrize("steps", [0, 3])
def test_the_inventory_says_what_is_mixed(steps):
    state = trained(with_params(torch.optim.Adam), steps=steps)
    treatments = {item.name: item.treatment for item in state.inventory()}
    assert [treatments[f"Adam.{key}"] for key in ("exp_avg", "exp_avg_sq", "step")] == ["mix", "mix", "give"]


def moments_of(state: ModelState, start: int, stop: int, change=lambda rows: None) -> Moments:
    """Return what a member that fetches elements [start, stop) of these moments mixes, after ``change``."""
    form = state.moment_form()
    assert form is not None
    vector = Vector(np.zeros(form.vector_elements(stop - start), np.float32))
    rows, _ = form.split(vector.array)
    state.begin_read_moments(rows, form, start, stop).wait()
    assert form.encode(vector.array)
    assert form.decode(vector.array)
    change(rows)
    return Moments(vector, form, start, stop)


def limits_of(moment: np.ndarray) -> np.ndarray:
    """Return the limit of each element of a partner's moment: twice the largest one of our tensor that is mixed."""
    parts = [part for part in np.split(moment, [100, 320, 336, 370, 400]) if part.size]
    return np.concatenate([np.full(part.size, 2 * np.abs(part).max()) for part in parts])


def all_moments(state: ModelState) -> np.ndarray:
    """Return all moments, float32 (moments, elements)."""
    form = state.moment_form()
    assert form is not None
    rows = np.zeros((len(form.names), form.elements), np.float32)
    state.begin_read_moments(rows, form, 0, form.elements).wait()
    return rows


def test_mixing_moves_half_of_the_way_and_changes_no_other_elements():
    ours, theirs = trained(with_params(torch.optim.Adam)), trained(with_params(torch.optim.Adam), steps=6)
    before, partner = all_moments(ours), all_moments(theirs)
    ours.mix_moments(moments_of(theirs, 100, 370))
    after, within = all_moments(ours), slice(100, 370)
    for own, other, mixed in zip(before, partner, after, strict=True):
        limits = limits_of(own)
        expected = (own + np.clip(other, -limits, limits))[within] / 2
        np.testing.assert_allclose(mixed[within], expected, rtol=1e-4, atol=1e-8)
    np.testing.assert_array_equal(after[:, :100], before[:, :100])
    np.testing.assert_array_equal(after[:, 370:], before[:, 370:])


@pytest.mark.parametrize("lie", [0.0, 1e30])
def test_a_liar_moves_a_moment_by_half_of_itself_or_by_the_largest_of_its_tensor(lie):
    ours = trained(with_params(torch.optim.Adam))
    before = all_moments(ours)

    def change(rows):
        rows[0], rows[1] = 1e20, lie

    ours.mix_moments(moments_of(ours, 0, 404, change))
    after = all_moments(ours)
    assert (after[1] >= before[1] / 2).all()
    assert after[1].max() <= 1.5 * before[1].max() * 1.0001
    assert np.abs(after[0]).max() <= 1.5 * np.abs(before[0]).max() * 1.0001


def test_a_parameter_without_gradients_gets_no_state_from_others():
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))
    ours, theirs = trained(with_params(torch.optim.Adam), model=model), trained(with_params(torch.optim.Adam), steps=6)
    states = ours.optimizers.all[0].state
    del states[model[0].weight]  # It has had no gradient so far.
    before = states[model[2].weight]["exp_avg"].clone()
    assert ours.moment_form() == theirs.moment_form()
    ours.mix_moments(moments_of(theirs, 0, 404))
    assert model[0].weight not in states
    assert not torch.equal(states[model[2].weight]["exp_avg"], before)


def test_moments_of_another_form_are_left_out():
    ours, theirs = trained(with_params(torch.optim.Adam)), trained(with_params(torch.optim.RMSprop))
    ours.moment_form()
    before = all_moments(ours)
    ours.mix_moments(moments_of(theirs, 0, 404))
    np.testing.assert_array_equal(all_moments(ours), before)
    rows = np.zeros((1, 404), np.float32)
    ours.begin_read_moments(rows, MomentForm(("square_avg",), ("second",), 404), 0, 404)
    assert np.isnan(rows).all()


def test_moments_in_another_order_of_memory_are_mixed_too():
    def convolution() -> nn.Module:
        layers = nn.Sequential(nn.Unflatten(1, (5, 2, 2)), nn.Conv2d(5, 8, 2), nn.Flatten())
        return layers.to(memory_format=torch.channels_last)

    ours = trained(with_params(torch.optim.Adam), model=convolution())
    theirs = trained(with_params(torch.optim.Adam), steps=6, model=convolution())
    assert any(not value["exp_avg"].is_contiguous() for value in ours.optimizers.all[0].state.values())
    before, partner = all_moments(ours), all_moments(theirs)
    ours.mix_moments(moments_of(theirs, 10, 150))
    np.testing.assert_allclose(all_moments(ours)[1, 10:150], (before + partner)[1, 10:150] / 2, rtol=1e-4, atol=1e-9)


def test_a_simulated_peer_mixes_as_a_node_does_to_the_bit():
    ours, theirs = trained(with_params(torch.optim.Adam)), trained(with_params(torch.optim.Adam), steps=6)
    moments = moments_of(theirs, 37, 390)
    rows = all_moments(ours)
    tensors, start = [], 0
    for size in (320, 16, 64, 4):
        tensors.append((start, start + size, (0, 1)))
        start += size
    MomentPlan(moments.form, [row[None] for row in rows], tensors).of_row(0).mix(moments)
    ours.mix_moments(moments)
    np.testing.assert_array_equal(all_moments(ours), rows)


# -- nodes -------------------------------------------------------------------------------------------------------------
QUICK_MIXES = {"mix_every_steps": 2, "boundary_patience_s": 5.0, "stall_s": 5.0, "codec": "fp32"}


def worker(make, scale):
    """Return a model, its optimizer, and a step whose gradients are ``scale`` long in every element."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    optimizer = make(model)

    def work():
        optimizer.zero_grad()
        (scale * sum(parameter.sum() for parameter in model.parameters())).backward()
        optimizer.step()

    return model, optimizer, work


def both(train, until, make, other_make=None, **options):
    """Start two nodes that train with gradients of 1 and of 1.2, and return them once they have met."""
    config = Config(**QUICK_MIXES | options)
    first = train(*worker(make, 1.0), config=config)
    second = train(*worker(other_make or make, 1.2), config=config, seeds=[first.node.address])
    until(lambda: all(len(sharing(node)) == 1 for node in (first, second)))
    return first, second


def mixed_parts(node):
    return node.side.network.peer.moments.mixed_count


def largest_second(node):
    return max(float(state["exp_avg_sq"].max()) for state in node.optimizer.state.values())


def test_second_moments_of_two_nodes_meet_although_their_gradients_differ(train, until):
    nodes = both(train, until, with_params(torch.optim.Adam, lr=1e-4, betas=(0.9, 0.9)))
    until(lambda: all(mixed_parts(node) >= 20 for node in nodes))
    # Without mixing they would tend to 1 and 1.44.
    assert all(1.0 < node.do(lambda _, node=node: largest_second(node)) < 1.44 for node in nodes)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (with_params(torch.optim.SGD, lr=1e-4, momentum=0.9), {}),
        (with_params(torch.optim.Adam, lr=1e-4), {"mix_state": "off"}),
    ],
    ids=["SGD", "off"],
)
def test_nothing_is_fetched_where_nothing_is_to_be_mixed(train, until, make, options):
    nodes = both(train, until, make, **options)
    until(lambda: all(node.side.network.peer.exchanges.done_count >= 10 for node in nodes))
    assert [mixed_parts(node) for node in nodes] == [0, 0]
    assert not any(node.side.network.peer.moments.declined for node in nodes)


def test_nodes_with_other_optimizers_mix_their_weights_alone_and_are_told(train, until):
    nodes = both(train, until, with_params(torch.optim.Adam, lr=1e-4), with_params(torch.optim.RMSprop, lr=1e-4))
    until(lambda: all(node.side.network.peer.exchanges.done_count >= 10 for node in nodes))
    until(lambda: all(notices(node.node, "moments") for node in nodes))
    (told,) = notices(nodes[0].node, "moments")
    assert "exp_avg, exp_avg_sq" in told
    assert [mixed_parts(node) for node in nodes] == [0, 0]
    assert [node.side.network.peer.exchanges.failures for node in nodes] == [0, 0]


def test_moments_that_are_spoiled_cost_the_exchange_of_moments_alone(train, until, monkeypatch):
    form = "gossip.arithmetic.moments.MomentForm"
    monkeypatch.setattr(f"{form}.decode", lambda self, vector: False)
    nodes = both(train, until, with_params(torch.optim.Adam, lr=1e-4))
    until(lambda: all(node.side.network.peer.exchanges.done_count >= 20 for node in nodes))
    assert [mixed_parts(node) for node in nodes] == [0, 0]
    assert any(node.side.network.peer.misbehaviour.rows for node in nodes)
