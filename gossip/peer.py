"""Peer: the decisions of one member behind receive, tick and deadline. Both drivers run it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gossip.codecs import COMPILED, Machine
from gossip.config import Config
from gossip.discovery import Listening, Reachability, Seeds
from gossip.effects import Dial, Effect, Notice, Send
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.progress import RunProgress
from gossip.exchange.session import Local, within
from gossip.handlers import HANDLERS
from gossip.holder import Holder
from gossip.ids import Address, MemberRecord, PeerId
from gossip.membership.members import Members
from gossip.membership.protocol import Membership
from gossip.misbehaviour import MisbehaviourLog
from gossip.schedule import Schedule, collided_s
from gossip.selection.partners import Partners
from gossip.selection.registry import selector_of
from gossip.selection.rule import Selector
from gossip.state_transfer.donating import Donating
from gossip.state_transfer.ending import Ending
from gossip.state_transfer.joining import Joining, Phase
from gossip.state_transfer.runs import Runs
from gossip.state_transfer.trial import TrialEvaluator
from gossip.wire.messages import Ack, Digest, Gossip, Message, Nack, Ping, PingReq, Reached, Records

__all__ = ["Peer"]

BOOK_DIALS = 4  # members of the address book to dial at once after a restart
WAIT_S = 0.25  # delay of the next mix if there is no partner
MEET_S = 0.5  # delay from the first link until a newcomer asks for weights: a table arrives within a round trip or two
SEARCHES = 2  # failed searches in a row before a busy partner is asked to reserve its next exchange for us
NEVER = -math.inf
IDLE = Phase.IDLE  # reading an Enum's attributes is slow
MEMBERSHIP = frozenset({Ping, Ack, PingReq, Nack, Gossip, Digest, Records})


class Peer(Holder):
    """One member of a swarm, without I/O: methods take ``now`` (seconds, monotonic) and return effects in order.

    Args:
        elements: Float32 elements of the weights that exchanges carry.
        frozen_elements: Elements of the weights that only a newcomer gets.
        trained_elements: Elements of one optimizer key.
        expected: The ids that seeds from an invite must prove.
        members: The member list; by default the membership protocol.
        selector: The partner selection; by default that of ``config``, which must not name a file.
        finished: A run that this node had finished in an earlier life.
        looks: Seeds are looked up on the effect LookUp and reported to :meth:`seeded`; until then there may be none.
        machine: The costs of an exchange here.
    """

    def __init__(
        self,
        me: MemberRecord,
        *,
        sign: Callable[[bytes], bytes],
        verify: Callable[[bytes, bytes, bytes], bool],
        config: Config,
        fingerprint: str,
        elements: int,
        trained_elements: int = 0,
        frozen_elements: int = 0,
        rng: random.Random,
        seeds: tuple[Address, ...] = (),
        expected: Mapping[Address, PeerId] | None = None,
        book: Iterable[MemberRecord] = (),
        members: Members | None = None,
        selector: Selector | None = None,
        finished: bytes = b"",
        looks: bool = False,
        machine: Machine = COMPILED,
        now: float,
    ) -> None:
        self.id, self.config, self.rng = me.id, config, rng
        self.local = Local(
            fingerprint, elements, trained_elements, frozen_elements, run_id=me.run_id, boundary_at=now,
            machine=machine, every=config.first_interval, progress=RunProgress(config.first_interval),
        )  # fmt: skip
        self.misbehaviour = MisbehaviourLog()
        if members is None:
            members = Membership(
                me, sign=sign, verify=verify, config=config, rng=rng, now=now, misbehaviour=self.misbehaviour
            )  # fmt: skip
        self.membership = members
        self.linked_peers: dict[PeerId, float] = {}  # linked members, and when each last had us dial its address
        self.partners = Partners(
            me.id, members, self.local, config, rng, self.linked_peers.__contains__,
            selector or selector_of(config, elements),
        )  # fmt: skip
        self.exchanges: Exchanges[Any] = Exchanges(me.id, self.local, config, self.new_session, self.partners)
        self.exchanges.misbehaviour = self.misbehaviour
        self.schedule = Schedule(config, rng)
        self.waiting = False  # our mix is due, and waits for the end of one that another peer initiated
        self.lonely = False  # no partner was found when our mix was due the last time
        self.searches = 0  # failed searches for a partner since streams began
        self.mixing = False  # exchanges of a mix are finished, but the mix may not be
        self.joining = Joining(self.local, config, self.new_session)
        self.joining.abandon = self.exchanges.abandon
        self.donating = Donating(self.local, config)
        self.seeds = Seeds(seeds, dict(expected or {}), config, now, looks)
        self.reach = Reachability()
        self.optimizer_scalars: tuple[tuple[str, float], ...] = ()
        self.steps = self.samples = 0
        self.reborn = me.incarnation > 1
        self.moved_steps = 0  # step count up to which the movement of the model was measured
        self.ending = Ending(self.local, members, finished)
        self.judge = TrialEvaluator()
        self.runs = Runs(
            self.local, self.membership, self.joining, self.linked_peers, self.begin_run, self.judge, config, rng, now
        )
        self.joining.reachable = self.runs.donors
        self.runs.wait_for = lambda: self.seeds.answering
        self.left = False
        book = list(book)
        self.membership.restore(book, now)
        self.hopeful = bool(seeds or book or looks)

    # -- time ----------------------------------------------------------------------------------------------------
    @property
    def deadline(self) -> float:
        """When to call :meth:`tick`. Drivers read it after every call, so empty parts are skipped."""
        if self.left:
            return math.inf
        soonest, other = self.runs.deadline, self.membership.deadline
        if other < soonest:
            soonest = other
        exchanges, joining = self.exchanges, self.joining
        for exchange in exchanges.table.values():
            if exchange.deadline < soonest:
                soonest = exchange.deadline
        if joining.phase is not IDLE:
            soonest = min(soonest, joining.next_deadline())
        elif self.schedule.due_at < soonest and self.local.ready and not self.offering and not exchanges.upcoming:
            soonest = min(soonest, max(self.schedule.time_beside(exchanges.coming), self.schedule.retry_at))
        if self.seeds.deadline < soonest:
            soonest = self.seeds.deadline
        reach = self.reach
        if reach.next_ping_at < soonest or reach.decide_at < soonest or reach.again_at < soonest:
            soonest = reach.deadline
        if self.donating.table:
            soonest = min(soonest, self.donating.deadline)
        return self.judge.deadline if self.judge.deadline < soonest else soonest

    # -- beginning and end ---------------------------------------------------------------------------------------
    def start(self, now: float) -> list[Effect]:
        if not self.hopeful and not self.runs.must_join:
            return self.begin_run(now, "No seed was given: this node starts a swarm.")
        effects = self.seeds.tick(now, False, (), self.rng)
        known = [record for record in self.membership.book() if record.address is not None]
        for record in self.rng.sample(known, min(BOOK_DIALS, len(known))):
            if record.address is not None:
                effects.append(Dial(record.address, record.id))
        return effects

    def introduce(self, records: Iterable[MemberRecord], now: float) -> None:
        """Add members that start together and know of us too, like those of one launcher."""
        if isinstance(self.membership, Membership):
            self.membership.meet(records, now)

    def leave(self, now: float) -> list[Effect]:
        """Announce LEFT with the last counts, which no later record can hold."""
        self.tell(now)
        self.left = True
        return [*self.replaced(), *self.membership.leave(now)]

    def tell_figures(self, packed: bytes, now: float) -> list[Effect]:
        """Publish the owner's figures in our record, for other owners; empty bytes withdraw them."""
        self.membership.update_me(now, extra=(packed,) if packed else ())
        return []

    # -- links ---------------------------------------------------------------------------------------------------
    def linked(self, peer: PeerId, record: MemberRecord, now: float) -> list[Effect]:
        """Note a link to ``peer`` after its Hello; ``record`` is the peer's signed record."""
        effects = self.membership.linked(peer, record, now)
        if peer not in self.linked_peers:
            self.linked_peers[peer] = NEVER
        self.partners.bench.answers(peer)
        effects += self.exchanges.linked(peer, now)
        me = self.membership.me
        if not self.reach.settled:
            effects += self.reach.linked(peer, me)
        if me.address is None:
            self.refresh_homes(now)
        if self.runs.alone:
            self.runs.next_at = now  # a lonely node looks for runs at once
        elif not self.local.ready and len(self.linked_peers) == 1:
            self.runs.next_at = now + MEET_S  # hear of other members first, or a single donor would be the majority
        return effects

    def unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        """Note that the last link to ``peer`` is gone. ``orderly``: it was closed as idle, which is no fault."""
        self.linked_peers.pop(peer, None)
        effects = self.membership.unlinked(peer, now, orderly)
        effects += self.exchanges.unlinked(peer, now, orderly)
        effects += self.joining.unlinked(peer, now)
        effects += self.donating.unlinked(peer)
        if self.membership.me.address is None:
            self.refresh_homes(now)
        if not self.linked_peers:
            self.seeds.unlinked(now)
        return effects + self.after(now)

    def by_memory(self, peer: PeerId, on: bool) -> None:
        """Note whether this member reads our vectors in shared memory. Only the driver knows."""
        if on:
            self.exchanges.by_memory.add(peer)
        else:
            self.exchanges.by_memory.discard(peer)

    def dial_failed(self, peer: PeerId | None, now: float) -> list[Effect]:
        """Handle a failed dial of ``peer`` (None: a seed): no answer, or one by another peer."""
        if peer is None or peer in self.linked_peers:
            return []
        effects = self.membership.dial_failed(peer, now)
        effects += self.exchanges.unlinked(peer, now)
        effects += self.joining.unlinked(peer, now)
        return effects + self.after(now)

    def seed_answered(self, seed: Address) -> None:
        """Note that this seed accepted a connection, whatever comes of it."""
        self.seeds.answered(seed)

    def seeded(self, seeds: tuple[Address, ...], expected: Mapping[Address, PeerId]) -> list[Effect]:
        """Replace the seeds after a look-up. A peer without links dials the new ones."""
        new = self.seeds.renew(seeds, expected)
        return [] if self.linked_peers else [self.seeds.dial(seed) for seed in new]

    def seed_is_me(self, seed: Address) -> None:
        """Drop a seed that is this peer itself: there is no other to wait for."""
        self.seeds.renew(tuple(other for other in self.seeds.seeds if other != seed), self.seeds.expected)

    def dial_tried(self, asker: PeerId, ok: bool, now: float) -> list[Effect]:
        return [Send(asker, Reached(ok))]

    def refresh_homes(self, now: float) -> None:
        dialable = {p for p in self.linked_peers if (r := self.membership.record(p)) is not None and r.address}
        homes = self.reach.choose_homes(self.linked_peers, dialable, now)
        if homes != self.membership.me.homes:
            self.membership.update_me(now, homes=homes)

    # -- messages ------------------------------------------------------------------------------------------------
    def receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        kind = type(message)
        if kind in MEMBERSHIP:
            return self.membership.receive(sender, message, now)
        handler = HANDLERS.get(kind)
        if handler is None:
            return []
        effects = handler(self, sender, message, now)
        return effects + self.after(now) if self.unsettled else effects

    @property
    def unsettled(self) -> bool:
        """True if :meth:`after` has anything to note."""
        exchanges = self.exchanges
        moved = exchanges.freed or exchanges.began
        busy = exchanges.mixed_at or exchanges.gave_up or self.joining.phase is not IDLE
        return bool(moved or busy or self.misbehaviour.news)

    def check_reach(self, now: float) -> list[Effect]:
        reach, address = self.reach, self.membership.me.address
        if now >= reach.again_at:
            if address is None and reach.wanted is not None:  # members dial only the address in our record
                self.membership.update_me(now, address=reach.wanted)
            return reach.again(self.linked_peers, self.membership.me, now)
        before = reach.found
        if reach.decided(now) is not False or address is None:
            return []
        self.membership.update_me(now, address=None)
        self.refresh_homes(now)
        return [] if before is False else [reach.notice(address)]

    # -- reports of the driver -----------------------------------------------------------------------------------
    def stepped(self, steps: int, samples: int, loss: float | None, now: float) -> list[Effect]:
        """Handle a step boundary with this life's counts: at ``due_steps`` and about every quarter of a second."""
        self.local.boundary_at = now
        self.counted(steps, samples)
        local = self.local
        self.membership.update_me(
            now, steps=steps, samples=samples, progress=local.progress.samples, loss=loss, version=local.version
        )  # fmt: skip
        verdict = self.judge.heard(steps, loss)
        if verdict is not None:
            return self.judged(verdict, now)
        return self.maybe_mix(now)

    def counted(self, steps: int, samples: int) -> None:
        """Update the counts of the training loop, at a boundary or not. Older reports are ignored.

        Call it before an Offer is received: stale versions would give equal peers too little weight in the mix.
        """
        steps, samples = max(steps, self.steps), max(samples, self.samples)
        every = self.config.interval_steps
        if every is not None:
            self.local.version = within(self.local.version + (steps - self.steps) / every)
        if self.local.ready:
            dialable = self.membership.me.address is not None
            self.local.progress.trained(
                samples - self.samples, steps - self.steps, self.membership.sharers, dialable=dialable,
                arrears=self.membership.take_arrears(),
            )  # fmt: skip
        self.steps = self.local.steps = steps
        self.samples = samples

    def maybe_mix(self, now: float) -> list[Effect]:
        exchanges = self.exchanges
        waiting = now < self.schedule.retry_at or self.offering or self.joining.phase is not IDLE
        if not self.local.ready or self.left or waiting or exchanges.upcoming:
            return []
        if not (self.schedule.due(self.steps, now, exchanges.coming) or self.local.settling):
            return []
        effects = exchanges.begin(now)
        self.lonely = not (effects or exchanges.moving)
        if not effects:
            self.schedule.wait(now, WAIT_S)
            self.waiting = exchanges.moving > 0
        return effects

    def snapshotted(self, session: int, now: float, mass: float = 0.0, moved: float = math.nan) -> list[Effect]:
        """Handle a snapshot. ``mass`` is what a push carries; ``moved`` how far local steps moved the model."""
        self.local.boundary_at = now
        if moved == moved and self.steps > self.moved_steps:  # only once for each boundary
            self.exchanges.filter.moved(moved)
            self.schedule.watch(self.consensus_distance, moved / (self.steps - self.moved_steps))
            self.partners.pace = self.schedule.pace
            self.moved_steps = self.steps
        if session in self.donating.table:
            return self.donating.snapshotted(session)
        effects = self.exchanges.snapshotted(session, now, mass)
        return effects + self.after(now) if self.unsettled else effects

    def spoiled(self, session: int | None, now: float) -> list[Effect]:
        """Handle weights with NaN or infinity, seen in this snapshot (None: by the training loop).

        They are given to no peer, and this peer is not ready until the swarm's weights have replaced them.
        """
        effects: list[Effect] = []
        if session is not None:
            given = session in self.donating.table
            effects += self.donating.abandon([session]) if given else self.exchanges.spoiled(session)
        if self.local.ready and self.joining.phase is not Phase.ADOPTING:  # the trial judges weights on trial
            self.local.ready = self.local.sound = False
            self.membership.update_me(now, ready=False)
            self.runs.spoiled(now)
            text = f"The weights are not finite any more (step {self.steps}): this node gives them to nobody, and "
            effects.append(Notice("spoiled", text + "takes the swarm's as soon as a member gives them."))
        return effects + self.after(now)

    def recalled(self, session: int, now: float) -> list[Effect]:
        """Handle an earlier snapshot for this session: the training loop is at no boundary."""
        return self.donating.snapshotted(session)

    def mended(self, now: float) -> list[Effect]:
        """Note that the training loop has made its weights finite again by itself."""
        if self.local.sound or self.joining.phase is Phase.ADOPTING:
            return []
        effects = self.joining.stop()
        self.local.ready = self.local.sound = True
        self.membership.update_me(now, ready=True)
        return [*effects, Notice("mended", "The weights are finite again: this node mixes again.")]

    def streamed(self, session: int, difference_sq: float, own_sq: float, now: float) -> list[Effect]:
        """Handle the complete streams of an exchange: |theirs - ours|^2 and |ours|^2."""
        exchange = self.exchanges.table.get(session)
        effects = self.exchanges.streamed(session, difference_sq, own_sq, now)
        if exchange is not None and effects:
            self.membership.acknowledged(exchange.partner, now)
        return effects + self.after(now) if self.unsettled else effects

    def gathered(
        self, session: int, difference_sq: float, own_sq: float, refused: Iterable[PeerId], now: float
    ) -> list[Effect]:
        """Handle a complete group average: |mean - ours|^2, |ours|^2 and the members whose slices were refused."""
        effects = self.exchanges.gathered(session, difference_sq, own_sq, refused, now)
        return effects + self.after(now) if self.unsettled else effects

    def failed(self, session: int, code: str, now: float) -> list[Effect]:
        """Handle the early end of a session's streams (an exchange, a piece fetched or served)."""
        effects = self.exchanges.failed(session, code, now)
        effects += self.joining.give_back(session, now)
        effects += self.donating.end(session)
        return effects + self.after(now)

    def collected(self, session: int, position: int, now: float) -> list[Effect]:
        return self.joining.collected(session, position, now) + self.after(now)

    def compared(self, session: int, apart_sq: float, own_sq: float, now: float) -> list[Effect]:
        """Handle a complete comparison: |theirs - ours|^2 and |ours|^2 over its elements."""
        return self.joining.compared(session, apart_sq, own_sq, now) + self.after(now)

    def heard(self, peer: PeerId, now: float) -> None:
        """Note progress of a stream with this member as proof of life: a slow link may delay its answer to a probe."""
        self.membership.acknowledged(peer, now)

    def misbehaves(self, who: PeerId | str, kind: str, now: float) -> list[Effect]:
        """Count misbehaviour of a member or an address (:mod:`gossip.misbehaviour`)."""
        self.misbehaviour.note(who, kind, now)
        return [*self.misbehaviour.take()]

    def served(self, session: int, now: float) -> list[Effect]:
        return self.donating.end(session)

    def settle(self, on: bool, now: float) -> list[Effect]:
        """Mix continuously with the plain mean (True), or as configured (False)."""
        self.local.settling = on
        self.local.boundary_at = now
        self.schedule.retry_at = 0.0
        return self.maybe_mix(now) if on else []

    # -- time ----------------------------------------------------------------------------------------------------
    def tick(self, now: float) -> list[Effect]:
        if self.left:
            return []
        effects = self.membership.tick(now) if now >= self.membership.deadline else []
        if self.exchanges.table:
            effects += self.exchanges.tick(now)
            effects += self.exchanges.look_elsewhere(self.membership.state, now)
        if self.joining.phase is not IDLE:
            effects += self.joining.tick(now)
        if self.donating.table:
            effects += self.donating.tick(now)
        if now >= self.seeds.deadline:
            listening = Listening(self.membership, self.linked_peers)
            effects += self.seeds.tick(now, bool(self.linked_peers), listening, self.rng)
        if now >= self.reach.deadline:
            effects += self.check_reach(now)
            effects += self.reach.tick(now)
        if now >= self.runs.deadline:
            effects += self.runs.tick(now)
        if now >= self.judge.deadline:
            effects += self.judged(self.judge.verdict(), now)
        if now >= self.schedule.due_at:
            effects += self.maybe_mix(now)
        return effects + self.after(now) if self.unsettled else effects

    def adapt(self) -> None:
        """Choose the interval anew from the cost of exchanges."""
        local = self.local
        self.schedule.adapt(self.steps, local.boundary_at, self.exchanges.usual(), local.machine)
        local.every = self.schedule.every
        local.progress.count_in(local.every)

    def after(self, now: float) -> list[Effect]:
        """Note what ended: schedule the next mix, and credit partners."""
        exchanges = self.exchanges
        effects: list[Effect] = []
        if self.misbehaviour.news:
            effects += self.misbehaviour.take()
        if exchanges.mixed_at:
            for partner in exchanges.mixed_at:
                self.partners.succeeded(partner)
                self.membership.acknowledged(partner, now)
            self.ending.mixed(exchanges.mixed_at)
            self.mixing = self.mixing or self.partners.counts(exchanges.mixed_at)
            exchanges.mixed_at.clear()
        if self.mixing and not (self.partners.several and exchanges.outgoing):
            self.mixing = False
            if self.config.chooses:
                self.adapt()
            self.schedule.mixed(self.steps, now, exchanges.own_mixed)
            exchanges.own_mixed = False
        if self.waiting and not exchanges.engaged and (exchanges.freed or not exchanges.moving):
            self.waiting = False  # otherwise frequent offers of one member would keep us waiting
            self.schedule.wait(now, 0.0)
        if exchanges.gave_up:
            exchanges.gave_up = False
            self.searches += 1
            exchanges.began = self.searches >= SEARCHES
            self.schedule.wait(now, collided_s(self.rng))
        joining = self.joining
        if exchanges.freed:
            exchanges.freed = False
            effects += exchanges.follow(now)
        if exchanges.began:
            exchanges.began = False
            self.searches = 0
            if self.schedule.behind and joining.phase is IDLE and not self.local.settling:
                effects += exchanges.look_ahead(now)
        if joining.phase is not IDLE and joining.starved and joining.deadline <= now:
            effects += self.joining.more_candidates(self.runs.donors(self.joining.run_id), now)
        return effects

    # -- choices -------------------------------------------------------------------------------------------------
    def new_session(self) -> int:
        return self.rng.getrandbits(62)
