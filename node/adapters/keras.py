"""A node beside Keras's ``fit``, as a callback."""

from __future__ import annotations

from collections.abc import Iterator
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
        self.weights = KerasWeights(model, options.get("frozen", False))
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
    """A Keras model's weights of floating point, trained ones and others (BatchNorm's statistics), of any backend.
    Those of frozen layers are left out of exchanges where others are trained, unless ``frozen``; newcomers get them
    once. Raises LayoutError for a model without weights, and later where a frozen one is trained."""

    def __init__(self, model: Any, frozen: bool = False) -> None:
        if not model.built or not model.weights:
            raise LayoutError("This Keras model has no weights yet: give it a keras.Input, or call it on a batch.")
        self.model = model
        trained = {id(variable) for variable in model.trainable_weights}
        # Keras counts frozen weights and statistics alike; only what was made to be trained can be frozen.
        made = {id(variable) for layer in model._flatten_layers() for variable in layer._trainable_variables}
        kept: dict[str, tuple[Any, Segment]] = {}
        for number, variable in enumerate(model.weights):
            if "float" in str(variable.dtype):
                kind: Kind = "buffer" if id(variable) not in made else "parameter"
                if trained and not frozen and kind == "parameter" and id(variable) not in trained:
                    kind = "frozen"
                # Keras numbers layers as they are made in a process: only their order is the same on every node.
                name = f"{number:04d}.{variable.name}"
                kept[name] = variable, Segment(name, tuple(variable.shape), str(variable.dtype), kind)
        self.layout = Layout(segment for _, segment in kept.values())
        self.variables = [kept[segment.name][0] for segment in self.layout.segments]
        self.frozen = {id(kept[one.name][0]): one.name for one in self.layout.segments if one.kind == "frozen"}
        self.hold_frozen()

    def hold_frozen(self) -> None:
        """For :meth:`read_frozen`, which any thread may call: where ``fit`` on jax keeps them no other can look.
        Torch's tensors stay the same ones."""
        held = [variable.value for variable in self.variables[len(self.variables) - len(self.frozen) :]]
        self.base = held if keras.backend.backend() == "torch" else [np.array(one) for one in held]

    def sync(self) -> None:
        """While ``fit`` runs on jax the weights are elsewhere; who asks for them pays for having them brought back."""
        for variable in self.model.trainable_weights if self.frozen else ():
            if id(variable) in self.frozen:
                raise LayoutError(
                    f"Weight {self.frozen[id(variable)]!r} was frozen when the Node was made and is trained now, and "
                    "would never be exchanged: make a new Node, or give this one frozen=True from the beginning."
                )
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()

    def read(self, out: Floats) -> None:
        self.sync()
        for variable, _, start, stop in self.pieces(out.size):
            out[start:stop] = keras.ops.convert_to_numpy(variable.value).reshape(-1)

    def begin_read_piece(self, out: Floats, start: int) -> None:
        self.sync()
        for variable, _, begins, ends in self.pieces(self.layout.exchanged):
            if begins < start + out.size and start < ends:
                fill(out, start, variable.value, begins)

    def read_frozen(self, out: Floats, start: int) -> None:
        begins = self.layout.exchanged
        for value in self.base:
            begins += fill(out, start, value, begins)

    def add(self, shift: Floats) -> None:
        self.sync()
        for variable, segment, start, stop in self.pieces(shift.size):
            value = keras.ops.convert_to_numpy(variable.value).astype(np.float32)
            variable.assign(value + shift[start:stop].reshape(segment.shape))

    def write(self, vector: Floats) -> None:
        self.sync()
        for variable, segment, start, stop in self.pieces(vector.size):
            variable.assign(vector[start:stop].reshape(segment.shape))
        self.hold_frozen()

    def pieces(self, elements: int) -> Iterator[tuple[Any, Segment, int, int]]:
        """Of a vector of so many, each variable's."""
        for variable, (segment, start, stop) in zip(self.variables, self._places(), strict=True):
            if stop <= elements:
                yield variable, segment, start, stop


def fill(out: Floats, start: int, value: Any, begins: int) -> int:
    """Of a variable that begins there in the vector, what lies in ``out``, which begins at ``start``. Its elements."""
    flat = keras.ops.convert_to_numpy(value).reshape(-1)
    low, high = max(begins, start), min(begins + flat.size, start + out.size)
    if low < high:
        out[low - start : high - start] = flat[low - begins : high - begins]
    return int(flat.size)
