"""Both drivers of gossip.Peer, the simulator and the node's Runtime on memory streams, end a scenario the same.

The tests compare the Outcomes of all peers that are alive at the end, for exact equality. An Outcome holds the weights
bit for bit, the state of the random number generator (so every partner, session and jitter was the same), the version,
the members with state, incarnation and readiness, the links, and the durations of the last exchanges to the last bit.

Two properties make that possible. No two messages of different bursts reach a peer at the same instant, which would
leave their order to chance (tests.agreement.scenario.Wires prevents it). And a transfer takes only the latency, since
a Runtime reports a stream chunk by chunk and the simulator at its end. If both ends dial at once, a Runtime holds two
links for a while and the simulator one, which does not change the outcome.
"""

from typing import Any

import numpy as np
import pytest

from gossip import kernel
from gossip.averaging.jobs import MixJob
from gossip.filters import balance, clip
from sim.engine.sessions import Sessions
from tests.agreement import scenario
from tests.agreement.scenario import Floats, Outcome, Scenario, Script, identity, run_nodes, simulate, start_vector
from tests.gossip.kernel.building import passes
from tests.harness.configs import tuned
from tests.harness.marks import rest_is_slow, slow


def trio_of_peers(*more: tuple[int, int]) -> Script:
    """Return the start of three peers, and of more with the seed of each."""
    joins = ((0,), (1, 0), (2, 0), *more)
    return [(0.0, lambda swarm, join=join: swarm.add(*join)) for join in joins]


def both(scenario: Scenario) -> dict[int, Outcome]:
    """Run the scenario through both drivers, assert equal outcomes, and return them."""
    return equal(simulate(scenario), run_nodes(scenario))


def equal(simulated: dict[int, Outcome], real: dict[int, Outcome]) -> dict[int, Outcome]:
    assert simulated.keys() == real.keys()
    for index, outcome in simulated.items():
        for name in Outcome.__dataclass_fields__:
            assert getattr(outcome, name) == getattr(real[index], name), f"{name} of peer {index}"
    return simulated


def states(outcome: Outcome) -> dict[int, str]:
    number = {identity(index).id: index for index in range(8)}
    return {number[peer]: state for peer, (state, _, _) in outcome.members.items()}


OUTER: dict[str, Any] = {"outer_momentum": 0.5, "outer_rate": 0.7}
GROUP: dict[str, Any] = {"mixing": "group"}


@pytest.mark.parametrize(
    "changes",
    [{}, {"codec": "bf16"}, OUTER, {"mix_every_steps": None, "mix_every_s": 0.3}, GROUP, GROUP | {"codec": "int8"},
     GROUP | {"group_size": 0, "codec": "bf16"}, GROUP | {"selection": "grid", "group_size": 2}, GROUP | OUTER,
     GROUP | {"filter": "trimmed"}],
    ids=["default", "bf16", "outer momentum", "by the clock", "group", "group in int8", "group of everybody in bf16",
         "grid", "group, outer momentum", "trimmed"],
)  # fmt: skip
def test_three_peers_join_through_one_seed_and_mix(changes: dict[str, Any]) -> None:
    ends = both(Scenario(trio_of_peers(), 20.0, tuned(chunk_elements=1024, **changes)))
    assert {end.run_id for end in ends.values()} == {ends[0].run_id}
    assert all(end.ready and end.exchanges[0] > 13 for end in ends.values())
    assert "mixing" not in changes or all(end.exchanges[1] == 0 for end in ends.values())
    assert all(set(states(end).values()) == {"alive"} for end in ends.values())
    # The newcomers took the first one's weights; later each was driven apart by steps of size 1.
    spread = np.ptp([end.values for end in ends.values()], axis=0).max()
    assert spread < 0.1  # Far below a step; bf16 cannot resolve smaller differences.
    assert not np.array_equal(ends[1].values, start_vector(1))


