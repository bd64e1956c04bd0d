"""Every sample has one owner, and only what must move moves."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from gossip.errors import ConfigError, DataError
from gossip.ids import PeerId
from node.data.division import MAX_BUCKETS, Sharers, owned_buckets
from node.data.sampler import Samplers
from node.data.share import Share
from tests.node.sharers import flat
from tests.theory.rendezvous import owners

torch.set_num_threads(1)

IDS = [PeerId(bytes([n]) * 16) for n in range(64)]
groups = st.sets(st.sampled_from(IDS), min_size=1, max_size=12).map(sorted)


def sharers(me, members, changes, **ranks):
    return Sharers(lambda: me, members, changes, lambda: 0, lambda: 0, **ranks)


class Swarm:
    """Members that a test changes, with the counter a Shard polls."""

    def __init__(self, *members):
        self.alive = list(members)
        self.epoch = 0

    def set(self, *members):
        self.alive = list(members)
        self.epoch += 1

    def shard(self, dataset, batch_size=4, shuffle=True, epochs=1, me=IDS[0], first_pass=0, **ranks):
        here = sharers(me, lambda: self.alive, lambda: self.epoch, **ranks)
        shard = Share(Samplers(here)).shard(dataset, batch_size, shuffle, epochs, None, False)
        shard.batches.sampler.next_number = first_pass
        return shard


def indices(shard):
    return [int(i) for batch in shard for i in batch]


# Ownership -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), groups, st.binary(max_size=8))
def test_every_bucket_has_one_owner_and_both_ways_of_asking_agree(buckets, members, salt):
    winners = owners(buckets, members, salt)
    for index, member in enumerate(members):
        np.testing.assert_array_equal(owned_buckets(buckets, member, members, salt), winners == index)


def test_the_weight_is_splitmix64_as_published():
    # The slow obvious version, in Python integers; its constants are checked against the published first output.
    mask = (1 << 64) - 1

    def splitmix64(x):
        z = (x + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def hash64(data):
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    assert splitmix64(0) == 0xE220A8397B1DCDAF
    members, salt = IDS[:5], b"x"
    for bucket, winner in enumerate(owners(200, members, salt)):
        hashed = splitmix64((bucket + hash64(b"bucket " + salt)) & mask)
        weights = [splitmix64(hashed ^ hash64(salt + member)) for member in members]
        assert weights.index(max(weights)) == winner


@given(st.integers(1, 300), groups, st.data())
def test_a_leaver_moves_only_its_own_buckets(buckets, members, data):
    leaver = data.draw(st.sampled_from(members))
    rest = [m for m in members if m != leaver]
    if not rest:
        return
    before, after = owners(buckets, members, b"s"), owners(buckets, rest, b"s")
    for was, now in zip(before, after, strict=True):
        assert members[was] in (rest[now], leaver)


@given(st.integers(1, 300), groups, st.randoms())
def test_owners_do_not_depend_on_the_order_members_are_listed_in(buckets, members, random):
    mixed = members * 2
    random.shuffle(mixed)
    np.testing.assert_array_equal(owners(buckets, members, b"s"), owners(buckets, mixed, b"s"))


def test_shares_are_balanced_as_a_fair_draw_would_be():
    # A member's share of B buckets among n is Binomial(B, 1/n); the largest of n deviations stays under 5 standard
    # deviations with probability 1 - 64 * 6e-7. The seed (the salt) is fixed, so this is not a matter of luck.
    buckets, members = MAX_BUCKETS, IDS
    counts = np.bincount(owners(buckets, members, b"fixed"), minlength=len(members))
    mean = buckets / len(members)
    assert np.abs(counts - mean).max() < 5 * (mean * (1 - 1 / len(members))) ** 0.5


def test_another_salt_is_another_division():
    one, two = owners(4096, IDS[:4], b"0"), owners(4096, IDS[:4], b"1")
    assert abs((one == two).mean() - 0.25) < 0.05  # independent draws agree a quarter of the time, sd 0.007


def test_ten_thousand_members_share_4096_buckets():
    crowd = [PeerId(n.to_bytes(16, "big")) for n in range(10_000)]
    winners = owners(4096, crowd, b"s")
    some = int(winners[0])
    np.testing.assert_array_equal(owned_buckets(4096, crowd[some], crowd, b"s"), winners == some)
    # 4,096 draws among 10,000: 10,000 (1 - (1 - 1e-4)^4096) = 3,361 different ones expected, sd under 30.
    assert abs(len(set(winners.tolist())) - 3361) < 150


# A pass --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), groups, st.integers(1, 40), st.booleans(), st.integers(0, 3))
def test_the_shares_of_all_members_cover_everything_once(length, members, batch_size, shuffle, number):
    swarm = Swarm(*members)
    data = torch.arange(length)
    seen = [
        index for me in members for index in indices(swarm.shard(data, batch_size, shuffle, me=me, first_pass=number))
    ]
    assert sorted(seen) == list(range(length))


@given(st.integers(20, 200), groups, st.integers(1, 20), st.integers(0, 12), st.data())
def test_a_pass_through_any_change_repeats_only_to_fill_a_batch_and_ends_owning_nothing_more(
    length, members, batch_size, when, data
):
    me = data.draw(st.sampled_from(members))
    later = sorted({*data.draw(groups), me})
    swarm = Swarm(*members)
    seen, after = [], []
    for number, batch in enumerate(swarm.shard(torch.arange(length), batch_size, me=me)):
        seen += batch.tolist()
        if swarm.epoch:
            after += batch.tolist()
        if number == when:
            swarm.set(*later)
    repeated = len(seen) - len(set(seen))
    assert repeated < -(-batch_size // 2), "at most one batch is filled up, to half of its size"
    assert not repeated or (swarm.epoch and len(batch) <= -(-batch_size // 2))
    if swarm.epoch:
        mine = set(indices(Swarm(*later).shard(torch.arange(length), me=me)))
        assert set(after) <= mine <= set(seen)


def test_a_death_within_a_pass_brings_in_the_dead_members_part():
    swarm = Swarm(*IDS[:3])
    shards = {me: iter(swarm.shard(torch.arange(300), 10, me=me)) for me in IDS[:3]}
    seen = [i for me in IDS[:3] for i in next(shards[me]).tolist()]
    swarm.set(*IDS[:2])  # the third dies after one batch of 10
    rest = [i for me in IDS[:2] for batch in shards[me] for i in batch.tolist()]
    assert set(seen + rest) == set(range(300))
    assert len(seen + rest) == 310  # the dead one's ten are done again, nothing else


def test_a_newcomer_within_a_pass_takes_its_part_and_no_more():
    swarm = Swarm(*IDS[:2])
    shards = {me: iter(swarm.shard(torch.arange(300), 10, me=me)) for me in IDS[:2]}
    before = [i for me in IDS[:2] for i in next(shards[me]).tolist()]
    swarm.set(*IDS[:3])
    shards[IDS[2]] = iter(swarm.shard(torch.arange(300), 10, me=IDS[2]))
    newcomers = [i for batch in shards.pop(IDS[2]) for i in batch.tolist()]
    after = [i for shard in shards.values() for batch in shard for i in batch.tolist()]
    assert sorted(set(before) | set(newcomers) | set(after)) == list(range(300))
    assert not set(newcomers) & set(after)


def test_what_stays_pending_keeps_its_order_when_members_change():
    calm = indices(Swarm(*IDS[:3]).shard(torch.arange(300), 1))
    swarm = Swarm(*IDS[:3])
    shaken = []
    for batch in swarm.shard(torch.arange(300), 1):
        shaken += batch.tolist()
        swarm.set(*IDS[:3])
    assert shaken == calm


def test_a_change_between_the_counter_and_the_members_is_seen_at_the_next_batch():
    swarm = Swarm(*IDS[:2])

    def members():
        if not swarm.epoch:
            alive = list(swarm.alive)
            swarm.set(IDS[0])  # dies while it is being asked
            return alive
        return swarm.alive

    samplers = Samplers(sharers(IDS[0], members, lambda: swarm.epoch))
    assert sorted(flat(samplers.make(100, 10))) == list(range(100))


def test_a_node_that_is_alone_has_everything_even_if_it_is_not_listed():
    assert sorted(indices(Swarm(IDS[0]).shard(torch.arange(50)))) == list(range(50))
    assert sorted(indices(Swarm().shard(torch.arange(50)))) == list(range(50))


def test_a_share_of_no_samples_gives_nothing_and_ends():
    members = IDS[:10]
    poor = next(m for n, m in enumerate(members) if n != owners(1, members, b"share 0 ")[0])
    asked = []

    def counter():
        asked.append(None)
        return 0

    for _ in Samplers(sharers(poor, lambda: members, counter)).make(1, 4):
        pytest.fail("it owns nothing")
    assert len(asked) == 1


def test_a_share_smaller_than_a_batch_is_one_short_batch():
    batches = list(Swarm(IDS[0]).shard(torch.arange(3), 64))
    assert [len(b) for b in batches] == [3]


def test_the_last_batches_of_a_pass_share_its_rest():
    assert [len(b) for b in Swarm(IDS[0]).shard(torch.arange(10), 4, epochs=2)] == [4, 3, 3, 4, 3, 3]
    assert [len(b) for b in Swarm(IDS[0]).shard(torch.arange(16 * 20 + 1), 16)] == [16] * 13 + [15] + [14] * 7


def test_order_repeats_by_pass_and_node():
    def order(me=IDS[0], **more):
        return indices(Swarm(me).shard(torch.arange(100), me=me, **more))

    assert order() == order()
    different = [order(), order(first_pass=1), order(me=IDS[1]), list(range(100))]
    assert all(a != b for a, b in itertools.combinations(different, 2))
    assert order(shuffle=False) == list(range(100))


def test_later_passes_and_later_loops_see_other_data():
    shard = Swarm(*IDS[:4]).shard(torch.arange(400), 400)
    first, second = set(indices(shard)), set(indices(shard))
    both = set(indices(Swarm(*IDS[:4]).shard(torch.arange(400), 400, epochs=2)))
    assert both == first | second
    assert len(first & second) < len(first) / 2  # a quarter in common expected


# Datasets ------------------------------------------------------------------------------------------------------------


class Squares(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)]), "y": index**2}


class Batched(Squares):
    def __getitems__(self, wanted):
        return [self[index] for index in wanted]

    def __getitem__(self, index):
        assert isinstance(index, int)
        return index, -index


X, Y = torch.arange(20.0).reshape(20, 1), torch.arange(20) ** 2


@pytest.mark.parametrize(
    "dataset",
    [
        (X, Y),
        [X, Y],
        TensorDataset(X, Y),
        (X.numpy(), Y.numpy()),
        (X, Y.numpy()),
        Subset(TensorDataset(X, Y), range(20)),
        [(x, y) for x, y in zip(X, Y, strict=True)],
    ],
    ids=["tuple", "list", "TensorDataset", "arrays", "mixed", "Subset", "list of samples"],
)
def test_pairs_come_out_as_tensors_row_by_row(dataset):
    rows = 0
    for x, y in Swarm(*IDS[:2]).shard(dataset, 6):
        assert isinstance(x, torch.Tensor)
        assert isinstance(y, torch.Tensor)
        assert x.shape == (len(y), 1)
        assert torch.equal(x[:, 0].long() ** 2, y)
        rows += len(y)
    assert 0 < rows < 20


def test_items_that_are_mappings_are_collated():
    batches = list(Swarm(IDS[0]).shard(Squares(), 8))
    assert [batch["x"].shape for batch in batches] == [(7, 1), (7, 1), (6, 1)]
    assert all(torch.equal(batch["x"][:, 0].long() ** 2, batch["y"]) for batch in batches)


def test_a_dataset_that_fetches_whole_batches_is_asked_for_them():
    (first, second), *_ = list(Swarm(IDS[0]).shard(Batched(), 20))
    assert sorted(first.tolist()) == list(range(20))
    assert torch.equal(first, -second)


def test_a_read_only_array_will_do():
    array = np.arange(10)
    array.flags.writeable = False
    assert sorted(indices(Swarm(IDS[0]).shard(array))) == list(range(10))


@pytest.mark.parametrize("length", [MAX_BUCKETS, MAX_BUCKETS + 1, (1 << 20) + 7])  # the last in two blocks
def test_a_large_dataset_is_divided_whole(length):
    members = IDS[:3]
    parts = [
        np.concatenate([b.numpy() for b in Swarm(*members).shard(torch.arange(length), 50_000, me=m)]) for m in members
    ]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(length))


def test_neighbours_of_a_large_dataset_spread_over_the_members():
    # Sorted data: any thousand samples in a row must reach all of four nodes, 250 +- 5 * 13.7 (binomial) each.
    winners = [set(indices(Swarm(*IDS[:4]).shard(torch.arange(100_000), 9999, me=m))) for m in IDS[:4]]
    for start in (0, 50_000, 99_000):
        for mine in winners:
            assert abs(sum(i in mine for i in range(start, start + 1000)) - 250) < 70


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Unknown:
    def __getitem__(self, index):
        return index

    def __len__(self):
        raise TypeError("unknown")


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ((torch.zeros(3), torch.zeros(4)), "equal length"),
        ((np.zeros(3), torch.zeros(4)), "equal length"),
        (torch.zeros(0, 3), "empty"),
        ([], "empty"),
        ((), "empty"),
        (Subset(TensorDataset(X), []), "empty"),
        (torch.tensor(1.0), "dimensions"),
        ((X, torch.tensor(1.0)), "dimensions"),
        (np.array(["a", "b"]), "convert it to numbers"),
        (Endless(), "IterableDataset"),
        ({"x": X}, "cannot be divided"),
        (iter([1, 2]), "cannot be divided"),
        (Unknown(), "does not know its length"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_sentence(dataset, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        Swarm(IDS[0]).shard(dataset)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("numbers", [{"batch_size": 0}, {"epochs": 0}])
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(ConfigError, match="at least 1"):
        Swarm(IDS[0]).shard(X, **numbers)
