"""One scenario for both drivers: the same Peers, and the same things happening to them at the same virtual times."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gossip.arithmetic.sketch import Sketcher
from gossip.config import Config
from gossip.discovery.seeds import Bootstrap
from gossip.exchange.session import LocalModel
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from node.identity.keys import Identity, verify
from node.model.snapshot import ModelState
from sim.arrays import F64, I64
from sim.engine.host import FlowTransfer, Host, Setup
from sim.engine.swarm import Swarm, constant
from sim.engine.training import OneByOne
from sim.learning.corrections import Corrections
from sim.seeds import derive, derive_int
from sim.world.network import NetworkModel
from tests.agreement import memory_network
from tests.agreement.memory_network import START_S, World
from tests.harness.configs import tuned

ELEMENTS = 2_500  # Three chunks, the last one short.
STEP_S = 0.1
LEAVING_S = 1.0
FEW = 20  # Fewer durations than a node keeps.
MOST_PEERS = 8

Floats = np.ndarray


@dataclass(frozen=True)
class Wires(NetworkModel):
    """A network over which no two independent messages reach a peer at the same instant.

    The Peer does not decide the order of simultaneous events, so the two drivers need not agree on it. Therefore each
    direction of each pair has its own latency, with a jitter of a millionth of a second: without it, peers that answer
    each other's gossip would fall into step for ever. Steps end at different instants for the same reason.
    """

    rate_bytes_s: float = math.inf
    clock: Callable[[], float] = field(kw_only=True)

    def latency(self, sender: int, receiver: int) -> float:
        return 0.01 + 0.001 * (7 * sender + receiver) / 3 + 1e-6 * (7919.357 * self.clock() % 1.0)


Script = list[tuple[float, Callable[[Any], None]]]
"""Each action gets a driver, :class:`Simulated` or :class:`Running`, whose methods have the same names."""


@dataclass(frozen=True)
class Scenario:
    """Actions for a driver, each with its time in seconds from the start; ``seed`` seeds the peers' random numbers."""

    script: Script
    until_s: float
    config: Config = field(default_factory=lambda: tuned(chunk_elements=1024))
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """The final state of one peer.

    ``draws`` is a hash of the state of its random number generator. If two peers' hashes are equal, both made the same
    draws, so every sampled partner, every jitter and every session number was the same.
    """

    ready: bool
    run_id: bytes
    version: float
    steps: int
    incarnation: int
    exchanges: tuple[int, int]  # (done, failed)
    members: dict[PeerId, tuple[str, int, bool]]  # (state, incarnation, ready)
    links: frozenset[PeerId]
    durations: dict[PeerId, list[float]]  # Seconds of the last exchanges, by partner.
    exchange_s: list[float]  # Seconds of the last few mixes, each from the request for a snapshot.
    refusals: dict[tuple[PeerId, str], int]  # Updates that a filter refused or shortened, by partner and reason.
    mass: float  # The mass of push-sum.
    draws: str
    pull: bytes = field(repr=False)  # The vector that the correction learned.
    vector: bytes = field(repr=False)

    @classmethod
    def of(
        cls, peer: Peer, steps: int, mass: float, vector: Floats, exchange_s: Sequence[float], pull: Floats | None
    ) -> Outcome:
        return cls(
            peer.view.ready, peer.local.run_id, peer.local.version, steps, peer.membership.me.incarnation,
            (peer.exchanges.done_count, peer.exchanges.failures),
            {record.id: (state.value, record.incarnation, record.ready) for record, state in peer.membership.members()},
            frozenset(peer.linked_peers),
            {who: list(past) for who, past in peer.exchanges.durations.durations_s.items()},
            list(exchange_s[-FEW:]), dict(peer.exchanges.refusals.counts), mass,
            hashlib.sha256(repr(peer.rng.getstate()).encode()).hexdigest(),
            b"" if pull is None or not pull.any() else pull.tobytes(), vector.tobytes(),
        )  # fmt: skip

    @property
    def values(self) -> Floats:
        return np.frombuffer(self.vector, np.float32)


def start_vector(index: int) -> Floats:
    return np.random.default_rng(index).normal(size=ELEMENTS).astype(np.float32)


def train(index: int, vector: Floats, steps: int) -> None:
    """Move a peer's weights apart from the others' at its first step and at two later ones."""
    if steps in (1, 40, 80):
        vector += np.random.default_rng((index, steps)).normal(size=ELEMENTS).astype(np.float32)


def first_step_s(index: int) -> float:
    return STEP_S * (0.31 + 0.17 * index)


def identity(index: int) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(derive(0, str(index), "key")))


def make_peer(index: int, seeds: tuple[int, ...], scenario: Scenario, now: float) -> Peer:
    """Return the Peer that both drivers use, with a real key because a Runtime verifies its partners' signatures."""
    own = identity(index)
    record = MemberRecord(
        own.id, own.public_key, 1, address=address_of(index), run_id=derive(0, str(index), "genesis")[:16]
    )
    rng = random.Random(derive(scenario.seed, str(index), "peer"))
    return Peer(
        Membership(record, sign=own.sign, verify=verify, config=scenario.config, rng=rng, now=now), scenario.config,
        LocalModel(ModelState({"x": start_vector(0)}).layout.fingerprint, ELEMENTS), rng=rng,
        bootstrap=Bootstrap(tuple(address_of(seed) for seed in seeds)), now=now,
    )  # fmt: skip


def address_of(index: int) -> Address:
    return Address(f"peer-{index}", 7700)


