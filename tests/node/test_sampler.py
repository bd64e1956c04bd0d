"""Samplers for the user's own DataLoader: the same division as a shard's, and a pass that goes on where it was left."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gossip.errors import ConfigError, DataError
from gossip.ids import PeerId
from node import Node
from node.data.division import MAX_BUCKETS
from node.data.sampler import MAX_IDS, MAX_LENGTHS, Samplers, Sharers
from node.data.sharding import Shard
from tests.theory.rendezvous import owners

IDS = [PeerId(bytes([n]) * 16) for n in range(64)]
groups = st.sets(st.sampled_from(IDS), min_size=1, max_size=6).map(sorted)


class Swarm:
    """Members that a test changes, and what their loops have trained on."""

    def __init__(self, *members):
        self.alive, self.epoch, self.trained, self.behind = list(members), 0, 0, 0

    def set(self, *members):
        self.alive, self.epoch = list(members), self.epoch + 1

    def samplers(self, me=IDS[0]):
        return Samplers(Sharers(
            lambda: me, lambda: self.alive, lambda: self.epoch, lambda: self.trained + self.behind, lambda: self.trained
        ))  # fmt: skip

    def sampler(self, *options, me=IDS[0], **more):
        return self.samplers(me).make(*options, **more)


def flat(batches):
    return [index for batch in batches for index in batch]


# A pass --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), groups, st.integers(1, 40), st.booleans(), st.data())
def test_the_passes_of_all_members_cover_everything_once_whatever_their_seeds(length, members, size, shuffle, data):
    swarm = Swarm(*members)
    seen = []
    for me in members:
        seed = data.draw(st.integers(-3, 2**70))
        seen += flat(swarm.sampler(length, size, shuffle, seed=seed, me=me))
    assert sorted(seen) == list(range(length))


@given(st.integers(1, 200), groups, st.integers(1, 40), st.booleans())
def test_a_sampler_gives_what_a_shard_gives_index_by_index_and_in_batches(length, members, size, shuffle):
    swarm = Swarm(*members)
    shard = Shard(torch.arange(length), size, shuffle, 2, IDS[0], lambda: swarm.alive, lambda: 0)
    batches, indices = swarm.sampler(length, size, shuffle), swarm.sampler(length, shuffle=shuffle)
    want = [batch.tolist() for batch in shard]
    assert [*batches, *batches] == want
    assert [*indices, *indices] == flat(want)


def test_the_seed_draws_the_order_and_nothing_else():
    swarm = Swarm(*IDS[:3])
    one, two = list(swarm.sampler(300)), list(swarm.sampler(300, seed=1))
    assert one != two
    assert sorted(one) == sorted(two) == list(swarm.sampler(300, shuffle=False, seed=2))


def test_the_last_short_batch_is_dropped_where_that_is_asked_and_no_other():
    swarm = Swarm(IDS[0])
    assert [len(batch) for batch in swarm.sampler(10, 4)] == [4, 4, 2]
    dropping = swarm.sampler(10, 4, drop_last=True)
    assert [len(batch) for batch in dropping] == [4, 4]
    assert len(dropping) == 2
    assert not {*flat(dropping)} >= set(range(10))
    assert [len(batch) for batch in swarm.sampler(8, 4, drop_last=True)] == [4, 4]
    assert list(swarm.sampler(3, 4, drop_last=True)) == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
@given(size=st.integers(3, 9), length=st.integers(1, 100))
def test_no_rank_gets_a_batch_of_one_sample_unless_there_are_no_more(ranks, size, length):
    """BatchNorm refuses one, and a share's length is a matter of chance."""
    alone = [IDS[0]]
    each = [
        Samplers(Sharers(lambda: IDS[0], lambda: alone, lambda: 0, lambda: 0, lambda: 0, rank, ranks)).make(
            length, size
        )
        for rank in range(ranks)
    ]
    batches = [list(sampler) for sampler in each]
    assert {*map(len, batches)} == {len(sampler) for sampler in each}
    assert {index for given in batches for index in flat(given)} == set(range(length))
    for given_at_once in zip(*batches, strict=True):
        (length_of_all,) = {len(batch) for batch in given_at_once}
        assert length_of_all <= size
        assert length_of_all > 1 or length <= ranks


