"""JAX: two nodes learn digits as well as a single one, with donated buffers, while one leaves and another joins."""

import threading
from functools import partial

import numpy as np
import pytest

from gossip.config import Config
from gossip.errors import LayoutError
from node import Node
from tests.node.conftest import until

jax = pytest.importorskip("jax")
jnp = jax.numpy
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402

from node.adapters import jax as adapter  # noqa: E402
from node.adapters.jax import Arriving, Pytree  # noqa: E402

pytestmark = pytest.mark.frameworks

images, labels = load_digits(return_X_y=True)
X, X_TEST, Y, Y_TEST = (
    part.astype(kind)
    for part, kind in zip(
        train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels),
        (np.float32, np.float32, np.int32, np.int32), strict=True,
    )
)  # fmt: skip
BATCH, MOMENTUM = 16, 0.9


def fresh(seed):
    random = np.random.default_rng(seed)
    sizes = [(64, 64), (64, 10)]
    return [{"w": jnp.asarray(random.normal(0, 0.2, s), jnp.float32), "b": jnp.zeros(s[1])} for s in sizes]


def logits(params, x):
    first, second = params
    return jax.nn.relu(x @ first["w"] + first["b"]) @ second["w"] + second["b"]


def loss_of(params, x, y):
    return -jnp.mean(jax.nn.log_softmax(logits(params, x))[jnp.arange(len(y)), y])


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, velocity, x, y, rate):
    loss, gradient = jax.value_and_grad(loss_of)(params, x, y)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
    return jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity, loss


def zeros(params):
    return jax.tree.map(jnp.zeros_like, params)


def accuracy(params):
    return float(jnp.mean(jnp.argmax(logits(params, X_TEST), 1) == Y_TEST))


