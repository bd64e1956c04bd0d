"""``with node.averaged()``: the average of real nodes that mix, and checkpoints that hold it beside what is trained."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gossip.errors import CheckpointError, LayoutError, LocalError
from node import Node
from node.model import checkpoint
from tests.node.conftest import QUICK
from tests.node.rank_loops import QUICK as OF_RANKS
from tests.node.rank_loops import model_of, net, no_errors, ranks, run
from tests.node.rank_threads import play
from tests.node.test_average import Net, same, state_of, trains
from tests.node.test_node import linear, mixed
from tests.node.trainees import towards

WAYS = {
    "pairs": QUICK,
    "outer step": replace(QUICK, outer_momentum=0.5, outer_rate=0.7),
    "parts": replace(QUICK, part="fragments 3"),
    "pushes": replace(QUICK, mixing="push-sum"),
}


def pair_of(train, until, config):
    """Two nodes that keep averages and pull apart, once they have mixed."""
    a, b = linear(1), linear(2)
    options = {"config": config, "keep_average": True}
    first = train(a, work=towards(a, 3.0), **options)
    second = train(b, work=towards(b, -3.0), seeds=[first.node.address], **options)
    until(mixed(first, second, times=8))
    return first, second


@pytest.mark.parametrize("way", WAYS)
def test_nodes_show_their_averages_and_go_on_as_if_they_had_not(train, until, way):
    first, second = pair_of(train, until, WAYS[way])

    def evaluate(node):
        before, mixes = state_of(first.model), node._training.average.mixes
        with node.averaged():
            shown = state_of(first.model)
            with pytest.raises(LocalError, match=r"node\.step was called inside"):
                node.step(samples=4)
        assert same(state_of(first.model), before)
        return before, shown, mixes

    before, shown, mixes = first.do(evaluate)
    assert not same(before, shown)
    assert mixes > 1
    until(lambda: first.side.average.mixes > mixes)
    until(mixed(first, second, times=16))


def test_what_an_exchange_brings_during_the_block_lands_after_it(train, until):
    first, _ = pair_of(train, until, QUICK)

    def evaluate(node):
        side = node._training
        before = state_of(first.model)
        with node.averaged():
            shown, end = state_of(first.model), time.monotonic() + 0.3
            while not side.live.boundary.arrived_updates and time.monotonic() < end:
                time.sleep(0.001)
            assert same(state_of(first.model), shown)
        assert same(state_of(first.model), before)
        brought = [torch.from_numpy(update.vector.array.copy()) for update in side.live.boundary.arrived_updates]
        weights = [update.weight for update in side.live.boundary.arrived_updates]
        side.visit()
        return before, brought, weights, state_of(first.model)

    for _ in range(60):  # until an exchange is under way as the block begins
        before, brought, weights, after = first.do(evaluate)
        if brought:
            break
    assert brought
    moved = torch.cat([(after[name] - before[name]).reshape(-1) for name in ("weight", "bias")])
    total = sum(weight * one for weight, one in zip(weights, brought, strict=True))
    torch.testing.assert_close(moved, total, rtol=1e-3, atol=1e-5)


def test_once_nodes_have_settled_the_average_is_what_they_agreed_on(train, until):
    first, _ = pair_of(train, until, QUICK)
    assert first.do(lambda node: node._training.average.mixes)

    def settle(node):
        node.settle(0.5)
        before = state_of(first.model)
        with node.averaged():
            return same(state_of(first.model), before)

    assert first.do(settle)


def test_a_node_that_keeps_none_says_how_to(train):
    model = linear(1)
    trainee = train(model)
    with pytest.raises(LocalError, match=r"keep_average=True"):
        trainee.do(lambda node: node.averaged())


@pytest.mark.parametrize("call", ["settle", "finish", "load", "load_state_dict", "start"])
def test_calls_that_train_on_are_refused_in_the_block(call, tmp_path):
    given = {"load": [tmp_path / "run"], "load_state_dict": [{}]}.get(call, [])
    with Node(linear(1), config=QUICK, keep_average=True) as node, node.averaged():
        with pytest.raises(LocalError, match=rf"node\.{call} was called inside"):
            getattr(node, call)(*given)
        node.save(tmp_path / "run")


def averaged_node(model, optimizer):
    """A node alone that has mixed three times, as far as its average knows."""
    node = Node(model, optimizer, config=QUICK, keep_average=True).start()
    for mix in range(3):
        trains(model, mix)
        node.step(samples=4)
        node._training.average.on_mixed([None])
    trains(model, 7)
    return node


def test_a_checkpoint_holds_the_average_under_the_names_and_goes_on_from_the_training_weights(tmp_path):
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    node = averaged_node(model, optimizer)
    training = state_of(model)
    node.save(tmp_path / "outside")
    assert same(state_of(model), training)
    with node.averaged():
        shown = state_of(model)
        node.save(tmp_path / "inside")
        assert same(state_of(model), shown)
    node.close()

    for name in ("outside", "inside"):
        held = load_file(tmp_path / f"{name}.safetensors")  # as any tool reads it
        stored = {key: value for key, value in held.items() if not key.startswith(("optimizer/", "training/"))}
        assert same(stored, shown)
        assert set(shown) - set(stored) == {"second.weight"}, "which is tied"
        assert torch.equal(held["training/first.weight"], training["first.weight"])
        assert "training/base.weight" not in held, "nobody changes it"

        resumed = Net()
        again = torch.optim.Adam(resumed.parameters())
        with Node(resumed, again, config=QUICK) as other:  # it keeps none itself
            assert other.load(tmp_path / name)["averaged_mixes"] == 3
            assert same(state_of(resumed), training)
            assert resumed.second.weight is resumed.first.weight
            assert torch.equal(*(one.state[one.param_groups[0]["params"][0]]["exp_avg"] for one in (optimizer, again)))

        resumed = Net()
        with Node(resumed, torch.optim.Adam(resumed.parameters()), config=QUICK, keep_average=True) as other:
            other.load(tmp_path / name)
            assert same(state_of(resumed), training)
            with other.averaged():
                assert same(state_of(resumed), shown)
            assert same(state_of(resumed), training)


def test_without_mixes_a_checkpoint_is_as_any(tmp_path):
    model = linear(1)
    with Node(model, config=QUICK, keep_average=True) as node:
        node.save(tmp_path / "run")
    assert set(load_file(tmp_path / "run.safetensors")) == {"weight", "bias"}
    assert checkpoint.load(tmp_path / "run").averaged == {}


def test_a_tensor_that_is_called_as_training_weights_are_keeps_its_name(tmp_path):
    model = {"w": torch.ones(3), "training/w": torch.full((3,), 5.0)}
    checkpoint.save(tmp_path / "run", model, None, {}, {"w": torch.zeros(3)})
    read = checkpoint.load(tmp_path / "run")
    assert same(read.averaged, model)
    assert same(read.tensors, {"w": torch.zeros(3), "training/w": model["training/w"]})


def test_a_file_whose_training_weights_are_not_there_is_refused(tmp_path):
    checkpoint.save(tmp_path / "run", {"w": torch.ones(3)}, None, {}, {"w": torch.zeros(3)})
    data = (tmp_path / "run.safetensors").read_bytes()
    (tmp_path / "run.safetensors").write_bytes(data.replace(b'\\"w\\": \\"training/w\\"', b'\\"w\\": \\"training/v\\"'))
    with pytest.raises(CheckpointError, match="cut off, corrupt"):
        checkpoint.load(tmp_path / "run")


def test_a_model_that_grew_in_the_block_is_told(tmp_path):
    model = linear(1)
    with Node(model, config=QUICK, keep_average=True) as node:
        node._training.average.on_mixed([None])
        with pytest.raises(LayoutError, match="was replaced"), node.averaged():
            model.weight = nn.Parameter(torch.zeros(2, 4))


@pytest.mark.parametrize("part", ["all", "fragments 3"])
def test_all_ranks_hold_the_same_average_and_need_each_other_for_none(train, monkeypatch, part):
    monkeypatch.setattr("node.node.GroupChannel", lambda group: group)
    config = replace(OF_RANKS, part=part)
    model = net(5)
    other = train(model, config=config)

    def loop(node, rank):
        average = node._training.average
        for _ in range(3000):
            run(node, 1, 0.005)
            if node.metrics().exchanges_done >= 6:
                break
        before, mixes = state_of(model_of(node)), average.mixes
        if rank == 0:  # an evaluation on one rank alone
            with node.averaged():
                pass
        with node.averaged():
            shown = state_of(model_of(node))
        assert same(state_of(model_of(node)), before)
        node.settle(0.1)
        return before, shown, mixes, average.mixes

    no_errors(play(pair := ranks(loop, seeds=[other.node.address], config=config, keep_average=True)[1]))
    (before, shown, mixes, after), theirs = pair[0].result, pair[1].result
    assert mixes > 0
    assert after == theirs[3] == 0
    assert not same(before, shown)
    assert same(before, theirs[0])
    assert same(shown, theirs[1])
    assert mixes == theirs[2]
