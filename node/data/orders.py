"""The order in which a user's DataLoader takes the samples of its dataset, and this node's part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)  # fmt: skip
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gossip.errors import DataError
from node.data.division import I64
from node.data.opened import length_of_items
from node.data.sampler import DrawSampler, Samplers, ShareBatchSampler, ShareSampler

SINGLE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
MAX_DRAWN = 1 << 30  # Samplers without an end may state 2 ** 31 as their length.


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a DataLoader's sampler, in one process."""

    length: int  # Samples of a pass.
    data: Any  # The dataset, or its subset.
    samples: int  # The dataset's length.
    shuffle: bool = False
    places: I64 | None = None  # The indices of a subset; None: all.
    draw: Callable[[], I64] | None = None  # Draws the indices of a pass; None: each sample comes once.
    block: int = 1  # The indices of a draw that stay together.

    def divides_like(self, other: Order) -> bool:
        """Return True if both are orders of as many samples, and of the same ones."""
        is_alike = (self.length, self.samples, self.shuffle) == (other.length, other.samples, other.shuffle)
        mine, theirs = (order.places if order.places is not None else () for order in (self, other))
        return is_alike and np.array_equal(mine, theirs)

    def share(self, samplers: Samplers) -> ShareSampler:
        """Return a sampler of this node's share of that order."""
        if self.draw is not None:
            sampler: ShareSampler = DrawSampler(self.draw, self.length, self.samples, samplers.sharers, self.block)
        else:
            sampler = ShareSampler(self.length, self.shuffle, 0, samplers.sharers, self.places)
            samplers.remember(sampler)
        samplers.compare(sampler, self.data, len(self.data))
        return sampler


def order_of(loader: DataLoader[Any]) -> Order:
    """Return the order of a loader over a dataset with a length.

    Raises:
        DataError: The loader makes its batches in a way that cannot be divided.
    """
    samples, sampler, data = length_of_items(loader.dataset), cast(Any, loader.sampler), loader.dataset
    if isinstance(sampler, ShareSampler) or isinstance(loader.batch_sampler, ShareBatchSampler):
        raise DataError("This DataLoader has node.sampler's order already: loop over it, or leave that sampler out.")
    if loader.batch_size is None and (loader.batch_sampler is not None or isinstance(sampler, BatchSampler)):
        raise DataError(
            f"This DataLoader makes its batches by a {type(loader.batch_sampler or sampler).__name__}, of which no "
            "node has a part: give it batch_size and a sampler of single samples, or divide them by node.sampler."
        )
    if any(isinstance(value, _BaseDataLoaderIter) for name, value in vars(loader).items() if name != "_iterator"):
        raise DataError(
            f"This {type(loader).__name__} keeps an iterator over all of its data, which would go on in place of a "
            "share: give node.loader a plain DataLoader; with persistent_workers=True that one keeps its workers too."
        )
    if isinstance(sampler, SubsetRandomSampler) and type(sampler).__iter__ is SubsetRandomSampler.__iter__:
        places = np.array(sampler.indices, dtype=np.int64)  # A copy, since the program may change them.
        if not len(places):
            raise DataError("The DataLoader's SubsetRandomSampler is empty; give it at least one sample.")
        return Order(len(places), Subset(data, sampler.indices), samples, True, places)
    is_plain = (
        type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    ) and len(sampler) == samples
    if is_plain:
        return Order(samples, data, samples, type(sampler) is RandomSampler)
    if type(sampler) is DistributedSampler:  # The division among processes is the node's.
        return Order(samples, data, samples, sampler.shuffle)
    kind = type(sampler).__name__
    try:
        length = len(sampler)
    except (TypeError, ValueError, OverflowError):  # It has none, or one that is infinite.
        length = MAX_DRAWN
    if length >= MAX_DRAWN:
        raise DataError(
            f"The sampler {kind} has no end, so its passes cannot be divided: give it a __len__, as that of its data."
        )

    def draw() -> I64:
        indices = np.fromiter(map(int, islice(sampler, len(sampler))), np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < samples:
            raise DataError(f"The sampler {kind} gives indices outside the dataset's {samples:,} samples.")
        return indices

    # Samplers of the program's own arrange batches, as of so many samples of each class. Those of torch do not.
    return Order(length, data, samples, draw=draw, block=1 if isinstance(sampler, SINGLE) else loader.batch_size or 1)
