"""Vectors that are read where they lie change a node as streams do, and as the simulator's: bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from gossip.wire.messages import Lent
from node.links.link import Link
from node.model.pool import VectorPool
from node.transfers.neighbours import Neighbours
from tests.agreement import memory_network
from tests.agreement.scenario import Scenario
from tests.agreement.test_agreement import METHODS, both, states, trio_of_peers
from tests.harness.configs import tuned


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All nodes are on one host; the sessions of what they lend."""
    seen: list[int] = []
    borrow = Neighbours.borrow

    def noted(self: Neighbours, link: Link, message: Lent) -> None:
        seen.append(message.session)
        borrow(self, link, message)

    monkeypatch.setattr(Neighbours, "borrow", noted)
    monkeypatch.setattr(VectorPool, "SHARED_ELEMENTS", 1)
    monkeypatch.setattr(memory_network, "HOST", ["memory of this host"])
    return seen


SOME = ["int8", "moniqua4", "fragments and momentum", "mask and int8", "push-sum to two", "clip", "lockstep"]


@pytest.mark.parametrize("changes", [{}, {"codec": "bf16"}, *[METHODS[name] for name in SOME]], ids=["", "bf16", *SOME])
def test_methods_end_the_same(changes: dict[str, Any], lent: list[int]) -> None:
    ends = both(Scenario(trio_of_peers(), 9.0, tuned(chunk_elements=1024, **changes)))
    done = sum(end.exchanges[0] for end in ends.values())
    assert len(lent) > 0.4 * done or changes.get("codec") == "moniqua4"
    if changes.get("codec") == "moniqua4":
        assert done > 20
        assert len(lent) < done, "which streams, but for what newcomers take"


def test_whoever_vanishes_or_is_cut_off_changes_all_alike(lent: list[int]) -> None:
    """Not in the 20 ms in which a frame of its is on its way: what it lent is not used once it is gone, where a stream
    that had left would still have come. On one host nothing is on its way for so long."""
    script = [
        *trio_of_peers(),
        (4.0248, lambda swarm: swarm.kill(1)),
        (7.0, lambda swarm: swarm.partition([0], [2])),
        (13.0, lambda swarm: swarm.heal()),
    ]
    ends = both(Scenario(script, 25.0, tuned(chunk_elements=1024, doubt_s=4.0, mix_every_steps=2)))
    assert states(ends[0])[1] == "dead"
    assert len(lent) > 20
