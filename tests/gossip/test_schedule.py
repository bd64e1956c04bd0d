"""The schedule: when the next mix is due, and whether a training loop must wait for one that began."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.codecs import COMPILED, ExchangeCost
from gossip.config import Config
from gossip.exchange.session import State
from gossip.schedule import Schedule
from tests.harness.world import World


def schedule(seed=0, **config):
    return Schedule(Config(**config), random.Random(seed))


def mixes_at(made, count):
    """Return the step counts at which a node mixes that does so whenever it is due."""
    steps, found = 0, []
    while len(found) < count:
        steps += 1
        if made.is_due(steps, 0.0):
            found.append(steps)
            made.on_mixed(steps, 0.0)
    return found


@pytest.mark.parametrize("every", [16, 64, 256])
def test_a_node_that_is_never_kept_waiting_mixes_once_in_each_interval_jittered_by_a_quarter(every):
    found = mixes_at(schedule(mix_every_steps=every), 400)
    assert (found[-1] - found[0]) / 399 == pytest.approx(every, rel=0.03)
    gaps = [later - before for before, later in itertools.pairwise(found[1:])]
    assert 0.75 * every - 1 <= min(gaps) < max(gaps) <= 1.25 * every + 1
    assert max(gaps) - min(gaps) > 0.3 * every


@given(st.integers(1, 50), st.lists(st.integers(0, 300), max_size=30), st.integers(0, 1000))
def test_the_next_mix_lies_in_the_future_and_within_three_intervals_whoever_asked_when(every, pauses, seed):
    made = schedule(seed, mix_every_steps=every)
    steps = 0
    for pause in pauses:
        steps += pause
        made.on_mixed(steps, 0.0)
        assert steps + 1 <= made.due_steps <= steps + max(3 * every, 1)


def test_what_was_missed_is_not_made_up_for():
    made = schedule(mix_every_steps=8)
    made.on_mixed(0, 0.0)
    made.on_mixed(1000, 0.0)
    assert made.due_steps >= 1002
    found = mixes_at(schedule(mix_every_steps=8), 10)
    assert found[-1] > 50


def test_mixing_at_every_step_is_due_at_every_step():
    assert mixes_at(schedule(mix_every_steps=1), 20)[-1] <= 26


def test_by_the_clock_the_first_mix_sets_the_time_and_steps_say_nothing():
    made = schedule(mix_every_steps=None, mix_every_s=30.0)
    assert not made.is_due(10**9, 1e9)
    made.on_mixed(0, 100.0)
    assert 100 + 22.5 <= made.due_at <= 100 + 37.5
    assert not made.is_due(10**9, made.due_at - 0.001)
    assert made.is_due(0, made.due_at)


def test_of_steps_and_seconds_either_is_enough():
    made = schedule(mix_every_steps=10, mix_every_s=30.0)
    made.on_mixed(0, 0.0)
    assert made.is_due(made.due_steps, 0.0)
    assert made.is_due(0, made.due_at)
    assert not made.is_due(made.due_steps - 1, made.due_at - 0.1)


# -- mixes that others ask for -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("by_steps", [True, False])
def test_however_often_others_ask_our_own_mix_is_due_within_two_intervals_of_our_last(by_steps):
    """The second interval is jittered by a quarter. Before, one frequent asker could take part in all mixes."""
    made = schedule(mix_every_steps=8) if by_steps else schedule(mix_every_steps=None, mix_every_s=8.0)
    made.begin(0, 0.0)
    own = []
    for steps in range(1, 2000):
        due = made.is_due(steps, float(steps))
        made.on_mixed(steps, float(steps), own=due)
        own += [steps] if due else []
    gaps = [later - before for before, later in itertools.pairwise(own)]
    assert max(gaps) <= 2.25 * 8 + 1
    assert sum(gaps) / len(gaps) == pytest.approx(16, rel=0.05)


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_what_others_ask_for_counts_and_all_together_stay_one_in_an_interval(share):
    """Others ask with probability ``share`` in each interval; 1/2 is usual where all members mix alike."""
    made, dice = schedule(mix_every_steps=64), random.Random(1)
    made.begin(0, 0.0)
    mixes = 0
    for steps in range(1, 64 * 4000):
        own = made.is_due(steps, 0.0)
        if own or dice.random() < share / 64:
            made.on_mixed(steps, 0.0, own)
            mixes += 1
    assert mixes / 4000 == pytest.approx(1.0, abs=0.05)


# -- how far a loop runs ahead of a mix --------------------------------------------------------------------------------
def pair(**config):
    swarm = World(config=Config(**config), latency_s=0.01)
    a, b = swarm.swarm(2)
    swarm.until(lambda: swarm.agreed() and bool(a.mixes and b.mixes), 30.0)
    swarm.until(swarm.quiet, 30.0)
    return swarm, a, b


def begun(node, swarm, state):
    """Return an exchange of this node in this state, begun at its step count."""
    node.peer.schedule.retry_at = 0.0
    node.peer.schedule.due_steps = 0
    node.peer.on_stepped(node.steps, node.steps, None, swarm.now)
    [exchange] = node.peer.exchanges.table.values()
    exchange.state = state
    return exchange


@pytest.mark.parametrize("state", [State.PREPARING, State.OFFERED, State.STREAMING, State.VERIFIED])
@pytest.mark.parametrize(("gap", "after"), [(0.0, 0), (0.25, 2), (1.0, 8), (2.0, 16), (None, math.inf)])
def test_a_loop_is_held_when_a_mix_under_way_is_as_old_as_the_gap_allows(gap, after, state):
    swarm, a, _ = pair(max_version_gap=gap, mix_every_steps=8)
    a.peer.update_counts(1000, 1000)
    a.steps = 1000
    exchange = begun(a, swarm, state)
    for steps in range(20):
        a.peer.update_counts(1000 + steps, 0)
        assert a.peer.view.is_held == (steps >= after)
    exchange.state = State.IN_DOUBT
    assert not a.peer.view.is_held, "nobody waits for one who is gone"


def test_a_report_that_is_older_than_what_was_counted_counts_no_sample_twice():
    _, a, _ = pair(mix_every_steps=8)
    a.peer.update_counts(a.steps, 32)
    steps, samples = a.peer.local.steps, a.peer.local.samples
    before, members = a.peer.local.progress.samples, a.peer.local.progress.members
    for more in (10, 8, 11):  # the network thread has looked at the loop while an earlier report was on its way
        a.peer.update_counts(steps + more, samples + 16 * more)
    assert a.peer.local.steps == steps + 11
    assert a.peer.local.progress.samples == before + members * 16 * 11


def test_one_that_is_asked_is_held_from_its_snapshot_on_and_not_before():
    swarm, a, b = pair(max_version_gap=0.0, mix_every_steps=8)
    begun(a, swarm, State.PREPARING)
    session = next(iter(a.peer.exchanges.table))
    [offered] = a.peer.on_snapshotted(session, swarm.now)
    b.peer.receive(a.id, offered.message, swarm.now)
    assert b.peer.exchanges.table[session].state is State.PREPARING
    assert not b.peer.view.is_held
    b.peer.on_snapshotted(session, swarm.now)
    assert b.peer.view.is_held
    b.peer.on_failed(session, "broken", swarm.now)
    assert not b.peer.view.is_held


# -- an interval that a node chooses -----------------------------------------------------------------------------------
def chooses(**config):
    return schedule(mix_every_steps="auto", codec="auto", **config)


def adapted(made, seconds, step_s=0.1, mixes=8, first=0, every=2):
    """Return the interval after so many mixes whose exchanges take ``seconds`` each."""
    exchange = ExchangeCost(1_000, "int8", 1_004, seconds)
    for mix in range(first, first + mixes):
        made.adapt_interval(every * mix, every * mix * step_s, exchange, COMPILED)
    return made.every


def test_a_node_begins_with_the_shortest_interval_that_its_codecs_bytes_allow():
    codecs = (None, "auto", "fp32", "bf16", "fp16", "int8", "int4")
    begins = [schedule(mix_every_steps="auto", codec=codec).every for codec in codecs]
    assert begins == [2, 2, 8, 4, 4, 2, 2]
    assert schedule(mix_every_steps=5, codec="int8").every == 5


def test_the_interval_follows_what_exchanges_take_and_small_changes_do_not_move_it():
    made = chooses()
    assert adapted(made, 0.8) == 8
    assert adapted(made, 0.95, first=8) == adapted(made, 0.65, first=16) == 8
    assert adapted(made, 0.01, first=24) == 2


def test_nothing_is_concluded_from_few_mixes_nor_from_one_long_pause():
    made = chooses()
    assert adapted(made, 5.0, mixes=4) == 2  # three spans between four mixes
    made = chooses()
    assert adapted(made, 0.8) == 8
    usual = ExchangeCost(1_000, "int8", 1_004, 0.8)
    made.adapt_interval(16, 1_000.0, usual, COMPILED)  # An evaluation of a quarter of an hour.
    assert made.every == 8


def test_mixes_come_as_often_as_the_interval_that_was_chosen():
    made = chooses()
    adapted(made, 3.2)
    assert made.every == 31
    found = mixes_at(made, 200)
    assert (found[-1] - found[0]) / 199 == pytest.approx(31, rel=0.05)


@pytest.mark.parametrize("given", [1, 8, 50])
def test_an_interval_that_was_given_stays_as_it_was_given(given):
    made = schedule(mix_every_steps=given)
    assert adapted(made, 5.0) == given
