"""Members that train on other data, or on the same batches, are told so in a sentence, and others are not."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from node import Node
from node.data.likeness import Likeness, likeness_of
from node.loop.comparison import mark_of, ratio_of
from node.observe.reduced import DATA, FIRST_LOSSES, RATE, mark_in
from tests.node.conftest import QUICK

X = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
ORDER = torch.randperm(200, generator=torch.Generator().manual_seed(2))

LARGE = 1e6 + X
WORDS = ["the", "cat", "sat", "on", "a", "mat"]


class Augmented(Dataset):
    """A dataset that adds noise of every random generator to its items, and counts how often it is read."""

    def __init__(self, rows, paths=()):
        self.rows, self.paths, self.asked = rows, paths, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.asked += 1
        return self.rows[index] + torch.randn(3) + random.random() + np.random.default_rng().random()


class Unread(Dataset):
    """A dataset that holds these values, and whose items are not fetched to compare it."""

    def __init__(self, length=200, **values):
        self.length = length
        vars(self).update(values)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        raise AssertionError("no item is fetched to compare it")


def encoded(words, in_a_tokenizer=False):
    """Return a dataset of lines of words, which a vocabulary numbers once they are drawn."""
    numbering = {word: number for number, word in enumerate(words)}
    encoder = Unread(vocabulary=numbering) if in_a_tokenizer else numbering
    return Unread(40, lines=[WORDS] * 40, encoder=encoder)


def windows(tokens):
    """Return a dataset of windows of one row of tokens."""
    return Unread(len(tokens) - 8, tokens=tokens, noise=torch.randn(500))


def differs(one, other):
    return likeness_of(one, len(one)).difference(likeness_of(other, len(other)))


def names(folder, order=range(200)):
    return [f"{folder}/{index:04}.png" for index in order]


SAME = {
    "tensors": (TensorDataset(X), TensorDataset(X.clone())), "a tensor and an array": (X, X.numpy()),
    "rounding": (X, (X.double() * 3).float() / 3 * (1 + 2e-7)), "random items": (Augmented(X), Augmented(X)),
    "files of another folder": (Augmented(X, names("/data")), Augmented(X, names("/mnt/disk"))),
    "items that are computed": (Unread(), Unread()), "texts": (["a", "b"] * 50, ["a", "b"] * 50),
    "mappings": ([{"x": row, "y": 1} for row in X], [{"x": row.clone(), "y": 1} for row in X]),
    "subsets": (Subset(TensorDataset(X), range(50, 90)), Subset(TensorDataset(X), list(range(50, 90)))),
    "subsets of items that are computed": (Subset(Unread(), range(9)), Subset(Unread(), torch.arange(9).tolist())),
    "nothing known": ([object()] * 9, [None] * 9), "sparse": (Augmented(X.to_sparse()), Augmented(X.to_sparse())),
    "not finite": (X / 0, X / 0), "large numbers of a small spread, rounded": (LARGE, LARGE * (1 + 1e-7)),
    "rounding where others are zero": (X * 0, X * 1e-9), "a vocabulary": (encoded(WORDS), encoded(WORDS)),
    "windows of tokens": (windows(ORDER), windows(ORDER.clone())),
}  # fmt: skip
OTHER = {
    "tensors": (TensorDataset(X), TensorDataset(X[ORDER])),
    "labels alone": (torch.arange(200) % 2, (torch.arange(200) % 2)[ORDER]),
    "large numbers": (torch.arange(200) + 50_000, (torch.arange(200) + 50_000)[ORDER]),
    "large numbers of a small spread": (LARGE, LARGE[ORDER]),
    "large numbers beside small ones": (torch.cat([X, LARGE], 1), torch.cat([X, LARGE[ORDER]], 1)),
    "a vocabulary": (encoded(WORDS), encoded(WORDS[::-1])),
    "a vocabulary in a tokenizer": (encoded(WORDS, True), encoded(WORDS[::-1], True)),
    "classes": (encoded(["cat", "dog"]), encoded(["dog", "cat"])),
    "windows of tokens": (windows(ORDER), windows(ORDER.flip(0))),
    "random items": (Augmented(X), Augmented(X[ORDER])),
    "files listed in another order": (Augmented(X, names("/data")), Augmented(X, names("/data", ORDER.tolist()))),
    "texts": (names("a"), names("a", ORDER.tolist())),
    "mappings": ([{"x": row} for row in X], [{"x": row} for row in X[ORDER]]),
    "subsets": (Subset(TensorDataset(X), range(50, 90)), Subset(TensorDataset(X), range(51, 91))),
    "subsets of items that are computed": (Subset(Unread(), range(9)), Subset(Unread(), ORDER[:9].tolist())),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_equal_data_do_not_differ(one, other):
    torch.manual_seed(3)
    assert differs(one, other) is None
    assert getattr(one, "asked", 0) == 0


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER)
def test_another_order_or_other_samples_differ(one, other):
    assert "in another order, or other samples" in differs(one, other)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_another_length_is_named(one, other):
    difference = differs(range(one), range(other))
    assert difference is None if one == other else f"{other:,} samples where this node has {one:,}" in difference


def told(node, text):
    return [str(event) for event in node.history() if text in str(event)]


def compared(until, nodes, name):
    """Wait until each of two nodes has read the other's mark of this name, and has compared it."""

    def has_heard(node):
        members = node._training.network.peer.membership.members()
        return any(mark_in(record, name) is not None for record, _ in members)

    until(lambda: all(map(has_heard, nodes)), 60)
    comparisons = [node._training.comparison for node in nodes]
    for _ in range(2):  # The first comparison may have begun before.
        before = [comparison.compared_at for comparison in comparisons]
        until(lambda: all(one.compared_at > was for one, was in zip(comparisons, before, strict=True)), 60)  # noqa: B023


