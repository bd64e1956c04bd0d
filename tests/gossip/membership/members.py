"""Members for tests: records, a bare Membership, and a simulated world of members.

No driver runs the :class:`gossip.membership.protocol.Membership`. In the world, members without weights come, vanish
and are cut off.
"""

import hashlib
import random
from collections.abc import Iterable
from typing import Any

from gossip.config import Config
from gossip.effects import Effect, MemberState, Send
from gossip.ids import MemberRecord, PeerId
from gossip.membership.protocol import Membership
from gossip.wire.messages import Ack, Ping, Records
from gossip.wire.records import Verify, trusting, unsigned
from tests.harness.host import Host
from tests.harness.world import World, address_of


def peer_id(number: int) -> PeerId:
    return PeerId(hashlib.sha256(number.to_bytes(4, "big")).digest()[:16])


def record_of(number: int, **changes: Any) -> MemberRecord:
    """Return an unsigned record of peer ``number`` as it starts."""
    fields: dict[str, Any] = {"ready": True, "address": address_of(number), "incarnation": 1} | changes
    return MemberRecord(id=peer_id(number), public_key=b"", **fields)


def member(
    number: int = 0, config: Config | None = None, now: float = 0.0, verify: Verify = trusting, **changes: Any
) -> Membership:
    """Return a Membership that no driver runs."""
    return Membership(
        record_of(number, **changes), sign=unsigned, verify=verify, config=config or Config(),
        rng=random.Random(number), now=now,
    )  # fmt: skip


def acquainted(count: int, now: float = 0.0, **changes: Any) -> Membership:
    """Return member 0, which met members 1 to ``count`` and has a link to 1."""
    me = member()
    me.on_linked(peer_id(1), record_of(1, **changes), now)
    me.receive(peer_id(1), Records(tuple(record_of(n, **changes) for n in range(2, count + 1)), b""), now)
    for n in range(2, count + 1):
        meet(me, n, now)
    return me


def meet(me: Membership, number: int, now: float) -> None:
    """Act as if ``me`` had once had a link with a member that it knows."""
    me._states.on_contact(me._table.entries[peer_id(number)], now)
    me._states.report_changes([])
    me._update_deadline()


def link(me: Membership, *numbers: int, now: float = 0.0) -> list[Effect]:
    """Give ``me`` a link with each of these members as it starts; return the effects."""
    return [effect for n in numbers for effect in me.on_linked(peer_id(n), record_of(n), now)]


def sent(effects: list[Effect], kind: type) -> list[Send]:
    """Return the messages of this kind among the effects."""
    return [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def tick_until(me: Membership, until: float) -> list[Effect]:
    """Run the timers that are due before this time; return the effects."""
    effects: list[Effect] = []
    while me.deadline < until:
        effects += me.tick(me.deadline)
    return effects


def answer_pings(me: Membership, effects: list[Effect], now: float) -> None:
    """Let all members that ``me`` has pinged answer at once."""
    for ping in sent(effects, Ping):
        me.receive(ping.to, Ack(ping.message.seq, ()), now)


class Bare:
    """A :class:`Membership` in a Peer's place."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership

    def __getattr__(self, name: str) -> Any:
        return getattr(self.membership, name)

    def on_dial_failed(self, peer: PeerId | None, now: float) -> list[Effect]:
        return [] if peer is None else self.membership.on_dial_failed(peer, now)


class Member(Host):
    """A host that dials one of its seeds as a peer does: often while alone, and rarely afterwards."""

    def __init__(self, world: World, number: int, membership: Membership, seeds: list[int]) -> None:
        super().__init__(world, number, Bare(membership))
        self.membership, self.seeds = membership, seeds

    def start(self) -> None:
        self.arm()
        if self.seeds:
            self.seek()

    def seek(self) -> None:
        self.world.network.dial(self, address_of(self.rng.choice(self.seeds)), None)
        self.later(30.0 if self.membership.alive() else 2.0, self.seek)


class MemberWorld(World):
    def __init__(self, seed: int = 0, *, loss: float = 0.0) -> None:
        super().__init__(seed, latency_s=0.02, loss=loss)

    def start(
        self, number: int, seed: int | list[int] | None = None, book: Iterable[MemberRecord] = (), **changes: Any
    ) -> Member:  # fmt: skip
        """Start (or restart) a process, which resets what is left of the links of its earlier life."""
        record, rng = record_of(number, **changes), random.Random(f"{self.seed} {number} {self.ties}")
        membership = Membership(record, sign=unsigned, verify=trusting, config=self.config, rng=rng, now=self.now)
        membership.restore(book, self.now)
        for link in [link for link in self.network.links if self.by_id.get(record.id) in link.ends]:
            self.network.cut_link(link)
        seeds = seed if isinstance(seed, list) else [] if seed is None else [seed]
        return self.enter(Member(self, number, membership, seeds))

    def swarm(self, count: int, run_s: float = 0.0) -> list[Member]:
        """Start members whose seed is the first of them, and let ``run_s`` pass."""
        members = [self.start(number, 0 if number else None) for number in range(count)]
        self.run(run_s)
        return members

    def states_of(self, peer: PeerId) -> set[MemberState | None]:
        """Return the states in which other running members hold this peer."""
        return {host.membership.state(peer) for host in self.running if host.id != peer}

    def agreed(self) -> bool:
        """Return True if every living member holds exactly the living ones to be ALIVE."""
        living = {host.id for host in self.running}
        return all({*host.membership.alive(), host.id} == living for host in self.running)
