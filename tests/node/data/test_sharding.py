"""Every sample has one owner, and only what must move moves."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, Subset, TensorDataset

from gossip.errors import ConfigError, DataError
from gossip.ids import PeerId
from node.data.division import MAX_BUCKETS, Sharers, owned_buckets
from node.data.sampler import Samplers
from tests.node.data.shares import Squares, shard, share
from tests.node.sharers import IDS, Swarm, flat, groups
from tests.theory.rendezvous import owners


def indices(batches):
    return [int(index) for batch in batches for index in batch]


# Ownership -----------------------------------------------------------------------------------------------------------
@given(st.integers(1, 300), groups, st.binary(max_size=8), st.randoms())
def test_every_bucket_has_one_owner_in_whatever_order_the_members_are_listed(buckets, members, salt, random):
    winners, listed = owners(buckets, members, salt), 2 * members
    random.shuffle(listed)
    for index, member in enumerate(members):
        np.testing.assert_array_equal(owned_buckets(buckets, member, listed, salt), winners == index)


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


def test_shares_are_balanced_as_a_fair_draw_would_be():
    # A member's share of B buckets among n is Binomial(B, 1/n); the largest of n deviations stays under 5 standard
    # deviations with probability 1 - 64 * 6e-7. The seed (the salt) is fixed, so this is not a matter of luck.
    buckets, members = MAX_BUCKETS, IDS
    counts = np.bincount(owners(buckets, members, b"fixed"), minlength=len(members))
    mean = buckets / len(members)
    assert np.abs(counts - mean).max() < 5 * (mean * (1 - 1 / len(members))) ** 0.5


def test_ten_thousand_members_share_4096_buckets():
    crowd = [PeerId(n.to_bytes(16, "big")) for n in range(10_000)]
    winners = owners(4096, crowd, b"s")
    some = int(winners[0])
    np.testing.assert_array_equal(owned_buckets(4096, crowd[some], crowd, b"s"), winners == some)
    # 4,096 draws among 10,000: 10,000 (1 - (1 - 1e-4)^4096) = 3,361 different ones expected, sd under 30.
    assert abs(len(set(winners.tolist())) - 3361) < 150


# A pass --------------------------------------------------------------------------------------------------------------


def test_what_stays_pending_keeps_its_order_when_members_change():
    calm = indices(shard(Swarm(*IDS[:3]), torch.arange(300), 1))
    swarm, shaken = Swarm(*IDS[:3]), []
    for batch in shard(swarm, torch.arange(300), 1):
        shaken += batch.tolist()
        if len(shaken) == 10:
            swarm.set(*IDS[:6])
    assert 10 < len(shaken) < len(calm), "newcomers have taken some"
    assert shaken == [index for index in calm if index in shaken]


def test_a_change_between_the_counter_and_the_members_is_seen_at_the_next_batch():
    swarm = Swarm(*IDS[:2])

    def members():
        if not swarm.epoch:
            alive = list(swarm.alive)
            swarm.set(IDS[0])  # dies while it is being asked
            return alive
        return swarm.alive

    samplers = Samplers(Sharers(lambda: IDS[0], members, lambda: swarm.epoch, lambda: 0, lambda: 0))
    assert sorted(flat(samplers.make(100, 10))) == list(range(100))


def test_a_share_of_no_samples_gives_nothing_and_ends():
    swarm = Swarm(*IDS[:10])
    poor = next(member for number, member in enumerate(IDS) if number != owners(1, IDS[:10], b"share 0 ")[0])
    assert list(swarm.sampler(1, 4, me=poor)) == []


def test_the_last_batches_of_a_pass_share_its_rest():
    def sizes(length, batch_size, epochs=1):
        return [len(batch) for batch in shard(Swarm(IDS[0]), torch.arange(length), batch_size, epochs=epochs)]

    assert sizes(3, 64) == [3]
    assert sizes(10, 4, epochs=2) == [4, 3, 3, 4, 3, 3]
    assert sizes(16 * 20 + 1, 16) == [16] * 13 + [15] + [14] * 7


def test_order_repeats_by_pass_and_node():
    def order(me=IDS[0], number=0, shuffle=True):
        swarm = Swarm(me)
        swarm.behind = 100 * number
        return indices(shard(swarm, torch.arange(100), shuffle=shuffle, me=me))

    assert order() == order()
    different = [order(), order(number=1), order(me=IDS[1]), list(range(100))]
    assert all(a != b for a, b in itertools.combinations(different, 2))
    assert order(shuffle=False) == list(range(100))


def test_later_passes_and_later_loops_see_other_data():
    loop, data = share(Swarm(*IDS[:4])), torch.arange(400)
    first, second = (set(indices(loop.shard(data, 400, True, 1, None, False))) for _ in range(2))
    both = set(indices(shard(Swarm(*IDS[:4]), torch.arange(400), 400, epochs=2)))
    assert both == first | second
    assert len(first & second) < len(first) / 2  # a quarter in common expected


# Datasets ------------------------------------------------------------------------------------------------------------
X, Y = torch.arange(20.0).reshape(20, 1), torch.arange(20) ** 2


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "dataset",
    [
        (X, Y),
        [X, Y],
        TensorDataset(X, Y),
        (read_only(X.numpy().copy()), read_only(Y.numpy().copy())),
        (X, Y.numpy()),
        Subset(TensorDataset(X, Y), range(20)),
        [(x, y) for x, y in zip(X, Y, strict=True)],
    ],
    ids=["tuple", "list", "TensorDataset", "read-only arrays", "mixed", "Subset", "list of samples"],
)
def test_pairs_come_out_as_tensors_row_by_row(dataset):
    rows = 0
    for x, y in shard(Swarm(*IDS[:2]), dataset, 6):
        assert isinstance(x, torch.Tensor)
        assert isinstance(y, torch.Tensor)
        assert x.shape == (len(y), 1)
        assert torch.equal(x[:, 0].long() ** 2, y)
        rows += len(y)
    assert 0 < rows < 20


def test_items_that_are_mappings_are_collated():
    items = [{"x": x, "y": int(y)} for x, y in zip(X, Y, strict=True)]
    batches = list(shard(Swarm(IDS[0]), items, 8))
    assert [batch["x"].shape for batch in batches] == [(7, 1), (7, 1), (6, 1)]
    assert all(torch.equal(batch["x"][:, 0].long() ** 2, batch["y"]) for batch in batches)


def test_a_dataset_that_fetches_whole_batches_is_asked_for_them():
    class Batched(Squares):
        def __getitems__(self, wanted):
            return [(index, -index) for index in wanted]

    ((first, second),) = shard(Swarm(IDS[0]), Batched(), 20)
    assert sorted(first.tolist()) == list(range(20))
    assert torch.equal(first, -second)


@pytest.mark.parametrize("length", [MAX_BUCKETS, MAX_BUCKETS + 1, (1 << 20) + 7])  # the last in two blocks
def test_a_large_dataset_is_divided_whole(length):
    swarm = Swarm(*IDS[:3])
    batches = [batch for me in swarm.alive for batch in shard(swarm, np.arange(length), 50_000, me=me)]
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(length))


def test_neighbours_of_a_large_dataset_spread_over_the_members():
    # Sorted data: any thousand samples in a row must reach all of four nodes, 250 +- 5 * 13.7 (binomial) each.
    winners = [set(indices(shard(Swarm(*IDS[:4]), torch.arange(100_000), 9999, me=me))) for me in IDS[:4]]
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
        shard(Swarm(IDS[0]), dataset)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["epochs", "batch_size"])
@pytest.mark.parametrize("number", [0, "3", 2.5, None])
def test_a_shard_of_impossible_numbers_is_refused(name, number):
    with pytest.raises(ConfigError, match=f"{name} is {number!r}.*at least 1"):
        shard(Swarm(IDS[0]), X, **{name: number})
