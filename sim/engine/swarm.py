"""The simulator's driver: all peers of a swarm on one event heap in virtual time, structured like node/network/."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gossip.averaging.averager import PERFORM
from gossip.codecs import COMPILED, Machine
from gossip.config import Config
from gossip.discovery import Bootstrap
from gossip.effects import (
    Dial,
    Effect,
    Gather,
    MemberChanged,
    Merge,
    Mix,
    Notice,
    ReceivePiece,
    Release,
    Rename,
    Send,
    Serve,
    Snapshot,
    Transfer,
    TryDial,
)  # fmt: skip
from gossip.exchange.session import LocalModel
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.members import Members
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.selection.graphs import Graph
from gossip.selection.registry import selector_of
from gossip.selection.rule import Selector
from gossip.timeline import NodeTimeline, TimelineWriter
from gossip.wire.records import trusting, unsigned
from sim.engine.events import Events
from sim.engine.host import Floats, Host, Times
from sim.engine.ideal import IdealLinks, IdealMembers, Registry
from sim.engine.links import VirtualLinks
from sim.engine.sessions import Sessions
from sim.engine.training import OneByOne, Trainer, Training
from sim.scenario.adversaries import Liar, unguarded
from sim.seeds import derive
from sim.world.network import NetworkModel

__all__ = ["Swarm"]

REST_S = 0.01  # pause after a tick that did not move the peer's deadline, as on a real node
PORT = 7700
TICK = 210  # code in the event log, above those of sim.engine.links


def constant(step_s: float) -> Times:
    """Return the step times of a peer whose steps all take ``step_s``."""
    return lambda count: np.full(count, step_s)


class Swarm:
    """A swarm of peers with one Config on one network. The same seed and calls give the same :meth:`digest`.

    ``on_step(index, vector, steps)`` is called for each step of a ready peer and may change the vector. Alternatively,
    a ``trainer`` computes the steps of many peers at once. By default nothing trains, and the swarm averages its
    initial vectors. ``parameters``: number of leading elements that the outer step covers; the buffers behind them are
    averaged plainly. ``machine``: what exchanges cost each peer. ``ideal``: use :mod:`sim.engine.ideal` instead of the
    membership protocol.
    """

    def __init__(
        self,
        seed: int,
        network: NetworkModel,
        config: Config,
        on_step: Callable[[int, Floats, int], None] | None = None,
        trainer: Trainer | None = None,
        *,
        ideal: bool = False,
        parameters: int | None = None,
        machine: Machine = COMPILED,
    ) -> None:
        self.machine = machine
        self.seed, self.network, self.config, self.parameters = seed, network, config, parameters
        self.hosts: list[Host] = []
        self.lives: list[int] = []  # restarts of each peer
        self.events = Events()
        self.timeline: TimelineWriter | None = None  # records all peers that start from now on
        self.corrects = getattr(trainer, "corrections", None) is not None
        if on_step is not None:
            trainer = OneByOne(self.hosts, on_step)
        self.registry = Registry() if ideal else None
        self.graph = Graph.from_file(config.graph) if config.graph else None
        self.selector: Selector | None = None  # shared by all peers where the method allows it
        self.links = VirtualLinks(self.events, network, config, self.perform)
        if self.registry is not None:
            self.links = IdealLinks(self.events, network, config, self.perform, self.registry)
        self.training = Training(self.events, self.hosts, config, self.perform, trainer)
        self.links.seen, self.training.arm = self.training.seen, self.arm
        self.sessions = Sessions(self.events, network, config, self.links, self.perform)
        sessions = self.sessions
        self.performers: dict[type, Callable[[Host, Any], None]] = dict.fromkeys(PERFORM, self.average) | {
            Send: self.links.send, Dial: self.links.dial, TryDial: self.links.try_dial,
            Snapshot: sessions.snapshot, Transfer: sessions.transfer, Gather: sessions.gather, Mix: sessions.mix,
            Merge: sessions.merge, Rename: sessions.rename, Release: sessions.release, ReceivePiece: sessions.collect,
            Serve: sessions.serve, Notice: self.ignore, MemberChanged: self.ignore,
        }  # fmt: skip

    @property
    def now(self) -> float:
        """Return the virtual time in seconds since the swarm was created."""
        return self.events.now

    # -- peers and the network -----------------------------------------------------------------------------------
    def add_peer(
        self,
        vector: Floats,
        seeds: Iterable[int] = (),
        *,
        step_s: float | Times = 0.1,
        samples_per_step: int = 1,
        name: str | None = None,
        founder: bool = False,
        row: int | None = None,
        liar: Liar | None = None,
    ) -> int:
        """Start a peer now and return its index.

        Args:
            vector: The model, float32, shape (elements,). It is changed in place, so it may be a row of a matrix.
            seeds: Indices of peers to join through; none to start a swarm.
            step_s: Seconds for a step, or a function that draws them.
            samples_per_step: Batch size.
            name: Together with the swarm's seed it determines the peer's randomness; by default the index.
            founder: True if the peer starts with the weights of the founders' common run; :meth:`introduce` makes
                founders known to each other. Any other peer joins, in an ideal swarm without seeds.
            row: The trainer's row for this peer; by default its index.
            liar: Makes the peer an attacker, and computes what it sends.
        """
        name = str(len(self.hosts)) if name is None else name
        times = constant(step_s) if isinstance(step_s, int | float) else step_s
        index = len(self.hosts)
        self.network.add(name)
        self.lives.append(0)
        config = self.config if liar is None else unguarded(self.config)
        peer = self.make_peer(name, 0, vector.size, seeds, founder, config)
        return self.launch(index, peer, vector, name, times, samples_per_step, row=row, liar=liar)

    def introduce(self) -> None:
        """Make the founders known to each other, as one launcher does for its processes; they have no seeds."""
        founders = [host for host in self.hosts if host.peer.membership.me.ready]
        records = [host.peer.membership.me for host in founders]
        for host in founders:
            host.peer.add_founders(records, self.now)
            self.arm(host)

    def make_peer(
        self, name: str, life: int, elements: int, seeds: Iterable[int], founder: bool = False,
        config: Config | None = None,
    ) -> Peer:  # fmt: skip
        whose = f"{name}/{life}" if life else name
        selector = self.selector or selector_of(self.config, elements, self.graph)
        if self.registry is not None and not selector.is_personal:
            self.selector = selector  # peers share one table of members, so it is sorted only once
        record = MemberRecord(
            PeerId(derive(self.seed, name, "id")[:16]), b"", life + 1, address=Address(f"peer-{name}", PORT),
            run_id=derive(self.seed, "" if founder else whose, "genesis")[:16], ready=founder,
        )  # fmt: skip
        ideal = self.registry is not None  # a newcomer then has no seeds; its book makes it wait for a run
        config, rng = config or self.config, random.Random(derive(self.seed, whose, "peer"))
        members: Members
        if self.registry is None:
            members = Membership(record, sign=unsigned, verify=trusting, config=config, rng=rng, now=self.now)
        else:
            members = IdealMembers(self.registry, record)
        bootstrap = Bootstrap(
            tuple(self.hosts[seed].address for seed in seeds), book=[record] if ideal and not founder else ()
        )  # fmt: skip
        model = LocalModel(f"vector of {elements}", elements, machine=self.machine)
        return Peer(members, config, model, rng=rng, bootstrap=bootstrap, selector=selector, now=self.now)

    def host(
        self, peer: Peer, vector: Floats, name: str, step_s: float, first_step_s: float, samples_per_step: int = 1
    ) -> int:
        """Run a Peer that the caller created, and return its index; its first step takes ``first_step_s``."""
        self.network.add(name)
        self.lives.append(0)
        return self.launch(len(self.hosts), peer, vector, name, constant(step_s), samples_per_step, first_step_s)

    def launch(
        self, index: int, peer: Peer, vector: Floats, name: str, times: Times, samples_per_step: int,
        first_step_s: float | None = None, row: int | None = None, liar: Liar | None = None,
    ) -> int:  # fmt: skip
        assert vector.dtype == np.float32, "models are float32 vectors"
        assert vector.ndim == 1, "models are flat vectors"
        life = self.lives[index]
        whose = f"{name}/{life}" if life else name
        rng = random.Random(derive(self.seed, whose, "network"))
        key = int.from_bytes(derive(self.seed, whose, "lines")[:8], "little")
        row = index if row is None else row
        host = Host(
            index, name, peer, vector, times, samples_per_step, rng, key, row, self.events, self.perform, liar
        )  # fmt: skip
        host.make_averager(self.config, self.training.wish, self.training.recall, self.parameters, self.corrects)
        if self.timeline is not None:
            host.timeline = NodeTimeline(self.timeline, index + 1, f"peer {name}, {host.id.hex()[:8]}")
            host.timeline.happened("starts" if not life else "starts again", self.now)
        if index == len(self.hosts):
            self.hosts.append(host)
        else:
            self.hosts[index] = host
        self.links.add(host)
        if first_step_s is None:  # a random phase within a step, so that peers do not all mix at the same instants
            phase = random.Random(derive(self.seed, whose, "phase")).random()
            first_step_s = float(times(1)[0]) * (1.0 - phase)
        self.training.begin(host, self.now + first_step_s)
        self.perform(host, peer.start(self.now))
        return index

    def revive(self, index: int, seeds: Iterable[int]) -> None:
        """Restart a peer that was killed or has left; the same member begins a new life and fetches the weights."""
        before = self.hosts[index]
        assert before.gone, "only a peer that is gone can be restarted"
        self.lives[index] += 1
        peer = self.make_peer(before.name, self.lives[index], before.vector.size, seeds, config=before.peer.config)
        if self.training.trainer is not None:
            self.training.trainer.reset(before.row)
        times, samples = before.times, before.samples_per_step
        self.launch(index, peer, before.vector, before.name, times, samples, row=before.row, liar=before.liar)
        before.end()

    def kill(self, index: int, silent: bool = False) -> None:
        """End a peer as kill -9 does; its machine closes the links to its partners.

        With ``silent`` the machine loses power as well, and the partners learn nothing.
        """
        host = self.hosts[index]
        self.training.end(host)
        host.gone, host.silent = True, silent
        self.sessions.forget(host)
        if host.timeline is not None:
            host.timeline.happened("is gone", self.now)
        self.links.killed(host)

    def leave(self, index: int) -> None:
        """Let a peer announce LEFT, and end it."""
        host = self.hosts[index]
        self.training.seen(host)
        for effect in host.peer.leave(self.now):
            if not isinstance(effect, Send) or self.links.linked(host, effect.to):  # a leaving peer dials no others
                self.performers[type(effect)](host, effect)
        self.kill(index)

    def partition(self, groups: Iterable[Iterable[int]]) -> None:
        """Partition the network into these groups; the other peers and newcomers form one more group."""
        self.links.carrier.partition(groups)

    def heal(self) -> None:
        """End the partition."""
        self.links.carrier.heal()

    def run_until(self, when: float) -> None:
        """Advance virtual time to ``when``, in seconds; the vectors then contain all steps that have ended."""
        self.events.run_until(when)
        self.training.settle(self.now)

    # -- questions -----------------------------------------------------------------------------------------------
    def alive(self) -> list[Host]:
        """Return the hosts that were not killed and have not left."""
        return [host for host in self.hosts if not host.gone]

    def digest(self) -> str:
        """Return the SHA-256 of the event log and all vectors, in hexadecimal."""
        whole = self.events.digest()
        for host in self.hosts:
            whole.update(host.vector.tobytes())
        return whole.hexdigest()

    # -- effects and time ----------------------------------------------------------------------------------------
    def perform(self, host: Host, effects: list[Effect]) -> None:
        performers = self.performers
        for effect in effects:
            performers[type(effect)](host, effect)
        self.look(host)
        if not host.visiting:  # during a visit, the timer is armed once at its end
            self.arm(host)

    def look(self, host: Host) -> None:
        """Let the training loop react to the peer's decisions: they may release it or make the next mix due sooner."""
        if host.waiting is not None:
            self.training.stand(host)
        if host.offering and not host.peer.initiator.is_blocked:
            host.offering, host.released = False, True
        if host.released:
            host.released = False
            self.training.released(host)

    def arm(self, host: Host) -> None:
        """Arm the host's one timer. If the deadline moves later, it fires early: cheaper than another event."""
        due = host.peer.deadline
        if due < host.armed:
            due = max(due, host.rest_until, self.events.now)
            if due < host.armed:
                host.armed = due
                self.events.push(due, self.on_timer, host, due)

    def on_timer(self, host: Host, due: float) -> None:
        if due != host.armed or host.gone:
            return
        host.armed = math.inf
        peer, now = host.peer, self.events.now
        deadline = peer.deadline
        if now >= deadline and now >= host.rest_until:
            self.events.note(host.index, 0, TICK)
            performers = self.performers
            for effect in peer.tick(now):
                performers[type(effect)](host, effect)
            self.look(host)
            deadline = peer.deadline
            if deadline <= now:
                host.rest_until = now + REST_S
        due = max(deadline, host.rest_until, now)
        if due < host.armed:
            host.armed = due
            self.events.push(due, self.on_timer, host, due)

    def average(self, host: Host, effect: Effect) -> None:
        """Perform an effect that concerns only the averager."""
        host.averager.perform(effect)

    def ignore(self, host: Host, effect: Notice | MemberChanged) -> None:
        """Do nothing: these effects inform people, who can query the peers here."""
