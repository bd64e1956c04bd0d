"""The interface of a Peer for drivers and for display: its parts are private to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gossip.arithmetic.subsets import Subset
from gossip.config import Config
from gossip.discovery import Reachability, Seeds
from gossip.effects import Effect, MemberState
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import Local, Session
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.members import Members
from gossip.misbehaviour import MisbehaviourLog
from gossip.schedule import Schedule
from gossip.selection.partners import Partners
from gossip.state_transfer.donating import Donating
from gossip.state_transfer.ending import Ending
from gossip.state_transfer.joining import Joining, Phase
from gossip.state_transfer.runs import Runs
from gossip.wire.messages import Fetch, Invite, Message, Offer

__all__ = ["Counts", "Face"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a peer's life so far."""

    done: int  # finished exchanges
    failed: int  # failed exchanges, including offers without an answer
    alive: int  # members, this one included
    holding: int  # members that hold this peer's run


class Face:
    """The queries of a Peer and the settings between its calls. Reports that make it decide are in Peer."""

    id: PeerId
    config: Config
    local: Local
    misbehaviour: MisbehaviourLog
    membership: Members
    partners: Partners
    exchanges: Exchanges[Any]
    schedule: Schedule
    joining: Joining
    donating: Donating
    seeds: Seeds
    reach: Reachability
    ending: Ending
    runs: Runs
    linked_peers: dict[PeerId, float]
    optimizer_scalars: tuple[tuple[str, float], ...]
    steps: int
    left: bool
    lonely: bool
    waiting: bool
    hopeful: bool

    # -- itself --------------------------------------------------------------------------------------------------
    @property
    def record(self) -> MemberRecord:
        """Our own signed record."""
        return self.membership.me

    @property
    def ready(self) -> bool:
        """True if this peer holds the weights of a run, and may train and mix."""
        return self.local.ready

    @property
    def may_join(self) -> bool:
        """True if it began with a seed or with known members: there may be a run to join."""
        return self.hopeful

    @property
    def sound(self) -> bool:
        """True if no weight is known to be NaN or infinite."""
        return self.local.sound

    @property
    def finished(self) -> bool:
        """True if the run has ended."""
        return self.local.finished

    @property
    def run_id(self) -> bytes:
        """The id of the run."""
        return self.local.run_id

    @property
    def version(self) -> float:
        """Mixing rounds behind the weights."""
        return self.local.version

    @property
    def elements(self) -> int:
        """The number of weights."""
        return self.local.elements

    @property
    def alone(self) -> bool:
        """True if no other member is ALIVE, as last reported."""
        return self.runs.alone

    def optimizer(self, keys: tuple[str, ...], scalars: tuple[tuple[str, float], ...]) -> None:
        """Set the parts of the optimizer's state that a newcomer can get."""
        self.local.optimizer_keys, self.optimizer_scalars = keys, scalars

    @property
    def gives_optimizer(self) -> bool:
        """True if there is any such state."""
        return bool(self.local.optimizer_keys)

    # -- the training loop ---------------------------------------------------------------------------------------
    @property
    def due_steps(self) -> int:
        """The step count of our next mix, at which to call ``stepped``, unless :attr:`offering`."""
        return self.schedule.steps_beside(self.exchanges.coming)

    @property
    def interval_steps(self) -> int | None:
        """Local steps between two mixes at present; None for mixing by the clock alone."""
        return self.schedule.every

    @property
    def offering(self) -> bool:
        """True if we may not begin a mix: one is in progress, or as many as may overlap."""
        exchanges = self.exchanges
        return exchanges.engaged if exchanges.overlapping else bool(exchanges.outgoing)

    @property
    def next_mix(self) -> tuple[float, float]:
        """:attr:`due_steps` (infinite while :attr:`offering`) and :attr:`mix_at`, which a driver reads together."""
        return math.inf if self.offering else self.due_steps, self.mix_at

    @property
    def held(self) -> bool:
        """True if the training loop must wait at its boundary: a mix began ``max_version_gap`` intervals ago."""
        return self.exchanges.held(self.steps)

    @property
    def next_part(self) -> Subset:
        """The elements of our next mix."""
        return self.exchanges.next_part

    @property
    def mix_at(self) -> float:
        """The time from which a due mix may begin, so that a driver takes a snapshot with it.

        It is infinite while other exchanges prevent a mix, and if no partner was found the last time. The first mix
        with a new partner then begins a step later, and a node that stays alone copies nothing.
        """
        exchanges = self.exchanges
        waits = exchanges.table and (exchanges.engaged or exchanges.upcoming)
        return math.inf if self.lonely or self.waiting or waits else self.schedule.retry_at

    @property
    def boundary_at(self) -> float:
        """The time of the training loop's last known step boundary."""
        return self.local.boundary_at

    def at_boundary(self, when: float) -> None:
        """Note a step boundary without a report."""
        self.local.boundary_at = max(self.local.boundary_at, when)

    # -- sessions ------------------------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        """True if no exchange is in progress."""
        return not self.exchanges.table

    @property
    def serving(self) -> bool:
        """True if a newcomer is fetching weights from us."""
        return bool(self.donating.table)

    @property
    def taking(self) -> bool:
        """True if we are fetching the weights of a run."""
        return self.joining.phase is not Phase.IDLE

    def exchange(self, session: int) -> Session | None:
        """Return the exchange with this session number, if it is in progress."""
        return self.exchanges.table.get(session)

    def under_way(self, session: int) -> bool:
        """Return True if an exchange has this session number."""
        return session in self.exchanges.table

    def serves(self, session: int) -> bool:
        """Return True if a newcomer fetches a piece under this session number."""
        return session in self.donating.table

    def concerns(self, session: int) -> bool:
        """Return True if the snapshot of this session is still needed."""
        return session in self.exchanges.table or session in self.donating.table

    def is_with(self, session: int, partner: PeerId) -> bool:
        """Return True if this partner takes part in this exchange or piece."""
        one = self.exchanges.table.get(session)
        if one is not None:
            return partner in one.others
        served = self.donating.table.get(session)
        return served is not None and served[0] == partner

    def pairs_with(self, partner: PeerId) -> list[int]:
        """Return the exchanges that depend on the link to this partner. A group depends on no single link."""
        if self.exchanges.kind.MANY:
            return []
        return [session for session, one in self.exchanges.table.items() if partner in one.others]

    def engaged(self) -> Iterator[PeerId]:
        """Yield all peers with a session in progress, some more than once."""
        for one in self.exchanges.table.values():
            yield from one.others
        for partner, _, _ in self.donating.table.values():
            yield partner
        for piece in self.joining.pieces.values():
            yield piece.donor

    def meant(self, to: PeerId, message: Message) -> bool:
        """Return True if a message that waited for a link should still be sent.

        A message must not begin a session that has ended or moved to another peer: the answer would tie up the link for
        nothing.
        """
        if not isinstance(message, Offer | Invite | Fetch):
            return True
        piece = self.joining.pieces.get(message.session)
        asked = self.joining.surveys.get(message.session) if piece is None else piece.donor
        return asked == to or self.is_with(message.session, to)

    @property
    def lacks(self) -> int:
        """The number of missing elements of the run that we fetch."""
        joining = self.joining
        ranges = [*joining.missing, *((piece.start, piece.stop) for piece in joining.pieces.values())]
        return sum(stop - start for start, stop in ranges)

    @property
    def starved(self) -> bool:
        """True if no known donor offers the missing pieces."""
        return self.joining.starved

    def must_join(self) -> None:
        """Do not begin a run only because no member offers one."""
        self.runs.must_join = True

    def waits_until(self, when: float) -> None:
        """Do not begin a run before ``when`` for lack of others: more are expected."""
        self.runs.join_by = max(self.runs.join_by, when)

    # -- others --------------------------------------------------------------------------------------------------
    def member(self, peer: PeerId) -> MemberRecord | None:
        """Return the record of another member."""
        return self.membership.record(peer)

    def members(self) -> list[tuple[MemberRecord, MemberState]]:
        """Return all other known members."""
        return self.membership.members()

    def link(self, peer: PeerId) -> tuple[float | None, float | None]:
        """Return the RTT in seconds and the rate in MB/s each way of the link to a member, as far as known.

        The rate is that of the last exchanges, including all waits.
        """
        return self.membership.rtt_s(peer), self.exchanges.durations.rate(peer)

    @property
    def turnover(self) -> int:
        """A counter that grows whenever the members, or an address of one, may have changed."""
        return self.membership.turnover

    def contacted(self) -> Iterable[PeerId]:
        """Return the ALIVE contacted members."""
        return self.membership.contacted()

    def remembers(self, peer: PeerId) -> bool:
        """Return True if this is or was a contacted member."""
        return self.membership.remembers(peer)

    @property
    def seed_addresses(self) -> tuple[Address, ...]:
        return self.seeds.seeds

    @property
    def relays(self) -> list[PeerId]:
        """The homes: members whose links carry messages to us if we cannot be dialled."""
        return self.reach.homes

    @property
    def owners_changed(self) -> int:
        """A counter of the changes of :meth:`owners`."""
        return self.membership.changes

    def owners(self) -> list[PeerId]:
        """Return the members that share the data: ALIVE and ready, this peer included."""
        return self.membership.owners()

    def sharing(self) -> list[MemberRecord]:
        """Return the records of the other ALIVE contacted members that hold our run."""
        return self.membership.sharing(self.local.run_id)

    def book(self) -> list[MemberRecord]:
        """Return the members to dial after a restart."""
        return self.membership.book()

    # -- what became of it ---------------------------------------------------------------------------------------
    @property
    def counts(self) -> Counts:
        exchanges, membership = self.exchanges, self.membership
        return Counts(exchanges.done, exchanges.failures, len(membership.contacted()) + 1, membership.sharers)

    @property
    def swarm_samples(self) -> int:
        """Samples behind the weights of our run, by all members. An exchange may lower the number."""
        return self.local.progress.samples

    @property
    def sharers(self) -> int:
        """Members of our run, ourselves included: each sample of ours adds so many to :attr:`swarm_samples`."""
        return self.local.progress.members

    @property
    def own_samples(self) -> int:
        """Samples that this node trained in all its lives, as others count them."""
        return self.membership.my_samples

    @property
    def failures(self) -> int:
        """Failed exchanges."""
        return self.exchanges.failures

    @property
    def failed_by(self) -> Mapping[str, int]:
        """Failed exchanges by reason."""
        return self.exchanges.failed_by

    @property
    def last_partner(self) -> PeerId | None:
        return self.exchanges.last_partner

    @property
    def consensus_distance(self) -> float:
        """See :attr:`gossip.exchange.session_table.Ledger.consensus_distance`."""
        return self.exchanges.consensus_distance

    def agreement(self) -> float:
        """See :meth:`gossip.exchange.session_table.Ledger.agreement`."""
        return self.exchanges.agreement()

    @property
    def refusals(self) -> Mapping[tuple[PeerId, str], int]:
        """Refused vectors by member and reason."""
        return self.exchanges.refusals.counts

    def misconduct(self) -> Iterator[tuple[str, str, int]]:
        """See :meth:`gossip.misbehaviour.MisbehaviourLog.rows`."""
        return self.misbehaviour.rows()

    def look_at_the_end(self, now: float) -> list[Effect]:
        """Count the votes on the end of the run. Call it once a second or so."""
        return self.ending.tick(now)
