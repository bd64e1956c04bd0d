"""The swarm of exact fractions (see swarm_harness) in groups, with faults at any message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from gossip.config import Config
from gossip.effects import Effect, Gather
from gossip.exchange.session import State
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Begin, Busy, Commit, Invite, Joined, Message, Outcome, Refuse, Settled
from tests.gossip.swarm_harness import Node, Swarm

GROUP = (Invite, Joined, Begin, Commit, Settled, Outcome, Abort, Busy, Refuse)


@dataclass
class Part:
    """One node's side of a group's streams: everybody's values, and the means of everybody's slices."""

    effect: Gather
    values: dict[PeerId, Fraction] = field(default_factory=dict)
    means: dict[PeerId, Fraction] = field(default_factory=dict)
    sent: set[PeerId] = field(default_factory=set)
    mean: Fraction | None = None


class GroupSwarm(Swarm):
    """``fault(number, sender, to, message)`` hears of every message about groups that is sent, by its number; True
    loses it. ``lost_streams`` are the numbers of streams that stall, and whose links are closed for it. Latencies of
    pairs differ, so that of messages sent together some arrive sooner."""

    def __init__(self, seed: int = 0, *, config: Config | None = None, **options: Any) -> None:
        super().__init__(seed, config=config or Config(mixing="group"), **options)
        self.parts: dict[tuple[PeerId, int], Part] = {}
        self.early: dict[tuple[PeerId, int], list[Callable[[], None]]] = {}
        self.members: dict[int, set[PeerId]] = {}  # of every group that began anywhere
        self.mixed: dict[int, set[PeerId]] = {}
        self.fault: Callable[[int, Node, Node, Message], bool] = lambda number, sender, to, message: False
        self.said = self.streams = 0
        self.lost_streams: set[int] = set()

    def latency(self, a: Node, b: Node) -> float:
        return self.latency_s * (0.5 + (7 * a.number + 3 * b.number) % 5 / 4)

    # -- messages and streams ----------------------------------------------------------------------------------------
    def send(self, node: Node, to: PeerId, message: Message) -> None:
        life = node.links.get(to)
        if life is None:
            super().send(node, to, message)
            return
        node.sent.append((self.now, to, message))
        other = self.by_id[to]
        if isinstance(message, GROUP):
            self.said += 1
            if self.fault(self.said, node, other, message):
                return
        self.later(self.latency(node, other), self.deliver, node, other, life, message)

    def perform(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Gather):
                self.log.append((node.id, effect))
                self.gather(node, effect)
            else:
                super().perform(node, [effect])
        self.arm(node)
        done = {session for _, session, _ in node.mixes}
        for session in done:
            self.mixed.setdefault(session, set()).add(node.id)

    def gather(self, node: Node, effect: Gather) -> None:
        number = effect.session
        self.members.setdefault(number, set()).update(effect.members)
        part = self.parts.get((node.id, number))
        if part is None:
            part = self.parts[node.id, number] = Part(effect)
            part.values[node.id] = node.snapshots[number]
        for member in effect.members:
            if member != node.id and member in node.links and member not in part.sent:
                part.sent.add(member)
                self.stream(node, number, member, "values", node.snapshots[number])
                if part.mean is not None:
                    self.stream(node, number, member, "means", part.mean)
        for arrive in self.early.pop((node.id, number), []):
            arrive()

    def stream(self, node: Node, number: int, member: PeerId | None = None, kind: str = "", value: Any = None) -> None:
        assert member is not None
        other = self.by_id[member]
        self.streams += 1
        if self.streams in self.lost_streams:
            self.later(self.config.stall_s, self.unlink, node, other)
            return
        delay_s = self.latency(node, other) + self.stream_s * (1 + self.rng.random())
        self.later(delay_s, self.arrive, other, node, number, node.links[member], kind, value)

    def arrive(self, node: Node, sender: Node, number: int, life: int, kind: str, value: Fraction) -> None:
        if not node.running or node.links.get(sender.id) != life:
            return
        part = self.parts.get((node.id, number))
        if part is None:
            if number in node.peer.exchanges.table:
                again = self.early.setdefault((node.id, number), [])
                again.append(lambda: self.arrive(node, sender, number, life, kind, value))
            return
        getattr(part, kind)[sender.id] = value
        members = part.effect.members
        if part.mean is None and len(part.values) == len(members):
            part.mean = part.means[node.id] = sum(part.values.values(), Fraction()) / len(members)
            for member in sorted(part.sent):
                if member in node.links:
                    self.stream(node, number, member, "means", part.mean)
        one = node.peer.exchanges.table.get(number)
        if len(part.means) == len(members) and one is not None and one.state is State.STREAMING:
            assert len(set(part.means.values())) == 1, "one mean for all"
            node.theirs[number] = part.means[node.id]
            node.streams[number] = sender.id
            apart, own = float(node.theirs[number] - node.snapshots[number]), float(node.snapshots[number])
            self.call(node, "gathered", number, apart**2, own**2, [])

    # -- questions ---------------------------------------------------------------------------------------------------
    def halves(self) -> list[int]:
        """Groups that some of those still running mixed, and others of them did not."""
        running = {node.id for node in self.nodes if node.running}
        found = []
        for number, members in self.members.items():
            mixed = self.mixed.get(number, set())
            survivors = members & running
            if mixed & survivors and not survivors <= mixed:
                found.append(number)
        return found

    def acquainted(self) -> bool:
        return all(a.peer.partners.fits(b.id) for a in self.nodes for b in self.nodes if a is not b)

    def offer(self) -> None:
        """Everybody invites at this instant."""
        for node in self.nodes:
            self.perform(node, node.peer.exchanges.begin(self.now))
            for session in node.wanted:
                node.snapshots[session] = node.value
                self.call(node, "snapshotted", session)
            node.wanted.clear()

    def finish(self) -> None:
        """Begin nothing more, and let what is under way end."""
        limit_s = self.now + 120.0
        self.quiet()
        while any(node.running and node.peer.exchanges.table for node in self.nodes):
            assert self.now < limit_s, f"a group never ends (seed {self.seed})"
            self.run(0.1)
            self.quiet()  # what ended may have asked for another
        self.run(1.0)


def together(count: int, seed: int = 0, **changes: Any) -> GroupSwarm:
    """A swarm whose members know each other, before their first group."""
    swarm = GroupSwarm(seed, config=Config(mixing="group", **changes))
    swarm.swarm(count)
    for node in swarm.nodes:
        node.peer.schedule.retry_at = float("inf")
    swarm.until(lambda: swarm.agreed() and swarm.acquainted(), 30.0)
    for number, node in enumerate(swarm.nodes):
        node.value = Fraction(100 * number)  # within the norm bound of one that holds 0
        node.shifts.clear()
    swarm.said = 0
    return swarm