def test_it_divides_anew_between_two_batches_and_between_two_indices():
    for size in (10, None):
        swarm = Swarm(*IDS[:2])
        mine = iter(swarm.sampler(300, size))
        first = next(mine) if size else [next(mine) for _ in range(10)]
        swarm.set(IDS[0])  # the other one dies
        rest = flat(mine) if size else list(mine)
        assert sorted([*first, *rest]) == list(range(300)), size


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


# A state -------------------------------------------------------------------------------------------------------------


def kept(sampler):
    """As a checkpoint has it."""
    return json.loads(json.dumps(sampler.state_dict(), allow_nan=False))


@pytest.mark.parametrize("size", [7, None])
def test_a_pass_goes_on_where_its_state_was_taken(size):
    swarm = Swarm(*IDS[:3])
    whole = list(swarm.sampler(300, size))
    sampler = swarm.sampler(300, size)
    pulled = iter(sampler)
    for _ in range(5):
        swarm.trained += len(next(pulled)) if size else bool(next(pulled) + 1)
    state = kept(sampler)
    assert list(pulled) == whole[5:]
    swarm.trained = 0
    again = swarm.sampler(300, size)
    again.load_state_dict(state)
    assert again.state_dict() == state, "a state that was loaded is the same until it is used"
    assert list(again) == whole[5:]
    swarm.trained = 300
    assert list(again) not in (whole, whole[5:]), "the next pass"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # of Python 3.12, by workers
def test_what_workers_fetched_ahead_and_nobody_trained_on_is_given_again():
    swarm = Swarm(*IDS[:3])
    data = TensorDataset(torch.arange(300))
    sampler = swarm.sampler(data, 8)
    loader = iter(DataLoader(data, batch_sampler=sampler, num_workers=2, prefetch_factor=2))
    taken = []
    for _ in range(3):
        taken += next(loader)[0].tolist()
        swarm.trained = len(taken)
    state = kept(sampler)
    given = sampler.sampler.begun[-1][0].total
    assert given > len(taken) == 24
    again = Swarm(*IDS[:3]).sampler(300, 8)
    again.load_state_dict(state)
    rest = flat(again)
    assert sorted([*taken, *rest]) == sorted(swarm.sampler(300))
    del loader


@given(st.integers(20, 100), st.integers(1, 20), st.integers(0, 250), st.integers(0, 20))
def test_a_loader_that_is_ahead_of_its_loop_by_the_end_of_a_pass_loses_nothing_of_either(length, size, pulled, behind):
    """Pass follows pass in one stream; the loop is behind by up to so many samples, no more than a pass."""
    swarm = Swarm(IDS[0])
    sampler, seen = swarm.sampler(length, size), []
    while len(seen) < pulled:
        for batch in sampler:
            seen += batch
            swarm.trained = max(0, len(seen) - behind)
            if len(seen) >= pulled:
                break
    state = kept(sampler)
    trained, passes = swarm.trained, swarm.trained // length
    again = Swarm(IDS[0]).sampler(length, size)
    again.load_state_dict(state)
    rest = flat(again)
    if state["pass"] == again.sampler.number:
        done = seen[passes * length : trained]
        assert sorted([*done, *rest]) == list(range(length))
    else:
        assert trained == (state["pass"] + 1) * length, "all of the pass was trained on"
        assert sorted(rest) == list(range(length))


def test_what_a_loop_leaves_of_a_pass_is_not_waited_for():
    """As a loader with workers does: five batches are fetched, three trained on, and the next pass begins."""
    swarm = Swarm(IDS[0])
    sampler = swarm.sampler(100, 10)
    for _ in range(2):
        fetched = [batch for _, batch in zip(range(5), sampler, strict=False)]
        swarm.trained += sum(map(len, fetched[:3]))
    for _, batch in zip(range(2), sampler, strict=False):
        swarm.trained += len(batch)
    again = Swarm(IDS[0]).sampler(100, 10)
    again.load_state_dict(kept(sampler))
    assert len(flat(again)) == 80
    assert again.sampler.number == 2


