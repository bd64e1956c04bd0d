"""The simulator's driver: every peer of a swarm in virtual time on one heap, the same shape as node/network/."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gossip.averaging.averager import PERFORM
from gossip.codecs import COMPILED, Machine
from gossip.config import Config
from gossip.effects import (
    Collect,
    Dial,
    Effect,
    Gather,
    MemberChanged,
    Merge,
    Mix,
    Notice,
    Release,
    Rename,
    Send,
    Serve,
    Snapshot,
    Transfer,
    TryDial,
)  # fmt: skip
from gossip.ids import Address, MemberRecord, PeerId
from gossip.peer import Peer
from gossip.selection.graphs import Graph
from gossip.selection.registry import selector_of
from gossip.selection.rule import Selector
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

REST_S = 0.01  # after a tick that did not move its deadline, as a node rests
PORT = 7700
TICK = 210  # in the log of events, above those of sim.links


def constant(step_s: float) -> Times:
    """Steps that all take the same time."""
    return lambda count: np.full(count, step_s)


class Swarm:
    """Peers of one Config on one Network. The same seed and the same calls give the same :meth:`digest`.

    ``on_step(index, vector, steps)`` is called for each step that a ready peer takes, and may change the vector; or a
    ``trainer`` computes the steps of many peers at once. By default nothing trains, and the swarm averages what it
    began with. ``parameters``: how many elements of a vector the outer step takes; buffers behind them are averaged
    plainly. ``machine``: what exchanges cost each peer. ``ideal``: everybody knows at once who is there
    (:mod:`sim.engine.ideal`), in place of the membership protocol.
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
        self.lives: list[int] = []  # how often each was started
        self.events = Events()
        self.corrects = getattr(trainer, "corrections", None) is not None
        if on_step is not None:
            trainer = OneByOne(self.hosts, on_step)
        self.registry = Registry() if ideal else None
        self.graph = Graph.from_file(config.graph) if config.graph else None
        self.selector: Selector | None = None  # of all peers, where one can be
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
            Merge: sessions.merge, Rename: sessions.rename, Release: sessions.release, Collect: sessions.collect,
            Serve: sessions.serve, Notice: self.ignore, MemberChanged: self.ignore,
        }  # fmt: skip

    @property
    def now(self) -> float:
        """Virtual seconds since the swarm was made."""
        return self.events.now

    # -- what happens to the swarm -------------------------------------------------------------------------------
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
        """Start a peer now; returns its index. ``vector``: float32, one dimension, used as it is and changed in place,
        so it may be a row of the caller's matrix. ``seeds``: indices of peers to join through, none to start a swarm.
        ``founder``: it is of one run with the other founders, and holds its weights; :meth:`introduce` lets them know
        each other. In an ideal swarm, which needs no seeds, everybody else joins. ``row``: what the trainer calls this
        peer, by default its index. ``liar``: it attacks, and this is what it sends.

        Its randomness comes from the swarm's seed and its ``name`` (by default its index).
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
        """The founders know each other, as processes that one launcher started; without it they are strangers, whom
        nothing would bring together."""
        founders = [host for host in self.hosts if host.peer.record.ready]
        records = [host.peer.record for host in founders]
        for host in founders:
            host.peer.introduce(records, self.now)
            self.arm(host)

    def make_peer(
        self, name: str, life: int, elements: int, seeds: Iterable[int], founder: bool = False,
        config: Config | None = None,
    ) -> Peer:  # fmt: skip
        whose = f"{name}/{life}" if life else name
        selector = self.selector or selector_of(self.config, elements, self.graph)
        if self.registry is not None and not selector.personal:
            self.selector = selector  # they share one table of members, and sort it once
        record = MemberRecord(
            PeerId(derive(self.seed, name, "id")[:16]), b"", life + 1, address=Address(f"peer-{name}", PORT),
            genesis=derive(self.seed, "" if founder else whose, "genesis")[:16], ready=founder,
        )  # fmt: skip
        ideal = self.registry is not None  # then a newcomer hopes without having a seed
        return Peer(
            record, sign=unsigned, verify=trusting, config=config or self.config, fingerprint=f"vector of {elements}",
            elements=elements, rng=random.Random(derive(self.seed, whose, "peer")),
            seeds=tuple(self.hosts[seed].address for seed in seeds), book=[record] if ideal and not founder else (),
            members=None if self.registry is None else IdealMembers(self.registry, record), selector=selector,
            machine=self.machine, now=self.now,
        )  # fmt: skip

    def host(
        self, peer: Peer, vector: Floats, name: str, step_s: float, first_step_s: float, samples_per_step: int = 1
    ) -> int:
        """Run a Peer that was made elsewhere; its first step ends in ``first_step_s``."""
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
        if index == len(self.hosts):
            self.hosts.append(host)
        else:
            self.hosts[index] = host
        self.links.add(host)
        if first_step_s is None:  # somewhere within a step, or all peers would mix at the same instants
            phase = random.Random(derive(self.seed, whose, "phase")).random()
            first_step_s = float(times(1)[0]) * (1.0 - phase)
        self.training.begin(host, self.now + first_step_s)
        self.perform(host, peer.start(self.now))
        return index

    def revive(self, index: int, seeds: Iterable[int]) -> None:
        """Start a peer again that was killed or left: the same member with a new life, which takes the weights of those
        present."""
        before = self.hosts[index]
        assert before.gone, "only one that is gone can come again"
        self.lives[index] += 1
        peer = self.make_peer(before.name, self.lives[index], before.vector.size, seeds, config=before.peer.config)
        if self.training.trainer is not None:
            self.training.trainer.reset(before.row)
        times, samples = before.times, before.samples_per_step
        self.launch(index, peer, before.vector, before.name, times, samples, row=before.row, liar=before.liar)
        before.end()

    def kill(self, index: int, silent: bool = False) -> None:
        """End a peer without a word, as kill -9 does: its machine tells its partners that their links are gone; or, a
        ``silent`` one, does not, as one that loses its power."""
        host = self.hosts[index]
        self.training.end(host)
        host.gone, host.silent = True, silent
        self.sessions.forget(host)
        self.links.killed(host)

    def leave(self, index: int) -> None:
        """Let a peer say LEFT and go."""
        host = self.hosts[index]
        self.training.seen(host)
        for effect in host.peer.leave(self.now):
            if not isinstance(effect, Send) or self.links.linked(host, effect.to):  # it does not stay to dial others
                self.performers[type(effect)](host, effect)
        self.kill(index)

    def partition(self, groups: Iterable[Iterable[int]]) -> None:
        """Cut the network into these groups of peers; those not named are one more, and newcomers belong to it."""
        self.links.carrier.partition(groups)

    def heal(self) -> None:
        """Join the groups again."""
        self.links.carrier.heal()

    def run_until(self, when: float) -> None:
        """Let virtual time pass up to ``when``, in seconds; the vectors then hold all steps that have ended."""
        self.events.run_until(when)
        self.training.settle(self.now)

    # -- questions -----------------------------------------------------------------------------------------------
    def alive(self) -> list[Host]:
        """Those neither killed nor gone."""
        return [host for host in self.hosts if not host.gone]

    def digest(self) -> str:
        """SHA-256 of the log of events and of all vectors, in hexadecimal."""
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
        if not host.visiting:  # else it is armed when its loop has left the boundary
            self.arm(host)

    def look(self, host: Host) -> None:
        """What was decided may let the training loop go on, or mix sooner than it would look."""
        if host.waiting is not None:
            self.training.stand(host)
        if host.offering and not host.peer.offering:
            host.offering, host.released = False, True
        if host.released:
            host.released = False
            self.training.released(host)

    def arm(self, host: Host) -> None:
        """One timer a host. A deadline that moved back lets the timer go off early, which costs less than another."""
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
        """What is for the averager alone."""
        host.averager.perform(effect)

    def ignore(self, host: Host, effect: Notice | MemberChanged) -> None:
        """For people, who ask the peers."""
