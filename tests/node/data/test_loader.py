"""An existing DataLoader gives a node's share, in epochs that the whole swarm counts."""

import copy
import gc
import itertools
import random
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from gossip.errors import ConfigError, DataError
from node import Node
from node.data.loader import samples_in
from tests.node.data.shares import share
from tests.node.sharers import IDS, Swarm, groups


class Numbers(Dataset):
    """A dataset whose items are their index and the seed of the worker that fetched them."""

    def __init__(self, length=100):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        worker = torch.utils.data.get_worker_info()
        return index, -1 if worker is None else worker.seed


def drawn(loader):
    return [int(index) for batch, _ in loader for index in batch]


def tagged(items):
    return [index for index, _ in items]


# Properties of the loader that are kept ------------------------------------------------------------------------------
@given(st.integers(1, 200), groups, st.integers(1, 30), st.booleans())
def test_the_loaders_of_all_members_give_everything_once(length, members, size, shuffle):
    swarm, loader = Swarm(*members), DataLoader(Numbers(length), size, shuffle=shuffle)
    parts = [drawn(share(swarm, me).loader(loader)) for me in members]
    assert sorted(index for part in parts for index in part) == list(range(length))
    assert shuffle or all(part == sorted(part) for part in parts)


def test_all_of_a_loader_is_kept_but_its_sampler():
    begun = []
    loader = DataLoader(
        Numbers(), 8, collate_fn=tagged, num_workers=1, worker_init_fn=begun.append, prefetch_factor=3, drop_last=True,
        generator=torch.Generator().manual_seed(3), multiprocessing_context="fork", timeout=5, pin_memory=False,
    )  # fmt: skip
    ours = share(Swarm(IDS[0])).loader(loader)
    for name in (
        "dataset", "batch_size", "collate_fn", "num_workers", "worker_init_fn", "prefetch_factor", "drop_last",
        "generator", "multiprocessing_context", "timeout", "pin_memory", "persistent_workers",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(loader, name), name
    assert list(DataLoader(Numbers(8), 4, collate_fn=tagged)) == [
        sorted(batch) for batch in share(Swarm()).loader(DataLoader(Numbers(8), 4, collate_fn=tagged))
    ]


class OwnLoader(DataLoader):
    """A loader of another library, with an attribute and an iteration of its own."""

    def __init__(self, *args, scale, **options):
        super().__init__(*args, **options)
        self.scale = scale

    def __iter__(self):
        return (self.scale * batch for batch, _ in super().__iter__())


def test_a_loader_of_another_class_stays_of_that_class():
    batches = list(share(Swarm(IDS[0])).loader(OwnLoader(Numbers(10), 5, scale=100)))
    assert [batch.tolist() for batch in batches] == [[0, 100, 200, 300, 400], [500, 600, 700, 800, 900]]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # Python 3.12 warns at a fork.
def test_workers_that_persist_serve_every_pass_and_epoch():
    whole = share(Swarm(IDS[0]))
    places = SubsetRandomSampler(range(20))
    loader = DataLoader(Numbers(40), 8, sampler=places, num_workers=2, persistent_workers=True)
    passes = []
    for places.indices in (range(20), range(20), range(40)):
        passes += [
            [pair for batch in whole.loader(loader) for pair in zip(*map(torch.Tensor.tolist, batch), strict=True)]
        ]
    assert [len(dict(items)) for items in passes] == [20, 20, 40], "the workers serve what the program adds"
    assert len({seed for items in passes for _, seed in items}) == 2, "of two workers, each started once"
    assert whole.loader(loader) is whole.loader(loader)


def test_its_length_stays_while_a_pass_runs():
    swarm = Swarm(*IDS[:3])
    loader = share(swarm).loader(DataLoader(Numbers(300), 10))
    before = len(loader)
    running = iter(loader)
    next(running)
    swarm.set(IDS[0])
    assert len(loader) == before
    for _ in running:
        assert len(loader) == before
    assert len(loader) == 30, "after it, that of the next"


@pytest.mark.parametrize("way", ["kept", "dropped", "again"])
@pytest.mark.parametrize("change", ["indices", "data", "draws"])
def test_each_pass_follows_what_the_program_has_changed(change, way):
    data, places = Numbers(20), list(range(20))
    sampler = {"indices": SubsetRandomSampler(places), "data": RandomSampler(data), "draws": Listed(*places)}[change]
    swarm, parts = Swarm(*IDS[:2]), []
    shares = [share(swarm, me) for me in IDS[:2]]
    plain = [DataLoader(data if change == "data" else Numbers(40), 4, sampler=sampler) for _ in shares]
    ours = [one.loader(loader) for one, loader in zip(shares, plain, strict=True)]
    before = [index for loader in ours for index in drawn(loader)]
    data.length, places[:], sampler.given = 40, range(40), range(40)
    for one, loader, user in zip(shares, ours, plain, strict=True):
        user.collate_fn = loader.collate_fn = lambda items: (torch.tensor(tagged(items)), "another")
        if way == "dropped":
            plain = user = None
        loader = one.loader(user) if way == "again" else loader
        parts += drawn(loader)
        assert next(iter(loader))[1] == "another"
    assert (sorted(before), sorted(parts)) == (list(range(20)), list(range(40)))


def test_epochs_are_as_long_as_at_their_call_while_their_data_grow(node):
    data = [torch.zeros(4)] * 96
    loader, sizes = DataLoader(data, 16, shuffle=True), []
    for _ in node.epochs(4, loader):
        data += [torch.zeros(4)] * 32
        for rows in node.loader(loader):
            node.step()
            sizes.append(len(rows))
    assert node.swarm_samples == sum(sizes) == 4 * 96, "the last pass ends with the run"


def test_a_dataset_of_whole_batches_is_divided_by_batch():
    loaders = [share(Swarm(*IDS[:2]), me).loader(DataLoader(Numbers(20), batch_size=None)) for me in IDS[:2]]
    assert sorted(int(index) for loader in loaders for index, _ in loader) == list(range(20))


def test_a_stream_of_a_nodes_files_is_used_as_it_is_and_counted(node):
    node.shards(["a", "b"])
    loader = DataLoader(Endless(), 4)
    assert node.loader(loader).dataset is loader.dataset
    batches = []
    for batch in node.loader(loader):
        node.step()
        batches.append(batch.tolist())
    assert batches[-1] == [8, 9]
    assert (node.metrics().steps, node.swarm_samples) == (3, 10)
    found = weakref.ref(node.loader(loader))
    del loader
    gc.collect()
    assert found() is None, "a loader for each epoch does not fill the memory"


# Samplers of the user ------------------------------------------------------------------------------------------------
def test_a_subset_is_divided():
    subset = list(range(50, 90))
    swarm, loader = Swarm(*IDS[:3]), DataLoader(Numbers(), 8, sampler=SubsetRandomSampler(subset))
    parts = [drawn(share(swarm, me).loader(loader)) for me in IDS[:3]]
    assert sorted(index for part in parts for index in part) == subset
    assert any(part != sorted(part) for part in parts)


def test_the_weights_of_a_weighted_sampler_go_with_the_share():
    """1,000 samples of class 0 and 100 of class 1, weighted to equal parts; members never draw each other's samples."""
    weights = torch.cat([torch.full((1000,), 0.1), torch.ones(100)])
    swarm, seen = Swarm(*IDS[:3]), Counter()
    owners = [Counter() for _ in range(3)]
    for me, owner in zip(IDS, owners, strict=False):
        sampler = WeightedRandomSampler(weights, 6000, generator=torch.Generator().manual_seed(me[0]))
        owner.update(drawn(share(swarm, me).loader(DataLoader(Numbers(1100), 50, sampler=sampler))))
        seen.update(owner)
    assert not any(set(one) & set(other) for one, other in itertools.combinations(owners, 2))
    rare = sum(count for index, count in seen.items() if index >= 1000)
    assert abs(sum(seen.values()) - 6000) < 5 * 78, "binomial: three draws of 6,000 at one third each"
    assert abs(rare / sum(seen.values()) - 0.5) < 5 * 0.0065


def test_equal_draws_of_all_members_are_divided_without_a_rest():
    draws = []
    for me in IDS[:3]:
        sampler = RandomSampler(Numbers(), True, 77, generator=torch.Generator().manual_seed(5))
        draws += drawn(share(Swarm(*IDS[:3]), me).loader(DataLoader(Numbers(), 8, sampler=sampler)))
    assert Counter(draws) == Counter(RandomSampler(Numbers(), True, 77, generator=torch.Generator().manual_seed(5)))


def test_ranks_draw_alike_whatever_they_have_drawn_before():
    loader = DataLoader(Numbers(), 8, sampler=RandomSampler(Numbers(), num_samples=77))
    one, other = (drawn(share(Swarm(*IDS[:2]), rank=rank, ranks=2).loader(loader)) for rank in range(2))
    assert len(one) == len(other)
    assert len({*one} & {*other}) <= 1, "of one draw without repetitions, but to fill the last batch"


class Listed(Sampler):
    """A sampler of the user's own, which gives what it was made with."""

    def __init__(self, *given):
        self.given = given

    def __len__(self):
        return len(self.given)

    def __iter__(self):
        return iter(self.given)


class Unsized(Listed):
    __len__ = None


class Infinite(Listed):
    def __len__(self):
        return float("inf") if len(self.given) == 1 else 2**31


class Recycling(DataLoader):
    """A loader that keeps the iterator of its first pass, as several public ones that recycle workers."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.iterator = super().__iter__()


class Endless(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10))


@pytest.mark.parametrize("sampler", [Listed(*reversed(range(100))), SequentialSampler(range(10))])
def test_a_sampler_of_the_users_own_keeps_its_order(sampler):
    parts = [drawn(share(Swarm(*IDS[:2]), me).loader(DataLoader(Numbers(), 8, sampler=sampler))) for me in IDS[:2]]
    assert Counter(parts[0] + parts[1]) == Counter(sampler)
    assert all(part == [index for index in sampler if index in part] for part in parts)


class Pairs(Sampler):
    """A sampler that arranges each batch of four as two pairs of one class, which is index // 2."""

    def __len__(self):
        return 101

    def __iter__(self):
        pairs = [[2 * number, 2 * number + 1] for number in range(50)]
        random.shuffle(pairs)
        return (index for pair in [*pairs, [100]] for index in pair)


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_that_a_sampler_of_the_users_own_arranges_stay_whole(ranks):
    swarm, batches, rests = Swarm(*IDS[:3]), [], []
    for me, rank in itertools.product(IDS[:3], range(ranks)):
        loader = share(swarm, me, rank, ranks).loader(DataLoader(Numbers(101), 4, sampler=Pairs()))
        running = iter(loader)
        mine = [next(running)[0].tolist()]
        mine += [batch.tolist() for batch, _ in running]
        assert len(mine) == len(loader)
        rests += [mine.pop()] if ranks > 1 or 100 in mine[-1] else []  # Ranks share the last batch of their node.
        batches += mine
    assert all({index ^ 1 for index in batch} == {*batch} for batch in batches)
    seen = Counter(index for batch in [*batches, *rests] for index in batch)
    assert {*seen} == set(range(101))
    assert sum(seen.values()) <= 101 + 2 * ranks * len(IDS[:3]), "but what fills up the last batches, once"


def refused_at_once(**options):
    return lambda: share(Swarm(IDS[0])).loader(DataLoader(Numbers(), **options))


REFUSED = {
    "batches": (refused_at_once(batch_sampler=Listed([0, 1])), "makes its batches by a Listed"),
    "plain": (refused_at_once(batch_sampler=BatchSampler(range(100), 8, False)), "by a BatchSampler"),
    "divided batches": (refused_at_once(batch_sampler=Swarm(IDS[0]).sampler(100, 8)), "has node.sampler's order"),
    "divided": (refused_at_once(sampler=Swarm(IDS[0]).sampler(100)), "has node.sampler's order already"),
    "no length": (refused_at_once(sampler=Unsized(3)), "Unsized has no end"),
    "infinite": (refused_at_once(sampler=Infinite(3)), "Infinite has no end"),
    "endless": (refused_at_once(sampler=Infinite(3, 4)), "Infinite has no end"),
    "lists": (refused_at_once(sampler=BatchSampler(range(9), 8, False), batch_size=None), "by a BatchSampler"),
    "recycling": (lambda: share(Swarm(IDS[0])).loader(Recycling(Numbers(), 2)), "This Recycling keeps an iterator"),
    "empty": (refused_at_once(sampler=SubsetRandomSampler([])), "is empty"),
    "outside": (lambda: list(refused_at_once(sampler=Listed(3, 100))()), "outside the dataset's 100"),
    "no loader": (lambda: share(Swarm(IDS[0])).loader([1, 2]), "not a list: node.shard divides"),
    "stream": (lambda: share(Swarm(IDS[0])).loader(DataLoader(Endless(), 2)), "node.shards"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_in_a_sentence(case):
    make, said = REFUSED[case]
    with pytest.raises(ConfigError if case == "no loader" else DataError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


# In a loop -----------------------------------------------------------------------------------------------------------
def train_epochs(node, count, loader, batches=10**6, **step):
    """Run a loop of epochs, and return their numbers and the sizes of all batches."""
    numbers, sizes = [], []
    for number in node.epochs(count, loader):
        numbers.append(number)
        for rows in node.loader(loader):
            node.step(**step)
            sizes.append(len(rows[0]))
            if len(sizes) == batches:
                return numbers, sizes
    return numbers, sizes


@pytest.mark.parametrize(("drop_last", "length"), [(False, 103), (True, 96)])
def test_epochs_of_one_node_are_those_of_a_plain_loop(node, drop_last, length):
    loader = DataLoader(TensorDataset(torch.zeros(103, 4)), 16, shuffle=True, drop_last=drop_last)
    numbers, sizes = train_epochs(node, 4, loader)
    assert numbers == [0, 1, 2, 3]
    assert len(sizes) == 4 * len(loader)
    assert node.swarm_samples == sum(sizes) == 4 * length


def test_a_killed_loop_goes_on_in_its_epoch_and_a_finished_one_gives_nothing(quick, tmp_path):
    loader = DataLoader(TensorDataset(torch.zeros(96, 4)), 16)
    with Node(nn.Linear(4, 2), config=quick) as node:
        train_epochs(node, 4, loader, batches=6 * 2 + 3)
        node.save(tmp_path / "run")
    with Node(nn.Linear(4, 2), config=quick) as node:
        node.load(tmp_path / "run")
        numbers, sizes = train_epochs(node, 4, loader)
        assert numbers == [2, 3]
        assert sum(sizes) == 96 + 48
        assert train_epochs(node, 4, loader) == ([], [])
        assert train_epochs(node, 5, loader)[0] == [4]
        node.finish(0)
        assert train_epochs(node, 9, loader) == ([], [])


@pytest.mark.parametrize("way", ["loader", "shard"])
def test_the_run_ends_inside_a_pass(way):
    data, swarm = TensorDataset(torch.zeros(96, 4)), Swarm(IDS[0])
    ours, steps = share(swarm), 0
    for _ in ours.epochs(2, data):
        for _ in ours.loader(DataLoader(data, 16)) if way == "loader" else ours.shard(data, 16, True, 1, None, False):
            swarm.trained += ours.draws.take(None)
            swarm.behind += 48  # The others train three times as much meanwhile.
            steps += 1
    assert steps == 3
    assert len(list(ours.shard(data, 16, True, 1, None, False))) == 6, "after the epochs a pass is whole again"


def test_a_late_node_begins_in_the_swarms_epoch(train, until, quick):
    loader = DataLoader(TensorDataset(torch.zeros(100, 4)), 10)
    first = train(nn.Linear(4, 2))
    until(lambda: first.node.swarm_samples > 250)
    with Node(nn.Linear(4, 2), seeds=[first.node.address], config=quick) as late:
        reached = late.swarm_samples // 100
        number = next(late.epochs(10**6, loader))
        assert reached <= number <= late.swarm_samples // 100


@pytest.mark.parametrize(
    ("count", "data", "error"), [(0, 10, ConfigError), (2.5, 10, ConfigError), (1, 0, DataError), (1, None, DataError)]
)
def test_epochs_that_cannot_be_are_refused(count, data, error):
    with pytest.raises(error):
        share(Swarm(IDS[0])).epochs(count, data)


# The samples of a step -----------------------------------------------------------------------------------------------
def test_a_step_counts_what_was_drawn_since_the_last(node):
    data = TensorDataset(torch.zeros(90, 4))
    for number, _ in enumerate(node.loader(DataLoader(data, 10)), 1):
        if number % 3 == 0:  # Accumulate gradients over three batches.
            node.step()
    assert node.swarm_samples == 90
    node.step()
    assert node.swarm_samples == 91


@pytest.mark.parametrize(
    ("samples", "count"),
    [(3, 3), (0, 0), (torch.tensor(5), 5), (torch.tensor([5]), 5), (torch.ones(7).sum(), 7), (8.0, 8)],
)
def test_whole_numbers_of_any_kind_are_samples(node, samples, count):
    node.step(samples=samples)
    if isinstance(samples, torch.Tensor):
        samples.fill_(10**6)  # the loop's next value
    assert node.swarm_samples == count
    assert type(node.swarm_samples) is int


@pytest.mark.parametrize(
    "samples",
    [-1, 2.5, float("nan"), float("inf"), "8", True, [8], torch.zeros(3), torch.tensor(float("nan")), torch.tensor(-2)],
    ids=range(10),
)
def test_other_samples_are_refused_in_a_sentence(node, samples):
    with pytest.raises(ConfigError, match="samples is ") as caught:
        node.step(samples=samples)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ([torch.zeros(6, 3), torch.zeros(6)], 6),
        ({"tokens": torch.zeros(40, 3), "more": 1}, 8),
        ([["a", "b", "c"], torch.zeros(3)], 3),
        ([("text", 1)] * 8, 8),
        ([(torch.zeros(3, 9), 1)] * 8, 8),
        ([torch.zeros(3)] * 8, 8),
        (torch.zeros(5), 5),
        (object(), 8),
    ],
)
def test_samples_of_a_stream_are_rows_of_columns_or_a_list_of_samples(batch, samples):
    assert samples_in(batch, DataLoader(Numbers(40), 8, collate_fn=list)) == samples


def test_a_loader_can_be_copied():
    loader = share(Swarm(IDS[0]), IDS[0]).loader(DataLoader(Numbers(40), 8))
    assert copy.copy(loader).batch_size == 8
