"""The training samples of each peer: a partition of the data set, or an independent draw for each peer.

A *client* is one source of samples in a federated data set, for example one writer or one role of a play.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from gossip.errors import ConfigError, DataError
from gossip.ids import quantity
from sim.arrays import I64
from sim.learning.corpora import LEAST_SAMPLES_A_PART, dirichlet_split, iid_split
from sim.seeds import derive_int, generator

if TYPE_CHECKING:
    from sim.learning.datasets import Dataset
    from sim.scenario.task import Task

# Samples drawn for each peer if the data set is too small to divide: two batches of LEAST_SAMPLES_A_PART, so that an
# epoch has an order.
SAMPLES_WITH_OVERLAP = 16


def parts(task: Task, dataset: Dataset, names: Sequence[str], seed: int) -> list[I64]:
    """Return each peer's training samples, as rows of the data set.

    - Dividing: without ``samples_per_peer`` each sample goes to one peer, so one more peer changes all parts.
    - Drawing: with it each peer draws that many. A draw depends only on (seed, name), so peers may hold the same
      samples. It never takes a sample twice, unless a class of dirichlet has too few. If dividing would leave fewer
      than LEAST_SAMPLES_A_PART samples each, every peer draws SAMPLES_WITH_OVERLAP.

    The partition's kind "iid" takes samples uniformly, and "dirichlet" by a random share of each class. "natural"
    assigns whole clients round-robin when dividing. When drawing, each peer draws from one client.

    Raises DataError or ConfigError for data that cannot be divided so.
    """
    count, kind = len(dataset.x_train), task.partition.kind
    if kind == "dirichlet" and not (dataset.labelled and dataset.y_train.dim() == 1):
        reason = "is text" if dataset.text else "has other targets"
        raise ConfigError(
            f"task.partition dirichlet needs one class a sample, and {dataset.name} {reason}: use natural or iid."
        )
    if kind == "natural" and dataset.clients is None:
        raise ConfigError(
            f"task.partition natural needs data that names its clients, as shakespeare, or a function that returns "
            f"them as a fifth tensor: for {dataset.name} use iid or dirichlet."
        )
    size = task.samples_per_peer  # Samples that each peer draws; None if the data set is divided.
    if size is None and count < LEAST_SAMPLES_A_PART * len(names):
        size = min(SAMPLES_WITH_OVERLAP, count)
    if size is not None:
        if size > count:
            raise DataError(f"task.samples_per_peer = {size} cannot work: {dataset.name} has {count} training samples.")
        return _drawn(task, dataset, names, seed, size)
    if kind == "natural":
        return _dealt_clients(dataset, len(names))
    split_seed = derive_int(seed, "", "partition")
    if kind == "dirichlet":
        assert task.partition.alpha is not None
        split = dirichlet_split(dataset.y_train, len(names), task.partition.alpha, split_seed)
    else:  # The kind is "iid".
        split = iid_split(count, len(names), split_seed >> 1)  # torch takes 63 bits.
    return [rows.numpy() for rows in split]


def _dealt_clients(dataset: Dataset, peers: int) -> list[I64]:
    """Assign the clients to the peers round-robin."""
    assert dataset.clients is not None
    clients = _rows_by_label(dataset.clients)
    if peers > len(clients):
        raise DataError(
            f"{dataset.name} has {quantity(len(clients), 'client')}, too few to deal among {peers:,} peers: "
            "give task.samples_per_peer, and each peer draws from one client, or fewer peers."
        )
    return [np.concatenate(clients[peer::peers]) for peer in range(peers)]


def _drawn(task: Task, dataset: Dataset, names: Sequence[str], seed: int, size: int) -> list[I64]:
    """Draw ``size`` samples for each peer; with "natural" at most as many as its client has."""
    pools: list[I64]  # The samples of each client, or of each class.
    if task.partition.kind == "natural" and dataset.clients is not None:
        pools = _rows_by_label(dataset.clients)
    elif task.partition.kind == "dirichlet":
        pools = _rows_by_label(dataset.y_train)
    count, drawn = len(dataset.x_train), []
    for name in names:
        random = generator(seed, name, "samples")
        if task.partition.kind == "iid":
            drawn.append(random.choice(count, size, replace=False))
        elif task.partition.kind == "natural":
            pool = pools[int(random.integers(len(pools)))]
            drawn.append(random.choice(pool, min(size, len(pool)), replace=False))
        else:  # The kind is "dirichlet".
            shares = random.dirichlet(np.full(len(pools), task.partition.alpha))  # (classes,)
            counts = random.multinomial(size, shares)
            pieces = [
                random.choice(pool, wanted, replace=wanted > len(pool))
                for pool, wanted in zip(pools, counts.tolist(), strict=True)
                if wanted
            ]
            drawn.append(np.concatenate(pieces))
    return drawn


def _rows_by_label(labels: torch.Tensor) -> list[I64]:
    """Group the rows of ``labels`` (rows,), each a class or a client, by their label, in the order of the labels."""
    values = labels.numpy()
    order = np.argsort(values, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(values[order])) + 1)
