"""The callback for Keras, with the backend that KERAS_BACKEND names: counts, the end of a run, and weights."""

import os

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gossip.config import Config
from gossip.errors import LayoutError, LocalError

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="make test-frameworks")
from node import running  # noqa: E402
from node.adapters.keras import KerasGossip, KerasWeights  # noqa: E402
from tests.frameworks.plays import counts  # noqa: E402

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]
QUICK = Config(mix_every_steps=2, join_timeout_s=3.0)
DATA = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3)


def classifier(**options):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, **options)
    return model


def gossip(model, **options):
    return KerasGossip(model, **{"batch_size": 8, "config": QUICK, "settle_s": 0.5} | options)


def loader(callback=None):
    return DataLoader(DATA, 8, sampler=callback and callback.sampler(DATA), drop_last=True)


def whole(model):
    weights = KerasWeights(model)
    out = np.empty(weights.layout.size, np.float32)
    weights.read(out)
    return out


class Hook(keras.callbacks.Callback):
    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def on_train_batch_end(self, batch, logs=None):
        self.hook(batch)


@pytest.mark.parametrize(("together", "steps"), [(1, 8), (4, 2)] if keras.backend.backend() == "jax" else [(1, 8)])
def test_a_batch_is_a_step_and_several_taken_at_once_keep_their_samples(together, steps):
    model = classifier(steps_per_execution=together)
    with gossip(model) as callback:
        model.fit(loader(callback), callbacks=[callback], verbose=0)
    assert counts(callback) == (steps, 64)


def test_weights_come_and_go_whole():
    model, other = classifier(), classifier()
    assert KerasWeights(model).layout.fingerprint == KerasWeights(other).layout.fingerprint
    weights, vector = KerasWeights(model), whole(other)
    weights.write(vector)
    assert np.array_equal(whole(model), vector)
    weights.add(np.full_like(vector, 0.5))
    assert np.allclose(whole(model), vector + 0.5)
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        assert np.allclose(mine, theirs + 0.5)


def test_statistics_are_no_parameters_to_the_outer_step():
    layout = KerasWeights(classifier()).layout
    assert [segment.name.partition(".")[2] for segment in layout.segments if segment.kind == "buffer"] == [
        "moving_mean", "moving_variance",
    ]  # fmt: skip


def frozen_base():
    """Return a classifier whose last layer alone is trained: 27 of 99 numbers, and 16 statistics."""
    model = classifier()
    for layer in model.layers[:-1]:
        layer.trainable = False
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def frozen_part(weights):
    """Return the frozen weights, read in two pieces as the network thread reads them for newcomers."""
    start, size = weights.layout.exchanged, weights.layout.size
    out = np.empty(size - start, np.float32)
    weights.read_frozen(out[:9], start)
    weights.read_frozen(out[9:], start + 9)
    return out


def test_any_piece_of_the_weights_is_what_lies_there():
    weights = KerasWeights(frozen_base())
    full = np.empty(weights.layout.exchanged, np.float32)
    weights.read(full)
    for start in range(full.size):
        for stop in (start + 1, start + 10, full.size):
            out = np.full(min(stop, full.size) - start, np.nan, np.float32)
            weights.begin_read_piece(out, start)
            np.testing.assert_array_equal(out, full[start : start + out.size])


def test_frozen_layers_do_not_travel_and_a_newcomer_has_them_once(train):
    theirs, model, seen = KerasWeights(frozen_base()), frozen_base(), []
    other = train(theirs)
    base = theirs.model.layers[0].get_weights()[0]
    assert not np.array_equal(model.layers[0].get_weights()[0], base)
    with gossip(model, seeds=[other.node.address], settle_s=20.0) as callback:
        assert (theirs.layout.size, theirs.layout.exchanged, theirs.layout.parameters) == (99, 43, 27)
        assert np.array_equal(model.layers[0].get_weights()[0], base)
        # During fit the JAX backend holds the weights outside the model.
        hook = Hook(lambda batch: seen.append(frozen_part(callback.weights)))
        model.fit(loader(callback), callbacks=[callback, hook], verbose=0)
    done = [event for event in callback.node.history() if event.kind == "exchange.done"]
    assert {event.bytes_sent for event in done} == {4 * 43}
    assert all(np.array_equal(one, frozen_part(theirs)) for one in seen)
    assert np.array_equal(whole(model)[43:], frozen_part(theirs))


