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

LARGE_ELEMENTS = 1 << 20  # A thread of its own copies as many. Fewer take the network's thread under a millisecond.


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
        paths, self._tree = jax.tree_util.tree_flatten_with_path(value)
        kept = [(at, path, leaf) for at, (path, leaf) in enumerate(paths) if _is_averaged(leaf)]
        self._at = [at for at, _, _ in kept]
        self._kinds = [(leaf.shape, leaf.dtype) for _, _, leaf in kept]
        names = [jax.tree_util.keystr(path, simple=True, separator=".") or "value" for _, path, _ in kept]
        self.layout = Layout(
            Segment(name, tuple(leaf.shape), leaf.dtype.name, "parameter")
            for name, (_, _, leaf) in zip(names, kept, strict=True)
        )
        # One call of the device each, compiled at the first use like a training step.
        self._flat, self._placed = jax.jit(_flat), jax.jit(self._cut)
        self._shifted, self._merged = jax.jit(self._shift), jax.jit(self._merge)

    def begin_read(self, out: Floats) -> Arriving:
        """Begin to copy the weights. The device's work is queued behind the training steps; the loop waits for none."""
        began = time.perf_counter()
        with memory_errors():
            flat = self._flat(self._floats())
            flat.copy_to_host_async()
        self.copy_s = time.perf_counter() - began
        return Arriving(flat, out)

    def begin_read_piece(self, out: Floats, start: int) -> Arriving:
        stop = start + out.size
        places = [(max(begins, start), min(ends, stop), begins) for _, begins, ends in self._places()]
        pieces = [
            leaf.reshape(-1)[low - begins : high - begins].astype(jnp.float32)
            for leaf, (low, high, begins) in zip(self._floats(), places, strict=True) if low < high
        ]  # fmt: skip
        with memory_errors():
            # A copy, because concatenating one piece returns that piece.
            flat = jnp.array(jnp.concatenate(pieces), copy=True)
            flat.copy_to_host_async()
        return Arriving(flat, out)

    def read(self, out: Floats) -> None:
        with memory_errors():
            np.copyto(out, np.asarray(self._flat(self._floats())))

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
        return None if upload.done() and upload.there is None else upload

    def write(self, vector: Floats) -> None:
        self._put(self._placed(JaxUpload(self, vector).wait()))

    def change(self, compiled: Callable[..., list[Any]], *values: Any) -> None:
        """Replace the averaged arrays by what ``compiled`` makes of them and of these values."""
        with memory_errors():
            self._put(compiled(self._floats(), *values))

    def _floats(self) -> list[Any]:
        """Return the averaged leaves, after checking that they still match the layout."""
        leaves, tree = jax.tree_util.tree_flatten(self.value)
        if tree != self._tree:
            raise LayoutError("The tree has other branches than it had: make a new Node after changing a model.")
        floats = [leaves[at] for at in self._at]
        for leaf, (shape, dtype), segment in zip(floats, self._kinds, self.layout.segments, strict=True):
            if getattr(leaf, "shape", None) != shape or leaf.dtype != dtype:
                raise LayoutError(
                    f"Array {segment.name!r} was {dtype} {shape} and is now another: make a new Node after changing a "
                    "model."
                )
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise LayoutError(
                    f"Array {segment.name!r} was given away to a step (donate_argnums): put what the step returned "
                    "into tree.value before node.step()."
                )
        return floats

    def _put(self, floats: list[Any]) -> None:
        leaves, tree = jax.tree_util.tree_flatten(self.value)
        for at, leaf in zip(self._at, floats, strict=True):
            leaves[at] = leaf
        self.value = jax.tree_util.tree_unflatten(tree, leaves)

    def _cut(self, vector: Any) -> list[Any]:
        return [
            vector[start:stop].reshape(shape).astype(dtype)
            for (shape, dtype), (_, start, stop) in zip(self._kinds, self._places(), strict=True)
        ]

    def _shift(self, floats: list[Any], shift: Any) -> list[Any]:
        return self._change(floats, shift, lambda wide, values: wide + values)

    def _merge(self, floats: list[Any], vector: Any, ratio: Any) -> list[Any]:
        return self._change(floats, vector, lambda wide, values: wide + ratio * (values - wide))

    def _change(self, floats: list[Any], vector: Any, changed: Callable[[Any, Any], Any]) -> list[Any]:
        """Change each array in float32 at least, and round once."""
        wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in floats]
        return [
            changed(leaf, vector[start:stop].reshape(leaf.shape)).astype(dtype)
            for leaf, (_, dtype), (_, start, stop) in zip(wide, self._kinds, self._places(), strict=True)
        ]


class JaxUpload(Upload):
    """An update's values on their way to the device.

    Once it is done the host's values are free, also after :meth:`add` or :meth:`merge`, which return this object. A
    device that is the host would use them in place, so that they are copied, large ones by a thread of their own.
    """

    def __init__(self, tree: Pytree, values: Floats) -> None:
        self._tree, self._values = tree, values
        self.there: Any = None  # The values on the device; None if it had no memory for them.
        self._copying: threading.Thread | None = None
        (device,) = jnp.zeros(()).devices()  # Where JAX puts arrays now.
        is_host = device.platform == "cpu"
        if is_host and values.size >= LARGE_ELEMENTS:
            self._copying = threading.Thread(target=self._put, args=(True,), name="gossip-copy", daemon=True)
            self._copying.start()
        else:
            self._put(is_host)

    def _put(self, copies: bool) -> None:
        with contextlib.suppress(MemoryError), memory_errors():
            self.there = jax.device_put(self._values.copy() if copies else self._values)

    def done(self) -> bool:
        if self._copying is not None:
            return not self._copying.is_alive()
        return self.there is None or bool(self.there.is_ready())

    def wait(self) -> Any:
        """Return the values on the device, once they are there.

        Raises:
            MemoryError: There was no memory for them.
        """
        if self._copying is not None:
            self._copying.join()
        if self.there is None:
            raise MemoryError("There was no memory for a copy of the update.")
        with memory_errors():
            return self.there.block_until_ready()

    def add(self) -> JaxUpload:
        return self._change(self._tree._shifted)

    def merge(self, ratio: float) -> JaxUpload:
        return self._change(self._tree._merged, np.float32(ratio))

    def _change(self, compiled: Callable[..., list[Any]], *values: Any) -> JaxUpload:
        if self.there is None or self.done():
            self.wait()  # It raises what went wrong with the copy, before the weights depend on it.
        self._tree.change(compiled, self.there, *values)
        return self


class Arriving(Pending):
    """A vector that the device computes, on its way to ``out``. A large one is copied by a thread of its own.

    A vector that could not be copied costs its exchange.
    """

    failure = ""

    def __init__(self, flat: Any, out: Floats) -> None:
        self._flat, self._out = flat, out
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
        return not self.failure  # A copy that failed is done at the next call: the network's thread has to see it.

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


def _flat(floats: list[Any]) -> Any:
    return jnp.concatenate([leaf.astype(jnp.float32).reshape(-1) for leaf in floats])
