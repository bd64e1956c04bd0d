"""Ideal membership: a shared registry replaces the membership protocol, so that every peer knows all members.

It serves runs that are too large for full membership tables. It also separates a method's own quality from the cost of
the protocol. Exchanges, joins and streams work as usual; probes, membership gossip, dials and links do not exist. A
*run* is a training that peers share; a member is *ready* once it holds its weights.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median_low
from typing import Unpack

from gossip.config import Config
from gossip.effects import Dial, Effect, MemberState, Send
from gossip.ids import MemberRecord, PeerId
from gossip.membership.self_record import OwnFields
from gossip.misbehaviour import MisbehaviourLog
from gossip.unordered import UnorderedList
from gossip.wire.messages import Message
from sim.engine.events import Events
from sim.engine.host import Host
from sim.engine.links import VirtualLinks
from sim.world.network import NetworkModel


class Registry:
    """The members that are alive, shared by all peers. ``alive`` has no particular order."""

    def __init__(self) -> None:
        self.alive = UnorderedList[PeerId]()
        self.records: dict[PeerId, MemberRecord] = {}
        self.progress: dict[PeerId, int] = {}  # The progress that each member states for its weights.
        self.ready: dict[bytes, int] = {}  # Number of members that hold the weights, by run.
        self.changes = 0  # Version of the set of runs; while it is unchanged, no new run need be looked for.
        self.turnover = 0  # Number of joins, departures and record changes.

    def add(self, record: MemberRecord) -> None:
        self.alive.add(record.id)
        self.put(record)

    def put(self, record: MemberRecord) -> None:
        """Store a member's first or changed record."""
        self.turnover += 1
        before = self.records.get(record.id)
        self.records[record.id] = record
        if before is not None:
            self._count_ready(before, -1)
        self._count_ready(record, 1)

    def remove(self, peer: PeerId) -> None:
        if peer not in self.alive:
            return
        self.turnover += 1
        self.alive.remove(peer)
        self._count_ready(self.records.pop(peer), -1)
        self.progress.pop(peer, None)

    def _count_ready(self, record: MemberRecord, change: int) -> None:
        """Add ``change``, 1 or -1, to the members that hold the weights of the record's run, if it says so."""
        if record.ready:
            count_before = self.ready.get(record.run_id, 0)
            count = count_before + change
            self.changes += count_before == 0 or count == 0  # A run appears, or the last member that held it is gone.
            if count:
                self.ready[record.run_id] = count
            else:
                del self.ready[record.run_id]