def test_both_learn_the_pull_of_each_peers_own_data_and_correct_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step pulls each peer in its own direction, and the swarm uses an outer step."""
    pulls = [np.random.default_rng((7, index)).normal(size=scenario.ELEMENTS).astype(np.float32) for index in range(3)]

    def pulled(index: int, vector: Floats, steps: int) -> None:
        # The pull is too short to reach the limit of a correction, which depends on a norm summed chunk by chunk.
        vector += np.float32(0.002) * pulls[index]

    monkeypatch.setattr(scenario, "train", pulled)
    config = tuned(chunk_elements=1024, mix_every_steps=8, correction=0.2, outer_momentum=0.5, outer_rate=0.7)
    ends = both(Scenario(trio_of_peers(), 20.0, config))
    assert all(end.exchanges[0] > 13 for end in ends.values())
    mean = np.mean(pulls, axis=0)
    for index, end in ends.items():  # Each peer learned to go against its own direction.
        against = np.frombuffer(end.pull, np.float32)
        assert np.corrcoef(against, mean - pulls[index])[0, 1] > 0.9


def test_both_limit_the_same_movement_in_one_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three peers with noise in their steps, of which one is pulled away all the time."""
    monkeypatch.setattr(clip, "PARTNERS_WITH_DIRECTIONS", 2)
    pull = np.random.default_rng(9).normal(size=scenario.ELEMENTS).astype(np.float32)

    def noisy(index: int, vector: Floats, steps: int) -> None:
        vector += np.random.default_rng((index, steps)).normal(size=scenario.ELEMENTS).astype(np.float32)
        if index == 2:
            vector += pull

    monkeypatch.setattr(scenario, "train", noisy)
    ends = both(Scenario(trio_of_peers(), 20.0, tuned(chunk_elements=1024, mix_every_steps=4)))
    assert (
        sum(count for end in ends.values() for (_, reason), count in end.refusals.items() if reason == "direction") > 8
    )


METHODS: dict[str, dict[str, Any]] = {
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "moniqua4": {"codec": "moniqua4"},
    "moniqua4 on a ring": {"codec": "moniqua4", "selection": "ring", "partners": 0},
    "mask": {"part": "mask 0.05", "mix_every_steps": 1},
    "fragments": {"part": "fragments 4", "mix_every_steps": 2},
    "fragments and momentum": {"part": "fragments 4", "mix_every_steps": 2, "outer_momentum": 0.5, "outer_rate": 0.7},
    "fragments and moniqua4": {"part": "fragments 4", "mix_every_steps": 2, "codec": "moniqua4"},
    "mask and int8": {"part": "mask 0.05", "mix_every_steps": 1, "codec": "int8"},
    "push-sum": {"mixing": "push-sum"},
    "push-sum to two": {"mixing": "push-sum", "partners": 2},
    "exponential in lockstep": {"mixing": "push-sum", "selection": "exponential", "max_version_gap": 0.0},
    "row-stochastic": {"mixing": "row-stochastic", "partners": 2},
    "ring at once": {"selection": "ring", "partners": 0},
    "clip": {"filter": "clip", "filter_limit": 10.0},
    "balance": {"filter": "balance", "filter_limit": 20.0, "bench_s": 1.0},
    "lockstep": {"max_version_gap": 0.0},
    "half an interval": {"max_version_gap": 0.5, "mix_every_steps": 2},
    "ring in lockstep": {"selection": "ring", "partners": 0, "max_version_gap": 0.0},
    # What mixing costs a step of 0.1 s takes the interval from 2 steps to 4.
    "each node's own interval": {"mix_every_steps": "auto", "codec": "auto", "mixing_share": 2.7e-5},
}
"""Intervals are powers of two: a version counts steps in intervals, and the drivers count at different times."""


# Other rows combine these methods with a second one, so that they are slow tests on their own.
COVERED = {"int8", "int4", "moniqua4", "mask", "fragments", "push-sum"}


