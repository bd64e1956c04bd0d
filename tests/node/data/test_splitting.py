"""A split into training and validation samples is the same on all nodes, whatever their seeds."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from gossip.errors import ConfigError, DataError
from node import Node
from node.data.splitting import split

X = torch.arange(100.0).reshape(100, 1)


def indices(parts):
    return [list(part.indices) for part in parts]


@given(st.integers(1, 500), st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 2**40))
def test_parts_are_disjoint_and_of_the_given_sizes_whatever_the_global_seed(length, parts, seed):
    fractions = [part / max(1.0, sum(parts)) for part in parts]
    torch.manual_seed(seed % 97)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    one = indices(split(range(length), fractions, seed))
    torch.manual_seed(5)
    assert one == indices(split(range(length), fractions, seed))
    together = [index for part in one for index in part]
    assert len(together) == len(set(together)) == round(length * sum(fractions))
    assert all(abs(len(part) - length * fraction) <= 1 for part, fraction in zip(one, fractions, strict=True))


def test_another_seed_is_another_split_and_parts_are_random():
    (train, held_out), other = indices(split(X, [0.8, 0.2], 0)), indices(split(X, [0.8, 0.2], 1))
    assert other != [train, held_out]
    assert not set(held_out) <= set(range(80, 100))


@pytest.mark.parametrize(
    "dataset", [X, (X, X.long()), [X, X], TensorDataset(X, X), X.numpy(), (X.numpy(), X), range(100)], ids=range(7)
)
def test_a_node_splits_what_it_divides(quick, dataset):
    with Node(nn.Linear(1, 1), config=quick) as node:
        train, held_out = node.split(dataset, [0.75, 0.25])
        assert (len(train), len(held_out)) == (75, 25)
        rows = [batch[0] if isinstance(batch, list | tuple) else batch for batch in node.shard(train, 25)]
    assert sorted(torch.cat([row.reshape(-1) for row in rows]).tolist()) == train.indices


@pytest.mark.parametrize(
    ("dataset", "fractions", "seed", "error"),
    [
        (X, [0.9, 0.2], 0, ConfigError),
        (X, [-0.1], 0, ConfigError),
        (X, [80, 20], 0, ConfigError),
        (X, [], 0, ConfigError),
        (X, [0.5], 1.5, ConfigError),
        (iter([1]), [0.5], 0, DataError),
    ],
)
def test_what_cannot_be_split_is_refused(dataset, fractions, seed, error):
    with pytest.raises(error):
        split(dataset, fractions, seed)
