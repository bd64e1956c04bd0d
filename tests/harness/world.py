"""A small swarm in virtual time: one heap, and real Peers whose weights are one exact fraction each.

The seed determines the whole run.
"""

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any, NoReturn

from gossip.config import Config
from gossip.discovery.seeds import Bootstrap
from gossip.exchange.session import LocalModel
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.wire.records import trusting, unsigned
from tests.harness.host import Host
from tests.harness.network import Network

ELEMENTS = 10_000


def peer_id(number: int) -> PeerId:
    """Return an id; ids are ordered by their numbers, and spread over the digest's buckets."""
    return PeerId(bytes([8 * number + 1]) + hashlib.sha256(bytes([number])).digest()[:15])


def address_of(number: int) -> Address:
    return Address("10.0.0.1", 1000 + number)


class World:
    """A swarm. :meth:`run` advances its time; tests change it, its hosts and its network between runs."""

    def __init__(
        self, seed: int = 0, *, config: Config | None = None, latency_s: float = 0.01, loss: float = 0.0
    ) -> None:  # fmt: skip
        self.seed, self.config = seed, config or Config()
        self.rng = random.Random(f"swarm {seed}")
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.ties = self.events = 0
        self.hosts: list[Host] = []  # One for each life.
        self.by_id: dict[PeerId, Host] = {}
        self.listening: dict[Address, Host] = {}
        self.network = Network(self, latency_s, loss)

    # -- hosts -------------------------------------------------------------------------------------------------------
    def start(
        self, *seeds: int, kind: type[Host] = Host, value: int = 0, step_s: float = 0.1, dialable: bool = True,
        run_id: bytes | None = None, elements: int = ELEMENTS, frozen: int = 0, base: int = 0, hash_s: float = 0.0,
        **record: Any,
    ) -> Host:  # fmt: skip
        """Start a new process, which dials the processes with these numbers."""
        number = len(self.hosts)
        run_id = hashlib.sha256(b"genesis%d" % number).digest()[:16] if run_id is None else run_id
        me = MemberRecord(peer_id(number), b"", 1, address=address_of(number), run_id=run_id, **record)
        rng, bootstrap = random.Random(f"{self.seed} {number}"), Bootstrap(tuple(map(address_of, seeds)))
        members = Membership(me, sign=unsigned, verify=trusting, config=self.config, rng=rng, now=self.now)
        model = LocalModel("f", elements, frozen_elements=frozen)
        peer = Peer(members, self.config, model, rng=rng, bootstrap=bootstrap, now=self.now)
        host = kind(self, number, peer, value=value, step_s=step_s, dialable=dialable)
        host.base, host.hash_s = base, hash_s
        return self.enter(host)

    def swarm(self, count: int, **how: Any) -> list[Host]:
        """Start and return ``count`` hosts of one run; the first is the seed of all others."""
        return [self.start(*([0] if number else []), value=1000 * number, **how) for number in range(count)]

    def enter(self, host: Host) -> Host:
        self.hosts.append(host)
        self.by_id[host.id] = self.listening[address_of(host.number)] = host
        host.start()
        return host

    def at(self, address: Address) -> Host | None:
        """Return the running host at this address, even if it is behind a router and cannot be dialled; else None."""
        host = self.listening.get(address)
        return None if host is None or host.gone else host

    def unlink(self, a: Host, b: Host) -> None:
        """Break the links between the two hosts."""
        for link in list(a.links.get(b.id, ())):
            self.network.cut_link(link)

    # -- time --------------------------------------------------------------------------------------------------------
    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        self.plan(self.now + delay_s, what, *arguments)

    def plan(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        """Call ``what`` at exactly this time.

        A delay would not do: ``now + (when - now)`` may round to less, and a deadline just ahead would never be met.
        """
        self.ties += 1
        heapq.heappush(self.heap, (when, self.ties, what, arguments))

    def run(self, seconds: float) -> None:
        end, heap = self.now + seconds, self.heap
        while heap and heap[0][0] <= end:
            self.now, _, what, arguments = heapq.heappop(heap)
            self.events += 1
            what(*arguments)
        self.now = end

    def until(self, condition: Callable[[], bool], limit_s: float, look_s: float = 0.1) -> float:
        """Run until the condition holds; return the virtual seconds it took. After ``limit_s``, fail with the seed."""
        begin = self.now
        while not condition():
            assert self.now - begin <= limit_s, f"not within {limit_s} s (seed {self.seed})"
            self.run(look_s)
        return self.now - begin

    def fail(self, claim: str, detail: str) -> NoReturn:
        raise AssertionError(f"{claim}: {detail} (seed {self.seed}, at {self.now:.4f} s)")

    # -- questions ---------------------------------------------------------------------------------------------------
    @property
    def running(self) -> list[Host]:
        return [host for host in self.hosts if not host.gone]

    def agreed(self) -> bool:
        """Return True if all running hosts are ready and of one run."""
        return all(host.peer.view.ready and host.run_id == self.running[0].run_id for host in self.running)

    def quiet(self) -> bool:
        """Return True if no exchange is in progress. Each call also keeps the running hosts from beginning one."""
        for host in self.running:
            host.peer.schedule.retry_at = float("inf")
        return not any(host.peer.exchanges.table for host in self.running)

    def resume(self) -> None:
        """Mix again after :meth:`quiet`."""
        for host in self.running:
            host.peer.schedule.retry_at = self.now
