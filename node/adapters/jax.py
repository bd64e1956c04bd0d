"""JAX: a tree of arrays that a Node averages, with any optimizer and any way of compiling steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossip.arithmetic.layout import Layout, Segment
from gossip.averaging.model import Pending, Upload
from gossip.errors import LayoutError
from node.model.state import Floats, State

__all__ = ["Pytree"]

LARGE_ELEMENTS = 1 << 20  # From here on a thread copies. Fewer elements take the network's thread under a millisecond.


class Pytree(State):
    """A tree of JAX arrays, whose floating-point arrays are averaged; other leaves are left alone.

    ``tree = Pytree(params)``, ``with Node(tree, ...) as node``; in the loop, after each step::

        tree.value = params
        node.step(loss)
        params = tree.value

    Arrays are immutable, and a Node's change makes another tree. So read :attr:`value` again after every call that may
    change it (entering the block, ``step``, ``settle``, ``load``). A step may reuse the buffers of ``params``
    (``donate_argnums``): the node sends a copy, made in the order of the device's work. The optimizer's state belongs
    to the loop: a newcomer's starts empty.

    Raises:
        LayoutError: The tree cannot be averaged; or, at ``step``, it is not the same tree as before.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        """The current tree."""
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(value)
        averaged = [(number, path, leaf) for number, (path, leaf) in enumerate(leaves) if _is_averaged(leaf)]
        self._leaf_numbers = [number for number, _, _ in averaged]  # Of the averaged arrays among all leaves.
        self._shapes_and_types = [(leaf.shape, leaf.dtype) for _, _, leaf in averaged]
        names = [jax.tree_util.keystr(path, simple=True, separator=".") or "value" for _, path, _ in averaged]
        self.layout = Layout(
            Segment(name, tuple(leaf.shape), leaf.dtype.name, "parameter")
            for name, (_, _, leaf) in zip(names, averaged, strict=True)
        )
        # One call of the device each, compiled at the first use like a training step.
        self._to_vector, self._from_vector = jax.jit(vector_of), jax.jit(self._arrays_of)
        self.add_on_device, self.merge_on_device = jax.jit(self._sums), jax.jit(self._merges)

    def begin_read(self, out: Floats) -> Arriving:
        """Begin to copy the weights. The device's work is queued behind the training steps; the loop waits for none."""
        began = time.perf_counter()
        with memory_errors():
            flat = self._to_vector(self._averaged_arrays())
            flat.copy_to_host_async()
        self.copy_s = time.perf_counter() - began
        return Arriving(flat, out)

    def begin_read_piece(self, out: Floats, start: int) -> Arriving:
        stop = start + out.size
        pieces = []
        for array, (_, array_start, array_stop) in zip(self._averaged_arrays(), self.layout.places(), strict=True):
            low, high = max(array_start, start), min(array_stop, stop)
            if low < high:
                pieces.append(array.reshape(-1)[low - array_start : high - array_start])
        with memory_errors():
            flat = vector_of(pieces)
            flat.copy_to_host_async()
        return Arriving(flat, out)

    def read(self, out: Floats) -> None:
        with memory_errors():
            np.copyto(out, np.asarray(self._to_vector(self._averaged_arrays())))

    def add(self, shift: Floats) -> JaxUpload:
        return JaxUpload(self, shift).add()

    def merge(self, vector: Floats, ratio: float) -> JaxUpload:
        return JaxUpload(self, vector).merge(ratio)

    def begin_upload(self, values: Floats) -> JaxUpload | None:
        """Begin to copy an update to the device, ahead of the call that adds it. Any thread may call it.

        Returns:
            The upload; None if the device has no memory for it.
        """
        upload = JaxUpload(self, values)
        return None if upload.done() and upload.on_device is None else upload

    def write(self, vector: Floats) -> None:
        self._replace(self._from_vector(JaxUpload(self, vector).wait()))

    def change(self, compute: Callable[..., list[Any]], *values: Any) -> None:
        """Replace the averaged arrays by the results of ``compute(arrays, *values)``."""
        with memory_errors():
            self._replace(compute(self._averaged_arrays(), *values))

    def _averaged_arrays(self) -> list[Any]:
        """Return the arrays that are averaged, after checking that they still match the layout."""
        leaves, tree = jax.tree_util.tree_flatten(self.value)
        if tree != self._tree:
            raise LayoutError("The tree has other branches than it had: make a new Node after changing a model.")
        arrays = [leaves[number] for number in self._leaf_numbers]
        for array, (shape, dtype), segment in zip(arrays, self._shapes_and_types, self.layout.segments, strict=True):
            if getattr(array, "shape", None) != shape or array.dtype != dtype:
                raise LayoutError(
                    f"Array {segment.name!r} was {dtype} {shape} and is now another: make a new Node after changing a "
                    "model."
                )
            if isinstance(array, jax.Array) and array.is_deleted():
                raise LayoutError(
                    f"Array {segment.name!r} was given away to a step (donate_argnums): put what the step returned "
                    "into tree.value before node.step()."
                )
        # JAX uses an array of numpy in place, which the program may write to before the device has read it.
        return [array.copy() if isinstance(array, np.ndarray) else array for array in arrays]

    def _replace(self, arrays: list[Any]) -> None:
        """Put these arrays in the place of the averaged ones."""
        leaves, tree = jax.tree_util.tree_flatten(self.value)
        for number, array in zip(self._leaf_numbers, arrays, strict=True):
            leaves[number] = array
        self.value = jax.tree_util.tree_unflatten(tree, leaves)

    # -- functions that JAX compiles ---------------------------------------------------------------------------------
    def _arrays_of(self, vector: Any) -> list[Any]:
        return [
            vector[start:stop].reshape(shape).astype(dtype)
            for (shape, dtype), (_, start, stop) in zip(self._shapes_and_types, self.layout.places(), strict=True)
        ]

    def _sums(self, arrays: list[Any], shift: Any) -> list[Any]:
        return self._changed(arrays, shift, lambda wide, values: wide + values)

    def _merges(self, arrays: list[Any], vector: Any, ratio: Any) -> list[Any]:
        return self._changed(arrays, vector, lambda wide, values: wide + ratio * (values - wide))

    def _changed(self, arrays: list[Any], vector: Any, change: Callable[[Any, Any], Any]) -> list[Any]:
        """Return ``change(array, values)`` for each array, computed in float32 at least and rounded once."""
        wide_arrays = [array.astype(jnp.promote_types(array.dtype, jnp.float32)) for array in arrays]
        return [
            change(wide, vector[start:stop].reshape(wide.shape)).astype(dtype)
            for wide, (_, dtype), (_, start, stop)
            in zip(wide_arrays, self._shapes_and_types, self.layout.places(), strict=True)
        ]  # fmt: skip