# -- the simulator ---------------------------------------------------------------------------------------------------
class CorrectedSteps(OneByOne):
    """Steps one by one, corrected by the arithmetic that the simulator's learners use."""

    def __init__(self, config: Config) -> None:
        super().__init__([], lambda index, vector, steps: train(index, vector, steps))
        self.corrections = Corrections(MOST_PEERS, ELEMENTS, config)

    def train(self, rows: I64, counts: I64) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            host = self.hosts[row]
            for step in range(host.computed_steps - count + 1, host.computed_steps + 1):
                self.on_step(row, host.vector, step)
                self.corrections.apply(host.vector[None], np.array([row]), np.array([step]), np.zeros(1))

    def on_weights_replaced(self, row: int) -> None:
        self.corrections.reset(row)

    def learn_correction(
        self, rows: I64, shifts: Floats, credits: F64, own_sq: F64, interval_steps: I64 | None = None
    ) -> None:
        self.corrections.learn(rows, shifts, credits, own_sq, np.zeros(len(rows)), interval_steps)


class Simulated:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        wires = Wires(clock=lambda: self.swarm.now)
        self.steps = CorrectedSteps(scenario.config) if scenario.config.kappa else None
        self.swarm = Swarm(0, wires, scenario.config, None if self.steps else train, self.steps)
        if self.steps is not None:
            self.steps.hosts = self.swarm.hosts
        self.swarm.run_until(START_S)
        self.took: dict[int, list[float]] = {}  # Seconds of each mix, by host.
        self.count, self.swarm.sessions.count_mix = self.swarm.sessions.count_mix, self.counted

    def counted(self, host: Host, transfer: FlowTransfer, share: float) -> None:
        assert transfer.requested_at is not None
        self.took.setdefault(host.index, []).append(self.swarm.now - transfer.requested_at)
        self.count(host, transfer, share)

    def add(self, index: int, *seeds: int) -> None:
        peer = make_peer(index, seeds, self.scenario, self.swarm.now)
        name, place = str(index), len(self.swarm.hosts)
        self.swarm.network.add(name)
        durations = constant(STEP_S)
        setup = Setup(index=place, row=place, name=name, vector=start_vector(index), draw_durations=durations)
        self.swarm.launch(setup, peer, first_step_s(index))

    def kill(self, index: int) -> None:
        self.swarm.kill(index)

    def leave(self, index: int) -> None:
        self.swarm.leave(index)

    def settle(self, index: int, on: bool) -> None:
        host = self.swarm.hosts[index]
        self.swarm.perform(host, host.peer.settle(on, self.swarm.now))

    def partition(self, *groups: list[int]) -> None:
        self.swarm.partition(groups)

    def heal(self) -> None:
        self.swarm.heal()


def simulate(scenario: Scenario) -> dict[int, Outcome]:
    """Run the scenario in the simulator; return the outcome of every peer that is alive at its end, by index."""
    driver = Simulated(scenario)
    for when, act in scenario.script:
        driver.swarm.run_until(START_S + when)
        act(driver)
    driver.swarm.run_until(START_S + scenario.until_s)
    for host in driver.swarm.alive():
        driver.swarm.training.report_steps(host)  # The simulator has had no reason to count the last steps yet.
    return {
        host.index: Outcome.of(
            host.peer, host.steps, host.boundary.mass, host.vector, driver.took.get(host.index, []),
            None if driver.steps is None else driver.steps.corrections.pull[host.row],
        )
        for host in driver.swarm.alive()
    }  # fmt: skip


# -- real runtimes ---------------------------------------------------------------------------------------------------
class Running:
    def __init__(self, scenario: Scenario, nursery: trio.Nursery) -> None:
        self.scenario = scenario
        self.world = World(Wires(clock=trio.current_time), nursery)

    def add(self, index: int, *seeds: int) -> None:
        peer = make_peer(index, seeds, self.scenario, trio.current_time())
        self.world.add(peer, self.scenario.config, start_vector(index), train, STEP_S, first_step_s(index))
        if self.scenario.config.limits_directions:  # A node's secret is drawn; here it is that of the simulated peer.
            secret = derive_int(0, str(index), "sketch")
            self.world.nodes[index].runtime.streams.averager.sketcher = Sketcher(ELEMENTS, secret)

    def kill(self, index: int) -> None:
        self.world.nodes[index].kill()

    def leave(self, index: int) -> None:
        self.world.nodes[index].leave(LEAVING_S)

    def settle(self, index: int, on: bool) -> None:
        node = self.world.nodes[index]
        node.runtime.perform(node.peer.settle(on, trio.current_time()))

    def partition(self, *groups: list[int]) -> None:
        self.world.partition(groups)

    def heal(self) -> None:
        self.world.heal()


def run_nodes(scenario: Scenario) -> dict[int, Outcome]:
    """Run the scenario with real Runtimes; return the same as :func:`simulate`."""
    found: dict[int, Outcome] = {}

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            driver = Running(scenario, nursery)
            for when, act in scenario.script:
                await trio.sleep_until(START_S + when)
                act(driver)
            await trio.sleep_until(START_S + scenario.until_s)
            for index, node in enumerate(driver.world.nodes):
                if not node.gone:
                    node.check()
                    node.peer.update_counts(node.steps, node.steps)
                    found[index] = Outcome.of(
                        node.peer, node.steps, node.boundary.mass, node.vector, node.runtime.streams.durations,
                        None if node.correction is None else node.correction.pull,
                    )  # fmt: skip
            nursery.cancel_scope.cancel()

    memory_network.run(main)
    return found
