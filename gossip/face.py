"""What drivers and people may ask of a Peer: nobody outside reaches for its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gossip.arithmetic.subsets import Subset
from gossip.conduct import Conduct
from gossip.config import Config
from gossip.discovery import Reachability, Seeds
from gossip.effects import Effect, MemberState
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import Local, Session
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.members import Members
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
    """Of a peer's life so far."""

    done: int  # exchanges finished
    failed: int  # exchanges that came to nothing, offers that nobody answered among them
    alive: int  # members, this one included
    holding: int  # of them, those that hold this one's run


class Face:
    """Reads, and what is asked of a peer between its calls. What is told to it, and makes it decide, is in Peer."""

    id: PeerId
    config: Config
    local: Local
    conduct: Conduct
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
        """What it says of itself."""
        return self.membership.me

    @property
    def ready(self) -> bool:
        """Whether this peer holds the weights of a run, and may train and mix."""
        return self.local.ready

    @property
    def may_join(self) -> bool:
        """Whether it began with a seed, or with members that it knew: there may be a run to join."""
        return self.hopeful

    @property
    def sound(self) -> bool:
        """Whether no weight is NaN or infinite, as far as is known."""
        return self.local.sound

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end."""
        return self.local.finished

    @property
    def genesis(self) -> bytes:
        """The run's id."""
        return self.local.genesis

    @property
    def version(self) -> float:
        """Mixing rounds behind the weights."""
        return self.local.version

    @property
    def elements(self) -> int:
        """Of the weights."""
        return self.local.elements

    @property
    def alone(self) -> bool:
        """Whether nobody else is alive to us, as last announced."""
        return self.runs.alone

    def optimizer(self, keys: tuple[str, ...], scalars: tuple[tuple[str, float], ...]) -> None:
        """What of the optimizer's state a newcomer can be given."""
        self.local.optimizer_keys, self.optimizer_scalars = keys, scalars

    @property
    def gives_optimizer(self) -> bool:
        """Whether that was said, and is anything."""
        return bool(self.local.optimizer_keys)

    # -- the training loop ---------------------------------------------------------------------------------------
    @property
    def due_steps(self) -> int:
        """The step count at which our next mix is due, and ``stepped`` is to be called, unless :attr:`offering`."""
        return self.schedule.steps_beside(self.exchanges.coming)

    @property
    def interval_steps(self) -> int | None:
        """Local steps between two mixes at present; None by the clock alone."""
        return self.schedule.every

    @property
    def offering(self) -> bool:
        """Whether no mix of our own may begin: one is under way, or, where mixes overlap, as many as may be."""
        exchanges = self.exchanges
        return exchanges.engaged if exchanges.overlapping else bool(exchanges.outgoing)

    @property
    def next_mix(self) -> tuple[float, float]:
        """:attr:`due_steps`, inf while none may begin, and :attr:`mix_at`: what a driver reads after decisions."""
        return math.inf if self.offering else self.due_steps, self.mix_at

    @property
    def held(self) -> bool:
        """Whether the training loop must wait at its boundary: a mix began ``max_version_gap`` intervals ago."""
        return self.exchanges.held(self.steps)

    @property
    def next_part(self) -> Subset:
        """Which elements the next mix of our own will be of."""
        return self.exchanges.next_part

    @property
    def mix_at(self) -> float:
        """From when on a mix that is due may begin, so that a driver takes a snapshot along. Never while none may begin
        beside those under way, nor where there was nobody to mix with the last time: the first mix with somebody begins
        a step later, and a node that stays alone copies nothing."""
        exchanges = self.exchanges
        waits = exchanges.table and (exchanges.engaged or exchanges.upcoming)
        return math.inf if self.lonely or self.waiting or waits else self.schedule.retry_at

    @property
    def boundary_at(self) -> float:
        """When the training loop was last seen at a step boundary."""
        return self.local.boundary_at

    def at_boundary(self, when: float) -> None:
        """The loop was at a boundary ``when``, with nothing to say."""
        self.local.boundary_at = max(self.local.boundary_at, when)

    # -- sessions ------------------------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        """Whether no exchange is under way."""
        return not self.exchanges.table

    @property
    def serving(self) -> bool:
        """Whether newcomers are given weights."""
        return bool(self.donating.table)

    @property
    def taking(self) -> bool:
        """Whether the weights of a run are on their way to us."""
        return self.joining.phase is not Phase.IDLE

    def exchange(self, session: int) -> Session | None:
        """The exchange under way with this number."""
        return self.exchanges.table.get(session)

    def under_way(self, session: int) -> bool:
        """Whether an exchange has this number."""
        return session in self.exchanges.table

    def serves(self, session: int) -> bool:
        """Whether a newcomer is given a piece under this number."""
        return session in self.donating.table

    def concerns(self, session: int) -> bool:
        """Whether a snapshot for this number is still wanted."""
        return session in self.exchanges.table or session in self.donating.table

    def is_with(self, session: int, partner: PeerId) -> bool:
        """Whether this is under way, an exchange or a piece served, and the partner takes part in it."""
        one = self.exchanges.table.get(session)
        if one is not None:
            return partner in one.others
        served = self.donating.table.get(session)
        return served is not None and served[0] == partner

    def pairs_with(self, partner: PeerId) -> list[int]:
        """Exchanges under way that live on the link to this partner: a group's live on no one link."""
        if self.exchanges.kind.MANY:
            return []
        return [session for session, one in self.exchanges.table.items() if partner in one.others]

    def engaged(self) -> Iterator[PeerId]:
        """Everybody with whom a session is under way, perhaps more than once."""
        for one in self.exchanges.table.values():
            yield from one.others
        for partner, _, _ in self.donating.table.values():
            yield partner
        for piece in self.joining.pieces.values():
            yield piece.donor

    def meant(self, to: PeerId, message: Message) -> bool:
        """Whether a message that waited for a link is still to be sent: not one that would begin a session which is
        over, or somebody else's by now. An answer to it would bind the link to nothing."""
        if not isinstance(message, Offer | Invite | Fetch):
            return True
        piece = self.joining.pieces.get(message.session)
        asked = self.joining.surveys.get(message.session) if piece is None else piece.donor
        return asked == to or self.is_with(message.session, to)

    @property
    def lacks(self) -> int:
        """Elements of a run's weights that are wanted and not here."""
        joining = self.joining
        ranges = [*joining.missing, *((piece.start, piece.stop) for piece in joining.pieces.values())]
        return sum(stop - start for start, stop in ranges)

    @property
    def starved(self) -> bool:
        """Whether nobody gives what is lacking."""
        return self.joining.starved

    def must_join(self) -> None:
        """It begins no run of its own for want of others."""
        self.runs.must_join = True

    def waits_until(self, when: float) -> None:
        """Others are to come: it begins no run of its own before, for want of them."""
        self.runs.join_by = max(self.runs.join_by, when)

    # -- others --------------------------------------------------------------------------------------------------
    def member(self, peer: PeerId) -> MemberRecord | None:
        """What another says of itself."""
        return self.membership.record(peer)

    def members(self) -> list[tuple[MemberRecord, MemberState]]:
        """Everybody else this peer knows of."""
        return self.membership.members()

    def link(self, peer: PeerId) -> tuple[float | None, float | None]:
        """Of the link to this member, as far as it is known: seconds there and back, and MB/s each way of the last
        exchanges, with all that they waited for."""
        return self.membership.rtt_s(peer), self.exchanges.durations.rate(peer)

    @property
    def turnover(self) -> int:
        """Grows whenever the members, or an address of one, may have changed."""
        return self.membership.turnover

    def met(self) -> Iterable[PeerId]:
        """Members that are alive, and known by more than hearsay."""
        return self.membership.met()

    def remembers(self, peer: PeerId) -> bool:
        """Whether this is a member, or was one."""
        return self.membership.remembers(peer)

    @property
    def seed_addresses(self) -> tuple[Address, ...]:
        return self.seeds.seeds

    @property
    def relays(self) -> list[PeerId]:
        """Members whose links carry what is for us, where nobody can dial us."""
        return self.reach.homes

    @property
    def owners_changed(self) -> int:
        """Counts changes of :meth:`owners`."""
        return self.membership.changes

    def owners(self) -> list[PeerId]:
        """Who shares the data: alive, ready and of our run, this peer included."""
        return self.membership.owners()

    def sharing(self) -> list[MemberRecord]:
        """What the others that are alive and hold our run's weights say of themselves; of those that we met."""
        return self.membership.sharing(self.local.genesis)

    def book(self) -> list[MemberRecord]:
        """Members to be dialled after a restart."""
        return self.membership.book()

    # -- what became of it ---------------------------------------------------------------------------------------
    @property
    def counts(self) -> Counts:
        exchanges, membership = self.exchanges, self.membership
        return Counts(exchanges.done, exchanges.failures, len(membership.met()) + 1, membership.sharers)

    @property
    def swarm_samples(self) -> int:
        """Samples behind the weights of our run, all members'. An exchange may lower the number."""
        return self.local.progress.samples

    @property
    def sharers(self) -> int:
        """Members of our run, ourselves included: each sample of ours adds so many to :attr:`swarm_samples`."""
        return self.local.progress.members

    @property
    def own_samples(self) -> int:
        """Trained by this node in all its lives, as others count them."""
        return self.membership.my_samples

    @property
    def failures(self) -> int:
        """Exchanges that came to nothing."""
        return self.exchanges.failures

    @property
    def failed_by(self) -> Mapping[str, int]:
        """The same by the reason."""
        return self.exchanges.failed_by

    @property
    def last_partner(self) -> PeerId | None:
        return self.exchanges.last_partner

    @property
    def consensus_distance(self) -> float:
        """As :attr:`gossip.exchange.session_table.Ledger.consensus_distance`."""
        return self.exchanges.consensus_distance

    def agreement(self) -> float:
        """As :meth:`gossip.exchange.session_table.Ledger.agreement`."""
        return self.exchanges.agreement()

    @property
    def refusals(self) -> Mapping[tuple[PeerId, str], int]:
        """What was refused of whom, by reason."""
        return self.exchanges.refusals.counts

    def misconduct(self) -> Iterator[tuple[str, str, int]]:
        """As :meth:`gossip.conduct.Conduct.rows`."""
        return self.conduct.rows()

    def look_at_the_end(self, now: float) -> list[Effect]:
        """Once a second or so: do most members say that the run is complete?"""
        return self.ending.tick(now)
