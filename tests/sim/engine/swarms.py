"""Small swarms of short vectors, and helpers that wait for something in virtual time."""

from collections.abc import Callable

import numpy as np

from gossip.config import Config
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel

ELEMENTS = 16


def vector(index: int) -> np.ndarray:
    return np.random.default_rng(index).normal(size=ELEMENTS).astype(np.float32)


def swarm_of(
    peers: int,
    *,
    config: Config | None = None,
    on_step: Callable[[int, np.ndarray, int], None] | None = None,
    ideal: bool = False,
    **network: object,
) -> Swarm:
    """Return a swarm whose peers join through the first one, or an ideal one of founders that keep their vectors."""
    swarm = Swarm(1, NetworkModel(**network), config or Config(), on_step, ideal=ideal)
    for index in range(peers):
        swarm.add_peer(vector(index), seeds=[0] if index and not ideal else [], founder=ideal)
    if ideal:
        swarm.introduce()
    return swarm


def run_while(swarm: Swarm, condition: Callable[[], bool], limit_s: float = 60.0, slice_s: float = 0.001) -> None:
    """Run until the condition no longer holds, to the precision of a slice."""
    limit = swarm.now + limit_s
    while condition():
        assert swarm.now < limit, f"still so after {limit_s} virtual seconds (seed {swarm.seed})"
        swarm.run_until(swarm.now + slice_s)


def are_linked(swarm: Swarm, a: int = 0, b: int = 1) -> bool:
    one, other = swarm.hosts[a], swarm.hosts[b]
    return other.id in one.links and one.id in other.links