class IdealMembers:
    """One peer's view of the registry: :class:`gossip.membership.members.Members` without a protocol.

    That class defines the methods. ``me`` is the peer's own record.
    """

    deadline = math.inf

    def __init__(self, registry: Registry, me: MemberRecord) -> None:
        self.me, self.my_samples, self._registry = me, me.samples, registry
        self.misbehaviour = MisbehaviourLog()
        registry.add(me)

    # -- queries -------------------------------------------------------------------------------------------------
    @property
    def changes(self) -> int:
        return self._registry.changes

    @property
    def turnover(self) -> int:
        return self._registry.turnover

    @property
    def has_company(self) -> bool:
        return len(self._registry.alive) > 1

    @property
    def run_size(self) -> int:
        return max(1, self._registry.ready.get(self.me.run_id, 0))

    def alive(self) -> Sequence[PeerId]:
        """Return the shared list of members, which includes this peer.

        :meth:`record` returns None for this peer, so it never selects itself.
        """
        members = self._registry.alive
        return members if len(members) > 1 else ()

    def contacted(self) -> Sequence[PeerId]:
        return self.alive()

    def remembers(self, peer: PeerId) -> bool:
        return self.was_contacted(peer)

    def was_contacted(self, peer: PeerId) -> bool:
        return peer in self._registry.alive

    def owners(self) -> list[PeerId]:
        return sorted(peer for peer, record in self._registry.records.items() if record.ready)

    def state(self, peer: PeerId) -> MemberState | None:
        return MemberState.ALIVE if peer in self._registry.alive else MemberState.DEAD

    def ready_among(self, peers: Iterable[PeerId], run_id: bytes) -> list[PeerId]:
        records, me = self._registry.records, self.me.id
        return [
            peer for peer in peers
            if peer != me and (record := records.get(peer)) is not None and record.ready and record.run_id == run_id
        ]  # fmt: skip

    def record(self, peer: PeerId) -> MemberRecord | None:
        return None if peer == self.me.id else self._registry.records.get(peer)

    def members(self) -> list[tuple[MemberRecord, MemberState]]:
        records = self._registry.records
        return [(record, MemberState.ALIVE) for peer, record in records.items() if peer != self.me.id]

    def rtt_s(self, peer: PeerId) -> float | None:
        return None  # Without probes there is no measurement.

    def runs(self) -> Iterable[bytes]:
        return self._registry.ready

    def run_members(self, run_id: bytes) -> list[MemberRecord]:
        records, mine = self._registry.records.values(), self.me.id
        return [record for record in records if record.ready and record.run_id == run_id and record.id != mine]

    def take_arrears(self) -> int:
        return 0

    def run_standing(self, run_id: bytes) -> tuple[int, int]:
        records, progress = self.run_members(run_id), self._registry.progress
        if self.me.run_id == run_id:
            records.append(self.me)
        return median_low([progress.get(record.id, 0) for record in records]) if records else 0, len(records)

    def book(self) -> list[MemberRecord]:
        return []

    # -- events --------------------------------------------------------------------------------------------------
    def update_me(self, now: float, **changes: Unpack[OwnFields]) -> None:
        self.my_samples = changes.get("samples", self.my_samples)
        progress = changes.get("progress")
        if progress is not None:
            self._registry.progress[self.me.id] = progress
        ready, run_id = changes.get("ready", self.me.ready), changes.get("run_id", self.me.run_id)
        if ready != self.me.ready or run_id != self.me.run_id:
            self.me = dataclasses.replace(self.me, ready=ready, run_id=run_id)
            self._registry.put(self.me)

    def leave(self, now: float) -> list[Effect]:
        self._registry.remove(self.me.id)
        return []

    def receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        return []

    def tick(self, now: float) -> list[Effect]:
        return []

    def on_linked(self, peer: PeerId, record: MemberRecord, now: float) -> list[Effect]:
        return []

    def on_unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        return []

    def on_dial_failed(self, peer: PeerId, now: float) -> list[Effect]:
        return []

    def on_proof_of_life(self, peer: PeerId, now: float) -> None:
        """Do nothing: no member is ever suspected."""

    def restore(self, records: Iterable[MemberRecord], now: float) -> None:
        """Do nothing: all members are known already."""


class IdealLinks(VirtualLinks):
    """Links between all pairs of live members, without dialling."""

    def __init__(
        self, events: Events, network: NetworkModel, config: Config, perform: Callable[[Host, list[Effect]], None],
        before_answer: Callable[[Host], None], registry: Registry,
    ) -> None:  # fmt: skip
        super().__init__(events, network, config, perform, before_answer)
        self.registry = registry

    def is_linked(self, host: Host, partner: PeerId) -> bool:
        return partner in self.registry.alive

    def send(self, host: Host, effect: Send) -> None:
        self.post(host, self.by_id[effect.to], effect.message)

    def dial(self, host: Host, effect: Dial) -> None:
        """Do nothing: all members are linked already."""

    def on_message(self, host: Host, sender: Host, message: Message) -> None:
        if host.gone:
            self.reset(host, sender)
            return
        self.deliver(host, sender, message)

    def on_killed(self, host: Host) -> None:
        self.registry.remove(host.id)
        super().on_killed(host)

    def partners_of(self, host: Host) -> list[PeerId]:
        """Return the peers that shared a session with this host."""
        return [partner for partner in dict.fromkeys(host.peer.view.session_peers()) if partner != host.id]

    def on_broken(self, host: Host, partner: PeerId, number: int) -> None:
        if not host.gone:
            self.report_unlinked(host, partner)