@settings(max_examples=150)
@given(st.integers(20, 300), groups, st.integers(1, 20), st.booleans(), st.data())
def test_through_any_changes_and_lives_a_pass_gives_nothing_twice_and_skips_nothing(
    length, members, size, shuffle, data
):
    """Several lives of one loop, each under an identity of its own and stopped after some batches, the members changing
    at any of them: together they are given what the last life owns, and no index twice."""
    swarm, state, seen, me = Swarm(*members), None, [], IDS[0]
    for life in range(data.draw(st.integers(1, 4))):
        me = data.draw(st.sampled_from(IDS[:6]))
        swarm.trained, swarm.behind = 0, 0
        sampler = swarm.sampler(length, size, shuffle, seed=life, me=me)
        if state is not None:
            sampler.load_state_dict(state)
            assert sampler.sampler.number == 0
        for _, batch in zip(range(data.draw(st.integers(0, 8))), sampler, strict=False):
            if sampler.sampler.number:
                break  # nothing was left of the pass: this is the next one's
            seen += batch
            swarm.trained += len(batch)
            if data.draw(st.booleans()):
                swarm.set(*data.draw(groups))
        if sampler.sampler.number:
            break
        state = kept(sampler)
    assert len(seen) == len(set(seen))
    assert state is None or state["pass"] == 0
    last = swarm.sampler(length, size, me=me)
    if state is not None:
        last.load_state_dict(state)
    rest = flat(last)
    if last.sampler.number == 0:
        assert not set(rest) & set(seen)
    mine = {index for index, owner in enumerate(owners_of(length, [*swarm.alive, me])) if owner == me}
    assert mine <= {*seen, *(rest if last.sampler.number == 0 else ())}


def owners_of(length, members):
    everybody = sorted(set(members))
    return [everybody[owner] for owner in owners(length, members, b"share %d 0 " % length)]


def test_a_state_from_before_the_swarm_went_on_is_forgotten():
    swarm = Swarm(*IDS[:2])
    sampler = swarm.sampler(300, 10)
    pulled = iter(sampler)
    swarm.trained = len(next(pulled))
    state = kept(sampler)
    swarm.behind = 2 * 300
    again = swarm.sampler(300, 10)
    again.load_state_dict(state)
    fresh = swarm.sampler(300, 10)
    assert flat(again) == flat(fresh)
    assert again.sampler.number == 2


def test_a_finished_pass_is_followed_by_the_next_one():
    swarm = Swarm(IDS[0])
    sampler = swarm.sampler(100, 10)
    whole = flat(sampler)
    swarm.trained = 100
    again = swarm.sampler(100, 10)
    again.load_state_dict(kept(sampler))
    following = flat(again)
    assert sorted(following) == sorted(whole)
    assert following != whole
    assert again.sampler.number == 1


def test_a_state_is_small_and_what_it_cannot_name_is_given_again():
    swarm = Swarm(*IDS)
    sampler = swarm.sampler(100_000, 10)
    pulled = iter(sampler)
    seen = []
    for change in range(20):
        batches = [next(pulled) for _ in range(1 + change % 3)]
        seen += flat(batches)
        swarm.trained += 10 * len(batches)
        swarm.set(*IDS[: 60 + change % 5])
    state = kept(sampler)
    assert len(json.dumps(state)) < 6_000
    assert 0 < sum(1 + len(row["beside"]) for row in state["given"]) <= MAX_IDS
    again = swarm.sampler(100_000, 10)
    again.load_state_dict(state)
    rest = flat(again)
    assert set(rest) >= {*swarm.sampler(100_000)} - {*seen}, "nothing is skipped"
    crowd = Swarm(*[PeerId(number.to_bytes(16, "big")) for number in range(MAX_IDS + 1)])
    many = crowd.sampler(100_000, 10)
    crowd.trained = len(next(iter(many)))
    assert kept(many) == {"samples": 100_000, "pass": 0, "given": []}


def test_a_loop_that_makes_one_for_each_epoch_goes_on_counting():
    swarm = Swarm(*IDS[:2])
    samplers, once = swarm.samplers(), swarm.sampler(300, 10)
    assert [list(samplers.make(300, 10)) for _ in range(3)] == [list(once) for _ in range(3)]
    assert list(samplers.make(200, 10)) == list(swarm.sampler(200, 10)), "of other data apart"


def test_a_nodes_state_has_the_last_sampler_of_each_length_made_before_or_after_it_is_loaded():
    swarm = Swarm(*IDS[:2])
    samplers = swarm.samplers()
    pulled = iter(samplers.make(300, 10))
    samplers.make(200)
    swarm.trained = len(next(pulled))
    state, rest = json.loads(json.dumps(samplers.state())), list(pulled)
    assert [one["samples"] for one in state] == [300, 200]
    swarm.trained = 0
    early, late = swarm.samplers(), swarm.samplers()
    made = early.make(300, 10)
    early.load(state)
    late.load(state)
    assert list(made) == list(late.make(300, 10)) == rest
    assert list(late.make(300, 10)) == list(made) != rest, "used once"
    late.load(None), late.load("no list"), late.load([3, {}, {"samples": "many"}])


