"""A small swarm of real :class:`gossip.membership.protocol.Membership` objects in virtual time: a heap, and a network
that can lose messages, be cut in two, and lose processes and machines."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from gossip.config import Config
from gossip.effects import Dial, Effect, MemberChanged, MemberState, Send
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.protocol import Membership
from gossip.wire.messages import Message, Records
from gossip.wire.records import Verify, trusting, unsigned

CONNECT_TIMEOUT_S = 3.0


def peer_id(number: int) -> PeerId:
    return PeerId(hashlib.sha256(number.to_bytes(4, "big")).digest()[:16])


def record_of(number: int, **changes: Any) -> MemberRecord:
    """An unsigned record of peer ``number`` as it starts."""
    fields: dict[str, Any] = {"ready": True, "address": Address("host", 1 + number), "incarnation": 1} | changes
    return MemberRecord(id=peer_id(number), public_key=b"", **fields)


def member(
    number: int = 0, config: Config | None = None, now: float = 0.0, verify: Verify = trusting, **changes: Any
) -> Membership:
    """One that nobody drives."""
    return Membership(
        record_of(number, **changes),
        sign=unsigned,
        verify=verify,
        config=config or Config(),
        rng=random.Random(number),
        now=now,
    )


def acquainted(count: int, now: float = 0.0, **changes: Any) -> Membership:
    """Member 0, which met members 1 to ``count`` and has a link to 1."""
    me = member()
    me.linked(peer_id(1), record_of(1, **changes), now)
    me.receive(peer_id(1), Records(tuple(record_of(n, **changes) for n in range(2, count + 1)), b""), now)
    for n in range(2, count + 1):
        meet(me, n, now)
    return me


def meet(me: Membership, number: int, now: float) -> None:
    """As if there had been a link with one that ``me`` knows of."""
    me._view.meet(me._table.entries[peer_id(number)], now)
    me._view.changed([])
    me._arm()


def sent(effects: list[Effect], kind: type) -> list[Send]:
    """The messages of this kind among the effects."""
    return [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


@dataclass
class Node:
    number: int
    id: PeerId
    address: Address | None
    membership: Membership
    running: bool = True  # the process; a machine that is off does not even refuse a dial
    powered: bool = True
    links: set[PeerId] = field(default_factory=set)
    armed: float = float("inf")  # when the earliest timer for it fires
    seen: list[tuple[float, MemberChanged]] = field(default_factory=list)


class World:
    """Drive it with :meth:`run`; change it between runs."""

    def __init__(
        self, seed: int = 0, *, latency_s: float = 0.02, loss: float = 0.0, config: Config | None = None
    ) -> None:
        self.seed = seed
        self.rng = random.Random(f"world {seed}")
        self.config = config or Config()
        self.latency_s, self.loss = latency_s, loss
        self.now = 0.0
        self.nodes: dict[PeerId, Node] = {}
        self.at: dict[Address, PeerId] = {}
        self.cut: Callable[[int, int], bool] = lambda a, b: False  # by numbers
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.ties = 0
        self.events = 0
        self.messages = 0

    # -- what happens --------------------------------------------------------------------------------------------------
    def start(
        self, number: int, seed: int | list[int] | None = None, book: Iterable[MemberRecord] = (), **changes: Any
    ) -> Node:
        """Start (or restart) a process; it dials the process ``seed``, or one of these."""
        record = record_of(number, **changes)
        rng = random.Random(f"{self.seed} {number} {self.ties}")
        membership = Membership(record, sign=unsigned, verify=trusting, config=self.config, rng=rng, now=self.now)
        membership.restore(book, self.now)
        node = Node(number, record.id, record.address, membership)
        self.nodes[record.id] = node
        if record.address is not None:
            self.at[record.address] = record.id
        if seed is not None:
            self.seek(node, [seed] if isinstance(seed, int) else seed)
        self.arm(node)
        return node

    def swarm(self, count: int, **changes: Any) -> list[Node]:
        """``count`` nodes; the first is the seed of all others."""
        return [self.start(number, 0 if number else None, **changes) for number in range(count)]

    def seek(self, node: Node, seeds: list[int]) -> None:
        """Dial a seed, often while alone and rarely ever after, as a peer does."""
        if node.running and self.nodes[node.id] is node:
            self.perform(node, [Dial(Address("host", 1 + self.rng.choice(seeds)))])
            self.later(30.0 if node.membership.alive() else 2.0, self.seek, node, seeds)

    def kill(self, node: Node) -> None:
        """kill -9: the kernel closes its links and refuses dials."""
        node.running = False
        self.unlink_all(node)

    def power_off(self, node: Node) -> None:
        """Nobody is told anything."""
        node.running = node.powered = False

    def leave(self, node: Node) -> None:
        self.perform(node, node.membership.leave(self.now))
        node.running = False
        self.later(2 * self.latency_s, self.unlink_all, node)

    def unlink_all(self, node: Node) -> None:
        for peer in sorted(node.links):
            self.unlink(node, self.nodes[peer])

    def unlink(self, a: Node, b: Node) -> None:
        for one, other in ((a, b), (b, a)):
            if other.id in one.links:
                one.links.discard(other.id)
                self.later(self.latency_s, self.call, one, "unlinked", other.id)

    def partition(self, side: Callable[[int], int] | None) -> None:
        """Cut the links between nodes of different sides, and let none through; None heals."""
        self.cut = (lambda a, b: side(a) != side(b)) if side else (lambda a, b: False)
        for node in self.nodes.values():
            for peer in sorted(node.links):
                if self.cut(node.number, self.nodes[peer].number):
                    self.unlink(node, self.nodes[peer])

    # -- time ----------------------------------------------------------------------------------------------------------
    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.heap and self.heap[0][0] <= end:
            self.now, _, what, arguments = heapq.heappop(self.heap)
            self.events += 1
            what(*arguments)
        self.now = end

    def until(self, condition: Callable[[], bool], limit_s: float) -> float:
        """Run until it holds; the virtual seconds that took, or fail naming the seed."""
        start = self.now
        while not condition():
            assert self.now - start <= limit_s, f"not within {limit_s} s (seed {self.seed})"
            self.run(0.1)
        return self.now - start

    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        self.plan(self.now + delay_s, what, *arguments)

    def plan(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        """At this very time: ``now + (when - now)`` may be less, and a deadline just ahead would stay for ever."""
        self.ties += 1
        heapq.heappush(self.heap, (when, self.ties, what, arguments))

    def arm(self, node: Node) -> None:
        deadline = node.membership.deadline
        if deadline < node.armed:
            node.armed = deadline
            self.plan(max(deadline, self.now), self.fire, node)

    def fire(self, node: Node) -> None:
        if node.armed > self.now or self.nodes[node.id] is not node:
            return  # an earlier timer did it
        node.armed = float("inf")
        if node.running and node.membership.deadline <= self.now:
            self.perform(node, node.membership.tick(self.now))
        if node.running:
            self.arm(node)

    def call(self, node: Node, event: str, *arguments: Any) -> None:
        if node.running and self.nodes[node.id] is node:
            self.perform(node, getattr(node.membership, event)(*arguments, self.now))
            self.arm(node)

    # -- network -------------------------------------------------------------------------------------------------------
    def perform(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            if type(effect) is Send:
                record = node.membership.record(effect.to)
                if effect.to in node.links:
                    self.transmit(node, effect.to, effect.message)
                elif record is not None and record.address is not None:
                    self.dial(node, record.address, effect.to, effect.message)
            elif type(effect) is Dial:
                self.dial(node, effect.address, effect.expect, None)
            elif type(effect) is MemberChanged:
                node.seen.append((self.now, effect))

    def transmit(self, node: Node, to: PeerId, message: Message) -> None:
        self.messages += 1
        if self.loss and self.rng.random() < self.loss:
            return
        self.later(self.latency_s, self.deliver, node, self.nodes[to], message)

    def deliver(self, node: Node, to: Node, message: Message) -> None:
        if to.running and not self.cut(node.number, to.number) and self.nodes[to.id] is to:
            self.perform(to, to.membership.receive(node.id, message, self.now))
            self.arm(to)

    def dial(self, node: Node, address: Address, expect: PeerId | None, message: Message | None) -> None:
        self.later(2 * self.latency_s, self.dialled, node, address, expect, message)

    def dialled(self, node: Node, address: Address, expect: PeerId | None, message: Message | None) -> None:
        if not node.running or self.nodes[node.id] is not node:
            return
        peer = self.at.get(address)
        to = None if peer is None else self.nodes[peer]
        if to is None or to.id == node.id or (expect is not None and to.id != expect):
            refused_after_s = 0.0
        elif not to.powered or self.cut(node.number, to.number):
            refused_after_s = CONNECT_TIMEOUT_S
        elif not to.running:
            refused_after_s = 0.0
        else:
            if to.id not in node.links:
                node.links.add(to.id)
                to.links.add(node.id)
                self.call(node, "linked", to.id, to.membership.me)
                self.call(to, "linked", node.id, node.membership.me)
            if message is not None:
                self.transmit(node, to.id, message)
            return
        if expect is not None:
            self.later(refused_after_s, self.call, node, "dial_failed", expect)

    # -- questions -----------------------------------------------------------------------------------------------------
    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.running]

    def states_of(self, peer: PeerId) -> set[MemberState | None]:
        """What the living others hold it to be."""
        return {node.membership.state(peer) for node in self.living() if node.id != peer}

    def agreed(self) -> bool:
        """Whether every living node holds exactly the living to be ALIVE."""
        living = {node.id for node in self.living()}
        return all({*node.membership.alive(), node.id} == living for node in self.living())
