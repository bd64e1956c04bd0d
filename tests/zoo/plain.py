"""A stand-in for Node, with which a program of the zoo is the plain loop from before the port."""

from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Self

from torch.utils.data import DataLoader, IterableDataset

from node.data.splitting import split

KINDS = ("mean", "median", "min", "max")  # As in node.observe.reduced.Reduced.


class Plain:
    """One process without a swarm: epochs are a range, a loader gives its batches, and a step does nothing."""

    finished = False
    workers = 1  # The batches that make one step, as in synchronous training by so many workers.
    share = 1  # The divisor of the epochs: the part that each of so many nodes trains.

    def __init__(self, model: Any, optimizer: Any = None, **choices: Any) -> None:
        self.schedulers: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def epochs(self, n: int, data: Any) -> Iterator[int]:
        for epoch in range(round(n / self.share)):
            if self.finished:
                return
            yield epoch

    def loader(self, loader: Any) -> Any:
        if self.workers == 1:
            return loader
        sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
        return DataLoader(
            loader.dataset, self.workers * loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
        )  # fmt: skip

    def shards(self, files: Iterable[str], **options: Any) -> list[str]:
        return list(files)

    def split(self, dataset: Any, fractions: list[float], seed: int = 0) -> Any:
        return split(dataset, fractions, seed)

    def schedule(self, scheduler: Any) -> None:
        """Step a scheduler at each step, as the plain loop does."""
        self.schedulers.append(scheduler)

    def step(self, loss: Any = None, samples: int | None = None) -> None:
        for scheduler in self.schedulers * self.workers * self.share:  # Schedulers count the steps of one process.
            if scheduler.last_epoch < scheduler.total_steps - 1:
                scheduler.step()

    def reduce(self, figures: Mapping[str, float]) -> dict[str, Any]:
        return {
            name: SimpleNamespace(mean=value, median=value, min=value, max=value) for name, value in figures.items()
        }

    def settle(self, seconds: float = 5.0, wait_s: float = 0.0) -> None: ...

    def finish(self, seconds: float = 5.0) -> None:
        self.finished = True
