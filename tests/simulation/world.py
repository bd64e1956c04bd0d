"""A world of honest peers and liars in virtual time: one heap, and everything follows from the seed."""

from __future__ import annotations

import hashlib
import heapq
import random
import zlib
from collections.abc import Callable
from typing import Any

from gossip.config import Config
from gossip.ids import Address, PeerId
from tests.simulation.host import Host
from tests.simulation.judge import Failure, Judge
from tests.simulation.network import Network

__all__ = ["World", "address_of", "peer_id"]

FIRST_PORT = 1000


def peer_id(number: int) -> PeerId:
    """Of the host of this number; the digest's buckets are by the first byte."""
    return PeerId(hashlib.sha256(b"host %d" % number).digest()[:16])


def address_of(number: int) -> Address:
    return Address("10.0.0.1", FIRST_PORT + number)


class World:
    """``tell`` hears of every event in words; without it none are made."""

    def __init__(self, seed: int, config: Config, tell: Callable[[str], None] | None = None) -> None:
        self.seed, self.config, self.tell = seed, config, tell
        self.rng = random.Random(f"world {seed}")
        self.now = 0.0
        self.ties = 0
        self.events = 0
        self.digest = 0  # of all that was delivered, so that two processes can compare
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.hosts: list[Host] = []  # one for each life
        self.ports: dict[int, Host] = {}  # the present life at each port
        self.by_id: dict[PeerId, Host] = {}
        self.network = Network(self)
        self.judge = Judge(self)

    # -- hosts ---------------------------------------------------------------------------------------------------
    def add(self, host: Host) -> Host:
        self.hosts.append(host)
        self.ports[FIRST_PORT + host.number] = host
        self.by_id[host.id] = host
        return host

    def at(self, address: Address) -> Host | None:
        """Who listens there; a host that nobody can dial listens, behind its router."""
        host = self.ports.get(address.port)
        return None if host is None or host.gone else host

    @property
    def running(self) -> list[Host]:
        return [host for host in self.hosts if not host.gone]

    @property
    def honest(self) -> list[Host]:
        return [host for host in self.hosts if not host.gone and not host.liar]

    # -- time ----------------------------------------------------------------------------------------------------
    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        self.plan(self.now + delay_s, what, *arguments)

    def plan(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        """At this very time: ``now + (when - now)`` may be less, and a deadline just ahead would stay for ever."""
        self.ties += 1
        heapq.heappush(self.heap, (when, self.ties, what, arguments))

    def run(self, seconds: float) -> None:
        end, heap = self.now + seconds, self.heap
        while heap and heap[0][0] <= end:
            self.now, _, what, arguments = heapq.heappop(heap)
            self.events += 1
            what(*arguments)
        self.now = end

    def mark(self, message: Any, number: int) -> None:
        """What is delivered, to whom and when, for the digest."""
        self.digest = zlib.crc32(b"%s %d %f" % (type(message).__name__.encode(), number, self.now), self.digest)

    def note(self, text: str) -> None:
        """For whoever reads the trace."""
        if self.tell is not None:
            self.tell(f"{self.now:9.4f}  {text}")

    def fail(self, claim: str, detail: str) -> None:
        raise Failure(claim, f"{detail} (seed {self.seed}, at {self.now:.4f} s)")
