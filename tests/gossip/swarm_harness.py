"""A small swarm of real :class:`gossip.peer.Peer` objects in virtual time, whose driver really averages: each node's
weights are one exact fraction, so that the mean can be compared with ``==``."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from gossip.arithmetic.mixing import push_mass
from gossip.config import Config
from gossip.effects import (
    Adopt,
    Collect,
    Confirm,
    Dial,
    Effect,
    Merge,
    Mix,
    Notice,
    Recall,
    Release,
    Rename,
    Restore,
    Send,
    Serve,
    Snapshot,
    Transfer,
    TryDial,
)  # fmt: skip
from gossip.ids import Address, MemberRecord, PeerId
from gossip.peer import Peer
from gossip.wire.messages import Message
from gossip.wire.records import trusting, unsigned

ELEMENTS = 10_000


def peer_id(number: int) -> PeerId:
    """Ordered as the numbers are, and spread over the digest's buckets."""
    return PeerId(bytes([8 * number + 1]) + hashlib.sha256(bytes([number])).digest()[:15])


def address_of(number: int) -> Address:
    return Address("10.0.0.1", 1000 + number)


@dataclass
class Node:
    number: int
    id: PeerId
    peer: Peer
    value: Fraction
    step_s: float
    dialable: bool = True
    running: bool = True
    stepping: bool = True
    learning: int = 0  # what a step adds to the value
    samples_per_step: int = 1
    steps: int = 0
    links: dict[PeerId, int] = field(default_factory=dict)  # to whom -> which life of that link
    waiting: dict[PeerId, list[Message]] = field(default_factory=dict)  # to be sent when the dial succeeds
    wanted: dict[int, int] = field(default_factory=dict)  # snapshots, and to how many partners they are pushed
    mass: Fraction = Fraction(1)  # of push-sum
    merges: list[tuple[Fraction, Fraction]] = field(default_factory=list)  # masses and values to be merged
    snapshots: dict[int, Fraction] = field(default_factory=dict)
    streams: dict[int, PeerId] = field(default_factory=dict)
    receives: dict[int, bool] = field(default_factory=dict)
    theirs: dict[int, Fraction] = field(default_factory=dict)
    shifts: list[Fraction] = field(default_factory=list)
    adoption: Fraction | None = None
    trial: bool = False
    kept: Fraction | None = None  # while other weights are on trial
    restoring: bool = False
    loss: Callable[[Node], float | None] = lambda node: None
    collecting: dict[int, Collect] = field(default_factory=dict)
    collected: list[tuple[int, int, Fraction, PeerId]] = field(default_factory=list)
    joining_since: float = -1.0
    serving: set[int] = field(default_factory=set)
    mixes: list[tuple[float, int, PeerId]] = field(default_factory=list)
    dials: list[tuple[float, Address]] = field(default_factory=list)
    notices: list[tuple[float, str, str]] = field(default_factory=list)
    sent: list[tuple[float, PeerId, Message]] = field(default_factory=list)
    armed: float = float("inf")

    @property
    def kinds(self) -> list[str]:
        return [kind for _, kind, _ in self.notices]

    @property
    def genesis(self) -> bytes:
        return self.peer.local.genesis


