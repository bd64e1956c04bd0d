"""A summary of a dataset, by which members see that their data differ."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from node.data.division import I64
from node.data.opened import columns_of

__all__ = ["Likeness", "likeness_of"]

ITEMS = 16  # Items that are looked at: two orders of one dataset agree in all of them only by a miracle.
MAX_VALUES = 4_096  # Values of an item that count: 16 such items take 0.2 ms.
TOLERANCE = 0.05  # Machines may compute the same data with differences in the last bits. Other data differ by more.


@dataclass(frozen=True, slots=True)
class Likeness:
    """The length of a dataset, and a sum over some of its items in which each place has its weight; 0: unknown.

    Only what lies in memory counts: tensors, arrays, lists, and attributes of that kind with an entry for each sample.
    Items that a program would compute or read from files are not fetched for it, because that may be slow or random,
    and because workers could not share a file that this process has opened.
    """

    length: int
    checksum: float = 0.0

    def difference(self, other: Likeness) -> str | None:
        """Return what is different about another member's data; None if nothing is, or nothing is known."""
        if self.length != other.length:
            return f"has {other.length:,} samples where this node has {self.length:,}"
        is_known = bool(self.checksum and other.checksum)
        if is_known and abs(self.checksum - other.checksum) > TOLERANCE:
            return f"has the {self.length:,} samples of this node in another order, or other samples"
        return None


def likeness_of(data: Any, length: int) -> Likeness:
    """Return the likeness of a dataset of this length. It fetches no item by the program's own code."""
    try:
        return Likeness(length, checksum_of(data, length))
    except Exception:  # Tensors of rare kinds have no rows, and a loop must not end by this.
        return Likeness(length)


def checksum_of(data: Any, length: int) -> float:
    """Return a sum over the values of some items; 0 if there are none in memory."""
    places = (np.arange(ITEMS) * length // ITEMS + length // (2 * ITEMS)).astype(np.int64)
    while isinstance(data, Subset):
        places, data = np.asarray(data.indices, dtype=np.int64)[places], data.dataset
    total, count = 0.0, 0
    for column in columns_in(data):
        for number, item in enumerate(rows_of(column, places)):
            values = values_of(item)[:MAX_VALUES]
            if len(values):
                count += 1
                weights = np.random.default_rng(count).uniform(1.0, 2.0, len(values))
                total += (number + 1) * float(weights @ values) / math.sqrt(len(values))
    return total if math.isfinite(total) else 0.0


def columns_in(data: Any) -> Sequence[Any]:
    """Return the sequences in memory that have an entry for each sample of a dataset: itself, or its attributes."""
    columns = columns_of(data)
    if columns is not None:
        return columns
    if isinstance(data, list | tuple | range):
        return [data]
    kinds, attributes = (torch.Tensor, np.ndarray, list, tuple), sorted(getattr(data, "__dict__", {}).items())
    values = [value for _, value in attributes if isinstance(value, kinds)]
    return [value for value in values if getattr(value, "shape", (1,)) and len(value) == len(data)]


def rows_of(column: Any, places: I64) -> Sequence[Any]:
    """Return the entries of a column at these places."""
    if isinstance(column, torch.Tensor):
        rows: Sequence[Any] = column[torch.from_numpy(places).to(column.device)].detach().cpu()  # type: ignore[assignment]
        return rows
    return list(column[places]) if isinstance(column, np.ndarray) else [column[place] for place in places.tolist()]


def values_of(item: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return an item as numbers of -1 to 1: numbers, texts, and tensors, lists and mappings of them."""
    if isinstance(item, torch.Tensor):
        item = item.numpy() if item.dtype != torch.bfloat16 else item.float().numpy()
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, str | PurePath):  # Of a path the last part: folders differ between machines.
        return hashed(PurePath(item).name.encode(errors="replace"))
    if isinstance(item, list | tuple):
        parts = [values_of(part) for part in item[:MAX_VALUES]]
        return np.concatenate(parts) if parts else np.empty(0)
    try:
        values = np.asarray(item).reshape(-1)[:MAX_VALUES]
        if values.dtype.kind in "iu" and values.itemsize >= 4:  # Tokens and ids: large ones would be squashed alike.
            return hashed(values.astype("<i8").tobytes())
        values = values.astype(np.float64)
    except (TypeError, ValueError):
        return np.empty(0)  # Another object, which says nothing.
    values = np.nan_to_num(values, nan=0.0, posinf=1e300, neginf=-1e300)
    squashed: np.ndarray[Any, np.dtype[np.float64]] = values / (1.0 + np.abs(values))
    return squashed


def hashed(content: bytes) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a number of 0 to 1 for these bytes."""
    return np.array([int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little") / 2**32])
