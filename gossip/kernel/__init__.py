"""Passes over a chunk, compiled from ``passes.c`` if a compiler was present at installation.

Otherwise numpy does the same in several passes, and every byte, difference and sum is equal. ``GOSSIP_KERNEL=numpy``
disables the compiled passes.
"""

import importlib
import os
from typing import Any, Protocol, cast

EDITION = 5  # Equal to passes.c's: a build of an older source, left in the folder, is not used.


class Passes(Protocol):
    """The compiled passes, each in place of several of numpy's. They release the GIL.

    Buffers are ``values`` (a codec's input), ``data`` (an encoded body to read), ``encoded`` (a body to write), ``own``
    (what others decode of ``values``) and ``out``. None means that a buffer is not wanted. A pass with both ``out`` and
    ``own`` returns their sums of squares, added to the given ones, in the order of :mod:`gossip.kernel.squares`.

    Raises:
        AssertionError: A buffer has another length than expected.
    """

    EDITION: int

    def difference(
        self, elements: int, theirs: Any, ours: Any, out: Any, out_sq: float, ours_sq: float, /
    ) -> tuple[float, float]:  # fmt: skip
        """Do the work of :func:`gossip.arithmetic.mixing.subtract`."""

    def mix(  # noqa: PLR0913  The arguments of the C function.
        self, elements: int, difference: Any, snapshot: Any, phi: Any, momentum: Any, pull: Any, weight: float,
        alpha: float, beta: float, scale: float, share: float, /,
    ) -> tuple[float, float]:  # fmt: skip
        """Do the work of ``gossip.arithmetic.outer_step.learn_and_step``, or without a snapshot of ``add_lesson``."""

    def add_read(self, elements: int, live: Any, shift: Any, out: Any, weight: float, /) -> bool:
        """Set ``live += weight * shift``, then ``out[:] = live``. Return True if the values read are finite."""

    def squares(self, elements: int, values: Any, before: float, /) -> float:
        """Do the work of :func:`gossip.kernel.squares.squares`."""

    def bf16(
        self, elements: int, values: Any, data: Any, encoded: Any, own: Any, out: Any, out_sq: float, own_sq: float, /
    ) -> tuple[float, float]:  # fmt: skip
        """Do the work of :class:`gossip.codecs.floats.Bf16`."""

    def blockwise(  # noqa: PLR0913  The arguments of the C function.
        self, elements: int, values: Any, data: Any, encoded: Any, own: Any, out: Any, start: int, block: int,
        bits: int, share: float, scales: Any, inverses: Any, noise: Any, offsets: Any, out_sq: float, own_sq: float, /,
    ) -> tuple[float, float]:  # fmt: skip
        """Do the work of :class:`gossip.codecs.blockwise.Blockwise`."""


def load_passes() -> Passes | None:
    """Return the compiled passes; None if there are none of this edition, or numpy is asked for."""
    if os.environ.get("GOSSIP_KERNEL") == "numpy":
        return None
    try:
        module = cast(Passes, importlib.import_module("gossip.kernel._passes"))
    except ImportError:
        return None
    return module if module.EDITION == EDITION else None


passes = load_passes()
"""The compiled passes; None if numpy is used."""


def implementation() -> str:
    """Return which implementation is used: "compiled" or "numpy"."""
    return "numpy" if passes is None else "compiled"