class Swarm:
    """Drive it with :meth:`run`; change it between runs. Everything follows from ``seed``."""

    def __init__(
        self, seed: int = 0, *, latency_s: float = 0.01, loss: float = 0.0, config: Config | None = None
    ) -> None:
        self.seed, self.latency_s, self.loss = seed, latency_s, loss
        self.config = config or Config()
        self.rng = random.Random(f"swarm {seed}")
        self.now = 0.0
        self.nodes: list[Node] = []
        self.by_id: dict[PeerId, Node] = {}
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.ties = 0
        self.lives = 0
        self.stream_s = 0.05
        self.chunk_s = 0.01
        self.cut: Callable[[int, int], bool] = lambda a, b: False  # by numbers
        self.log: list[tuple[PeerId, Effect]] = []

    # -- what happens ------------------------------------------------------------------------------------------------
    def start(
        self, *seeds: int, value: int = 0, step_s: float = 0.1, genesis: bytes | None = None, dialable: bool = True,
        elements: int = ELEMENTS, **record: Any,
    ) -> Node:  # fmt: skip
        """A new process, which dials the processes of these numbers."""
        number = len(self.nodes)
        genesis = hashlib.sha256(b"genesis%d" % number).digest()[:16] if genesis is None else genesis
        me = MemberRecord(peer_id(number), b"", 1, address=address_of(number), genesis=genesis, **record)
        rng = random.Random(f"{self.seed} {number}")
        peer = Peer(
            me, sign=unsigned, verify=trusting, config=self.config, fingerprint="f", elements=elements, rng=rng,
            seeds=tuple(address_of(seed) for seed in seeds), now=self.now,
        )  # fmt: skip
        node = Node(number, me.id, peer, Fraction(value), step_s, dialable)
        self.nodes.append(node)
        self.by_id[node.id] = node
        self.perform(node, peer.start(self.now))
        self.later(step_s * rng.random(), self.boundary, node)
        return node

    def swarm(self, count: int, **how: Any) -> list[Node]:
        """``count`` nodes of one run; the first is the seed of all others."""
        return [self.start(*([0] if number else []), value=1000 * number, **how) for number in range(count)]

    def kill(self, node: Node) -> None:
        node.running = False
        for peer in list(node.links):
            self.unlink(node, self.by_id[peer])

    def unlink(self, a: Node, b: Node) -> None:
        """The connection breaks; what is on its way is lost."""
        for one, other in ((a, b), (b, a)):
            if one.links.pop(other.id, None) is not None:
                self.later(self.latency_s, self.broken, one, other.id)

    def partition(self, side: Callable[[int], int] | None) -> None:
        """Cut the links between nodes of different sides, and let none through; None heals."""
        self.cut = (lambda a, b: side(a) != side(b)) if side else (lambda a, b: False)
        for node in self.nodes:
            for peer in list(node.links):
                if self.cut(node.number, self.by_id[peer].number):
                    self.unlink(node, self.by_id[peer])

    # -- time --------------------------------------------------------------------------------------------------------
    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.heap and self.heap[0][0] <= end:
            self.now, _, what, arguments = heapq.heappop(self.heap)
            what(*arguments)
        self.now = end

    def until(self, condition: Callable[[], bool], limit_s: float) -> float:
        begin = self.now
        while not condition():
            assert self.now - begin <= limit_s, f"not within {limit_s} s (seed {self.seed})"
            self.run(0.1)
        return self.now - begin

    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        self.plan(self.now + delay_s, what, *arguments)

    def plan(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        """At this very time: ``now + (when - now)`` may be less, and a deadline just ahead would stay for ever."""
        self.ties += 1
        heapq.heappush(self.heap, (when, self.ties, what, arguments))

    def arm(self, node: Node) -> None:
        deadline = node.peer.deadline
        if deadline < node.armed:
            node.armed = deadline
            self.plan(max(deadline, self.now), self.fire, node)

    def fire(self, node: Node) -> None:
        if node.armed > self.now:
            return
        node.armed = float("inf")
        for _ in range(3):  # what a tick changes may itself be told at once
            if not node.running or node.peer.deadline > self.now:
                break
            self.perform(node, node.peer.tick(self.now))
        assert not node.running or node.peer.deadline > self.now, "ticks move the deadline, or the driver spins"
        if node.running:
            self.arm(node)

    def call(self, node: Node, event: str, *arguments: Any) -> None:
        if node.running:
            self.perform(node, getattr(node.peer, event)(*arguments, self.now))

    def boundary(self, node: Node) -> None:
        """A step boundary: shifts and adoptions are applied, snapshots taken, in the order of a real node."""
        if not node.running:
            return
        self.later(node.step_s, self.boundary, node)
        if not node.stepping:
            return
        if node.restoring:
            assert node.kept is not None
            node.value, node.kept, node.restoring = node.kept, None, False
            self.call(node, "restored")
        if node.trial:
            self.apply_shifts(node)
        if node.adoption is not None:
            apart = float(node.adoption - node.value) ** 2, float(node.value) ** 2
            node.kept = node.value if node.trial else None
            node.value, node.adoption = node.adoption, None
            node.shifts.clear()
            node.merges.clear()
            node.mass = Fraction(1)
            if node.running:
                self.perform(node, node.peer.adopted(self.now, *apart))
        self.apply_shifts(node)
        wanted, node.wanted = node.wanted, {}
        for session, pushes in wanted.items():
            mass = Fraction(0)
            if pushes:
                mass, node.mass = push_mass(node.mass, pushes, self.config.mixing == "push-sum")
            node.snapshots[session] = node.value
            if node.running:
                self.perform(node, node.peer.snapshotted(session, self.now, mass))
        if node.peer.ready:
            node.steps += 1
            node.value += node.learning
        self.call(node, "stepped", node.steps, node.samples_per_step * node.steps, node.loss(node))

    # -- effects -----------------------------------------------------------------------------------------------------
    def perform(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            self.log.append((node.id, effect))
            match effect:
                case Send(to, message):
                    self.send(node, to, message)
                case Dial(address, expect):
                    self.dial(node, address, expect)
                case TryDial(asker, address):
                    asked = next(n for n in self.nodes if address_of(n.number) == address)
                    self.later(2 * self.latency_s, self.call, node, "dial_tried", asker, asked.dialable)
                case Snapshot(session, _, pushes):
                    node.wanted[session] = pushes
                case Recall(session):
                    node.wanted.pop(session, None)
                    node.snapshots[session] = node.value
                    self.later(0.0, self.call, node, "recalled", session)
                case Transfer(session, partner):
                    node.streams[session], node.receives[session] = partner, effect.receives
                    self.stream(node, session)
                case Rename(session, number):
                    node.snapshots[number] = node.snapshots.pop(session)
                case Mix(session, weight):
                    shift = Fraction(weight) * (node.theirs[session] - node.snapshots[session])
                    node.shifts.append(shift)
                    node.mixes.append((self.now, session, node.streams[session]))
                case Merge(session, mass):
                    received = session in node.theirs
                    node.merges.append((mass, node.theirs[session] if received else node.snapshots[session]))
                    if received:
                        node.mixes.append((self.now, session, node.streams[session]))
                case Release(session):
                    node.wanted.pop(session, None)
                    for table in (node.snapshots, node.streams, node.receives, node.theirs, node.collecting):
                        table.pop(session, None)
                    node.serving.discard(session)
                case Serve(session, partner, start, stop):
                    node.serving.add(session)
                    self.later(self.chunk_s, self.piece, node, session, self.by_id[partner], start, stop)
                case Collect():
                    node.collecting[effect.session] = effect
                    if node.joining_since != node.peer.joining.began:  # what an abandoned joining got counts no more
                        node.joining_since = node.peer.joining.began
                        node.collected.clear()
                case Confirm():
                    node.kept = None
                case Restore():
                    node.restoring = True
                case Adopt():
                    node.trial = effect.trial
                    covered = sum(stop - start for start, stop, _, _ in node.collected)
                    assert covered == node.peer.joining.size, "every element arrived once"
                    node.adoption = sum((p[2] * (p[1] - p[0]) for p in node.collected), Fraction()) / covered
                    node.collected.clear()
                case Notice(kind, sentence):
                    node.notices.append((self.now, kind, sentence))
        self.arm(node)

    def send(self, node: Node, to: PeerId, message: Message) -> None:
        node.sent.append((self.now, to, message))
        life = node.links.get(to)
        if life is not None:
            if self.rng.random() >= self.loss:
                self.later(self.latency_s, self.deliver, node, self.by_id[to], life, message)
            return
        record = node.peer.membership.record(to)
        if record is not None and record.address is not None:
            node.waiting.setdefault(to, []).append(message)
            if len(node.waiting[to]) == 1:
                self.dial(node, record.address, to)

    def deliver(self, sender: Node, to: Node, life: int, message: Message) -> None:
        if to.running and to.links.get(sender.id) == life:
            self.perform(to, to.peer.receive(sender.id, message, self.now))

    def dial(self, node: Node, address: Address, expect: PeerId | None) -> None:
        node.dials.append((self.now, address))
        self.later(2 * self.latency_s, self.dialled, node, address, expect)

    def dialled(self, node: Node, address: Address, expect: PeerId | None) -> None:
        if not node.running:
            return
        to = next((n for n in self.nodes if address_of(n.number) == address), None)
        waiting = node.waiting.pop(expect, []) if expect is not None else []
        good = to is not None and to.running and to.dialable and to is not node and expect in (None, to.id)
        if to is None or not good or self.cut(node.number, to.number):
            self.call(node, "dial_failed", expect)
            return
        if to.id not in node.links:
            self.lives += 1
            node.links[to.id] = to.links[node.id] = self.lives
            self.call(node, "linked", to.id, to.peer.membership.me)
            self.call(to, "linked", node.id, node.peer.membership.me)
        for message in waiting:
            self.send(node, to.id, message)

    def broken(self, node: Node, peer: PeerId) -> None:
        if not node.running or peer in node.links:
            return
        for session in [s for s, partner in node.streams.items() if partner == peer]:
            self.call(node, "failed", session, "broken")
        self.call(node, "unlinked", peer)

    def stream(self, node: Node, session: int) -> None:
        """Both sides stream at once, as soon as both have begun; of a push the one that offered alone."""
        partner = self.by_id[node.streams[session]]
        life = node.links.get(partner.id)
        if partner.streams.get(session) != node.id or life is None or session in node.theirs:
            return
        for one, other in ((node, partner), (partner, node)):
            if not one.receives[session]:
                continue
            delay_s = self.latency_s + self.stream_s * (1 + self.rng.random())
            self.later(delay_s, self.streamed, one, other, session, life, other.snapshots[session])

    def streamed(self, node: Node, partner: Node, session: int, life: int, theirs: Fraction) -> None:
        if node.streams.get(session) == partner.id and node.links.get(partner.id) == life:
            node.theirs[session] = theirs
            own = float(node.snapshots[session])
            self.call(node, "streamed", session, float(theirs - node.snapshots[session]) ** 2, own * own)

    def piece(self, donor: Node, session: int, taker: Node, start: int, stop: int) -> None:
        if session not in donor.serving or donor.id not in taker.links or not donor.running:
            return
        collect = taker.collecting.get(session)
        if collect is not None and collect.partner == donor.id:
            position = min(start + self.config.chunk_elements, stop)
            if collect.compare:
                held = next(value for a, b, value, _ in reversed(taker.collected) if a <= start < b)
                elements = position - start
                apart = float(donor.snapshots[session] - held) ** 2 * elements
                start = position
                if taker.running:
                    effects = taker.peer.compared(session, apart, float(held) ** 2 * elements, self.now)
                    self.perform(taker, effects)
            else:
                given = (start, position, donor.snapshots[session], donor.id)
                taker.collected = [one for one in taker.collected if one[:2] != given[:2]]  # again, of another
                taker.collected.append(given)
                start = position
                self.call(taker, "collected", session, position)
        if start < stop:
            self.later(self.chunk_s, self.piece, donor, session, taker, start, stop)
        else:
            self.call(donor, "served", session)

    def apply_shifts(self, node: Node) -> None:
        node.value += sum(node.shifts, Fraction())
        node.shifts.clear()
        for mass, value in node.merges:
            node.value += mass / (node.mass + mass) * (value - node.value)
            node.mass += mass
        node.merges.clear()

    # -- questions ---------------------------------------------------------------------------------------------------
    def total(self) -> Fraction:
        """Of all weights, with the mixes that wait for a boundary."""
        return sum((node.value + sum(node.shifts, Fraction()) for node in self.nodes), Fraction())

    def sums(self) -> tuple[Fraction, Fraction]:
        """Of all masses, and of each mass times its value: of the nodes, of what they are to merge, and of what is in
        flight, which is every push that its partner has not committed and its owner not taken back."""
        held = [(node.mass, node.value + sum(node.shifts, Fraction())) for node in self.nodes]
        for node in self.nodes:
            held += node.merges
            for session, exchange in node.peer.exchanges.table.items():
                arrived = exchange.partner != node.id and (
                    (node.id, session) in self.by_id[exchange.partner].peer.exchanges.verdicts
                )
                if exchange.initiator and exchange.mass and not arrived:
                    held.append((Fraction(exchange.mass), node.snapshots[session]))
        return sum((mass for mass, _ in held), Fraction()), sum((mass * value for mass, value in held), Fraction())

    def quiet(self) -> bool:
        """Whether no exchange is under way; as long as this is asked, nobody begins one."""
        for node in self.nodes:
            node.peer.schedule.retry_at = float("inf")
        return not any(node.peer.exchanges.table for node in self.nodes)

    def resume(self) -> None:
        """Mix again after :meth:`quiet`."""
        for node in self.nodes:
            node.peer.schedule.retry_at = self.now

    def storm(self, rng: random.Random, look: Callable[[], None] = lambda: None) -> None:
        """30 moments, a third of a second apart at most: messages are lost, links break, loops stand still and go on;
        nobody dies. ``look`` sees each. In the end all is well again, but for what is under way."""
        self.loss = rng.choice([0.0, 0.02])
        for _ in range(30):
            self.run(rng.random() * 0.3)
            look()
            a, b = rng.sample(self.nodes, 2)
            if rng.random() < 0.8:
                self.unlink(a, b)
            a.stepping = rng.random() < 0.8
        self.loss = 0.0
        for node in self.nodes:
            node.stepping = True

    def agreed(self) -> bool:
        living = [node for node in self.nodes if node.running]
        return all(node.peer.ready and node.genesis == living[0].genesis for node in living)
