"""Samplers for the user's own DataLoader: the same division as a shard's, and a pass that goes on where it was left."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from gossip.errors import ConfigError, DataError
from node import Node
from node.data.division import MAX_BUCKETS
from node.data.sampler import Samplers
from tests.node.data.shares import Squares, shard, share
from tests.node.sharers import IDS, Swarm, flat, groups


# A pass --------------------------------------------------------------------------------------------------------------
@given(st.integers(1, 200), groups, st.integers(1, 40), st.booleans(), st.integers(0, 3), st.data())
def test_each_pass_of_all_members_covers_everything_once_whatever_their_seeds(
    length, members, size, shuffle, number, data
):
    swarm, seen = Swarm(*members), []
    swarm.behind = number * length
    for me in members:
        seed = data.draw(st.integers(-3, 2**70))
        seen += flat(swarm.sampler(length, size, shuffle, seed=seed, me=me))
    assert sorted(seen) == list(range(length))


@given(st.integers(1, 200), groups, st.integers(1, 40), st.booleans())
def test_a_sampler_gives_what_a_shard_gives_index_by_index_and_in_batches(length, members, size, shuffle):
    swarm = Swarm(*members)
    batches, indices = swarm.sampler(length, size, shuffle), swarm.sampler(length, shuffle=shuffle)
    want = [batch.tolist() for batch in shard(swarm, torch.arange(length), size, shuffle, epochs=2)]
    assert [*batches, *batches] == want
    assert [*indices, *indices] == flat(want)


def test_the_seed_draws_the_order_and_nothing_else():
    swarm = Swarm(*IDS[:3])
    one, two = list(swarm.sampler(300)), list(swarm.sampler(300, seed=1))
    assert one != two
    assert sorted(one) == sorted(two) == list(swarm.sampler(300, shuffle=False, seed=2))


def test_the_last_short_batch_is_dropped_where_that_is_asked_and_no_other():
    swarm = Swarm(IDS[0])
    assert [len(batch) for batch in swarm.sampler(10, 4)] == [4, 3, 3]
    dropping = swarm.sampler(10, 4, drop_last=True)
    assert [len(batch) for batch in dropping] == [4, 4]
    assert len(dropping) == 2
    assert not {*flat(dropping)} >= set(range(10))
    assert [len(batch) for batch in swarm.sampler(8, 4, drop_last=True)] == [4, 4]
    assert list(swarm.sampler(3, 4, drop_last=True)) == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
@given(size=st.integers(3, 9), length=st.integers(1, 100))
def test_no_rank_gets_a_batch_of_one_sample_unless_there_are_no_more(ranks, size, length):
    """BatchNorm refuses a batch of one sample, and the length of a share is random."""
    swarm = Swarm(IDS[0])
    each = [Samplers(swarm.sharers(rank=rank, ranks=ranks)).make(length, size) for rank in range(ranks)]
    batches = [list(sampler) for sampler in each]
    assert {*map(len, batches)} == {len(sampler) for sampler in each}
    assert {index for given in batches for index in flat(given)} == set(range(length))
    for given_at_once in zip(*batches, strict=True):
        (length_of_all,) = {len(batch) for batch in given_at_once}
        assert length_of_all <= size
        assert length_of_all > 1 or length <= ranks


def test_it_divides_anew_between_two_batches_and_between_two_indices():
    swarm = Swarm(*IDS[:2])
    batches = (batch.tolist() for batch, _ in share(swarm).loader(DataLoader(Squares(300), 10)))
    indices = iter(swarm.sampler(300))
    first = flat(next(batches) for _ in range(10)), [next(indices) for _ in range(10)]
    swarm.set(IDS[0])  # The other member leaves.
    assert sorted([*first[0], *flat(batches)]) == list(range(300))
    assert sorted([*first[1], *indices]) == list(range(300))


def test_an_iterator_that_nobody_draws_from_costs_no_pass():
    sampler = Swarm(IDS[0]).sampler(100)
    iter(sampler)
    assert list(sampler) == list(Swarm(IDS[0]).sampler(100))


def test_the_number_of_the_pass_follows_the_swarm_and_an_epoch_that_is_set_changes_nothing():
    swarm = Swarm(*IDS[:2])
    ahead = swarm.sampler(300, 10)
    passes = [flat(ahead) for _ in range(4)]
    late, swarm.behind = swarm.sampler(300, 10), 3 * 300 + 5
    late.set_epoch(17)
    assert flat(late) == passes[3]
    assert flat(late) not in passes
    swarm.behind = 0
    assert flat(late) not in passes, "its own count goes on where the swarm's falls behind"


# Its length ----------------------------------------------------------------------------------------------------------
@given(st.integers(1, 300), groups, st.integers(1, 40), st.booleans())
def test_its_length_is_that_of_the_pass_to_come_as_the_members_are_now(length, members, size, drop_last):
    swarm = Swarm(*members)
    sampler, indices = swarm.sampler(length, size, drop_last=drop_last), swarm.sampler(length)
    assert len(sampler) == len(list(sampler)), "of the first pass, asked before it"
    assert len(indices) == len(list(indices))
    assert len(indices) == len(list(swarm.sampler(length))), "and when it is over"
    swarm.set(IDS[0])
    assert len(sampler) == (length // size if drop_last else -(-length // size))


def test_the_length_of_a_large_share_is_its_mean():
    length, swarm = 10 * MAX_BUCKETS, Swarm(*IDS[:4])
    sampler = swarm.sampler(length)
    # 10 a bucket on average: the sum over a quarter of the buckets has a standard deviation of sqrt(length / 4) = 405.
    assert abs(len(sampler) - sum(1 for _ in sampler)) < 5 * 405


# Loaders and datasets ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # Python 3.12 warns at a fork.
def test_any_loader_takes_it_with_workers_that_persist(workers):
    swarm, more = Swarm(*IDS[:2]), {"num_workers": workers, "persistent_workers": workers > 0}
    batches = DataLoader(Squares(60), batch_sampler=swarm.sampler(Squares(60), 8), **more)
    singly = DataLoader(Squares(60), batch_size=8, sampler=swarm.sampler(Squares(60)), **more)
    want = list(swarm.sampler(60))
    for loader in (batches, singly):
        assert len(loader) == -(-len(want) // 8)
        first, second = ([int(index) for batch, _ in loader for index in batch] for _ in range(2))
        assert first == want
        assert len(second) != 0
        assert second != first


X = torch.arange(20.0)


@pytest.mark.parametrize(
    ("dataset", "length"),
    [(20, 20), (TensorDataset(X, X), 20), (X, 20), (X.numpy(), 20), ([X, X, X], 3), (range(7), 7), ("text", 4)],
    ids=lambda value: type(value).__name__,
)
def test_it_divides_what_a_loader_would_index(dataset, length):
    assert sorted(Swarm(IDS[0]).sampler(dataset)) == list(range(length))


@pytest.mark.parametrize(
    ("dataset", "given", "said"),
    [
        ((X, X), {}, "columns or samples"),
        (0, {}, "at least one"),
        (-3, {}, "at least one"),
        (True, {}, "cannot be divided"),
        (None, {}, "cannot be divided"),
        (10, {"batch_size": 0}, "batch_size is 0"),
        (10, {"batch_size": 2.5}, "batch_size is 2.5"),
        (10, {"batch_size": "8"}, "batch_size is '8'"),
        (10, {"seed": 1.5}, "seed is 1.5"),
        (10, {"seed": True}, "seed is True"),
        (10, {"drop_last": True}, "drop_last applies to batches"),
    ],
)
def test_what_cannot_be_divided_and_numbers_that_cannot_be_are_refused_in_a_sentence(dataset, given, said):
    with pytest.raises(ConfigError if given else DataError, match=said):
        Swarm(IDS[0]).sampler(dataset, **given)


# The sampler of a node -----------------------------------------------------------------------------------------------
def test_a_node_divides_with_the_others_and_its_checkpoints_have_the_rest_of_the_pass(train, until, quick, tmp_path):
    data = TensorDataset(torch.arange(300))
    other = train(torch.nn.Linear(2, 1))
    ours = train(torch.nn.Linear(2, 1), seeds=[other.node.address])
    until(lambda: len(ours.node.members) == 2)
    until(lambda: len(ours.node.sampler(data)) + len(other.node.sampler(data)) == 300)
    other.stop()
    sampler = ours.node.sampler(data, 8)
    until(lambda: len(sampler) == 38)  # All of it is ours again.

    with Node(torch.nn.Linear(2, 1), config=quick) as node:
        seen = []
        loader = iter(DataLoader(data, batch_sampler=node.sampler(data, 8)))
        for _ in range(5):
            seen += next(loader)[0].tolist()
            node.step(samples=8)
        node.save(tmp_path / "run")
        state = node.state_dict()
    for resumed in (state, None):
        with Node(torch.nn.Linear(2, 1), config=quick) as node:
            if resumed is None:
                node.load(tmp_path / "run")
            else:
                node.load_state_dict(json.loads(json.dumps(resumed)))
            rest = flat(node.sampler(300, 8))
        assert sorted([*seen, *rest]) == list(range(300))