def divide(length):
    """Return the work of a loop that draws a batch of its share at each step."""

    def work(trainee):
        loader = DataLoader(TensorDataset(X[:length]), 4)
        while True:
            for _ in trainee.node.loader(loader):
                yield

    return work


@pytest.fixture
def pair(train):
    """``pair(work, work)`` trains two nodes, each with a generator of the trainee as its work."""

    def begin(*works):
        for work in works:
            seeds = [trainees[0].node.address] if trainees else []
            trainee = train(nn.Linear(4, 2), seeds=seeds)
            trainee.phase, running = 1, work(trainee)
            trainee.work = lambda running=running: next(running)
            trainees.append(trainee)
        return [trainee.node for trainee in trainees]

    begin.trainees = trainees = []
    return begin


def test_a_member_with_fewer_samples_is_told_once_to_each(pair, until):
    nodes = pair(divide(200), divide(180))
    until(lambda: told(nodes[0], "180 samples where this node has 200"))
    until(lambda: told(nodes[1], "200 samples where this node has 180"))
    compared(until, nodes, DATA)
    assert [len(told(node, "samples where")) for node in nodes] == [1, 1]


def test_equal_data_and_later_other_data_are_not_told(pair, until):
    """One node also reads a dataset for evaluation. Later it trains on a second one, as a late member does at once."""

    def evaluates(trainee):
        loader, held_out = DataLoader(TensorDataset(X), 50), DataLoader(TensorDataset(X[:30]), 30)
        while trainee.phase == 1:
            for loaded in (loader, held_out):
                for _ in trainee.node.loader(loaded):
                    yield
        yield from divide(120)(trainee)

    first, second = pair(evaluates, divide(200))
    compared(until, (first, second), DATA)
    for trainee in pair.trainees:
        trainee.phase = 2
    own = first._training.comparison
    until(lambda: own.marks[DATA] is None, 60)
    until(lambda: mark_in(first._training.network.peer.membership.me, DATA) is None)
    assert not told(first, "samples where") + told(second, "samples where")


