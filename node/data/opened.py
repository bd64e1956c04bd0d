"""Datasets as functions from indices to batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from gossip.errors import DataError
from node.data.division import I64

Collate: TypeAlias = Callable[[list[Any]], Any]
"""A function from a list of items to a batch."""


def open_dataset(dataset: Any, collate: Collate | None = None) -> tuple[int, Callable[[Sequence[int]], Any]]:
    """Return a dataset's length, and a function from indices to a batch.

    Args:
        dataset: A tensor or array, a tuple or list of them of equal length, or a TensorDataset, all indexed a batch at
            a time; arrays become tensors, as in a DataLoader. Or any object with ``__len__`` and ``__getitem__``.
        collate: Makes a batch of items, by default ``torch.utils.data.default_collate``.

    Raises:
        DataError: The dataset cannot be divided.
    """
    columns = columns_of(dataset)
    if columns is None:
        return _open_items(dataset, collate)
    fetches = [_column(values) for values in columns]
    length = _length_of(columns)
    is_single = isinstance(dataset, torch.Tensor | np.ndarray)

    def fetch(indices: Sequence[int]) -> Any:
        rows = np.asarray(indices, dtype=np.int64)
        batch = tuple(column(rows) for column in fetches)
        if collate is not None:
            return collate(list(batch[0]) if is_single else list(zip(*batch, strict=True)))
        return batch[0] if is_single else batch

    return length, fetch


def columns_of(dataset: Any) -> Sequence[Any] | None:
    """Return the tensors or arrays whose rows are a dataset's samples; None for a dataset of items."""
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors
    if isinstance(dataset, torch.Tensor | np.ndarray):
        return [dataset]
    is_columns = isinstance(dataset, tuple | list) and bool(dataset)
    return dataset if is_columns and all(isinstance(values, torch.Tensor | np.ndarray) for values in dataset) else None


def _length_of(columns: Sequence[Any]) -> int:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise DataError(f"The dataset's tensors have {lengths} rows; give tensors of equal length.")
    if not lengths[0]:
        raise DataError("The dataset is empty; give at least one sample.")
    return lengths[0]


def _column(values: torch.Tensor | npt.NDArray[Any]) -> Callable[[I64], torch.Tensor]:
    """Return a function from indices to the tensor of these rows."""
    if not values.ndim:
        raise DataError("The dataset holds a tensor without dimensions; its first dimension must count samples.")
    if isinstance(values, torch.Tensor):
        return lambda indices: values[torch.from_numpy(indices)]
    try:  # Indexing by an array copies, so that read-only and memory-mapped arrays work too.
        torch.from_numpy(values[np.empty(0, dtype=np.int64)])
    except (TypeError, ValueError) as error:
        raise DataError(f"torch has no type for an array of {values.dtype}; convert it to numbers first.") from error
    return lambda indices: torch.from_numpy(values[indices])


def length_of_items(dataset: Any) -> int:
    """Return a dataset's ``len``, at least one. Raises :class:`DataError` if it cannot be indexed."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise DataError(f"{kind} is an IterableDataset, which has no parts; divide its files with node.shards.")
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(f"{kind} cannot be divided; give tensors, or a dataset with __len__ and __getitem__.")
    try:
        length = len(dataset)
    except TypeError as error:
        raise DataError(f"{kind} does not know its length, so it cannot be divided; give it a __len__.") from error
    if not length:
        raise DataError("The dataset is empty; give at least one sample.")
    return length


def _open_items(dataset: Any, collate: Collate | None) -> tuple[int, Callable[[Sequence[int]], Any]]:
    length = length_of_items(dataset)
    get_items = getattr(dataset, "__getitems__", None)  # Fetches a whole batch at once, as torch's own fetcher prefers.

    def fetch(batch: Sequence[int]) -> Any:
        items = get_items(batch) if get_items else [dataset[index] for index in batch]
        return (collate or default_collate)(items)

    return length, fetch
