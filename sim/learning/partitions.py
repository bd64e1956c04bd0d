"""The training samples of each peer: a partition of the data set, or an independent draw for each peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from gossip.errors import ConfigError, DataError
from gossip.ids import quantity
from sim.learning.corpora import LEAST_SAMPLES_A_PART, dirichlet_split, iid_split
from sim.seeds import derive, generator

if TYPE_CHECKING:
    from sim.learning.datasets import Dataset
    from sim.scenario.task import Task

__all__ = ["parts"]

I64 = NDArray[np.int64]

# Samples drawn for each peer if the data set is too small to divide: two batches of 8, so that an epoch has an order.
SAMPLES_WITH_OVERLAP = 16


def parts(task: Task, dataset: Dataset, names: Sequence[str], seed: int) -> list[I64]:
    """Return each peer's training samples, as rows of the data set.

    Without ``samples_per_peer`` the whole data set is divided, each sample to one peer, so one more peer changes all
    parts. If that would leave fewer than 8 samples each, every peer draws 16. A draw depends only on (seed, name).
    It never takes a sample twice, unless a class of dirichlet has too few, but other peers may hold the same samples.
    "natural" assigns whole clients: round-robin when dividing, one for each peer when drawing.

    Raises DataError or ConfigError for data that cannot be divided so.
    """
    count, kind = len(dataset.x_train), task.partition.kind
    if kind == "dirichlet" and not (dataset.labelled and dataset.y_train.dim() == 1):
        what = "is text" if dataset.text else "has other targets"
        raise ConfigError(
            f"task.partition dirichlet needs one class a sample, and {dataset.name} {what}: use natural or iid."
        )
    if kind == "natural" and dataset.clients is None:
        raise ConfigError(
            f"task.partition natural needs data that names its clients, as shakespeare, or a function that returns "
            f"them as a fifth tensor: for {dataset.name} use iid or dirichlet."
        )
    draw = task.samples_per_peer
    if draw is None and count < LEAST_SAMPLES_A_PART * len(names):
        draw = min(SAMPLES_WITH_OVERLAP, count)
    if draw is not None:
        if draw > count:
            raise DataError(f"task.samples_per_peer = {draw} cannot work: {dataset.name} has {count} training samples.")
        return _drawn(task, dataset, names, seed, draw)
    shuffle = int.from_bytes(derive(seed, "", "partition")[:8], "little")
    if kind == "natural":
        return _dealt(dataset, len(names))
    if kind == "dirichlet":
        assert task.partition.alpha is not None
        split = dirichlet_split(dataset.y_train, len(names), task.partition.alpha, shuffle)
    else:
        split = iid_split(count, len(names), shuffle >> 1)  # torch takes 63 bits
    return [rows.numpy() for rows in split]


def _dealt(dataset: Dataset, peers: int) -> list[I64]:
    """Assign the clients to the peers round-robin."""
    held = _clients(dataset)
    if peers > len(held):
        raise DataError(
            f"{dataset.name} has {quantity(len(held), 'client')}, too few to deal among {peers:,} peers: "
            "give task.samples_per_peer, and each peer draws from one client, or fewer peers."
        )
    return [np.concatenate(held[peer::peers]) for peer in range(peers)]


def _drawn(task: Task, dataset: Dataset, names: Sequence[str], seed: int, draw: int) -> list[I64]:
    pools: list[I64]
    if task.partition.kind == "natural":
        pools = _clients(dataset)
    elif task.partition.kind == "dirichlet":
        pools = _grouped(dataset.y_train)
    count, drawn = len(dataset.x_train), []
    for name in names:
        random = generator(seed, name, "samples")
        if task.partition.kind == "iid":
            drawn.append(random.choice(count, draw, replace=False))
        elif task.partition.kind == "natural":
            pool = pools[int(random.integers(len(pools)))]
            drawn.append(random.choice(pool, min(draw, len(pool)), replace=False))
        else:
            shares = random.dirichlet(np.full(len(pools), task.partition.alpha))  # (classes,)
            counts = random.multinomial(draw, shares)
            pieces = [
                random.choice(pool, wanted, replace=wanted > len(pool))
                for pool, wanted in zip(pools, counts.tolist(), strict=True)
                if wanted
            ]
            drawn.append(np.concatenate(pieces))
    return drawn


def _clients(dataset: Dataset) -> list[I64]:
    assert dataset.clients is not None
    return _grouped(dataset.clients)


def _grouped(numbers: torch.Tensor) -> list[I64]:
    """Return the rows of each number, in the order of the numbers."""
    held = numbers.numpy()
    order = np.argsort(held, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(held[order])) + 1)
