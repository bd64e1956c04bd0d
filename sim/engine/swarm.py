"""The simulator's driver: all peers of a swarm on one event heap in virtual time, structured like node/network/.

A Peer decides and returns *effects*, and its driver carries them out. A *host* (:mod:`sim.engine.host`) is one life of
a peer with its model. A *founder* holds weights from the start; all others join and fetch them.
"""

import gc
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gossip.averaging.averager import PERFORM
from gossip.codecs import COMPILED, Machine
from gossip.config import Config
from gossip.discovery.seeds import Bootstrap
from gossip.effects import (
    Dial,
    Effect,
    Gather,
    LeaveOut,
    MemberChanged,
    Merge,
    Mix,
    Notice,
    Punch,
    ReceiveMoments,
    ReceivePiece,
    Release,
    Rename,
    Send,
    SendMoments,
    SendPiece,
    Snapshot,
    Transfer,
    TryDial,
    Tunnel,
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
from sim.engine.hidden import HiddenDials
from sim.engine.host import DurationSource, Floats, Host, Setup, name_of_life
from sim.engine.ideal import IdealLinks, IdealMembers, Registry
from sim.engine.links import VirtualLinks
from sim.engine.sessions import Sessions
from sim.engine.training import POLL_S, OneByOne, Trainer, Training
from sim.learning.optimizer.moments import MomentPlan
from sim.level import Counts
from sim.scenario.adversaries import Attacker, unguarded
from sim.seeds import derive
from sim.world.nat import PORT
from sim.world.network import NetworkModel

REST_S = 0.01  # Pause after a tick that did not move the peer's deadline, as on a real node.
TICK = 210  # Code in the event log of a timer that fired, above those of sim.engine.links.


class Swarm:
    """A swarm of peers with one Config on one network. The same seed and calls give the same :meth:`digest`.

    By default nothing trains, and the swarm averages its initial vectors.

    Args:
        seed: The seed of all randomness.
        network: Latencies and rates.
        config: The settings of all peers.
        on_step: Called as ``on_step(index, vector, steps)`` for each step of a ready peer; it may change the vector.
        trainer: Computes the steps of many peers at once, in place of ``on_step``.
        ideal: Use :mod:`sim.engine.ideal` instead of the membership protocol.
        machine: What exchanges cost each peer.
        timeline: Records all peers.
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
        machine: Machine = COMPILED,
        timeline: TimelineWriter | None = None,
    ) -> None:
        self.machine, self.timeline = machine, timeline
        self.seed, self.network, self.config = seed, network, config
        self.hosts: list[Host] = []
        self.restarts = 0
        self.events = Events()
        # The leading elements that the outer step covers; buffers behind them are averaged plainly. None: all.
        self.parameters: int | None = getattr(trainer, "parameters", None)
        self.has_correction = getattr(trainer, "corrections", None) is not None
        self.moment_plan: MomentPlan | None = getattr(trainer, "moment_plan", None)
        if on_step is not None:
            trainer = OneByOne(self.hosts, on_step)
        self.registry = Registry() if ideal else None
        self.graph = Graph.from_file(config.graph) if config.graph else None
        self.selector: Selector | None = None  # Shared by all peers where the method allows it.
        self.training = Training(self.events, self.hosts, config, self.perform, self.arm_timer, trainer)
        wiring = self.events, network, config, self.perform, self.training.report_steps
        self.links = VirtualLinks(*wiring) if self.registry is None else IdealLinks(*wiring, self.registry)
        self.sessions = Sessions(self.events, network, config, self.links, self.perform)
        sessions, hidden = self.sessions, HiddenDials(self.links)
        # The handler of each type of effect. The types in PERFORM, and Rename, concern the averager alone. Notices and
        # changes of members inform people, who can query the peers here.
        self.performers: dict[type, Callable[[Host, Any], None]] = dict.fromkeys(
            PERFORM, lambda host, effect: host.averager.perform(effect)
        ) | {
            Send: self.links.send, Dial: self.links.dial, TryDial: self.links.dials.try_dial,
            Punch: hidden.punch, Tunnel: hidden.tunnel,
            Snapshot: sessions.snapshot, Transfer: sessions.transfer, Gather: sessions.gather,
            LeaveOut: sessions.leave_out, Mix: sessions.mix, Merge: sessions.merge,
            Rename: lambda host, effect: host.averager.rename(effect),
            Release: sessions.release, SendPiece: sessions.send_piece,
            ReceivePiece: sessions.receive, ReceiveMoments: sessions.receive,
            SendMoments: sessions.send_moments, **dict.fromkeys((Notice, MemberChanged), lambda host, effect: None),
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
        step_s: float | DurationSource = 0.1,
        samples_per_step: int = 1,
        name: str | None = None,
        founder: bool = False,
        row: int | None = None,
        attacker: Attacker | None = None,
    ) -> int:
        """Start a peer now and return its index.

        Args:
            vector: The model, float32, shape (elements,). It is changed in place, so it may be a row of a matrix.
            seeds: Indices of peers to join through; none to start a swarm.
            step_s: Seconds for a step, or the source of each step's.
            samples_per_step: Batch size.
            name: Together with the swarm's seed it determines the peer's randomness; by default the index.
            founder: True if the peer starts with the weights of the founders' common run; :meth:`introduce` makes
                founders known to each other. Any other peer joins, in an ideal swarm without seeds.
            row: The trainer's row for this peer; by default its index.
            attacker: Makes the peer an attacker, and computes what it sends.
        """
        index = len(self.hosts)
        setup = Setup(
            index=index, name=str(index) if name is None else name, vector=vector, attacker=attacker,
            draw_durations=constant(step_s) if isinstance(step_s, int | float) else step_s,
            samples_per_step=samples_per_step, row=index if row is None else row,
        )  # fmt: skip
        self.network.add(setup.name)
        config = self.config if attacker is None else unguarded(self.config)
        return self.launch(setup, self.make_peer(setup.name, 0, vector.size, seeds, founder, config))

    def introduce(self) -> None:
        """Make the founders known to each other, as one launcher does for its processes; they have no seeds."""
        founders = [host for host in self.hosts if host.peer.membership.me.ready]
        records = [host.peer.membership.me for host in founders]
        for host in founders:
            host.peer.add_founders(records, self.now)
            self.arm_timer(host)

    def make_peer(
        self, name: str, life: int, elements: int, seeds: Iterable[int], founder: bool = False,
        config: Config | None = None,
    ) -> Peer:  # fmt: skip
        """Create the Peer of one life; ``life`` counts the restarts. Each life has random draws of its own."""
        draws_name = name_of_life(name, life)
        selector = self.selector or selector_of(self.config, self.graph)
        if self.registry is not None and not selector.is_personal:
            self.selector = selector  # Peers share one table of members, so it is sorted only once.
        nat = self.network.nat
        address = Address(f"peer-{name}", PORT) if nat is None else nat.inside(name)
        record = MemberRecord(
            PeerId(derive(self.seed, name, "id")[:16]), b"", life + 1, address=address,
            run_id=derive(self.seed, "" if founder else draws_name, "genesis")[:16], ready=founder,
        )  # fmt: skip
        config, rng = config or self.config, random.Random(derive(self.seed, draws_name, "peer"))
        members: Members
        if self.registry is None:
            members = Membership(record, sign=unsigned, verify=trusting, config=config, rng=rng, now=self.now)
        else:
            members = IdealMembers(self.registry, record)
        # A peer without seeds and without a book, the addresses from an earlier life, begins a run of its own. In an
        # ideal swarm a newcomer has no seeds and must wait for the swarm's run, so its book holds its own record.
        book = [record] if self.registry is not None and not founder else ()
        bootstrap = Bootstrap(tuple(self.hosts[seed].address for seed in seeds), book=book)
        model = LocalModel(f"vector of {elements}", elements, machine=self.machine)
        return Peer(members, config, model, rng=rng, bootstrap=bootstrap, selector=selector, now=self.now)

    def launch(self, setup: Setup, peer: Peer, first_step_s: float | None = None, life: int = 0) -> int:
        """Create the host of a peer's life, begin its training loop, start the peer, and return its index.

        ``first_step_s`` None: the first step is in progress already, at a random phase.
        """
        index, vector = setup.index, setup.vector
        assert vector.dtype == np.float32, "models are float32 vectors"
        assert vector.ndim == 1, "models are flat vectors"
        host, training = Host(setup, life, self.seed, peer, self.events, self.perform), self.training
        host.make_averager(
            self.config, training.request_visit, training.prepare_copy, self.parameters, self.has_correction,
            None if self.moment_plan is None else self.moment_plan.of_row(setup.row),
        )  # fmt: skip
        if self.timeline is not None:
            host.timeline = NodeTimeline(self.timeline, index + 1, f"peer {setup.name}, {host.id.hex()[:8]}")
            host.timeline.record_event("starts" if not life else "starts again", self.now)
        if index == len(self.hosts):
            self.hosts.append(host)
        else:
            self.hosts[index] = host
        self.links.add(host)
        if first_step_s is None:  # The phase is random, so that peers do not all mix at the same instants.
            phase = random.Random(derive(self.seed, host.draws_name, "phase")).random()
            first_step_s = float(setup.draw_durations(1)[0]) * (1.0 - phase)
        training.begin_loop(host, self.now + first_step_s)
        self.perform(host, peer.start(self.now))
        return index

    def restart(self, index: int, seeds: Iterable[int]) -> None:
        """Restart a peer that was killed or has left; the same member begins a new life and fetches the weights."""
        before = self.hosts[index]
        if before.is_leaving and not before.gone:
            self.announce_left(before)
        assert before.gone, "only a peer that is gone can be restarted"
        life = before.life + 1
        peer = self.make_peer(before.name, life, before.vector.size, seeds, config=before.peer.config)
        if self.training.trainer is not None:
            self.training.trainer.reset(before.row)
        self.launch(before.setup, peer, life=life)
        self.restarts += 1
        if self.restarts % len(self.hosts) == 0:
            gc.collect()  # Ended lives are cycles, and a run disables the collector. Peers hold tables of all members.

    def kill(self, index: int, silent: bool = False) -> None:
        """End a peer as kill -9 does; its machine closes the links to its partners.

        With ``silent`` the machine loses power as well, and the partners learn nothing.
        """
        host = self.hosts[index]
        self.training.end_loop(host)
        host.gone, host.silent = True, silent
        self.sessions.on_killed(host)
        if host.timeline is not None:
            host.timeline.record_event("is gone", self.now)
        self.links.on_killed(host)

    def leave(self, index: int) -> None:
        """Let a peer mix with the remaining ones, within its grace, then announce LEFT, and end it."""
        host = self.hosts[index]
        self.training.halt(host)
        self.training.report_steps(host)
        self.perform(host, host.peer.hand_over(self.now))
        self.wait_to_leave(host, self.now + host.peer.config.internal.grace_s)

    def wait_to_leave(self, host: Host, until: float) -> None:
        """Look again and again whether a peer that leaves has mixed, and end it then or at ``until``."""
        if host.gone:
            return
        if self.now < until and host.peer.view.is_handing_over:
            self.events.push(min(until, self.now + POLL_S), self.wait_to_leave, host, until)
        else:
            self.announce_left(host)

    def announce_left(self, host: Host) -> None:
        """Let a peer announce LEFT, and end it."""
        for effect in host.peer.leave(self.now):
            if not isinstance(effect, Send) or self.links.is_linked(host, effect.to):  # A leaving peer dials no others.
                self.performers[type(effect)](host, effect)
        self.kill(host.index)

    def partition(self, groups: Iterable[Iterable[int]]) -> None:
        """Partition the network into these groups; the other peers and newcomers form one more group."""
        self.links.carrier.partition(groups)

    def heal(self) -> None:
        """End the partition."""
        self.links.carrier.heal()

    def advance(self, when: float) -> None:
        """Advance virtual time to ``when``, in seconds; the vectors may lag behind."""
        self.events.run_until(when)

    def update_models(self) -> None:
        """Bring the vectors to the ends of their current steps, or of the last ones, as the trainer can."""
        self.training.update_models(self.now)

    def run_until(self, when: float) -> None:
        """Advance virtual time to ``when``, in seconds, and update the vectors."""
        self.advance(when)
        self.update_models()

    # -- questions -----------------------------------------------------------------------------------------------
    def alive(self) -> list[Host]:
        """Return the hosts that were not killed, have not left and do not mix a last time."""
        return [host for host in self.hosts if not (host.gone or host.is_leaving)]

    @property
    def handled_events(self) -> int:
        return self.events.handled_events

    @property
    def mixes(self) -> int:
        return self.sessions.durations.mixes

    def counts(self) -> Counts:
        """Return what the swarm has counted so far."""
        alive, sessions = self.alive(), self.sessions
        ready = [host for host in alive if host.peer.view.ready]
        intervals = [steps for host in alive if (steps := host.peer.schedule.every) is not None]
        refusals, relayed = Counter[str](), self.links.carrier.flows.relayed_bytes()
        for host in alive:
            if host.attacker is None:
                for (_, code), times in host.peer.exchanges.refusals.counts.items():
                    refusals[code] += times
        return Counts(
            live_peers=len(alive), ready_peers=len(ready),
            honest_rows=np.array([host.row for host in ready if host.attacker is None], np.int64),
            steps=self.training.steps, interval_steps=statistics.median_low(intervals) if intervals else None,
            exchanges=sessions.exchanges,
            failures=sessions.failures_of_gone + sum(host.peer.exchanges.failures for host in alive),
            sent_bytes=self.links.carrier.flows.sent_bytes + self.links.message_bytes,
            durations_s=sessions.durations.seconds, refusals=dict(refusals),
            relayed_bytes=sum(relayed.values()), most_relayed_bytes=max(relayed.values(), default=0),
        )  # fmt: skip

    def digest(self) -> str:
        """Return the SHA-256 of the event log and all vectors, in hexadecimal."""
        digest = self.events.digest()
        for host in self.hosts:
            digest.update(host.vector.tobytes())
        return digest.hexdigest()

    # -- effects and time ----------------------------------------------------------------------------------------
    def perform(self, host: Host, effects: list[Effect]) -> None:
        """Perform a peer's effects, let its training loop react to its decisions, and arm its timer."""
        performers = self.performers
        for effect in effects:
            performers[type(effect)](host, effect)
        self.update_loop(host)
        if not host.is_visiting:  # During a visit, the timer is armed once at its end.
            self.arm_timer(host)

    def update_loop(self, host: Host) -> None:
        """Let the training loop react to the peer's decisions: they may resume it or make the next mix due sooner."""
        if host.pause is not None:
            self.training.schedule_poll(host)
        if host.is_offering and not host.peer.initiator.is_blocked:  # The peer may start an exchange again.
            host.is_offering, host.has_free_slot = False, True
        if host.has_free_slot:
            host.has_free_slot = False
            self.training.on_slot_freed(host)

    def arm_timer(self, host: Host) -> None:
        """Arm the host's one timer. If the deadline moves later, it fires early: cheaper than another event."""
        due = host.peer.deadline
        if due < host.timer_at:
            due = max(due, host.rest_until, self.events.now)
            if due < host.timer_at:
                host.timer_at = due
                self.events.push(due, self.on_timer, host, due)

    def on_timer(self, host: Host, due: float) -> None:
        """Tick the peer if its deadline has come, and arm the timer again."""
        if due != host.timer_at or host.gone:
            return
        host.timer_at = math.inf
        peer, now = host.peer, self.events.now
        if now >= peer.deadline and now >= host.rest_until:
            self.events.log(host.index, 0, TICK)
            performers = self.performers
            for effect in peer.tick(now):
                performers[type(effect)](host, effect)
            self.update_loop(host)
            if peer.deadline <= now:
                host.rest_until = now + REST_S
        self.arm_timer(host)


def constant(step_s: float) -> DurationSource:
    """Return the step durations of a peer whose steps all take ``step_s``."""
    return lambda count: np.full(count, step_s)