class JaxUpload(Upload):
    """An update's values on their way to the device.

    Once it is done the host's vector may be overwritten, also after :meth:`add` or :meth:`merge`, which return this
    object. Where the device is the host, JAX would use that vector in place. There it is copied, in a thread if it is
    large.
    """

    def __init__(self, tree: Pytree, values: Floats) -> None:
        self._tree, self._values = tree, values
        self.on_device: Any = None  # The values on the device; None until they are there, or if it has no memory.
        self._copying: threading.Thread | None = None
        (device,) = jnp.zeros(()).devices()  # Where JAX puts arrays now.
        is_host = device.platform == "cpu"
        if is_host and values.size >= LARGE_ELEMENTS:
            self._copying = threading.Thread(target=self._send, args=(True,), name="gossip-copy", daemon=True)
            self._copying.start()
        else:
            self._send(is_host)

    def _send(self, must_copy: bool) -> None:
        with contextlib.suppress(MemoryError), memory_errors():
            self.on_device = jax.device_put(self._values.copy() if must_copy else self._values)

    def done(self) -> bool:
        if self._copying is not None:
            return not self._copying.is_alive()
        return self.on_device is None or bool(self.on_device.is_ready())

    def wait(self) -> Any:
        """Return the values on the device, once they are there.

        Raises:
            MemoryError: There was no memory for them.
        """
        if self._copying is not None:
            self._copying.join()
        if self.on_device is None:
            raise MemoryError("There was no memory for a copy of the update.")
        with memory_errors():
            return self.on_device.block_until_ready()

    def add(self) -> JaxUpload:
        return self._apply(self._tree.add_on_device)

    def merge(self, ratio: float) -> JaxUpload:
        return self._apply(self._tree.merge_on_device, np.float32(ratio))

    def _apply(self, compute: Callable[..., list[Any]], *values: Any) -> JaxUpload:
        if self.on_device is None or self.done():
            self.wait()  # It raises the error of a failed copy, before the weights depend on it.
        self._tree.change(compute, self.on_device, *values)
        return self


class Arriving(Pending):
    """A vector that the device computes, on its way to ``out``. A large one is copied by a thread of its own.

    If the copy fails, its exchange fails with it.

    Attributes:
        failure: The error of a failed copy; empty if there is none.
    """

    failure = ""

    def __init__(self, flat: Any, out: Floats) -> None:
        self._flat, self._out = flat, out  # `_flat` is None once the copy has ended.
        self._copying: threading.Thread | None = None

    def done(self) -> bool:
        if self._copying is not None:
            return not self._copying.is_alive()
        if self._flat is None:
            return True
        if not self._flat.is_ready():
            return False
        if self._out.size >= LARGE_ELEMENTS:
            self._copying = threading.Thread(target=self._copy, name="gossip-copy", daemon=True)
            self._copying.start()
            return False
        self._copy()
        return not self.failure  # A failed copy is done at the next call: the network's thread has to see it.

    def _copy(self) -> None:
        try:
            np.copyto(self._out, np.asarray(self._flat))
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        self._flat = None


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError, which costs an exchange alone, where JAX says that a device has no memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(str(error)) from error


def _is_averaged(leaf: Any) -> bool:
    """Return True for floating-point arrays. The layout refuses complex and 8-bit arrays."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def vector_of(arrays: list[Any]) -> Any:
    """Return the elements of all arrays as one float32 vector, in memory of its own."""
    # Without the copy a single flat array is returned itself, whose buffer a step may be given (donate_argnums).
    return jnp.array(jnp.concatenate([array.astype(jnp.float32).reshape(-1) for array in arrays]), copy=True)
