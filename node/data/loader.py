"""A user's DataLoader that gives this node's share."""

import copy
import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from node.data.draws import DrawCount
from node.data.orders import Order, order_of
from node.data.sampler import ShareBatchSampler, ShareSampler

UNREAD_BATCHES = 8  # Batches of a stream after which its dataset has surely taken a file; a buffer may come first.


class ShareLoader:
    """A DataLoader like the user's that gives this node's share of its samples, a pass for each ``iter``.

    It is a copy of the user's, so that its workers, collation, pinning and all else are kept. Only the sampler differs.
    Each pass follows what has changed in the user's: its attributes, and the samples of its dataset and sampler.
    It has the attributes of a DataLoader. ``len`` is the number of batches in this node's pass, which stays the same
    while a pass runs, and changes with the members between passes.

    A loader over an ``IterableDataset`` is used as it is, since its files are divided.

    Args:
        loader: The user's loader.
        draws: The count of what the loop draws.
        passes_begun: The passes over this node's files that have begun, shape (1,), if it has divided any.

    Raises:
        DataError: The loader cannot be divided.
    """

    def __init__(self, loader: DataLoader[Any], draws: DrawCount, passes_begun: Tensor | None = None) -> None:
        # A copy, since the node finds this object by the user's loader, and frees it with that.
        self.draws, self.plain, self.passes_begun = draws, copy.copy(loader), passes_begun
        vars(self.plain)["_iterator"] = None
        self.inner, self.user, self.followed = copy.copy(self.plain), weakref.ref(loader), followed_in(loader)
        self.order: Order | None = None
        self.given: SizedSampler | None = None
        self.unread = 0  # Batches of a stream so far.
        self.follow()

    def follow(self) -> None:
        """Take over what has changed since the last pass: in the user's loader, or by assignment to this object."""
        user = self.user()
        loader = self.plain if user is None else user
        before, self.followed = self.followed, followed_in(loader)
        changes = {name: value for name, value in self.followed.items() if before.get(name, self) is not value}
        changes |= {name: value for name, value in vars(self).items() if name in self.followed}
        order = None if isinstance(loader.dataset, IterableDataset) else order_of(loader)
        if order is not None and not (self.order and self.order.divides_like(order)):
            self.order, share, size = order, order.share(self.draws.samplers), loader.batch_size
            batches = share if size is None else ShareBatchSampler(share, size, loader.drop_last)
            self.given = SizedSampler(batches) if self.given is None else self.given
            self.given.batches = batches  # Workers that persist keep the first sampler.
            # Without a batch size the dataset gives whole batches, which are its samples.
            changes |= {"sampler": self.given} if size is None else {"sampler": share, "batch_sampler": self.given}
        vars(self.inner).update(changes)  # A DataLoader refuses to have its sampler assigned.

    @property
    def epoch_samples(self) -> int | None:
        """Return the samples that one process would train in an epoch; None if they are unknown."""
        loader, order = self.inner, self.order
        if order is None:
            return len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        batch = (loader.batch_size or 1) if loader.drop_last else 1
        return max(order.length // batch, 1) * batch

    @property
    def length(self) -> int | None:
        """Return the samples of a pass, of all members together; None for a stream."""
        return None if self.order is None else self.order.length

    def __iter__(self) -> Iterator[Any]:
        self.follow()
        waiting: deque[int] = deque()  # The sizes in this pass, since other passes may begin inside it.
        for batch in self.draws.passes(self.inner, self.length, self.inner.dataset):
            if self.order is None:
                self.check_files()
            if self.given is not None and not waiting:  # A pass begins.
                waiting = self.given.waiting
            self.draws.give(waiting.popleft() if waiting else samples_in(batch, self.inner))
            yield batch

    def check_files(self) -> None:
        """Tell once if a dataset gives samples and has read no file of this node's share."""
        self.unread += 1
        if self.unread == UNREAD_BATCHES and self.passes_begun is not None and not self.passes_begun:
            kind = type(self.inner.dataset).__name__
            self.draws.samplers.notify("data", (
                f"{kind} has given {UNREAD_BATCHES} batches and taken no file from node.shards, so that each node may "
                "train on all of its data: let it iterate over what node.shards returned."
            ))  # fmt: skip

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if "inner" not in vars(self):  # An object that is being copied.
            raise AttributeError(name)
        return getattr(self.inner, name)


class SizedSampler(Sampler[Any]):
    """A sampler that notes the size of each batch, because workers fetch batches before the loop gets them.

    Args:
        batches: Gives indices, or lists of them.
    """

    def __init__(self, batches: ShareSampler | ShareBatchSampler) -> None:
        self.batches = batches
        # The sizes of batches in the last pass that began, which the loop has not got yet, in order.
        self.waiting: deque[int] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.waiting = deque()  # The loop may have left the batches of an earlier pass.
        return self.noted(self.waiting)

    def noted(self, waiting: deque[int]) -> Iterator[Any]:
        for batch in self.batches:
            waiting.append(len(batch) if isinstance(batch, list) else 1)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)


def followed_in(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the attributes of a user's loader but its samplers and its iterator."""
    own = ("sampler", "batch_sampler", "_iterator")
    return {name: value for name, value in vars(loader).items() if name not in own}


def samples_in(batch: Any, loader: DataLoader[Any]) -> int:
    """Return the number of samples in a batch of an iterable dataset: the rows of its first column.

    A column with more rows than the loader's batch size has rows of another kind, as tokens. A collate function of the
    user may also return a list of samples: it is as long as the batch size, and what is in it is not.
    """
    most, rows = loader.batch_size or math.inf, [*rows_of(batch)]
    has_samples = loader.collate_fn is not default_collate and isinstance(batch, list | tuple) and len(batch) == most
    if has_samples and any(count != most for count in rows):
        return len(batch)
    return int(min(rows[0], most)) if rows else loader.batch_size or 1


def rows_of(value: Any) -> Iterator[int]:
    """Yield the rows of each column in a batch: a tensor, or a list of texts or numbers."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        yield from map(int, shape[:1])
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from rows_of(item)
    elif isinstance(value, list | tuple) and value:
        if isinstance(value[0], str | int | float):
            yield len(value)
        for item in value:
            yield from rows_of(item)