def alone(samples, seed=0):
    params, random = fresh(seed), np.random.default_rng(seed)
    velocity = zeros(params)
    for _ in range(samples // BATCH):
        at = random.integers(len(X), size=BATCH)
        params, velocity, _ = train_step(params, velocity, X[at], Y[at], 0.02)
    return accuracy(params)


class Learner(threading.Thread):
    """A node and its loop, which runs until a test ends it, with or without settling."""

    def __init__(self, seed, seeds=()):
        super().__init__(daemon=True)
        self.seed, self.seeds = seed, seeds
        self.node, self.entered = None, threading.Event()
        self.leave, self.end = threading.Event(), threading.Event()
        self.at_entry = self.result = self.metrics = self.error = None

    def run(self):
        try:
            self.train()
        except BaseException as error:
            self.error = error
        finally:
            self.entered.set()

    def train(self):
        tree, random = Pytree({"params": fresh(self.seed), "calls": jnp.int32(0)}), np.random.default_rng(self.seed)
        with Node(tree, seeds=self.seeds, config=Config(mix_every_steps=8, join_timeout_s=10)) as node:
            self.node, self.at_entry = node, accuracy(tree.value["params"])
            self.entered.set()
            params, calls = tree.value["params"], tree.value["calls"]
            velocity = zeros(params)
            while not (self.end.is_set() or self.leave.is_set()):
                at = random.integers(len(X), size=BATCH)
                params, velocity, loss = train_step(params, velocity, X[at], Y[at], 0.02)
                tree.value = {"params": params, "calls": calls + 1}
                node.step(loss=loss, samples=BATCH)
                params, calls = tree.value["params"], tree.value["calls"]
            if self.end.is_set():
                node.settle(2.0)
            self.result, self.metrics = accuracy(tree.value["params"]), node.metrics()
            self.calls = int(tree.value["calls"])


def learner(*arguments):
    one = Learner(*arguments)
    one.start()
    assert one.entered.wait(60)
    assert one.error is None, one.error
    return one


def copied(copy):
    until(copy.done, 10)


def test_two_nodes_learn_as_one_alone_does_while_one_leaves_and_another_joins():
    first = learner(0)
    second = learner(1, [first.node.address])
    until(lambda: second.node.swarm_samples >= 20_000 and second.node.metrics().exchanges_done >= 10, 60)
    second.leave.set()
    second.join(30)
    third = learner(2, [first.node.address])
    until(lambda: third.node.swarm_samples >= 60_000 and third.node.metrics().exchanges_done >= 10, 60)
    for one in (first, third):
        one.end.set()
    for one in (first, third):
        one.join(60)
        assert not one.is_alive()
    for one in (first, second, third):
        assert one.error is None, one.error
    assert third.at_entry > 0.8, "it begins with what the others have learned"
    assert third.calls == third.metrics.steps, "what is no float is its own"
    expected = alone(60_000)
    assert expected > 0.93
    for one in (first, third):
        assert one.result > expected - 0.02


def test_a_snapshot_is_of_the_weights_before_a_step_that_uses_their_buffers_again():
    tree = Pytree(fresh(0))
    before = np.zeros(tree.layout.size, np.float32)
    tree.read(before)
    out = np.zeros_like(before)
    copy = tree.begin_read(out)
    params, _, _ = train_step(tree.value, zeros(tree.value), X[:BATCH], Y[:BATCH], 0.5)
    with pytest.raises(LayoutError, match=r"was given away to a step \(donate_argnums\)"):
        tree.read(np.zeros_like(before))
    tree.value = params
    copied(copy)
    np.testing.assert_array_equal(out, before)
    tree.read(out)
    assert np.abs(out - before).max() > 0


def test_a_snapshot_of_numpys_arrays_is_of_before_the_program_writes_to_them():
    tree = Pytree({"w": np.zeros(1 << 22, np.float32)})
    copy = tree.begin_read(out := np.ones(1 << 22, np.float32))
    tree.value["w"] += 1
    copied(copy)
    assert not out.any()


@pytest.mark.parametrize(
    "tree", [{"one": jnp.arange(40.0)}, {"a": jnp.ones((3, 5), jnp.bfloat16), "b": jnp.arange(25.0)}]
)
def test_any_piece_is_a_copy_of_what_lies_there(tree):
    """The piece is also a copy if the tree is a single array, whose buffer may be donated to the next step."""
    state = Pytree(tree)
    full = np.empty(state.layout.size, np.float32)
    state.read(full)
    for start in range(0, full.size, 3):
        for stop in (start + 1, start + 10, full.size):
            out = np.full(min(stop, full.size) - start, np.nan, np.float32)
            copy = state.begin_read_piece(out, start)
            for leaf in jax.tree_util.tree_leaves(state.value):
                assert copy._flat is not leaf
            copied(copy)
            np.testing.assert_array_equal(out, full[start : start + out.size])
    copy = state.begin_read(out := np.empty_like(full))
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree), donate_argnums=0)(state.value)
    copied(copy)
    np.testing.assert_array_equal(out, full)


def test_an_addition_changes_floats_alone_and_writes_to_no_array():
    value = {"w": jnp.ones((2, 3)), "h": jnp.ones(2, jnp.bfloat16), "n": jnp.arange(3), "s": 2.0}
    tree = Pytree(value)
    assert [(s.name, s.dtype) for s in tree.layout.segments] == [("h", "bfloat16"), ("w", "float32")]
    shift = np.arange(8, dtype=np.float32)
    copied(tree.add(shift))
    shift[:] = 99  # The caller reuses the vector.
    assert tree.value["h"].tolist() == [1, 2]
    assert tree.value["w"].tolist() == [[3, 4, 5], [6, 7, 8]]
    assert tree.value["n"] is value["n"]
    assert tree.value["s"] == 2.0
    assert value["w"].tolist() == [[1, 1, 1], [1, 1, 1]]
    tree.write(np.full(8, 0.5, np.float32))
    assert tree.value["w"].dtype == jnp.float32
    assert tree.value["w"].tolist() == [[0.5] * 3] * 2
    saved = tree.tensors()
    tree.write(np.zeros(8, np.float32))
    tree.load(saved)
    assert tree.value["h"].tolist() == [0.5, 0.5]


