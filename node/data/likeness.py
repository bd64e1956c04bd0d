"""A summary of a dataset, by which members see that their data differ."""

from __future__ import annotations

import hashlib
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Subset

from node.data.division import I64
from node.data.opened import columns_of

F64: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

ITEMS = 16  # Items that are looked at: two orders of one dataset agree in all of them only by a miracle.
MAX_VALUES = 4_096  # Values of an item that count: 16 such items take 0.2 ms.
LEAST_TEXTS = 3  # Of a numbering in the script, where two numbers, as a rank and a size, may follow by chance.
MAX_TEXTS = 300_000  # Texts of a numbering that is looked at, in 10 ms; those of its first numbers count.
FIRST_NUMBERS = 256
LEAST_SPREAD = 1e-4  # The spread relative to the mean below which differences count less: rounding may cause them.
TOLERANCE = 0.05  # Machines may compute the same data with differences in the last bits. Other data differ by more.


@dataclass(frozen=True, slots=True)
class Likeness:
    """The length of a dataset, and a sum over some of its items in which each place has its weight; 0: unknown.

    Only what lies in memory counts: tensors, arrays, lists, and attributes of that kind with an entry for each sample;
    of a subset without them its indices.
    Items that a program would compute or read from files are not fetched for it, because that may be slow or random,
    and because workers could not share a file that this process has opened. The numberings of texts count too, as a
    vocabulary, of the dataset and of the script: items are often encoded by them once they are drawn.
    """

    length: int
    checksum: float = 0.0

    def difference(self, other: Likeness) -> str | None:
        """Return what is different about another member's data; None if nothing is, or nothing is known."""
        if self.length != other.length:
            return f"has {other.length:,} samples where this node has {self.length:,}"
        is_known = bool(self.checksum and other.checksum)
        if is_known and abs(self.checksum - other.checksum) > TOLERANCE:
            return (
                f"has the {self.length:,} samples of this node in another order, or other samples, or numbers their "
                "words or classes otherwise, as the order of a set does (sort it)"
            )
        return None


def likeness_of(data: Any, length: int) -> Likeness:
    """Return the likeness of a dataset of this length. It fetches no item by the program's own code."""
    try:
        return Likeness(length, checksum_of(data, length))
    except Exception:  # Tensors of rare kinds have no rows, and a loop must not end by this.
        return Likeness(length)


def checksum_of(data: Any, length: int) -> float:
    """Return a sum over the values of some items and over numberings; 0 if there are none in memory."""
    places = (np.arange(ITEMS) * length // ITEMS + length // (2 * ITEMS)).astype(np.int64)
    is_subset = isinstance(data, Subset)
    while isinstance(data, Subset):
        places, data = np.asarray(data.indices, dtype=np.int64)[places], data.dataset
    total, count = numbering_in(data), 0
    # Nodes that split data on disk unlike each other differ in the indices, where nothing else is in memory.
    for column in columns_in(data) or [range(len(data))] * is_subset:
        rows = [values_of(item)[:MAX_VALUES] for item in rows_of(column, places)]
        for number, (values, beside) in enumerate(zip(rows, spread_of(rows), strict=True)):
            if len(values):
                count += 1
                weights = np.random.default_rng(count).uniform(1.0, 2.0, len(values))
                total += (number + 1) * float(weights @ (squashed(values) + beside)) / math.sqrt(len(values))
    return total if math.isfinite(total) else 0.0


def spread_of(rows: Sequence[F64]) -> Sequence[F64 | float]:
    """Return how far the values of each row are from their mean over the rows, as numbers of -1 to 1.

    Large values that differ little would otherwise be squashed alike. It is 0 if the rows are of several lengths.
    """
    if len({len(row) for row in rows}) != 1:
        return [0.0] * len(rows)
    values = np.stack(rows)  # (rows, values)
    mean = values.mean(axis=0)
    scale = np.maximum(values.std(axis=0), LEAST_SPREAD * (1.0 + np.abs(mean)))
    return list(squashed((values - mean) / scale))


def squashed(values: F64) -> F64:
    return values / (1.0 + np.abs(values))


def columns_in(data: Any) -> Sequence[Any]:
    """Return the sequences in memory that have an entry for each sample of a dataset: itself, or its attributes.

    A longer row of whole numbers counts too: windows of tokens.
    """
    columns = columns_of(data)
    if columns is not None:
        return columns
    if isinstance(data, list | tuple | range):
        return [data]
    kinds, attributes = (torch.Tensor, np.ndarray, list, tuple), sorted(getattr(data, "__dict__", {}).items())
    values: list[Any] = [value for _, value in attributes if isinstance(value, kinds)]
    values = [value for value in values if getattr(value, "shape", (1,))]
    return [value for value in values if len(value) == len(data) or (is_tokens(value) and len(value) > len(data))]


def is_tokens(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"


def numbering_in(data: Any) -> float:
    """Return a sum over the numberings of texts in a dataset's attributes, in theirs, and in the script; 0 for none.

    The order of a set of texts differs between processes, and with it the numbers that ``enumerate`` gives them.
    """
    own = list(getattr(data, "__dict__", {}).values())
    inner = [
        value for one in own if not isinstance(one, torch.Tensor) for value in getattr(one, "__dict__", {}).values()
    ]
    script = [value for value in vars(sys.modules["__main__"]).values() if is_numbering(value)]
    found = {id(value): value for value in (*own, *inner) if is_numbering(value)}
    found |= {id(value): value for value in script if len(value) >= LEAST_TEXTS}
    total = 0
    for numbering in found.values():
        last = min(numbering.values()) + FIRST_NUMBERS
        total += sum(zlib.crc32(f"{number} {text}".encode()) for text, number in numbering.items() if number < last)
    return (total % 2**32) / 2**22


def is_numbering(value: Any) -> bool:
    """Return True for a mapping that gives texts the numbers of a range, as a vocabulary."""
    if not isinstance(value, dict) or not 2 <= len(value) <= MAX_TEXTS:
        return False
    first = next(iter(value.items()))
    if type(first[0]) is not str or type(first[1]) is not int:
        return False
    has_kinds = set(map(type, value)) == {str} and set(map(type, value.values())) == {int}
    return has_kinds and max(value.values()) - min(value.values()) + 1 == len(value)


def rows_of(column: Any, places: I64) -> Sequence[Any]:
    """Return the entries of a column at these places."""
    if isinstance(column, torch.Tensor):
        rows: Sequence[Any] = column[torch.from_numpy(places).to(column.device)].detach().cpu()  # type: ignore[assignment]
        return rows
    return list(column[places]) if isinstance(column, np.ndarray) else [column[place] for place in places.tolist()]


def values_of(item: Any) -> F64:
    """Return an item as finite numbers: numbers, texts, and tensors, lists and mappings of them."""
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
    finite: F64 = np.nan_to_num(values, nan=0.0, posinf=1e150, neginf=-1e150)
    return finite


def hashed(content: bytes) -> F64:
    """Return a number of 0 to 1 for these bytes."""
    return np.array([int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little") / 2**32])
