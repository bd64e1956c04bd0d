"""The calls of a Node by which a loop gets its data and its learning rates."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Subset

from gossip.errors import ConfigError
from node.data.files import Files, FileShards
from node.data.loader import ShareLoader
from node.data.sampler import Samplers, ShareBatchSampler, ShareSampler
from node.data.share import Share
from node.data.splitting import split
from node.loop.schedules import Schedules
from node.model.optimizers import Optimizers
from node.settings import checked_seconds

# The times to settle at the end of epochs: to mix, and to wait for the other nodes. They cost time only if a node is
# slow or never comes: a last step or an evaluation may take half a minute.
SETTLE_S = 10.0, 60.0
LEFT = (
    "This loop left node.epochs before their end and has not settled since, so that its weights are this node's own: "
    "call node.settle(10, wait_s=60) before they are evaluated or saved."
)


class DataCalls:
    """The base of :class:`node.node.Node`, whose users call these methods of it."""

    def settle(self, seconds: float = 5.0, wait_s: float = 0.0) -> float | None:
        raise NotImplementedError

    def _prepare_data(self, model: object, samplers: Samplers, optimizers: Optimizers) -> None:
        self._share = Share(samplers)
        self._share.draws.is_evaluating = lambda: getattr(model, "training", None) is False
        self._share.draws.training_marks = lambda: training_marks(model)
        self._agreed_at = -1  # The steps of this loop at its last settle, if all nodes then agreed.
        self._is_unsettled = False  # The loop is in epochs, or has left its last ones before their end.
        me = weakref.proxy(self)  # A cycle would keep a node whose program has let go of it.
        self._schedules = Schedules(optimizers.all, lambda total: me.progress(total))

    def epochs(self, n: int, data: Any, settle: tuple[float, float] | None = SETTLE_S) -> Iterator[int]:
        """Iterate over the epochs of a run of ``n`` epochs, by the swarm's count of samples.

        The numbers begin at the swarm's epoch. At the end of ``n`` epochs, or of the run, iterators of :meth:`loader`
        and :meth:`shard` end too, and :meth:`settle` is called, not after ``break``. Another call goes on counting.

        Args:
            n: The number of epochs.
            data: The loader or dataset that the loop trains on, or the samples in an epoch.
            settle: The arguments of :meth:`settle` at the end, ``seconds`` and ``wait_s``; None: do not settle.

        Raises:
            ConfigError: ``n`` is no whole number of at least 1, or a time does not fit.
            DataError: The length of ``data`` is unknown.
        """
        epochs = self._schedules.followed(self._share.epochs(n, data), self._share.samplers)
        return epochs if settle is None else self._settled(epochs, checked_times(settle))

    def _settled(self, epochs: Iterator[int], times: tuple[float, float]) -> Iterator[int]:
        """Yield the epochs, and settle after the last."""
        if self._share.samplers.sharers.finished():  # This node holds the final weights.
            return
        self._is_unsettled = True
        yield from epochs
        self._is_unsettled = False
        if self._agreed_at != self._share.draws.steps:
            self.settle(*times)

    def loader(self, loader: DataLoader[Any]) -> ShareLoader:
        """Return a DataLoader like ``loader`` that gives this node's share of its samples, as members come and go.

        All else is kept, also the weights of a sampler. Call it once or in each epoch: one loader gives the same
        object. Each ``iter`` is a pass, and ``len`` its batches.

        Args:
            loader: A ``torch.utils.data.DataLoader``. One over an IterableDataset is used as it is: let the dataset
                read files of :meth:`shards`.

        Raises:
            DataError: Its batches cannot be divided.
            ConfigError: It is no DataLoader.
        """
        return self._share.loader(loader)

    def shard(
        self, dataset: Any, batch_size: int, shuffle: bool = True, epochs: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None, drop_last: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        """Iterate over this node's share of ``dataset`` in batches.

        The share follows changes of the members, so that a dead member's part is covered again.

        Args:
            dataset: A dataset with a length.
            batch_size: Samples in a batch.
            shuffle: True to shuffle each pass.
            epochs: The number of passes.
            collate_fn: Makes a batch of a list of samples, as in a DataLoader.
            drop_last: True to leave out a rest that is no whole batch. Otherwise the last batches share it.
        """
        return self._share.shard(dataset, batch_size, shuffle, epochs, collate_fn, drop_last)

    def sampler(
        self, dataset_or_length: Any, batch_size: int | None = None, shuffle: bool = True, drop_last: bool = False,
        seed: int = 0,
    ) -> ShareSampler | ShareBatchSampler:  # fmt: skip
        """Return this node's share as indices for a ``torch.utils.data.DataLoader`` of your own.

        Each ``iter`` is one pass. The sampler's ``state_dict`` is part of the node's.

        Args:
            dataset_or_length: A dataset, or its number of samples.
            batch_size: If given, the result is for DataLoader's ``batch_sampler``, otherwise for ``sampler``.
            shuffle: True to shuffle each pass.
            drop_last: True to drop an incomplete last batch.
            seed: The seed of the shuffling.

        Raises:
            DataError: The dataset does not fit.
            ConfigError: An argument does not fit.
        """
        return self._share.sampler(dataset_or_length, batch_size, shuffle, drop_last, seed)

    def shards(
        self, files: Files, epochs: int | None = None, shuffle: bool = True, samples: int | None = None
    ) -> FileShards:
        """Return this node's share of data files, for a dataset that reads them as a stream.

        Each ``iter`` of the result gives names, for an ``IterableDataset`` of your own or a pipeline of webdataset
        (docs/node.md). ``list`` raises DataError without ``epochs``, since it would not follow the members.

        Args:
            files: Paths, URLs or other texts, the same on all nodes. Give several per node: shares of few files are
                uneven, and a node whose share is empty reads a file that another one reads too.
            epochs: Passes per ``iter``; None: without end.
            shuffle: True to shuffle the files in each pass.
            samples: The samples in all files together, if known: members then agree on the number of the pass.

        Raises:
            DataError: There are no files.
            ConfigError: A number is impossible.
        """
        return self._share.files(files, epochs, shuffle, samples)

    def split(self, dataset: Any, fractions: Sequence[float], seed: int = 0) -> list[Subset[Any]]:
        """Return disjoint random parts of ``dataset``, the same on all nodes: for training, validation and test.

        Args:
            dataset: A dataset with a length, or tensors of equal length.
            fractions: The fraction of each part; together at most 1.
            seed: Draws another division.

        Raises:
            ConfigError: A fraction or the seed does not fit.
            DataError: The dataset does not fit.
        """
        return split(dataset, fractions, seed)

    def progress(self, total: int | None = None) -> float:
        """Return the share of the run that the swarm has trained, 0 to 1. It is 1 once the run has finished.

        Args:
            total: The samples of the whole run; by default those of :meth:`epochs`.

        Raises:
            ConfigError: The total is unknown, or no number above 0.
        """
        self._schedules.is_read = True
        samples: int | None = self._share.draws.total(total)
        sharers = self._share.samplers.sharers
        if sharers.finished():
            return 1.0
        if samples is None:
            raise ConfigError("The run's samples are unknown: give total=, or loop over node.epochs first.")
        return min(1.0, sharers.swarm_samples() / samples)

    def schedule(self, schedule: Any, total: int | None = None, steps: int | None = None) -> None:
        """Let learning rates follow the swarm's progress, inside :meth:`step` and at once.

        Leave calls of the scheduler's ``step`` out.

        Args:
            schedule: A scheduler of ``torch.optim``, made for a run of one process: it is advanced to the step that the
                progress says. Or a function from the progress, 0 to 1, to the factor of all learning rates.
            total: The samples of the whole run; by default those of :meth:`epochs`.
            steps: How often one process would call the scheduler's ``step`` in a whole run. OneCycleLR,
                CosineAnnealingLR, PolynomialLR, chains that end in one of them, and transformers' schedules know it.

        Raises:
            ConfigError: The steps are unknown, or it is no schedule. :meth:`step` raises it if the total is unknown.
        """
        self._schedules.add(schedule, total, steps)
        self._schedules.advance(must_know=self._share.draws.last_total is not None)


def training_marks(model: object) -> list[int]:
    """Return the counts of writes to a module's buffers and gradients, which a pass changes that trains the module."""
    if not isinstance(model, nn.Module):
        return []
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [0 if tensor.is_inference() else tensor._version for tensor in (*model.buffers(), *gradients)]


def checked_times(times: Any) -> tuple[float, float]:
    """Return the times of ``settle`` at the end of epochs. Raises ConfigError if they do not fit."""
    if not isinstance(times, tuple | list) or len(times) != 2:
        raise ConfigError(f"settle is {times!r}: give its seconds and its wait_s, as (10, 60), or None.")
    return checked_seconds("settle[0]", times[0], True), checked_seconds("settle[1]", times[1], True)
