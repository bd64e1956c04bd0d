"""A node beside Keras's ``fit``, as a callback."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.layout import Kind, Layout, Segment
from gossip.errors import ConfigError, LayoutError
from node.adapters.adapter import Block
from node.model.state import State

__all__ = ["KerasGossip", "KerasWeights"]

Floats = NDArray[np.float32]


class KerasGossip(Block, keras.callbacks.Callback):  # type: ignore[misc]
    """``with KerasGossip(model, batch_size=16, samples=100_000, seeds=[...]) as gossip: model.fit(...,
    callbacks=[gossip])``, with the torch and the jax backend.

    Entering joins, so that ``gossip.node.load(path)`` can go on with a run before ``fit``; leaving the block takes the
    node away, whatever ends it. Keras tells no callback how many samples a batch had: they count as ``batch_size``
    each, which is right with ``drop_last=True``. The data are divided by ``DataLoader(dataset, batch_size,
    sampler=gossip.sampler(dataset), drop_last=True)``. :class:`node.adapters.adapter.Adapter` has the other arguments.
    """

    def __init__(
        self, model: Any, *, batch_size: int, samples: int | None = None, settle_s: float = 5.0, **options: Any
    ) -> None:
        super().__init__(samples=samples, settle_s=settle_s, **options)
        keras.callbacks.Callback.__init__(self)
        if keras.backend.backend() not in ("torch", "jax"):
            raise ConfigError(f"Keras runs on {keras.backend.backend()}: choose torch or jax with KERAS_BACKEND.")
        self.weights = KerasWeights(model)
        self.batch_size = batch_size
        self.batch = -1  # of this epoch, the last that the node knows of

    def __enter__(self) -> Any:
        super().__enter__()
        self.ready()
        return self

    @property
    def feeds(self) -> bool:
        """Always: ``fit`` looks at a batch before it asks whether there is anything to train."""
        return True

    def ready(self) -> None:
        if not self.running:
            self.check_entered()
            self.begin(self.weights)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.ready()
        if self.over:
            self.model._initial_epoch = self.params["epochs"]  # as BackupAndRestore has it: nothing is left to train

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        batches, self.batch = batch - self.batch, batch  # several, where one execution takes several steps
        if self.step((logs or {}).get("loss"), batches * self.batch_size):
            self.model.stop_training = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.settle()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.model._initial_epoch = None
        self.settle()


class KerasWeights(State):
    """A Keras model's weights of floating point, trained ones and others (BatchNorm's statistics, frozen layers), of
    any backend. Raises LayoutError for a model without weights."""

    def __init__(self, model: Any) -> None:
        if not model.built or not model.weights:
            raise LayoutError("This Keras model has no weights yet: give it a keras.Input, or call it on a batch.")
        self.model = model
        trained: list[tuple[Any, Kind]] = [(variable, "parameter") for variable in model.trainable_weights]
        others: list[tuple[Any, Kind]] = [(variable, "buffer") for variable in model.non_trainable_weights]
        kept = [(variable, kind) for variable, kind in trained + others if "float" in str(variable.dtype)]
        self.variables = [variable for variable, _ in kept]
        # Keras numbers layers as they are made in a process: only their order is the same on every node.
        self.layout = Layout(
            Segment(f"{number:04d}.{variable.name}", tuple(variable.shape), str(variable.dtype), kind)
            for number, (variable, kind) in enumerate(kept)
        )

    def sync(self) -> None:
        """While ``fit`` runs on jax the weights are elsewhere; who asks for them pays for having them brought back."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()

    def read(self, out: Floats) -> None:
        self.sync()
        for variable, (_, start, stop) in zip(self.variables, self._places(), strict=True):
            out[start:stop] = keras.ops.convert_to_numpy(variable.value).reshape(-1)

    def add(self, shift: Floats) -> None:
        self.sync()
        for variable, (segment, start, stop) in zip(self.variables, self._places(), strict=True):
            value = keras.ops.convert_to_numpy(variable.value).astype(np.float32)
            variable.assign(value + shift[start:stop].reshape(segment.shape))

    def write(self, vector: Floats) -> None:
        self.sync()
        for variable, (segment, start, stop) in zip(self.variables, self._places(), strict=True):
            variable.assign(vector[start:stop].reshape(segment.shape))
