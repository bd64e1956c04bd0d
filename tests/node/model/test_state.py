"""A model with its own ``State``: the calls that it receives, and the results of a minimal one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gossip.arithmetic.layout import Layout, Segment
from gossip.averaging.model import Pending
from gossip.config import Config
from gossip.errors import CheckpointError, ConfigError, LayoutError
from node import Node
from node.model.scalars import LastLoss
from node.model.snapshot import ModelState
from node.model.state import State
from tests.node.vectors import vector_of


class Plain(State):
    """A minimal state: two arrays, in whatever form a framework may keep them."""

    def __init__(self, w, h):
        self.w, self.h = np.asarray(w, np.float32), np.asarray(h, np.float16)
        self.layout = Layout(
            [Segment("w", self.w.shape, "float32", "parameter"), Segment("h", self.h.shape, "float16", "parameter")]
        )

    def read(self, out):
        out[:] = np.concatenate([self.w.reshape(-1), self.h.reshape(-1)])[: out.size]

    def add(self, shift):
        self.w = self.w + shift[: self.w.size].reshape(self.w.shape)
        self.h = (self.h + shift[self.w.size :].reshape(self.h.shape)).astype(np.float16)

    def write(self, vector):
        self.w, self.h = np.zeros_like(self.w), np.zeros_like(self.h)
        self.add(vector)


def drawn(seed):
    random = np.random.default_rng(seed)
    return random.standard_normal((3, 5)), random.standard_normal(7)


def both():
    """Return a minimal state, and a mapping of the same arrays."""
    w, h = drawn(0)
    return Plain(w, h), ModelState(
        {"w": torch.tensor(w, dtype=torch.float32), "h": torch.tensor(h, dtype=torch.float16)}
    )


def test_a_state_of_four_parts_does_what_that_of_torch_tensors_does():
    least, torchs = both()
    assert least.layout == torchs.layout
    assert (least.size(), least.optimizer_range()) == (22, range(22, 22))
    shift = np.random.default_rng(1).standard_normal(22).astype(np.float32)
    at = np.array([0, 3, 14, 15, 21])
    for state in (least, torchs):
        state.add(shift)
        state.add_at(shift[:5].copy(), at)
        state.merge(np.full(22, 0.25, np.float32), 0.5)
    np.testing.assert_array_equal(vector_of(least), vector_of(torchs))
    some, its = np.empty(5, np.float32), np.empty(5, np.float32)
    assert least.begin_read_at(some, at) is None
    torchs.begin_read_at(its, at)
    np.testing.assert_array_equal(some, its)
    assert least.sound()
    least.h = np.full_like(least.h, np.inf)
    assert not least.sound()


def test_its_checkpoint_is_the_arrays_by_name_and_goes_back_whole_or_not_at_all():
    least, torchs = both()
    saved = least.tensors()
    assert {name: (value.dtype, value.shape) for name, value in saved.items()} == {
        name: (value.dtype, value.shape) for name, value in torchs.tensors().items()
    }
    other = Plain(*drawn(1))
    before = vector_of(other)
    for wrong in ({"w": saved["w"]}, {**saved, "h": torch.zeros(8)}):
        with pytest.raises(CheckpointError, match="another model than this node's \\(tensor 'h' is "):
            other.load(wrong)
        np.testing.assert_array_equal(vector_of(other), before)
    other.load(saved)
    np.testing.assert_array_equal(vector_of(other), vector_of(least))


def test_an_optimizer_beside_a_state_that_is_brought_is_refused(quick):
    with pytest.raises(ConfigError, match="A Plain brings its own state: leave optimizer out"):
        Node(Plain(*drawn(0)), torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]), config=quick)


class Based(Plain):
    """A state with one frozen array."""

    def __init__(self, w, h):
        super().__init__(w, h)
        self.layout = Layout([*self.layout.segments[:1], replace(self.layout.segments[1], kind="frozen")])

    def add(self, shift):
        self.w = self.w + shift[: self.w.size].reshape(self.w.shape)

    def write(self, vector):
        self.w, self.h = np.zeros_like(self.w), np.zeros_like(self.h)
        super().add(vector)


class Thawing(Based):
    def read_frozen(self, out, start):
        out[:] = self.h.reshape(-1)[start - self.w.size :][: out.size]


def test_a_state_may_freeze_some_of_its_tensors_where_it_can_give_them_to_newcomers(train, quick):
    with pytest.raises(LayoutError, match="The layout of Based has frozen tensors and it has no read_frozen"):
        Node(Based(*drawn(0)), config=quick)
    state = Thawing(*drawn(0))
    assert (state.size(), state.layout.size) == (15, 22)
    state.add_at(np.ones(1, np.float32), np.array([14]))
    state.merge(np.zeros(15, np.float32), 0.5)
    state.adopt_exchanged(np.full(22, 0.5, np.float32), (), {})
    assert (state.w == 0.5).all()
    np.testing.assert_array_equal(state.h, drawn(0)[1].astype(np.float16))
    donor, newcomer = Thawing(*drawn(0)), Thawing(*drawn(1))
    first = train(donor)
    train(newcomer, seeds=[first.node.address])
    np.testing.assert_array_equal(newcomer.h, donor.h)


def test_nodes_of_such_a_model_mix_and_a_newcomer_takes_its_weights(train, until, tmp_path):
    donor = Plain(*drawn(0))
    first = train(donor)
    torchs = both()[1]
    newcomer = Plain(*drawn(1))
    began = vector_of(newcomer)
    second = train(newcomer, seeds=[first.node.address])
    until(lambda: second.node.metrics().exchanges_done >= 3)
    second.stop()
    apart = np.abs(vector_of(newcomer) - vector_of(torchs))
    assert np.abs(began - vector_of(torchs)).max() > 1
    assert apart.max() < 1e-2, "nobody trained: what the newcomer holds is what it was given"
    first.do(lambda node: node.save(tmp_path / "run"))
    first.stop()
    again = Plain(*drawn(2))
    alone = train(again)
    alone.do(lambda node: node.load(tmp_path / "run"))
    np.testing.assert_array_equal(vector_of(again), vector_of(donor))


class Late(Plain):
    """A state whose copies arrive when they are polled, as those of a device may. While it fails, none arrive."""

    fails = False

    def begin_read(self, out):
        return Arriving(self, out)


class Arriving(Pending):
    failure = ""

    def __init__(self, state, out):
        self.out, self.values, self.asked = out, np.empty_like(out), 0
        state.read(self.values)
        if state.fails:
            self.failure = "RuntimeError: no such device"
        else:
            out[:] = np.nan

    def done(self):
        self.asked += 1
        if self.asked == 3 and not self.failure:
            self.out[:] = self.values
        return self.asked >= 3


def test_a_copy_that_arrives_later_is_waited_for_and_holds_what_was_there_when_it_began(train, until):
    first = train(Late(*drawn(0)))
    movement = first.side.network.runtime.averager.movement
    assert np.isfinite(movement.expected_sample).all(), "the first of all, from which local steps are measured"
    second = train(Late(*drawn(1)), seeds=[first.node.address])
    until(lambda: second.node.metrics().exchanges_done >= 3)
    for one in (first, second):
        one.stop()
        assert one.model.sound()
    for name in ("w", "h"):
        np.testing.assert_allclose(getattr(first.model, name), getattr(second.model, name), atol=1e-2)


class LossOfADevice:
    def __init__(self, value):
        self.value, self.ready = value, False

    def is_ready(self):
        return self.ready

    def __float__(self):
        assert self.ready, "reading it now would wait for the device"
        return self.value


def test_a_loss_that_its_device_has_not_computed_is_not_waited_for():
    last, one, other = LastLoss(), LossOfADevice(2.0), LossOfADevice(1.0)
    last.set(one)
    assert last.read() is None
    one.ready = True
    assert last.read() == 2.0
    last.set(other)
    assert last.read() == 2.0, "of the last that was there"
    other.ready = True
    assert last.read() == 1.0


def test_a_copy_that_fails_costs_the_exchange_and_neither_the_loop_nor_the_next_one(train, until, caplog):
    config = Config(mix_every_steps=2, join_timeout_s=3.0, filter="none")
    state, other = (Late(*drawn(seed)) for seed in range(2))
    first = train(other, config=config)
    second = train(state, config=config, seeds=[first.node.address])
    until(lambda: second.node.metrics().exchanges_done)
    before, state.fails = state.w.copy(), True
    until(lambda: [record.kind for record in caplog.records].count("device"))
    done, steps = second.node.metrics().exchanges_done, second.node.metrics().steps
    until(lambda: second.node.metrics().steps > steps + 50)
    assert second.node.metrics().exchanges_done <= done + 1, "one whose copy was there may have ended since"
    assert np.isfinite(state.w).all()
    assert np.abs(state.w - before).max() < 10
    state.fails = False
    until(lambda: second.node.metrics().exchanges_done > done + 2)
    assert [record.kind for record in caplog.records].count("device") == 1, "it is told once"
    assert "could not be copied from the model's device (RuntimeError: no such device)" in caplog.text
