"""This node's share of the data, as its loop draws it: in batches, by a user's loader, in epochs of the swarm."""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gossip.errors import ConfigError, DataError, checked_whole
from gossip.recent import Recent
from node.data.draws import DrawCount
from node.data.epochs import Epochs
from node.data.files import Files, FileShards, shared_zeros
from node.data.likeness import likeness_of
from node.data.loader import ShareLoader
from node.data.opened import Collate, open_dataset
from node.data.sampler import MAX_LENGTHS, Samplers, ShareBatchSampler, ShareSampler


class Share:
    """The share of one node.

    Args:
        samplers: The samplers of the node.
    """

    def __init__(self, samplers: Samplers) -> None:
        self.samplers, self.draws = samplers, DrawCount(samplers, self.given)
        self.own = Recent[int, ShareSampler](MAX_LENGTHS)  # Samplers for the user's own loaders, by length.
        self.passes_begun: Tensor | None = None  # Of files, in any process; None before files are divided.
        self.loaders: WeakKeyDictionary[DataLoader[Any], ShareLoader] = WeakKeyDictionary()

    def shard(
        self, dataset: Any, batch_size: int, shuffle: bool, epochs: int, collate: Collate | None, drop_last: bool
    ) -> Iterator[Any]:
        """Yield this node's share of a dataset in batches, in so many passes.

        At the first batch after a change of members, a dead member's part is included and a newcomer's part left out. A
        pass ends when nothing owned is left. Its last batches may be smaller, and a share smaller than a batch is one
        short batch. An empty share (more members than samples) gives nothing: the loop body does not run, and a loop
        that trains until some condition must wait between passes by itself.

        Across the swarm a sample is seen at least once per pass, not exactly once. Samples that a member trained on
        before it died, or before a newcomer took them over, are trained on again, because members do not coordinate.
        """
        length, fetch = open_dataset(dataset, collate)
        batch_size = checked_whole("batch_size", batch_size, "give a whole number of at least 1.")
        epochs = checked_whole("epochs", epochs, "ask for at least 1 pass.")
        batches = self.samplers.make(length, batch_size, shuffle, drop_last)
        assert isinstance(batches, ShareBatchSampler)
        self.samplers.compare(batches.sampler, dataset, length)
        return self.passes(fetch, batches, epochs, dataset[0] if isinstance(dataset, tuple) else dataset)

    def passes(
        self, fetch: Callable[[Any], Any], batches: ShareBatchSampler, epochs: int, data: object
    ) -> Iterator[Any]:
        """Yield the batches of passes whose indices these are."""
        for _ in range(epochs):
            for batch in self.draws.passes(batches, batches.sampler.length, data):
                self.draws.give(len(batch))
                yield fetch(batch)

    def loader(self, loader: Any) -> ShareLoader:
        """Return the share of a user's loader, always the same object for one loader, so that its workers live on."""
        if isinstance(loader, ShareLoader):
            loader.follow()
            return loader
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"node.loader takes a torch DataLoader, not a {type(loader).__name__}: node.shard divides a dataset."
            )
        if isinstance(loader.dataset, IterableDataset) and self.passes_begun is None:
            raise DataError(
                f"{type(loader.dataset).__name__} is an IterableDataset, which has no parts: let it read the files of "
                "node.shards, or use its DataLoader without node.loader if each node has data of its own."
            )
        if loader not in self.loaders:
            self.loaders[loader] = ShareLoader(loader, self.draws, self.passes_begun)
        else:
            self.loaders[loader].follow()
        return self.loaders[loader]

    def sampler(self, *arguments: Any) -> ShareSampler | ShareBatchSampler:
        """Return a sampler for a loader of the user's own (:meth:`node.data.sampler.Samplers.make`)."""
        made = self.samplers.make(*arguments)
        sampler = made.sampler if isinstance(made, ShareBatchSampler) else made
        previous = self.own.pop(sampler.length, None)
        sampler.given_before = 0 if previous is None else previous.given
        self.own[sampler.length] = sampler
        return made

    def given(self) -> int:
        """Return the samples that these samplers have given to loaders, of this rank, evaluations left out."""
        return sum(sampler.given for sampler in self.own.values())

    def files(self, files: Files, epochs: int | None, shuffle: bool, samples: int | None) -> FileShards:
        """Return this node's share of data files."""
        if self.passes_begun is None:
            self.passes_begun, self.draws.is_divided = shared_zeros(1), True
        shards = FileShards(files, epochs, shuffle, samples, self.samplers.sharers, self.passes_begun)
        if self.samplers.on_pass is not None:
            self.samplers.on_pass(likeness_of(shards.files, len(shards.files)), False)
        return shards

    def epochs(self, count: int, data: Any) -> Iterator[int]:
        """Yield the numbers of the swarm's epochs over ``data`` (:class:`node.data.epochs.Epochs`)."""
        epochs, is_number = Epochs(count, self.epoch_samples(data), self.samplers.sharers), isinstance(data, int)
        loader = self.loader(data) if isinstance(data, DataLoader | ShareLoader) else None

        def length() -> int | None:  # It may change between passes.
            return loader.length if loader is not None else None if is_number else self.epoch_samples(data)

        return self.draws.numbers(epochs, length, is_number)

    def epoch_samples(self, data: Any) -> int:
        """Return the samples that one process would train in an epoch over a loader, a dataset or a number of them."""
        if isinstance(data, DataLoader | ShareLoader):
            samples = self.loader(data).epoch_samples
            if samples is None:
                raise DataError(
                    f"{type(data.dataset).__name__} has no length: give node.epochs the number of samples in an epoch."
                )
            return samples
        is_number = isinstance(data, int) and not isinstance(data, bool)
        return data if is_number and data > 0 else open_dataset(data)[0]