def test_freezing_is_no_part_of_a_checkpoint_and_thawing_is_told(tmp_path):
    model = frozen_base()
    with gossip(model) as callback:
        callback.node.save(tmp_path / "run")
    again = classifier()
    with gossip(again, average="*") as callback:
        callback.node.load(tmp_path / "run")
        assert np.array_equal(np.sort(whole(again)), np.sort(whole(model)))
    assert KerasWeights(model, average=True).layout.exchanged == 99
    weights = KerasWeights(model)
    model.layers[0].trainable = True
    with pytest.raises(LayoutError, match="kernel' was frozen when the Node was made and is trained now"):
        weights.read(np.empty(99, np.float32))


def test_values_that_others_sent_are_trained_on_while_fit_runs():
    """During fit the JAX backend holds the weights outside the model."""
    model, seen = classifier(), []
    model.optimizer.learning_rate = 0.0
    weights = KerasWeights(model)
    before = whole(model)[: weights.layout.parameters]

    def shift(batch):
        if batch == 3:
            weights.add(np.ones(weights.layout.size, np.float32))
        seen.append(whole(model)[: weights.layout.parameters] - before)

    model.fit(loader(), callbacks=[Hook(shift)], verbose=0)
    assert [round(float(one.mean()), 3) for one in seen] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert np.allclose(whole(model)[: weights.layout.parameters], before + 1)


def test_a_training_that_raises_takes_its_node_away(train, until):
    def fail(batch):
        if batch == 3:
            assert [member.state for member in other.node.members[1:]] == ["alive"]
            raise ZeroDivisionError

    model = classifier()
    other = train(KerasWeights(classifier()))
    with pytest.raises(ZeroDivisionError), gossip(model, seeds=[other.node.address]) as callback:
        model.fit(loader(), callbacks=[callback, Hook(fail)], verbose=0)
    until(lambda: [member.state for member in other.node.members[1:]] == ["left"])
    assert counts(callback) == (4, 32)


def test_two_nodes_agree_before_they_evaluate(train):
    theirs = classifier()
    other = train(KerasWeights(theirs))
    model = classifier()
    with gossip(model, seeds=[other.node.address], settle_s=20.0) as callback:
        assert np.allclose(whole(model), whole(theirs)), "it took the swarm's weights"
        model.fit(loader(callback), validation_data=DATA.tensors, callbacks=[callback], epochs=2, verbose=0)
        assert callback.node.metrics().exchanges_done >= 3


def test_the_run_ends_with_the_swarms_samples_and_a_late_comer_trains_nothing(tmp_path):
    model = classifier()
    with gossip(model, samples=100, state_dir=tmp_path) as callback:
        model.fit(loader(callback), epochs=50, callbacks=[callback], verbose=0)
    assert counts(callback) == (13, 104)
    final = whole(model)
    running.trained_runs().clear()  # As in another process: in this one a later Node begins a run of its own.
    model = classifier()
    with gossip(model, samples=100, state_dir=tmp_path) as callback:
        model.fit(loader(callback), epochs=50, callbacks=[callback], verbose=0)
    assert counts(callback) == (0, 0)
    assert np.array_equal(whole(model), final), "it has what the run ended with"
    model.fit(loader(), epochs=1, verbose=0)  # A later fit trains as it does without the callback.
    assert not np.array_equal(whole(model), final)


def test_a_checkpoint_of_the_node_holds_run_and_weights(tmp_path):
    model = classifier()
    with gossip(model) as callback:
        model.fit(loader(callback), callbacks=[callback], verbose=0)
        callback.node.save(tmp_path / "run")
    again = classifier()
    with gossip(again) as callback:
        callback.node.load(tmp_path / "run")
        assert np.array_equal(whole(again), whole(model))
        again.fit(loader(callback), callbacks=[callback], verbose=0)
    assert callback.node.swarm_samples == 128


def test_options_that_cannot_work_are_refused_at_once():
    with pytest.raises(LayoutError, match="no weights yet"):
        gossip(keras.Sequential([keras.layers.Dense(3)]))
    with pytest.raises(TypeError, match="seed"):
        gossip(classifier(), seed=["127.0.0.1:1"])
    model = classifier()
    with pytest.raises(LocalError, match="inside the block"):
        model.fit(loader(), callbacks=[gossip(model)], verbose=0)
