"""A pass over the data resumes where a checkpoint was written, even if members came or left since."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.errors import DataError
from gossip.ids import PeerId
from node.data.sampler import MAX_IDS, MAX_LENGTHS
from tests.node.sharers import IDS, Swarm, flat, groups
from tests.theory.rendezvous import owners


def kept(sampler):
    """Return the sampler's state after a round trip through JSON, as in a checkpoint."""
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


def test_a_pass_that_drop_last_ended_is_not_resumed_without_a_batch():
    """The rest, which is less than a batch, would be an epoch in which the loop trains nothing."""
    swarm = Swarm(IDS[0])
    sampler = swarm.sampler(300, 16, drop_last=True)
    for batch in sampler:
        swarm.trained += len(batch)
    again = Swarm(IDS[0]).sampler(300, 16, drop_last=True)
    again.load_state_dict(kept(sampler))
    assert len(list(again)) == 18


@pytest.mark.parametrize("evaluations", [1, 2])
def test_evaluations_inside_a_pass_leave_it_to_be_resumed(evaluations):
    swarm = Swarm(IDS[0])
    sampler = swarm.sampler(100, 10)
    training = iter(sampler)
    swarm.trained += len(next(training))
    with torch.no_grad():
        assert sum(len(flat(sampler)) for _ in range(evaluations)) == 100 * evaluations
    swarm.trained += len(next(training))
    again = Swarm(IDS[0]).sampler(100, 10)
    again.load_state_dict(kept(sampler))
    assert again.state_dict()["pass"] == 0
    assert len(flat(again)) == 80
    assert sampler.sampler.given == 20


@given(st.integers(20, 100), st.integers(1, 20), st.integers(0, 250), st.integers(0, 20))
def test_a_loader_that_is_ahead_of_its_loop_by_the_end_of_a_pass_loses_nothing_of_either(length, size, pulled, behind):
    """Passes follow each other in one stream. The loop is ``behind`` samples late, at most a pass.

    What a loader's workers fetched ahead and nobody trained on is given again.
    """
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
        assert {*done, *rest} == set(range(length))
        assert len(done) + len(rest) - length < -(-size // 2), "at most one batch is filled up, to half of its size"
    else:
        assert trained == (state["pass"] + 1) * length, "all of the pass was trained on"
        assert sorted(rest) == list(range(length))


def test_what_a_loop_leaves_of_a_pass_is_not_waited_for():
    """Like a loader with workers, the loop fetches five batches, trains on three and begins the next pass."""
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


def owned(length, swarm, me):
    """Return the samples of the first pass that a member owns."""
    everybody = sorted({*swarm.alive, me})
    winners = owners(length, everybody, b"share 0 ")
    return {index for index, winner in enumerate(winners) if everybody[winner] == me}


@settings(max_examples=2 * settings.default.max_examples)
@given(st.integers(20, 300), groups, st.integers(1, 20), st.booleans(), st.data())
def test_through_any_changes_and_lives_a_pass_gives_all_that_is_owned_and_repeats_only_to_fill_a_batch(
    length, members, size, shuffle, data
):
    """Together, several lives of one loop are given all that the last life owns, and at each moment nothing else.

    Each life has an identity of its own and stops after some batches, and the members change at any batch. An index is
    repeated only in a batch of half the size, which the rest of the pass did not fill: at most once for each change of
    members and each life after the first.
    """
    swarm, state, seen, me, changes, fills = Swarm(*members), None, [], IDS[0], 0, 0
    lives = data.draw(st.integers(1, 4))
    for life in range(lives):
        me = data.draw(st.sampled_from(IDS[:6]))
        swarm.trained, swarm.behind = 0, 0
        sampler = swarm.sampler(length, size, shuffle, seed=life, me=me)
        if state is not None:
            sampler.load_state_dict(state)
            assert sampler.sampler.number == 0
        stops_after = 10**6 if life == lives - 1 else data.draw(st.integers(0, 8))
        for _, batch in zip(range(stops_after), sampler, strict=False):
            if sampler.sampler.number:
                break  # The pass had ended: this batch belongs to the next one.
            assert {*batch} <= owned(length, swarm, me)
            if {*batch} & {*seen}:
                assert len(batch) <= -(-size // 2)
                fills += 1
            seen += batch
            swarm.trained += len(batch)
            if data.draw(st.booleans()):
                swarm.set(*data.draw(groups))
                changes += 1
        if sampler.sampler.number:
            break
        state = kept(sampler)
    assert owned(length, swarm, me) <= {*seen}
    assert fills <= changes + life


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
        samplers.load([{"samples": 1_000 + length, "pass": 0, "given": []}])
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
    if state:
        with pytest.raises(DataError, match="no state of a sampler"):
            Swarm(IDS[0]).samplers().load([state])


def test_the_state_of_another_dataset_is_refused():
    with pytest.raises(DataError, match=r"of 11 samples, this dataset has 10"):
        Swarm(IDS[0]).sampler(10).load_state_dict(Swarm(IDS[0]).sampler(11).state_dict())
