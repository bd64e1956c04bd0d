"""The memory of a node that joins: it asks for the weights first, and holds what it adopts once."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gossip.arithmetic.outer_step import OuterStep
from gossip.averaging.averager import Averager
from gossip.averaging.vectors import Vector
from gossip.averaging.visit import Visit
from gossip.config import Config
from gossip.effects import ReceivePiece
from gossip.wire.messages import Fetch
from node import Node
from node.loop.training import TrainingSide
from node.model.snapshot import ModelState
from node.network.runtime import Runtime
from node.network.transfers import streams
from node.network.transfers.streams import Streams
from tests.node.offline import OTHER, in_trio, runtime

RARELY = {"mix_every_steps": 1_000_000, "join_timeout_s": 3.0}  # Nothing is mixed.
PLAIN = {"outer_momentum": 0.0, "outer_rate": 1.0}


class Norm(nn.Sequential):
    """A model with buffers, which the outer step leaves alone."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(40, 20), nn.BatchNorm1d(20))


@pytest.fixture
def join(train, until):
    """``join(config, adam)`` starts a node, and another that takes over its weights. Return both.

    With ``adam`` both have an optimizer, and the first a step that leaves the weights as they are.
    """

    def start(config, adam):
        models = [Norm(0), Norm(1)]
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.0, weight_decay=0.0) if adam else None for one in models]

        def work():
            for parameter in models[0].parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizers[0].step()

        if adam:
            work()  # The optimizer has its state before the first copy for newcomers.
        first = train(models[0], optimizers[0], work if adam else None, config=config)
        until(lambda: first.side.run.steps > 3)
        return first, train(models[1], optimizers[1], config=config, seeds=[first.node.address])

    return start


def weights_of(side):
    out = np.empty(side.live.state.size(), np.float32)
    side.live.state.read(out)
    return out


@pytest.fixture
def noted(monkeypatch):
    """Return the list of what nodes did, each entry with its node, in order."""
    events = []

    def watch(kind, name, word, after=False):
        method = getattr(kind, name)

        def watched(self, *arguments, **named):
            told = word(*arguments) if callable(word) else word
            if told and not after:
                events.append((self, told))
            found = method(self, *arguments, **named)
            if told and after:
                events.append((self, told))
            return found

        monkeypatch.setattr(kind, name, watched)

    watch(Runtime, "send", lambda to, message: "asks" if isinstance(message, Fetch) else None)
    watch(ModelState, "buffer", "buffer")
    watch(Averager, "joining_array", "collects")
    watch(Streams, "touch_vectors", "touched", after=True)
    watch(OuterStep, "reset", "outer")
    watch(OuterStep, "take_over", "outer")
    watch(ModelState, "adopt", "adopts")
    watch(TrainingSide, "step", "steps")
    monkeypatch.setattr(streams, "LARGE_BYTES", 1)
    return events


def of(side, events):
    """Return what one node did."""
    runtime, live = side.network.runtime, side.live
    mine = (side, runtime, runtime.streams, runtime.averager, live.state, live.outer)
    return [word for who, word in events if any(who is one for one in mine)]


@pytest.mark.parametrize("outer", [{}, PLAIN])
@pytest.mark.parametrize("adam", [False, True])
def test_a_newcomer_asks_first_and_has_its_memory_before_it_adopts(join, until, noted, monkeypatch, outer, adam):
    """Once, where fresh pages are expensive, 11 of the 18 s of joining with 400 MB passed before the node asked."""
    plain = Streams.touch_vectors
    monkeypatch.setattr(streams, "INLINE_ELEMENTS", 1)
    monkeypatch.setattr(Streams, "touch_vectors", lambda self, vectors=2: (time.sleep(0.3), plain(self, vectors))[1])
    first, second = join(Config(**RARELY, **outer), adam)
    side = second.side
    until(lambda: "steps" in of(side, noted))
    events = of(side, noted)
    assert events[0] == "asks"
    joining = events[: events.index("adopts")]
    assert "outer" not in joining
    assert joining.count("buffer") == 2, "a snapshot and a difference"
    assert joining.count("touched") == 1
    assert "touched" not in events[events.index("adopts") :]
    assert np.array_equal(weights_of(side), weights_of(first.side))
    if adam:
        assert second.optimizer.state[second.model[0].weight]["exp_avg"].any(), "its state came too"


