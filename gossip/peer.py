"""Peer: one member's decisions behind receive, tick and deadline. Both drivers run this and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gossip.codecs import COMPILED, Machine
from gossip.conduct import Conduct
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
from gossip.schedule import Schedule, collided_s
from gossip.selection.partners import Partners
from gossip.selection.registry import selector_of
from gossip.selection.rule import Selector
from gossip.state_transfer.donating import Donating
from gossip.state_transfer.ending import Ending
from gossip.state_transfer.joining import Joining, Phase
from gossip.state_transfer.runs import Runs
from gossip.state_transfer.trial import Judge
from gossip.wire.messages import Ack, Digest, Gossip, Message, Nack, Ping, PingReq, Reached, Records

__all__ = ["Peer"]

BOOK_DIALS = 4  # members of the address book tried at once after a restart
WAIT_S = 0.25  # with nobody to mix with
MEET_S = 0.5  # from the first link until a newcomer asks for weights: a table is there within a round trip or two
SEARCHES = 2  # in vain, one after the other: all are under way, and one of them may promise us its next exchange
NEVER = -math.inf
IDLE = Phase.IDLE  # an Enum's attributes are slow
MEMBERSHIP = frozenset({Ping, Ack, PingReq, Nack, Gossip, Digest, Records})


class Peer(Holder):
    """One member of a swarm, without I/O: every method takes ``now`` (seconds, monotonic) and returns effects in order.

    ``elements``: float32 elements of the weights that exchanges carry; ``frozen_elements``: of those that only a
    newcomer gets; ``trained_elements``: of one optimizer key. ``sign`` and ``verify`` are the identity's; ``expected``
    holds the ids that seeds from an invite must prove; ``members`` is who knows the others, by default the membership
    protocol; ``selector`` is whom to mix with, by default what ``config`` says, which must not name a file;
    ``finished`` is a run that this node had finished in an earlier life. ``looks``: seeds are looked up when LookUp
    asks for it, and told with :meth:`seeded`; until then there may be none. ``machine``: what exchanges cost here.
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
            fingerprint, elements, trained_elements, frozen_elements, genesis=me.genesis, boundary_at=now,
            machine=machine, every=config.first_interval, progress=RunProgress(config.first_interval),
        )  # fmt: skip
        self.conduct = Conduct()
        if members is None:
            members = Membership(
                me, sign=sign, verify=verify, config=config, rng=rng, now=now, conduct=self.conduct
            )  # fmt: skip
        self.membership = members
        self.linked_peers: dict[PeerId, float] = {}  # and when each last had us dial its address
        self.partners = Partners(
            me.id, members, self.local, config, rng, self.linked_peers.__contains__,
            selector or selector_of(config, elements),
        )  # fmt: skip
        self.exchanges: Exchanges[Any] = Exchanges(me.id, self.local, config, self.new_session, self.partners)
        self.exchanges.conduct = self.conduct
        self.schedule = Schedule(config, rng)
        self.waiting = False  # our mix is due, and waits for the end of one that another asked for
        self.lonely = False  # when our mix was due the last time there was nobody to mix with
        self.searches = 0  # for a partner, in vain, since streams began
        self.mixing = False  # exchanges of a mix are finished, and it may not be over
        self.joining = Joining(self.local, config, self.new_session)
        self.joining.abandon = self.exchanges.abandon
        self.donating = Donating(self.local, config)
        self.seeds = Seeds(seeds, dict(expected or {}), config, now, looks)
        self.reach = Reachability()
        self.optimizer_scalars: tuple[tuple[str, float], ...] = ()
        self.steps = self.samples = 0
        self.reborn = me.incarnation > 1
        self.moved_steps = 0  # the step count up to which progress was measured
        self.ending = Ending(self.local, members, finished)
        self.judge = Judge()
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
        """When to call :meth:`tick`. Drivers ask after every call of this peer, so what is empty is not asked."""
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
        """Members that are there from the beginning and know of us too, as those that one launcher started."""
        if isinstance(self.membership, Membership):
            self.membership.meet(records, now)

    def leave(self, now: float) -> list[Effect]:
        """Say LEFT, with the last counts: nobody will say them later."""
        self.tell(now)
        self.left = True
        return [*self.replaced(), *self.membership.leave(now)]

    def tell_figures(self, packed: bytes, now: float) -> list[Effect]:
        """What its owner measured, for the owners of others: it goes out behind our record; empty: nothing any more."""
        self.membership.update_me(now, extra=(packed,) if packed else ())
        return []

    # -- links ---------------------------------------------------------------------------------------------------
    def linked(self, peer: PeerId, record: MemberRecord, now: float) -> list[Effect]:
        """A link to ``peer`` finished its Hello; ``record`` is what it signed of itself."""
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
            self.runs.next_at = now  # who waits for company looks at once
        elif not self.local.ready and len(self.linked_peers) == 1:
            self.runs.next_at = now + MEET_S  # it tells us of the others, or its word alone would be the majority's
        return effects

    def unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        """The last link to ``peer`` is gone, and sessions on it ended with it. ``orderly``: closed for want of use,
        which says nothing about the peer."""
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
        """This member reads our vectors where they lie, or does so no more: as the driver finds, and nobody says."""
        if on:
            self.exchanges.by_memory.add(peer)
        else:
            self.exchanges.by_memory.discard(peer)

    def dial_failed(self, peer: PeerId | None, now: float) -> list[Effect]:
        """Nobody, or somebody else, answered where ``peer`` should be (None: a seed)."""
        if peer is None or peer in self.linked_peers:
            return []
        effects = self.membership.dial_failed(peer, now)
        effects += self.exchanges.unlinked(peer, now)
        effects += self.joining.unlinked(peer, now)
        return effects + self.after(now)

    def seed_answered(self, seed: Address) -> None:
        """A connection to this seed was opened, whatever comes of it."""
        self.seeds.answered(seed)

    def seeded(self, seeds: tuple[Address, ...], expected: Mapping[Address, PeerId]) -> list[Effect]:
        """The seeds were looked up: these, and no others. Who is alone dials those that are new."""
        new = self.seeds.renew(seeds, expected)
        return [] if self.linked_peers else [self.seeds.dial(seed) for seed in new]

    def seed_is_me(self, seed: Address) -> None:
        """Who answered at this seed is this peer itself: there is nobody to wait for."""
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
        """Whether :meth:`after` has something to note."""
        exchanges = self.exchanges
        moved = exchanges.freed or exchanges.began
        busy = exchanges.mixed_at or exchanges.gave_up or self.joining.phase is not IDLE
        return bool(moved or busy or self.conduct.news)

    def check_reach(self, now: float) -> list[Effect]:
        reach, address = self.reach, self.membership.me.address
        if now >= reach.again_at:
            if address is None and reach.wanted is not None:  # only what our record says is ever tried
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
        """The training loop is at a step boundary, ``steps`` and ``samples`` into its life; call it at least when
        ``due_steps`` is reached, and every quarter of a second or so."""
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
        """How far the training loop is, boundary or not: call it before an Offer is received. The weight of a mix comes
        from the two versions, and with stale ones equal peers would weigh each other too little. A report that is older
        than what was counted already counts nothing."""
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
        """The snapshot asked for is taken. ``mass``: what of the model's a push carries away; ``moved``: how far local
        steps alone have moved the model since the last snapshot, where somebody measures it."""
        self.local.boundary_at = now
        if moved == moved and self.steps > self.moved_steps:  # and not a second one at the same boundary
            self.exchanges.filter.moved(moved)
            self.schedule.watch(self.consensus_distance, moved / (self.steps - self.moved_steps))
            self.partners.pace = self.schedule.pace
            self.moved_steps = self.steps
        if session in self.donating.table:
            return self.donating.snapshotted(session)
        effects = self.exchanges.snapshotted(session, now, mass)
        return effects + self.after(now) if self.unsettled else effects

    def spoiled(self, session: int | None, now: float) -> list[Effect]:
        """Our weights hold NaN or infinity, as the snapshot of this session shows (None: the training loop saw it).
        Nothing of them is given to anybody; until the swarm's have taken their place this peer is not ready.
        """
        effects: list[Effect] = []
        if session is not None:
            given = session in self.donating.table
            effects += self.donating.abandon([session]) if given else self.exchanges.spoiled(session)
        if self.local.ready and self.joining.phase is not Phase.ADOPTING:  # what is on trial is judged as it is
            self.local.ready = self.local.sound = False
            self.membership.update_me(now, ready=False)
            self.runs.spoiled(now)
            text = f"The weights are not finite any more (step {self.steps}): this node gives them to nobody, and "
            effects.append(Notice("spoiled", text + "takes the swarm's as soon as a member gives them."))
        return effects + self.after(now)

    def recalled(self, session: int, now: float) -> list[Effect]:
        """An earlier snapshot is the session's: the training loop is at no boundary."""
        return self.donating.snapshotted(session)

    def mended(self, now: float) -> list[Effect]:
        """The training loop has made its weights finite again, by itself."""
        if self.local.sound or self.joining.phase is Phase.ADOPTING:
            return []
        effects = self.joining.stop()
        self.local.ready = self.local.sound = True
        self.membership.update_me(now, ready=True)
        return [*effects, Notice("mended", "The weights are finite again: this node mixes again.")]

    def streamed(self, session: int, difference_sq: float, own_sq: float, now: float) -> list[Effect]:
        """An exchange's streams are whole: |theirs - ours|^2 and |ours|^2."""
        exchange = self.exchanges.table.get(session)
        effects = self.exchanges.streamed(session, difference_sq, own_sq, now)
        if exchange is not None and effects:
            self.membership.acknowledged(exchange.partner, now)
        return effects + self.after(now) if self.unsettled else effects

    def gathered(
        self, session: int, difference_sq: float, own_sq: float, refused: Iterable[PeerId], now: float
    ) -> list[Effect]:
        """All slices of a group are means: |mean - ours|^2, |ours|^2, and who was refused: whose slices were left out
        of ours, or whose means are none."""
        effects = self.exchanges.gathered(session, difference_sq, own_sq, refused, now)
        return effects + self.after(now) if self.unsettled else effects

    def failed(self, session: int, code: str, now: float) -> list[Effect]:
        """Streams of this session (exchange, piece fetched, piece served) ended early."""
        effects = self.exchanges.failed(session, code, now)
        effects += self.joining.give_back(session, now)
        effects += self.donating.end(session)
        return effects + self.after(now)

    def collected(self, session: int, position: int, now: float) -> list[Effect]:
        return self.joining.collected(session, position, now) + self.after(now)

    def compared(self, session: int, apart_sq: float, own_sq: float, now: float) -> list[Effect]:
        """What was received to be compared is whole: |theirs - ours|^2 and |ours|^2 over its elements."""
        return self.joining.compared(session, apart_sq, own_sq, now) + self.after(now)

    def heard(self, peer: PeerId, now: float) -> None:
        """Bytes of a vector came from this member, or it took some: on a slow link its answer to a probe is behind
        them."""
        self.membership.acknowledged(peer, now)

    def misbehaves(self, who: PeerId | str, kind: str, now: float) -> list[Effect]:
        """A member, or somebody at an address, did what :mod:`gossip.conduct` counts."""
        self.conduct.note(who, kind, now)
        return [*self.conduct.take()]

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
        """Choose the interval anew, by what exchanges take."""
        local = self.local
        self.schedule.adapt(self.steps, local.boundary_at, self.exchanges.usual(), local.machine)
        local.every = self.schedule.every
        local.progress.count_in(local.every)

    def after(self, now: float) -> list[Effect]:
        """Note what ended: when the next mix is due, and who earned trust."""
        exchanges = self.exchanges
        effects: list[Effect] = []
        if self.conduct.news:
            effects += self.conduct.take()
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
            self.waiting = False  # or a member that asks often enough would have us wait most of the time
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
            effects += self.joining.more_candidates(self.runs.donors(self.joining.genesis), now)
        return effects

    # -- choices -------------------------------------------------------------------------------------------------
    def new_session(self) -> int:
        return self.rng.getrandbits(62)
