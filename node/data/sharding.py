"""Which part of a dataset is this node's: decided by hashing over the members alive, with nobody's permission.

Rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998: every member has a pseudo-random weight for
every bucket and the highest owns it. When a member goes, only its buckets move; when one comes, it takes only its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from gossip.errors import ConfigError, DataError
from gossip.ids import PeerId

__all__ = ["MAX_BUCKETS", "Shard", "owned", "samples_in"]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

MAX_BUCKETS: Final = 65_536
"""Up to here every sample is a bucket of its own. Beyond, more buckets would only cost: among 1,000 members a share is
65 buckets +- 12 %, which is less than the spread of their speeds."""

_BLOCK: Final = 1 << 20  # indices hashed at once: 8 MiB a temporary, whatever the dataset's length


class Shard:
    """This node's share of ``dataset``, in batches, looked up anew as members come and go.

    Iterating gives ``epochs`` passes; iterating again gives further passes, not the same ones. A pass covers what this
    node owns: no index twice; a dead member's part comes in, and what a newcomer owns goes away, at the first batch
    after the change. The pass ends when nothing owned is left, so its last batch may be short, and a share smaller
    than ``batch_size`` is one short batch. A share of zero samples (more members than samples) gives nothing: the loop
    body does not run, and a caller that loops until it has trained enough must wait between passes by itself.

    Across the swarm a sample is seen at least once a pass, not exactly once: what a member had done before it died, or
    before a newcomer took it over, is done again, because nobody asks.

    ``dataset`` is a tensor or array, a tuple or list of them of equal length, or a TensorDataset (all of these are
    indexed a batch at a time, arrays come out as tensors, as from a DataLoader); or any object with ``__len__`` and
    ``__getitem__``, whose items are collated by ``torch.utils.data.default_collate``.

    ``members()`` gives the ids of everybody alive; ``epoch_of_members()`` is a counter that changes whenever that set
    does, read before every batch. ``first_pass`` is the number of the first pass: nodes that agree on it divide the
    dataset without overlap, and another number divides it in another way, so that over the passes every node sees all
    of the data. Order depends on ``(pass, me)`` alone.

    Raises :class:`DataError` where the dataset cannot be divided, :class:`ConfigError` for impossible numbers.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool,
        epochs: int,
        me: PeerId,
        members: Callable[[], Sequence[PeerId]],
        epoch_of_members: Callable[[], int],
        first_pass: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; a batch needs at least 1 sample.")
        if epochs < 1:
            raise ConfigError(f"epochs is {epochs}; ask for at least 1 pass.")
        self._length, self._fetch = _open(dataset)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._epochs = epochs
        self._me = me
        self._members = members
        self._epoch_of_members = epoch_of_members
        self._pass = first_pass

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._epochs):
            number = self._pass
            self._pass += 1  # before the first batch: a loop left by `break` goes on with other data
            yield from self._one_pass(number)

    def _one_pass(self, number: int) -> Iterator[Any]:
        given = np.zeros(self._length, dtype=np.bool_)  # (samples,)
        pending: I64 = np.empty(0, dtype=np.int64)  # (owned and not yet given,), in the order of giving
        seen: int | None = None
        while True:
            # The counter is read before the members: a change between the two is then seen at the next batch.
            now = self._epoch_of_members()
            if now != seen:
                seen = now
                share = _share(self._length, self._me, self._members(), number)
                pending = share[~given[share]]
                if self._shuffle:
                    pending = pending[np.argsort(self._keys(pending, number), kind="stable")]
            if not len(pending):
                return
            batch, pending = pending[: self._batch_size], pending[self._batch_size :]
            given[batch] = True
            yield self._fetch(batch)

    def _keys(self, indices: I64, number: int) -> U64:
        """A sorting key for every index. A hash instead of a permutation: the order of what stays is the same after
        members change, and the memory is that of the share, not of the dataset."""
        salt = _hash64(b"order 0 %d " % number + self._me)
        return _mix(_mix(indices.astype(np.uint64)) ^ salt)


def samples_in(dataset: Any) -> int:
    """How many samples a dataset holds, at least one; raises as :class:`Shard` does."""
    return _open(dataset)[0]


