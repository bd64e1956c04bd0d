"""Tests of the division of data files among members."""

import itertools
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from gossip.errors import ConfigError, DataError
from tests.node.sharers import FILES, IDS, Swarm


def test_members_that_agree_on_the_pass_read_every_file_once():
    swarm = Swarm(*IDS[:5])
    read = [list(swarm.shards(me=me)) for me in IDS[:5]]
    assert Counter(itertools.chain(*read)) == Counter(FILES)
    assert min(map(len, read)) >= 10


def test_passes_divide_differently_and_go_on_after_a_break():
    shards = Swarm(*IDS[:5]).shards(epochs=None)
    first = list(itertools.islice(shards, 3))
    second = set(itertools.islice(shards, 10))
    assert len(set(first)) == 3
    again = Swarm(*IDS[:5]).shards(epochs=2)
    both = list(again)
    assert set(first) <= set(both)
    assert second <= set(both), "the second iteration is the second pass"
    assert len(both) > len(set(both)), "over two passes some files come again"


def test_without_shuffling_files_come_in_order():
    read = list(Swarm(*IDS[:3]).shards(shuffle=False))
    assert read == sorted(read)


def test_the_files_of_a_dead_member_are_read_by_others_and_a_newcomer_takes_its_own():
    swarm = Swarm(*IDS[:4])
    survivors = [iter(swarm.shards(me=me)) for me in IDS[:3]]
    read = [list(itertools.islice(one, 5)) for one in survivors]
    swarm.set(*IDS[:3])
    for one, files in zip(survivors, read, strict=True):
        files += list(one)
    assert Counter(itertools.chain(*read)) == Counter(FILES), "the dead one had told nobody what it had read"
    swarm = Swarm(IDS[0])
    alone = iter(swarm.shards())
    files = list(itertools.islice(alone, 10))
    swarm.set(*IDS[:4])
    files += list(alone)
    assert len(files) == len(set(files)) < 50


def test_the_pass_follows_the_swarm_where_samples_are_known():
    swarm = Swarm(*IDS[:5])
    swarm.trained = 3_500
    newcomer, veteran = swarm.shards(me=IDS[0], samples=1_000), swarm.shards(me=IDS[1], samples=1_000, epochs=4)
    assert not set(newcomer) & set(list(veteran)[: len(FILES) // 10]), "both are in the fourth pass"
    assert newcomer.next_numbers[0] == 4


def test_ranks_of_a_node_share_its_files():
    swarm = Swarm(*IDS[:5])
    ranks = [list(swarm.shards(rank=rank, ranks=2)) for rank in range(2)]
    assert set(ranks[0]) | set(ranks[1]) == set(swarm.shards())
    assert len(ranks[0]) == len(ranks[1]), "ranks wait for each other's gradients"


def test_nobody_is_without_data_where_files_are_few():
    swarm = Swarm(*IDS)
    read = [list(swarm.shards(files=["a", "b", "c"], me=me)) for me in IDS]
    assert all(read)
    assert sum(map(len, read)) == len(IDS), "three own one each, and the others read one that has an owner"
    assert set(itertools.chain(*read)) == {"a", "b", "c"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_worker_reads_in_endless_passes_over_fewer_files_than_workers(ranks):
    shards = Swarm(IDS[0]).shards(files=FILES[:ranks], epochs=None, rank=ranks - 1, ranks=ranks)
    loader = DataLoader(Lines(shards), None, num_workers=2, multiprocessing_context="fork", timeout=10)
    assert set(itertools.islice(loader, 12)) == {*FILES[:ranks]}


class Lines(IterableDataset):
    def __init__(self, shards):
        self.shards = shards

    def __iter__(self):
        yield from self.shards


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_read_each_file_of_the_share_once(start):
    swarm = Swarm(*IDS[:3])
    alone = list(swarm.shards())
    if start == "fork":
        loader = DataLoader(Lines(swarm.shards()), batch_size=None, num_workers=2, multiprocessing_context=start)
        assert Counter(loader) == Counter(alone)
    else:  # A spawned worker takes seconds to import torch; its dataset is pickled.
        copy = pickle.loads(pickle.dumps(Lines(swarm.shards())))
        swarm.set(IDS[0])
        assert list(copy.shards) == alone, "as the members were when it was copied"


def test_what_cannot_be_divided_is_refused_in_one_sentence():
    swarm = Swarm(IDS[0])
    with pytest.raises(DataError, match="There are no files to divide"):
        swarm.shards(files=[])
    for files in (5, None):
        with pytest.raises(DataError, match="has no files to divide"):
            swarm.shards(files=files)
    for number in (0, 2.5, "3", True):
        with pytest.raises(ConfigError, match=f"epochs is {number!r}"):
            swarm.shards(epochs=number)
        with pytest.raises(ConfigError, match=f"samples is {number!r}"):
            swarm.shards(samples=number)
    assert list(swarm.shards(files="one.txt")) == list(swarm.shards(files=Path("one.txt"))) == ["one.txt"]
    assert len(swarm.shards()) == 100


@pytest.mark.parametrize(
    ("collect", "error"), [(list, DataError), (tuple, DataError), (sorted, DataError), (len, TypeError)]
)
def test_an_endless_share_is_refused_where_somebody_makes_a_list_of_it(collect, error):
    """webdataset.WebDataset calls ``list``, which would fill the memory; tqdm catches the TypeError of ``len``."""
    shards = Swarm(*IDS[:5]).shards(epochs=None)
    with pytest.raises(error, match="These files come without end"):
        collect(shards)
    assert shards, "a dataset may ask whether it was given any"
    assert len(list(itertools.islice(shards, 300))) == 300


def test_two_nodes_divide_files_while_they_train(train, until):
    first = train(torch.nn.Linear(4, 2))
    second = train(torch.nn.Linear(4, 2), seeds=[first.node.address])
    until(lambda: all(len(one.side.view.owners) == 2 for one in (first, second)))
    read = [one.do(lambda node: list(node.shards(FILES, epochs=1))) for one in (first, second)]
    assert Counter(itertools.chain(*read)) == Counter(FILES)


@pytest.mark.parametrize(("start", "lives_on"), [("fork", False), ("fork", True), ("spawn", False)])
def test_workers_begin_another_pass_each_time_together(start, lives_on):
    shards = Swarm(*IDS[:5]).shards(epochs=1)
    loader = DataLoader(
        Lines(shards), None, num_workers=2, multiprocessing_context=start, persistent_workers=lives_on
    )  # fmt: skip
    passes = [list(loader) for _ in range(3)]
    expected = Swarm(*IDS[:5]).shards(epochs=1)
    assert [Counter(one) for one in passes] == [Counter(list(expected)) for _ in range(3)]
    assert len({tuple(one) for one in passes}) == 3