def test_what_a_node_remembers_of_samplers_is_bounded():
    samplers = Swarm(IDS[0]).samplers()
    for length in range(1, 50):
        samplers.make(length)
        samplers.load([{"samples": 1_000 + length}])
    assert len(samplers.state()) == MAX_LENGTHS
    assert len(samplers.states) == MAX_LENGTHS


@pytest.mark.parametrize(
    "state",
    [None, {}, {"samples": 10}, {"samples": 10, "pass": "0", "given": []}, {"samples": 10, "pass": -1, "given": []},
     {"samples": 10, "pass": 0, "given": [{"node": "xy", "beside": [], "seed": 0, "last": 1}]},
     {"samples": 10, "pass": 0, "given": [{"node": "ab", "beside": [], "seed": "", "last": 1}]},
     {"samples": 10, "pass": 0, "given": [{"node": "ab", "beside": [], "seed": 0, "last": 1.5}]},
     {"samples": 10, "pass": 0, "given": 3}],
)  # fmt: skip
def test_what_is_no_state_is_refused_in_a_sentence(state):
    with pytest.raises(DataError, match="no state of a sampler"):
        Swarm(IDS[0]).sampler(10).load_state_dict(state)


def test_the_state_of_another_dataset_is_refused():
    with pytest.raises(DataError, match=r"of 11 samples, this dataset has 10"):
        Swarm(IDS[0]).sampler(10).load_state_dict(Swarm(IDS[0]).sampler(11).state_dict())


# Loaders and datasets ------------------------------------------------------------------------------------------------


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return index, index**2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # of Python 3.12, by workers
def test_any_loader_takes_it_with_workers_that_persist(workers):
    swarm, more = Swarm(*IDS[:2]), {"num_workers": workers, "persistent_workers": workers > 0}
    batches = DataLoader(Squares(), batch_sampler=swarm.sampler(Squares(), 8), **more)
    singly = DataLoader(Squares(), batch_size=8, sampler=swarm.sampler(Squares()), **more)
    want = list(swarm.sampler(60))
    for loader in (batches, singly):
        assert len(loader) == -(-len(want) // 8)
        first, second = ([int(index) for batch, _ in loader for index in batch] for _ in range(2))
        assert first == want
        assert len(second) != 0
        assert second != first


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Unknown:
    def __getitem__(self, index):
        return index


X = torch.arange(20.0)


@pytest.mark.parametrize(
    ("dataset", "length"),
    [(20, 20), (TensorDataset(X, X), 20), (X, 20), (X.numpy(), 20), ([X, X, X], 3), (range(7), 7), ("text", 4)],
    ids=lambda value: type(value).__name__,
)
def test_it_divides_what_a_loader_would_index(dataset, length):
    assert sorted(Swarm(IDS[0]).sampler(dataset)) == list(range(length))


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ((X, X), "columns or samples"),
        ({"train": X}, "cannot be divided"),
        (Endless(), "IterableDataset"),
        (Unknown(), "cannot be divided"),
        ([], "empty"),
        (0, "at least one"),
        (-3, "at least one"),
        (True, "cannot be divided"),
        (None, "cannot be divided"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_cannot_be_divided_is_refused_in_a_sentence(dataset, said):
    with pytest.raises(DataError, match=said):
        Swarm(IDS[0]).sampler(dataset)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"drop_last": True}, "drop_last is of batches"),
    ],
)
def test_numbers_that_cannot_be_are_refused_in_a_sentence(given, said):
    with pytest.raises(ConfigError, match=said):
        Swarm(IDS[0]).sampler(10, **given)


# Of a node -----------------------------------------------------------------------------------------------------------


def test_a_node_divides_with_the_others_and_its_checkpoints_have_the_rest_of_the_pass(train, until, quick, tmp_path):
    data = TensorDataset(torch.arange(300))
    other = train(torch.nn.Linear(2, 1))
    ours = train(torch.nn.Linear(2, 1), seeds=[other.node.address])
    until(lambda: len(ours.node.members) == 2)
    until(lambda: len(ours.node.sampler(data)) + len(other.node.sampler(data)) == 300)
    other.stop()
    sampler = ours.node.sampler(data, 8)
    until(lambda: len(sampler) == 38)  # all of it is ours again

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
