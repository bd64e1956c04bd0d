"""This node's share of a dataset, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from gossip.errors import ConfigError, DataError
from node.data.division import I64, Pass, Sharers, rank_share

__all__ = ["Shard", "length_of_items"]


class Shard:
    """This node's share of ``dataset``, in batches, divided again as members come and go.

    Iterating gives ``epochs`` passes; iterating again gives further passes, not the same ones. A pass covers this
    node's share without repeating an index. At the first batch after a change of members, a dead member's part is
    included and a newcomer's part left out. The pass ends when nothing owned is left. Its last batch may be short, and
    a share smaller than ``batch_size`` is one short batch. An empty share (more members than samples) gives nothing:
    the loop body does not run, and a loop that trains until some condition must wait between passes by itself.

    Across the swarm a sample is seen at least once per pass, not exactly once. Samples that a member trained on before
    it died, or before a newcomer took them over, are trained on again, because members do not coordinate.

    Args:
        dataset: A tensor or array, a tuple or list of them of equal length, or a TensorDataset, all indexed a batch at
            a time; arrays become tensors, as in a DataLoader. Or any object with ``__len__`` and ``__getitem__``, whose
            items are collated by ``torch.utils.data.default_collate``.
        batch_size: Samples per batch and rank.
        shuffle: Shuffle the share, by ``(pass, me)`` alone; otherwise it is ascending.
        epochs: Passes per iteration.
        sharers: The members that share the data, and this process among them.
        next_pass: The number of the first pass. Nodes that agree on it divide the dataset without overlap; each number
            divides it differently, so that over the passes every node sees all data.

    Raises:
        DataError: The dataset cannot be divided.
        ConfigError: A number is impossible.
    """

    def __init__(
        self, dataset: Any, batch_size: int, shuffle: bool, epochs: int, sharers: Sharers, next_pass: int = 0
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; a batch needs at least 1 sample.")
        if epochs < 1:
            raise ConfigError(f"epochs is {epochs}; ask for at least 1 pass.")
        self.length, self._fetch = _open(dataset)
        self._batch_size, self._seed, self._epochs = batch_size, 0 if shuffle else None, epochs
        self._sharers, self.next_pass = sharers, next_pass

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = self._sharers.rank, self._sharers.ranks
        for _ in range(self._epochs):
            begun_pass = Pass(self.length, self.next_pass, self._seed, self._sharers)
            self.next_pass += 1  # Before the first batch, so that after `break` the loop goes on with other data.
            while len(batch := begun_pass.take(self._batch_size * ranks, ranks=ranks)):
                yield self._fetch(rank_share(batch, rank, ranks))


def _open(dataset: Any) -> tuple[int, Callable[[I64], Any]]:
    """Return a dataset's length, and a function from indices to a batch."""
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors
    if isinstance(dataset, torch.Tensor | np.ndarray):
        column = _column(dataset)
        return _length_of([dataset]), column
    is_columns = isinstance(dataset, tuple | list) and bool(dataset)
    if is_columns and all(isinstance(values, torch.Tensor | np.ndarray) for values in dataset):
        columns = [_column(values) for values in dataset]
        return _length_of(dataset), lambda indices: tuple(column(indices) for column in columns)
    return _open_items(dataset)


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


def _open_items(dataset: Any) -> tuple[int, Callable[[I64], Any]]:
    length = length_of_items(dataset)
    get_items = getattr(dataset, "__getitems__", None)  # Fetches a whole batch at once, as torch's own fetcher prefers.

    def fetch(batch: I64) -> Any:
        indices = batch.tolist()
        return default_collate(get_items(indices) if get_items else [dataset[index] for index in indices])

    return length, fetch
