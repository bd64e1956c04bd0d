"""If some parameters are frozen, only the trained ones travel; a newcomer gets everything once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gossip.config import Config
from gossip.errors import LayoutError, LocalError
from node import Node
from node.model.inventory.items import Choices
from node.model.snapshot import ModelState
from tests.node.vectors import slow_vector, vector_of

FROZEN, TRAINED = 900, 100  # elements


class Adapted(nn.Module):
    """A frozen base, and a small adapter that every node trains."""

    def __init__(self, seed, frozen=True):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.base = nn.Parameter(torch.randn(FROZEN, generator=random), requires_grad=not frozen)
        self.adapter = nn.Parameter(torch.randn(TRAINED - 1, generator=random))
        self.register_buffer("mean", torch.randn(1, generator=random))


def test_exchanges_carry_a_tenth_of_a_model_of_which_nine_tenths_are_frozen():
    model = Adapted(0)
    state = ModelState(model)
    assert [s.name for s in state.layout.segments] == ["adapter", "mean", "base"]
    assert (state.layout.parameters, state.size(), state.layout.size) == (TRAINED - 1, TRAINED, TRAINED + FROZEN)
    np.testing.assert_array_equal(vector_of(state), slow_vector([model.adapter, model.mean]))
    np.testing.assert_array_equal(vector_of(state, full=True), slow_vector([model.adapter, model.mean, model.base]))
    before = model.base.clone()
    state.add(np.ones(TRAINED, np.float32))
    state.merge(np.ones(TRAINED, np.float32), 0.5)
    state.add_at(np.ones(1, np.float32), np.array([TRAINED - 1]))
    assert torch.equal(model.base, before)
    state.adopt(np.full(TRAINED + FROZEN, 0.25, np.float32), (), {})
    assert torch.all(model.base == 0.25)


@pytest.mark.parametrize(
    "state",
    [
        ModelState(Adapted(0), choices=Choices(average="*")),
        ModelState(Adapted(0).requires_grad_(False)),  # Whatever changes these weights, it is not a gradient.
        ModelState(dict(Adapted(0).named_parameters()) | {"mean": torch.zeros(1)}),
    ],
    ids=["asked for", "nothing is trained by gradients", "a mapping"],
)
def test_everything_travels_where_it_is_asked_for_or_nothing_says_what_is_trained(state):
    assert state.size() == state.layout.size == state.layout.exchanged == TRAINED + FROZEN


def test_a_parameter_that_is_trained_after_all_is_told_and_one_that_no_longer_is_goes_on_as_before():
    model = Adapted(0)
    state = ModelState(model)
    model.adapter.requires_grad_(False)
    assert vector_of(state).size == TRAINED
    model.base.requires_grad_(True)
    with pytest.raises(LayoutError, match=r"'base' was frozen when the Node was made and is trained now"):
        vector_of(state)


def pulled(model, optimizer):
    """Return a training step that moves only the trained parameters."""

    def work():
        optimizer.zero_grad()
        loss = ((model.adapter - model.base[: TRAINED - 1]) ** 2).sum()
        loss.backward()
        optimizer.step()
        return loss

    return work


def trainee(train, seed, frozen=True, **options):
    model = Adapted(seed, frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return train(model, optimizer, pulled(model, optimizer), **options)


def test_a_newcomer_takes_the_frozen_base_and_the_optimizers_state_and_then_exchanges_what_is_trained(train, until):
    first = trainee(train, 0)
    until(lambda: first.node._training.network.peer.local.optimizer_keys)
    second = trainee(train, 1, seeds=[first.node.address])
    base = Adapted(0).base
    assert torch.equal(second.at_entry["base"], base)
    assert second.optimizer.state[second.model.adapter]["momentum_buffer"].norm() > 0
    until(lambda: second.node.metrics().exchanges_done >= 3)
    until(lambda: torch.dist(second.model.adapter, base[: TRAINED - 1]) < 0.1)
    for one in (first, second):
        one.stop()
        assert torch.equal(one.model.base, base)


def test_a_newcomer_gets_the_frozen_base_of_a_member_whose_loop_stands(train):
    first = trainee(train, 0)

    def stand(node):
        newcomer = Adapted(1)
        with Node(newcomer, seeds=[node.address], config=first.options["config"], join_or_fail_s=20):
            return newcomer.base.clone(), torch.dist(newcomer.adapter, first.model.adapter)

    base, apart = first.do(stand)
    assert torch.equal(base, first.model.base)
    assert apart < torch.dist(Adapted(1).adapter, first.model.adapter) / 2, "of a snapshot of before"


def exchange_bytes(train, until, **options):
    """Return the bytes that a newcomer receives per exchange, including its other traffic."""
    config = Config(mix_every_steps=2, outer_momentum=0.0)
    first = trainee(train, 0, config=config, **options)
    second = trainee(train, 0, config=config, seeds=[first.node.address], **options)

    def reading(node):
        links = node._training.network.runtime.links.all()
        return sum(link.bytes_received for link in links), node.metrics().exchanges_done

    until(lambda: second.node.metrics().exchanges_done >= 2)
    before = second.do(reading)
    until(lambda: second.node.metrics().exchanges_done >= before[1] + 20)
    after = second.do(reading)
    for one in (first, second):
        one.stop()
    return (after[0] - before[0]) / (after[1] - before[1])


def test_an_exchange_takes_the_bytes_of_what_is_trained(train, until):
    alone, everything = exchange_bytes(train, until), exchange_bytes(train, until, frozen=False)
    assert alone >= 4 * TRAINED
    assert 0.8 * 4 * FROZEN < everything - alone < 1.5 * 4 * FROZEN


def test_who_freezes_other_parameters_is_refused_and_told_which(train, quick):
    first = trainee(train, 0)
    sentence = (
        r"'base' is trained here and frozen there: freeze the same ones on every node.* give every Node the same local="
    )
    for model, average in ((Adapted(1, frozen=False), ()), (Adapted(1), ["base"])):
        node = Node(model, seeds=[first.node.address], config=quick, average=average)
        with pytest.raises(LocalError, match=sentence):
            node.start()


def test_a_checkpoint_fits_whatever_is_trained_next(train, tmp_path):
    first = trainee(train, 0)
    first.do(lambda node: node.save(tmp_path / "run"))
    first.stop()
    model = Adapted(1, frozen=False)
    again = train(model)
    again.do(lambda node: node.load(tmp_path / "run"))
    assert torch.equal(model.base, Adapted(0).base)
    assert (
        Node(Adapted(2))._training.live.state.layout.contents_fingerprint
        == again.node._training.live.state.layout.fingerprint
    )