def test_a_tree_with_other_branches_or_shapes_is_refused():
    tree = Pytree({"w": jnp.ones(3)})
    out = np.zeros(3, np.float32)
    for value, sentence in (({"w": jnp.ones(3), "v": jnp.ones(1)}, "other branches"), ({"w": jnp.ones(4)}, "is now")):
        tree.value = value
        with pytest.raises(LayoutError, match=sentence):
            tree.read(out)


def test_a_mapping_of_jax_arrays_is_refused_and_left_alone():
    array = jnp.ones(3)
    with pytest.raises(LayoutError, match=r"node\.adapters\.jax\.Pytree"):
        Node({"w": array})
    assert array.tolist() == [1, 1, 1]


def test_a_large_vector_is_copied_by_a_thread_of_its_own(monkeypatch):
    monkeypatch.setattr(adapter, "LARGE_ELEMENTS", 4)
    tree = Pytree({"w": jnp.arange(8.0)})
    out = np.full(8, np.nan, np.float32)
    copy = tree.begin_read(out)
    copied(copy)
    assert out.tolist() == list(range(8))
    assert copy._copying is not None
    assert copy.done()


class Broken:
    """A vector whose copy from the device fails."""

    def is_ready(self):
        return True

    def __array__(self, *_):
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize("large", [4, 1 << 20])
def test_a_copy_that_fails_says_so_once_the_network_asks(large, monkeypatch):
    """The training thread makes the first call of ``done``, and would take True for a copy that holds the weights."""
    monkeypatch.setattr(adapter, "LARGE_ELEMENTS", large)
    copy = Arriving(Broken(), np.zeros(8, np.float32))
    assert not copy.done()
    copied(copy)
    assert copy.failure == "RuntimeError: the device is gone"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("large", [4, 1 << 20])
def test_an_update_goes_to_the_device_ahead_and_its_vector_is_free_once_it_is_there(dtype, large, monkeypatch):
    monkeypatch.setattr(adapter, "LARGE_ELEMENTS", large)
    tree = Pytree({"w": jnp.arange(1 << 16, dtype=dtype), "n": jnp.arange(3)})
    before = np.empty(tree.layout.size, np.float32)
    tree.read(before)
    random = np.random.default_rng(0)
    for share in (None, 0.25):
        values = tree.buffer(tree.layout.size)
        values[:] = random.standard_normal(tree.layout.size)
        expected = before + values if share is None else before + np.float32(share) * (values - before)
        upload = tree.begin_upload(values)
        copied(upload)
        values[:] = np.nan
        changed = upload.add() if share is None else upload.merge(share)
        assert changed.done()
        tree.value = jax.tree.map(lambda leaf: leaf + 0, tree.value)  # A step, to which the old buffers may be donated.
        after = np.empty_like(before)
        tree.read(after)
        np.testing.assert_allclose(after, jnp.asarray(expected, dtype).astype(jnp.float32), rtol=1e-6, atol=1e-6)
        before = after


def test_an_update_that_is_added_before_it_is_there_keeps_its_vector_busy():
    tree = Pytree({"w": jnp.zeros(1 << 22)})
    values = np.ones(1 << 22, np.float32)
    pending = tree.begin_upload(values).add()
    copied(pending)
    values[:] = np.nan
    assert float(tree.value["w"].min()) == 1.0


def test_a_device_without_memory_costs_an_exchange_and_not_the_loop(monkeypatch):
    """The step boundary handles a MemoryError; a JaxRuntimeError would propagate out of ``node.step``."""

    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 32 bytes.")

    tree = Pytree({"w": jnp.zeros(8)})
    out = np.zeros(8, np.float32)
    monkeypatch.setattr(tree, "_to_vector", full)
    for call in (tree.begin_read, tree.read):
        with pytest.raises(MemoryError, match="RESOURCE_EXHAUSTED"):
            call(out)
    monkeypatch.setattr(jax, "device_put", full)
    assert tree.begin_upload(out) is None, "the boundary tries again"
    with pytest.raises(MemoryError, match="no memory for a copy of the update"):
        tree.add(out)
    assert tree.value["w"].tolist() == [0] * 8
