"""Both drivers of gossip.Peer end a scenario of group means the same, bit for bit (see test_agreement)."""

import pytest

from tests.agreement.scenario import Scenario
from tests.agreement.test_agreement import both, states, trio_of_peers
from tests.harness.configs import tuned


def test_a_killed_member_is_left_out_by_both() -> None:
    config = tuned(chunk_elements=1024, mixing="group")
    ends = both(Scenario([*trio_of_peers(), (5.0, lambda swarm: swarm.kill(1))], 30.0, config))
    assert states(ends[0]) == {1: "dead", 2: "alive"}
    apart, both_mixed = ends[2].exchanges[0] - ends[0].exchanges[0], min(end.exchanges[0] for end in ends.values())
    assert abs(apart) <= 1 < 15 < both_mixed  # either may have had one with the first alone


@pytest.mark.slow
def test_groups_go_on_in_both_parts_of_a_cut_swarm_and_heal() -> None:
    script = [
        *trio_of_peers((3, 0)),
        (10.0, lambda swarm: swarm.partition([0, 1], [2, 3])),
        (30.0, lambda swarm: swarm.heal()),
    ]
    ends = both(Scenario(script, 75.0, tuned(chunk_elements=1024, mixing="group")))
    assert all(set(states(end).values()) == {"alive"} for end in ends.values())