@pytest.mark.parametrize(
    "changes", [(slow if name in COVERED else pytest.param)(METHODS[name], id=name) for name in METHODS]
)
def test_every_method_ends_the_same_in_both(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "GAMMA", 0.9)  # The default would refuse such short vectors for ever.
    ends = both(Scenario(trio_of_peers(), 6.5, tuned(chunk_elements=1024, **changes)))
    few = 1 if changes.get("filter") == "balance" else 3  # A refused partner is benched for a while.
    assert all(end.ready and end.exchanges[0] > few for end in ends.values())
    if "filter" in changes:
        assert any(end.refusals for end in ends.values())
    if changes.get("mixing") == "push-sum":
        assert {end.mass for end in ends.values()} != {1.0}
    if changes.get("max_version_gap") == 0.0:
        assert all(end.steps < 65 for end in ends.values())  # A step takes 0.1 s, so each peer waited at times.


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_nodes_with_compiled_passes_end_as_a_simulator_that_has_numpy(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tuned(chunk_elements=1024, codec=codec)
    outcomes = []
    for play, with_what in ((simulate, None), (run_nodes, passes())):
        monkeypatch.setattr(kernel, "passes", with_what)
        outcomes.append(play(Scenario(trio_of_peers(), 9.0, config)))
    assert all(end.exchanges[0] > 3 for end in equal(*outcomes).values())


@pytest.mark.parametrize(
    "method", ["push-sum to two", "fragments", "lockstep", "ring at once", "exponential in lockstep"]
)
def test_a_partner_that_vanishes_in_the_middle_of_a_mix_changes_both_alike(method: str) -> None:
    script = [
        *trio_of_peers(),
        # At some moments, for instance 4.0548, a lockstep loop that the cut holds resumes a millisecond later in the
        # simulator than in the Runtime, which delays its next steps. Two or three of 40 seeds show this; the cause is
        # not known.
        (4.2548, lambda swarm: swarm.kill(1)),
        (7.0, lambda swarm: swarm.partition([0], [2])),
        (13.0, lambda swarm: swarm.heal()),
    ]
    config = tuned(chunk_elements=1024, doubt_s=4.0, **(METHODS[method] | {"mix_every_steps": 2}))
    ends = both(Scenario(script, 16.0, config))
    assert ends.keys() == {0, 2}
    assert all(end.steps > 100 for end in ends.values())  # No peer waits for one that is dead.


@pytest.mark.parametrize("after_s", rest_is_slow([4.05, 3.965, 5.06], 1))
def test_a_mix_that_was_in_doubt_is_applied_late_and_alike(after_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All peers are cut off between the two commits of an exchange. One side learns only after the cut that both had
    committed, and has begun other exchanges by then. Such a moment lasts a few milliseconds, so the test searches for
    the first one."""
    late = []
    count = MixJob.count_local_steps_once
    monkeypatch.setattr(MixJob, "count_local_steps_once", lambda job: (count(job), late.append(job.is_late)))
    config = tuned(chunk_elements=1024, mix_every_steps=2, outer_momentum=0.5, outer_rate=0.7)

    def cut_off(when_s: float) -> Scenario:
        cut = (when_s, lambda swarm: swarm.partition([0], [1], [2]))
        return Scenario([*trio_of_peers(), cut, (when_s + 1.0, lambda swarm: swarm.heal())], 12.0, config)

    for turn in range(100):
        late.clear()
        scenario = cut_off(after_s + 0.0041 * turn)
        simulate(scenario)
        if late.count(True) == 1:
            break
    late.clear()
    ends = both(scenario)
    assert late.count(True) == 2  # Once in each driver.
    assert all(end.exchanges[0] > 20 for end in ends.values())


def test_mixes_that_overlap_are_alike_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = []
    count = MixJob.count_local_steps_once
    monkeypatch.setattr(MixJob, "count_local_steps_once", lambda job: (count(job), beside.append(job.added_since)))
    config = tuned(chunk_elements=1024, mix_every_steps=1, outer_momentum=0.5, outer_rate=0.7)
    both(Scenario(trio_of_peers((3, 0), (4, 1)), 8.0, config))
    assert len([since for since in beside if since is not None]) > 20


@pytest.mark.parametrize("part", ["all", "fragments 4"])
def test_settling_takes_the_plain_mean_in_both(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With outer momentum, settling would overshoot the mean and return. Later mixes start from the plain mean."""
    plain, mix = [], Sessions.mix
    monkeypatch.setattr(
        Sessions, "mix", lambda self, host, effect: (plain.append(effect.plain), mix(self, host, effect))
    )
    settling = [
        (when_s, lambda swarm, index=index, on=on: swarm.settle(index, on))
        for when_s, on in ((4.5117, True), (8.0131, False)) for index in range(3)
    ]  # fmt: skip
    config = tuned(chunk_elements=1024, mix_every_steps=4, outer_momentum=0.5, outer_rate=0.7, part=part)
    both(Scenario([*trio_of_peers(), *settling], 12.0, config))
    assert plain.count(True) > 10
    assert plain.count(False) > 20
    assert not plain[0]
    assert not plain[-1]


@pytest.mark.parametrize(
    ("act", "until_s", "expected"),
    [
        (lambda swarm: swarm.kill(1), 25.0, {0: {1: "dead", 2: "alive"}, 2: {0: "alive", 1: "dead"}}),
        (lambda swarm: swarm.kill(0), 30.0, {1: {0: "dead", 2: "alive"}, 2: {0: "dead", 1: "alive"}}),
        (lambda swarm: swarm.leave(1), 10.0, {0: {1: "left", 2: "alive"}, 2: {0: "alive", 1: "left"}}),
    ],
    ids=["killed", "the seed killed", "leaves"],
)
def test_a_peer_that_is_killed_or_leaves_is_gone_to_both(act: Any, until_s: float, expected: dict[int, Any]) -> None:
    ends = both(Scenario([*trio_of_peers(), (5.0, act)], until_s))
    assert {index: states(end) for index, end in ends.items()} == expected
    assert until_s < 30.0 or ends[1].exchanges[0] > 20  # Those left of the longest run mix on.


def test_a_cut_swarm_goes_on_in_parts_and_heals() -> None:
    script = [
        *trio_of_peers((3, 0)),
        (4.0, lambda swarm: swarm.partition([0, 1], [2, 3])),
        (24.0, lambda swarm: swarm.heal()),
    ]
    cut = both(Scenario(script[:-1], 23.9))
    assert states(cut[0]) == {1: "alive", 2: "dead", 3: "dead"}
    healed = both(Scenario(script, 50.0))
    assert all(set(states(end).values()) == {"alive"} for end in healed.values())
    assert len({end.run_id for end in healed.values()}) == 1


def test_two_runs_that_meet_become_one() -> None:
    script = [
        (0.0, lambda swarm: swarm.partition([0, 1], [2, 3])),
        (0.0, lambda swarm: swarm.add(0)),
        (0.0, lambda swarm: swarm.add(1, 0)),
        (0.0, lambda swarm: swarm.add(2, 0)),  # It cannot reach its seed, and begins its own run after 3 s.
        (0.0, lambda swarm: swarm.add(3, 2)),
        (9.0, lambda swarm: swarm.heal()),
    ]
    config = tuned(chunk_elements=1024, join_timeout_s=3.0, heal_period_s=4.7)
    apart = both(Scenario(script[:-1], 8.9, config))
    assert apart[0].run_id == apart[1].run_id != apart[2].run_id == apart[3].run_id
    together = both(Scenario(script, 25.0, config))
    assert {end.run_id for end in together.values()} == {apart[0].run_id}
    assert all(end.ready for end in together.values())


@pytest.mark.parametrize("every", [1, 2])
def test_two_fixed_vectors_end_at_their_mean(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single step moves one of two peers away. Their exchanges bring both to the mean, without overshooting it."""

    def once(index: int, vector: Floats, steps: int) -> None:
        if index == 1 and steps == 40:
            vector += np.float32(1.0)

    monkeypatch.setattr(scenario, "train", once)
    config = tuned(chunk_elements=1024, mix_every_steps=every, filter="none")
    ends = both(Scenario(trio_of_peers()[:2], 10.0, config))
    assert all(end.exchanges[0] > 20 for end in ends.values())
    mean = start_vector(0) + np.float32(0.5)  # The newcomer took the weights of peer 0.
    assert np.abs(np.stack([end.values for end in ends.values()]) - mean).max() < 1e-6