@pytest.mark.parametrize("adam", [False, True])
def test_the_outer_step_is_that_of_the_adopted_weights_and_lies_where_they_were_collected(
    join, until, monkeypatch, adam
):
    made = []
    plain = Vector.mapped
    monkeypatch.setattr(Vector, "mapped", lambda elements: made.append(plain(elements)) or made[-1])
    first, second = join(Config(**RARELY), adam)
    outer, parameters = second.side.live.outer, sum(map(torch.numel, second.model.parameters()))
    [collected] = made
    until(lambda: collected.array.size == parameters)  # The rest of the memory was given back.
    assert np.shares_memory(outer._phi, collected.array)
    assert np.array_equal(outer._phi, weights_of(first.side)[:parameters])
    assert outer._momentum.shape == (parameters,)
    assert not outer._momentum.any()
    assert second.side.network.runtime.averager.joining_vector is None
    free = [array for arrays in second.side.live.pool.free_arrays.values() for array in arrays]
    assert not any(np.shares_memory(array, outer._phi) for array in free), "no exchange writes there"


@pytest.mark.parametrize("seeds", [[], ["127.0.0.1:9"]])
@pytest.mark.parametrize("outer", [{}, PLAIN])
def test_a_node_alone_has_its_memory_before_its_first_step(train, noted, until, seeds, outer):
    model = Norm(0)
    trainee = train(model, seeds=seeds, config=Config(**RARELY | {"join_timeout_s": 0.3}, **outer))
    side = trainee.side
    until(lambda: "steps" in of(side, noted))
    before = of(side, noted)
    before = before[: before.index("steps")]
    assert before.count("buffer") == 2
    assert before.count("touched") == 1
    assert ("outer" in before) is not side.live.outer.is_plain
    if not side.live.outer.is_plain:
        assert np.array_equal(side.live.outer._phi, weights_of(side)[: side.live.outer.parameters])


@in_trio
async def test_the_memory_of_weights_that_a_newcomer_gives_up_is_free_at_the_next_step():
    node = runtime()
    node.averager.joining_array(ReceivePiece(1, OTHER, 0, 4, 4))
    node.averager.on_visit(None, 1, 1, None)
    assert node.averager.joining_vector is None


def test_no_snapshot_is_told_before_the_outer_step_has_begun():
    """A node without a donor is ready when the network says so, and may be offered an exchange at once."""
    vector = np.full(300, 3.0, np.float32)
    side = Node({"x": vector}, seeds=["127.0.0.1:9"])._training
    taken, told = [], []
    side.service.runtime = SimpleNamespace(
        streams=SimpleNamespace(allocate_memory=lambda: taken.append(side.live.outer.has_weights)),
        peer=SimpleNamespace(
            local=SimpleNamespace(optimizer_keys=()), view=SimpleNamespace(sound=True, finished=False)
        ),
    )  # fmt: skip
    side.network.call = lambda *arguments: told.append(side.live.outer.has_weights) or True
    side.report(Visit())
    assert not any(told), "there is nothing to begin with yet"
    told.clear()
    side.report(Visit(snapshots=[(1, side.live.pool.take(), 0.0)]))
    assert taken == [True]
    assert told
    assert all(told)
    assert np.array_equal(side.live.outer._phi, vector)


def test_memory_collected_beyond_the_outer_steps_part_goes_back_to_the_system():
    def held():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    vector = Vector.mapped(16 << 20)
    vector.array.fill(1.0)
    before, kept = held(), vector.array[: (2 << 20) + 5]
    vector.shorten(kept.size)
    assert held() < before - 40e6
    assert vector.array.size == kept.size
    assert (kept == 1.0).all()
    vector.shorten(3)
    assert (kept[:3] == 1.0).all()
