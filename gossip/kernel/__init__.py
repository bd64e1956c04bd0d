"""Passes over a chunk in C (``passes.c``), where a compiler was there when this was installed; elsewhere numpy does the
same in several, and every byte, difference and sum is equal. ``GOSSIP_KERNEL=numpy`` leaves them out."""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol, cast

__all__ = ["EDITION", "Passes", "built", "passes"]

EDITION = 4  # passes.c has the same: what an older one built, in a folder that has changed since, is not used


class Passes(Protocol):
    """One pass each, in place of several of numpy's. Of ``values`` (what a codec is given), ``data`` (a body),
    ``encoded`` (another, to be written), ``own`` (what others decode of ``values``) and ``out``, what is None is not
    wanted; the interpreter is left to others meanwhile. ``squares`` has the order of summation, with what there was
    before of each sum; what it returns are those of ``out`` and ``own``, where both are wanted. Raises AssertionError
    for a buffer of any other length."""

    EDITION: int

    def difference(
        self, elements: int, theirs: Any, ours: Any, out: Any, out_sq: float, ours_sq: float, /
    ) -> tuple[float, float]: ...  # fmt: skip

    def outer_step(
        self, elements: int, difference: Any, snapshot: Any, phi: Any, momentum: Any, weight: float, alpha: float,
        beta: float, /,
    ) -> None: ...  # fmt: skip

    def add_read(self, elements: int, live: Any, shift: Any, out: Any, weight: float, /) -> bool:
        """``live += weight * shift``, then ``out[:] = live``: whether what was read is finite."""

    def squares(self, elements: int, values: Any, before: float, /) -> float: ...

    def bf16(
        self, elements: int, values: Any, data: Any, encoded: Any, own: Any, out: Any, out_sq: float, own_sq: float, /
    ) -> tuple[float, float]: ...  # fmt: skip

    def blockwise(
        self, elements: int, values: Any, data: Any, encoded: Any, own: Any, out: Any, start: int, block: int,
        bits: int, share: float, scales: Any, inverses: Any, noise: Any, offsets: Any, out_sq: float, own_sq: float, /,
    ) -> tuple[float, float]: ...  # fmt: skip


def found() -> Passes | None:
    if os.environ.get("GOSSIP_KERNEL") == "numpy":
        return None
    try:
        module = cast(Passes, importlib.import_module("gossip.kernel._passes"))
    except ImportError:
        return None
    return module if module.EDITION == EDITION else None


passes = found()
"""None where numpy does it."""


def built() -> str:
    """Which of the two is in use: "compiled" or "numpy"."""
    return "numpy" if passes is None else "compiled"