def owned(buckets: int, me: PeerId, members: Sequence[PeerId], salt: bytes) -> npt.NDArray[np.bool_]:
    """Which of the buckets ``me`` owns: those where nobody weighs more, or as much with a smaller id.

    Rivals come in blocks, and only the buckets still held go on to the next: after k rivals 1 / (k + 1) of them are
    left, so blocks grow as what is held shrinks, and a round costs at most ``buckets`` hashes. 65,536 buckets among
    10,000 members take about a million hashes instead of 655 million, which a training loop would feel.

    Returns (buckets,) bool.
    """
    rivals = sorted(set(members) - {me})
    theirs = np.array([_hash64(salt + rival) for rival in rivals], dtype=np.uint64)  # (rivals,)
    lower = np.array([rival < me for rival in rivals], dtype=np.bool_)  # (rivals,), who wins a tie
    hashes = _bucket_hashes(buckets, salt)  # (held,)
    held = np.arange(buckets)  # (held,)
    start = 0
    while start < len(rivals) and len(held):
        stop = start + max(1, buckets // len(held))
        mine = _mix(hashes ^ _hash64(salt + me))[:, None]  # (held, 1)
        weight = _mix(hashes[:, None] ^ theirs[None, start:stop])  # (held, block), at most `buckets` elements
        keep = ~((weight > mine) | ((weight == mine) & lower[start:stop])).any(axis=1)
        held, hashes = held[keep], hashes[keep]
        start = stop
    result = np.zeros(buckets, dtype=np.bool_)
    result[held] = True
    return result


def _share(length: int, me: PeerId, members: Sequence[PeerId], number: int) -> I64:
    """The indices that ``me`` owns in pass ``number``, ascending."""
    salt = b"share %d %d " % (length, number)
    mine = owned(min(length, MAX_BUCKETS), me, members, salt)
    if length <= MAX_BUCKETS:
        return np.flatnonzero(mine)
    parts = []
    for start in range(0, length, _BLOCK):
        indices = np.arange(start, min(start + _BLOCK, length), dtype=np.uint64)
        # The top 16 bits of a hash, not index // size: neighbours are often alike (sorted by label, one speaker).
        bucket = (_mix(indices) >> np.uint64(48)).astype(np.int64)
        parts.append(start + np.flatnonzero(mine[bucket]))
    return np.concatenate(parts)


def _open(dataset: Any) -> tuple[int, Callable[[I64], Any]]:
    """A dataset's length, and what gives the batch of some indices."""
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors
    if isinstance(dataset, torch.Tensor | np.ndarray):
        column = _column(dataset)
        return _length_of([dataset]), column
    if isinstance(dataset, tuple | list) and dataset and all(isinstance(c, torch.Tensor | np.ndarray) for c in dataset):
        columns = [_column(c) for c in dataset]
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
    if not values.ndim:
        raise DataError("The dataset holds a tensor without dimensions; its first dimension must count samples.")
    if isinstance(values, torch.Tensor):
        return lambda indices: values[torch.from_numpy(indices)]
    try:  # indexing by an array copies, so that read-only and memory-mapped arrays do as well
        torch.from_numpy(values[np.empty(0, dtype=np.int64)])
    except (TypeError, ValueError) as error:
        raise DataError(f"torch has no type for an array of {values.dtype}; convert it to numbers first.") from error
    return lambda indices: torch.from_numpy(values[indices])


def _open_items(dataset: Any) -> tuple[int, Callable[[I64], Any]]:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise DataError(f"{kind} is an IterableDataset, which has no parts to divide; use your own loader.")
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(f"{kind} cannot be divided; give tensors, or a dataset with __len__ and __getitem__.")
    try:
        length = len(dataset)
    except TypeError as error:
        raise DataError(f"{kind} does not know its length, so it cannot be divided; give it a __len__.") from error
    if not length:
        raise DataError("The dataset is empty; give at least one sample.")
    many = getattr(dataset, "__getitems__", None)  # a whole batch at once: what torch's own fetcher asks for first

    def fetch(indices: I64) -> Any:
        wanted = indices.tolist()
        return default_collate(many(wanted) if many else [dataset[index] for index in wanted])

    return length, fetch


def _bucket_hashes(buckets: int, salt: bytes) -> U64:
    return _mix(np.arange(buckets, dtype=np.uint64) + _hash64(b"bucket " + salt))


def _hash64(data: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))


def _mix(x: U64) -> U64:
    """splitmix64's step (Steele, Lea and Flood 2014), element by element; sums and products wrap, as they must."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
