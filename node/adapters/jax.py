"""JAX: a tree of arrays that a Node averages, with any optimizer and any way of compiling steps."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossip.arithmetic.layout import Layout, Segment
from gossip.errors import LayoutError
from node.model.state import Floats, State

__all__ = ["Pytree"]


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
        self._flat, self._shifted, self._placed = jax.jit(_flat), jax.jit(self._shift), jax.jit(self._cut)

    def begin_read(self, out: Floats) -> Arriving:
        """Begin to copy the weights. The device's work is queued behind the training steps; the loop waits for none."""
        began = time.perf_counter()
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
        # A copy, because concatenating one piece returns that piece.
        flat = jnp.array(jnp.concatenate(pieces), copy=True)
        flat.copy_to_host_async()
        return Arriving(flat, out)

    def read(self, out: Floats) -> None:
        np.copyto(out, np.asarray(self._flat(self._floats())))

    def add(self, shift: Floats) -> None:
        self._put(self._shifted(self._floats(), shift.copy()))  # JAX may read a host array in place after the call.

    def write(self, vector: Floats) -> None:
        self._put(self._placed(vector.copy()))

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
        """Add in float32 at least, and round once."""
        wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in floats]
        return [
            (leaf + shift[start:stop].reshape(leaf.shape)).astype(dtype)
            for leaf, (_, dtype), (_, start, stop) in zip(wide, self._kinds, self._places(), strict=True)
        ]


class Arriving:
    """A vector that the device computes, on its way to ``out``. A large one is copied by a thread of its own."""

    LARGE_ELEMENTS = 1 << 20  # Less takes the network's thread under a millisecond.

    def __init__(self, flat: Any, out: Floats) -> None:
        self._flat, self._out = flat, out
        self._copying: threading.Thread | None = None

    def done(self) -> bool:
        if self._copying is not None:
            return not self._copying.is_alive()
        if self._flat is not None and self._flat.is_ready():
            if self._out.size >= self.LARGE_ELEMENTS:
                self._copying = threading.Thread(target=self._copy, name="gossip-copy", daemon=True)
                self._copying.start()
                return False
            self._copy()
        return self._flat is None

    def _copy(self) -> None:
        np.copyto(self._out, np.asarray(self._flat))
        self._flat = None


def _is_averaged(leaf: Any) -> bool:
    """Return True for floating-point arrays. The layout refuses complex and 8-bit arrays."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _flat(floats: list[Any]) -> Any:
    return jnp.concatenate([leaf.astype(jnp.float32).reshape(-1) for leaf in floats])
