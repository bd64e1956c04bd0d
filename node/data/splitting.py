"""A division of a dataset into parts, as for training and validation, that is the same on all nodes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from gossip.errors import ConfigError, checked_whole
from gossip.ids import PeerId
from node.data.division import ordered
from node.data.opened import columns_of, open_dataset

NOBODY = PeerId(bytes(16))


def split(dataset: Any, fractions: Sequence[float], seed: int) -> list[Subset[Any]]:
    """Return disjoint random parts of a dataset, the same in every process (:meth:`node.node.Node.split`)."""
    is_fraction = [isinstance(part, int | float) and 0 <= part <= 1 for part in fractions]
    if not is_fraction or not all(is_fraction) or math.fsum(fractions) > 1 + 1e-9:
        raise ConfigError(f"fractions is {list(fractions)!r}: give numbers of 0 to 1 whose sum is at most 1.")
    seed, (length, _) = checked_whole("seed", seed, "give a whole number.", -math.inf), open_dataset(dataset)
    columns = columns_of(dataset)
    if columns is not None and isinstance(dataset, tuple | list):
        dataset = TensorDataset(*map(torch.as_tensor, columns))
    order = ordered(np.arange(length), 0, NOBODY, seed)
    ends = [round(length * math.fsum(fractions[: count + 1])) for count in range(len(fractions))]
    starts = [0, *ends[:-1]]
    return [Subset(dataset, np.sort(order[start:end]).tolist()) for start, end in zip(starts, ends, strict=True)]