@pytest.mark.parametrize("is_training", [True, False])
def test_passes_over_other_data_remove_the_mark_unless_they_are_evaluations(is_training):
    with Node({"w": torch.zeros(4)}, config=QUICK) as node:
        list(node.shard(X, 50))
        with torch.set_grad_enabled(is_training):
            for length in (30, 40, 50):
                list(node.shard(X[:length], 50))
        assert (node._training.comparison.marks[DATA] is None) == is_training


def test_a_short_first_pass_is_long_enough_to_hear_of_the_others():
    with (
        Node({"w": torch.zeros(4)}, config=QUICK) as first,
        Node({"w": torch.zeros(4)}, seeds=[first.address], config=QUICK) as second,
    ):
        passes = iter(first.shard(X, 50)), iter(second.shard(X[:180], 50))
        for node, batches in zip((first, second), passes, strict=True):
            next(batches)
            node.step()
        for batches in passes:
            list(batches)
        assert any(told(node, "180") for node in (first, second))


def losses(seed):
    def work(trainee):
        draws = random.Random(seed)
        while True:
            yield draws.random()

    return work


def test_two_loops_of_one_seed_are_told_once_that_they_draw_the_same_batches(pair, until):
    nodes = pair(losses(5), losses(5))
    compared(until, nodes, FIRST_LOSSES)
    assert [len(told(node, "equal to the bit")) for node in nodes] == [1, 1]


def test_two_losses_mark_the_batches_and_constant_ones_say_nothing():
    assert mark_of(0.1, 0.1) is None
    assert mark_of(0.2, float("nan")) is None
    assert mark_of(0.2, 0.1) == mark_of(0.2, 0.1) != mark_of(0.3, 0.1)
    assert mark_of(0.2, 0.1) != mark_of(0.2, 0.15), "the first losses are equal where a last layer begins with zeros"


def test_what_is_unknown_does_not_differ():
    assert Likeness(5, 0.0).difference(Likeness(5, 77.0)) is None


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [(1, 4, 4), (4, 1, 4), (0, 1e-3, math.inf), (0.5, 0.5, 1), (0, 0, math.nan), (math.nan, 1, math.nan)],
)
def test_the_ratio_of_two_rates_is_at_least_1_or_unknown(one, other, ratio):
    assert ratio_of(one, other) == pytest.approx(ratio, rel=0, nan_ok=True)


@pytest.fixture
def rates(train, monkeypatch):
    """Return a function that trains a node at each given rate. The nodes compare their rates at once."""
    monkeypatch.setattr("node.loop.comparison.RATE_PERIOD_S", 0.1)
    monkeypatch.setattr("node.loop.comparison.RATES_APART_S", 0.5)

    def begin(*values):
        nodes = []
        for value in values:
            model = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), value)
            nodes.append(train(model, optimizer, seeds=[nodes[0].address] if nodes else []).node)
        return nodes

    return begin


def test_a_node_that_trains_at_another_rate_is_told_once_to_each(rates, until):
    fast, slow = rates(0.8, 0.1)
    until(lambda: told(fast, f"rate of this node is 8 times that of member {slow.id[:8]}"), 60)
    until(lambda: told(slow, f"rate of member {fast.id[:8]} is 8 times that of this node"), 60)
    compared(until, (fast, slow), RATE)
    assert [len(told(node, "The learning rate")) for node in (fast, slow)] == [1, 1]


def test_rates_that_differ_a_little_or_for_a_moment_are_not_told(rates, until, monkeypatch):
    monkeypatch.setattr("node.loop.comparison.RATES_APART_S", 60.0)  # A busy machine passes a rate on after seconds.
    one, other = rates(0.1, 0.3)
    (group,) = other._training.live.optimizers.all[0].param_groups
    compared(until, (one, other), RATE)
    group["lr"] = 1.0
    until(lambda: one._training.comparison.rates_apart_since, 60)
    group["lr"] = 0.1
    until(lambda: not one._training.comparison.rates_apart_since, 60)
    assert not told(one, "learning rate") + told(other, "learning rate")
