"""A callback that adds a node to Keras's ``fit``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from gossip.arithmetic.layout import Kind, Layout, Segment
from gossip.errors import ConfigError, LayoutError
from node.adapters.adapter import ContextAdapter
from node.model.state import Floats, State

__all__ = ["KerasGossip", "KerasWeights"]


class KerasGossip(ContextAdapter, keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback, for the torch and jax backends.

    ``with KerasGossip(model, batch_size=16, samples=100_000, seeds=[...]) as gossip: model.fit(...,
    callbacks=[gossip])``. Entering the block joins the swarm, so that ``gossip.node.load(path)`` can resume a run
    before ``fit``; leaving it closes the node, however it ends. Divide the data with ``DataLoader(dataset, batch_size,
    sampler=gossip.sampler(dataset), drop_last=True)``.

    Args:
        model: The built model.
        batch_size: The samples counted for each batch, since Keras does not report them; exact with ``drop_last=True``.
        samples: As in :class:`node.adapters.adapter.Adapter`.
        settle_s: As in :class:`node.adapters.adapter.Adapter`, in seconds.
        **options: As in :class:`node.adapters.adapter.Adapter`.

    Raises:
        ConfigError: Keras runs on another backend.
        LayoutError: The model has no weights yet.
    """

    def __init__(
        self, model: Any, *, batch_size: int, samples: int | None = None, settle_s: float = 5.0, **options: Any
    ) -> None:
        average = options.pop("average", ())
        if average not in ((), "*", ["*"], ("*",)):
            raise ConfigError(f"average={average!r} is for torch: Keras averages frozen layers all or none, give '*'.")
        super().__init__(samples=samples, settle_s=settle_s, **options)
        keras.callbacks.Callback.__init__(self)
        if keras.backend.backend() not in ("torch", "jax"):
            raise ConfigError(f"Keras runs on {keras.backend.backend()}: choose torch or jax with KERAS_BACKEND.")
        self.weights = KerasWeights(model, bool(average))
        self.batch_size = batch_size
        self.batch = -1  # The last batch of this epoch that the node has counted; -1: none.

    def __enter__(self) -> Any:
        super().__enter__()
        self.ready()
        return self

    @property
    def has_data(self) -> bool:
        """Return True always: ``fit`` needs a batch before it checks whether there is anything to train."""
        return True

    def ready(self) -> None:
        if not self.is_in_swarm:
            self.check_entered()
            self.begin(self.weights)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.model is not self.weights.model:
            raise ConfigError("KerasGossip was made of another model than the one that is trained: give it this one.")
        self.ready()
        if self.over:
            self.model._initial_epoch = self.params["epochs"]  # As BackupAndRestore does it: no epoch is left to train.

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        batches, self.batch = batch - self.batch, batch  # More than one if an execution runs several steps.
        if self.step((logs or {}).get("loss"), batches * self.batch_size):
            self.model.stop_training = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.settle()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.model._initial_epoch = None
        self.settle()


class KerasWeights(State):
    """A Keras model's floating-point weights, trained ones and others (like BatchNorm's statistics), on any backend.

    Weights of frozen layers are left out of exchanges if others are trained, unless ``average``; newcomers get them
    once. Raises LayoutError for a model without weights, and later if a frozen weight is trained.
    """

    def __init__(self, model: Any, average: bool = False) -> None:
        if not model.built or not model.weights:
            raise LayoutError("This Keras model has no weights yet: give it a keras.Input, or call it on a batch.")
        self.model = model
        trained = {id(variable) for variable in model.trainable_weights}
        # Keras lists frozen weights and statistics together. Only weights that were created as trainable can be frozen.
        made_trainable = {id(variable) for layer in model._flatten_layers() for variable in layer._trainable_variables}
        floats: dict[str, tuple[Any, Segment]] = {}  # The floating-point weights, by name.
        for number, variable in enumerate(model.weights):
            if "float" in str(variable.dtype):
                kind: Kind = "buffer" if id(variable) not in made_trainable else "parameter"
                if trained and not average and kind == "parameter" and id(variable) not in trained:
                    kind = "frozen"
                # Numbers in Keras's own names differ by process; the order of the weights is the same on all nodes.
                name = f"{number:04d}.{variable.name}"
                floats[name] = variable, Segment(name, tuple(variable.shape), str(variable.dtype), kind)
        self.layout = Layout(segment for _, segment in floats.values())
        self.variables = [floats[segment.name][0] for segment in self.layout.segments]
        frozen_names = [segment.name for segment in self.layout.segments if segment.kind == "frozen"]
        self.frozen = {id(floats[name][0]): name for name in frozen_names}
        self.hold_frozen()

    def hold_frozen(self) -> None:
        """Keep the frozen weights for :meth:`read_frozen`, which any thread may call.

        Other threads cannot read them while ``fit`` runs on jax, so they are copied. Torch's tensors stay the same
        objects.
        """
        # A layout has its frozen segments at the end.
        values = [variable.value for variable in self.variables[len(self.variables) - len(self.frozen) :]]
        self.frozen_values = values if keras.backend.backend() == "torch" else [np.array(value) for value in values]

    def sync(self) -> None:
        """Check that frozen weights are still frozen, and bring the weights back from jax.

        While ``fit`` runs on jax it keeps the weights elsewhere, so each access costs a transfer.
        """
        for variable in self.model.trainable_weights if self.frozen else ():
            if id(variable) in self.frozen:
                raise LayoutError(
                    f"Weight {self.frozen[id(variable)]!r} was frozen when the Node was made and is trained now, and "
                    "would never be exchanged: make a new Node, or give this one average='*' from the beginning."
                )
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()

    def read(self, out: Floats) -> None:
        self.sync()
        for variable, _, start, stop in self.pieces(out.size):
            out[start:stop] = keras.ops.convert_to_numpy(variable.value).reshape(-1)

    def begin_read_piece(self, out: Floats, start: int) -> None:
        self.sync()
        for variable, _, variable_start, variable_stop in self.pieces(self.layout.exchanged):
            if variable_start < start + out.size and start < variable_stop:
                fill(out, start, variable.value, variable_start)

    def read_frozen(self, out: Floats, start: int) -> None:
        value_start = self.layout.exchanged
        for value in self.frozen_values:
            value_start += fill(out, start, value, value_start)

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
        """Yield the variables of a vector of this many elements, with their segments and bounds."""
        for variable, (segment, start, stop) in zip(self.variables, self.layout.places(), strict=True):
            if stop <= elements:
                yield variable, segment, start, stop


def fill(out: Floats, start: int, value: Any, value_start: int) -> int:
    """Copy the overlap of a variable with ``out``; return the number of the variable's elements.

    The variable begins at ``value_start`` of the vector, and ``out`` at ``start``.
    """
    flat = keras.ops.convert_to_numpy(value).reshape(-1)
    low, high = max(value_start, start), min(value_start + flat.size, start + out.size)
    if low < high:
        out[low - start : high - start] = flat[low - value_start : high - value_start]
    return int(flat.size)
