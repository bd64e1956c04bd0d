"""Who is left alone looks for the others at once."""

from __future__ import annotations

import pytest

from gossip.config import Config
from gossip.effects import MemberState
from tests.gossip.swarm_harness import Swarm


@pytest.mark.parametrize("seed", range(6, 12))
def test_one_that_is_left_alone_dials_the_dead_every_two_seconds_from_then_on(seed):
    """It kept the half minute of who has company until that was over."""
    swarm = Swarm(seed, config=Config())
    nodes = swarm.swarm(3)
    swarm.until(swarm.agreed, 30.0)
    swarm.partition(lambda number: int(number == 2))
    lonely = nodes[2]
    state = lonely.peer.membership.state
    swarm.until(lambda: all(state(other.id) is MemberState.DEAD for other in nodes[:2]), 60.0)
    since = swarm.now
    swarm.run(10.0)
    assert len([when for when, _ in lonely.dials if when >= since]) >= 8, "two of them, five times"
    swarm.partition(None)
    assert swarm.until(lambda: lonely.peer.membership.company, 20.0) < 10.0
