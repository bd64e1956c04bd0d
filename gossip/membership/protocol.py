"""The membership protocol: SWIM with Lifeguard over a full table, with push-pull anti-entropy.

``states`` holds the rules for states, ``detector`` probes, ``anti_entropy`` compares tables, ``self_record`` keeps our
own record. This module handles messages and timers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from statistics import median_low
from typing import Any, Unpack

from gossip.config import Config
from gossip.effects import Dial, Effect, MemberState, Notice, Send
from gossip.errors import RemoteError
from gossip.ids import MemberRecord, PeerId
from gossip.membership.anti_entropy import PushPull
from gossip.membership.detector import PIGGYBACK, Detector
from gossip.membership.dissemination import Rumours
from gossip.membership.entry import Entry
from gossip.membership.self_record import Myself, Own
from gossip.membership.states import TELL_EVERY_S, MemberStates
from gossip.membership.strangers import Introductions
from gossip.membership.table import Table
from gossip.misbehaviour import MisbehaviourLog
from gossip.wire.messages import (
    MAX_UPDATES,
    Ack,
    Digest,
    Gossip,
    Hint,
    Message,
    Nack,
    Ping,
    PingReq,
    Records,
    Update,
)  # fmt: skip
from gossip.wire.records import Sign, Verify, acceptable, claims_more, signed

__all__ = ["Membership"]

FAREWELLS = 8  # members, besides the linked ones, that we tell directly when we leave
DEAD_KEPT_S = 86_400.0  # The dead are remembered and dialled for a day: longer than a cut that is repaired lasts.
HEAL_ALONE = 3  # dials each probe period while we know no ALIVE member
ENOUGH_LINKS = 24  # links that suffice for gossip: among 1,000 members, records were as fresh as with random targets
BOOK = 1_024  # records saved for the next start: 256 KiB
ALIVE, SUSPECT, DEAD = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD  # reading an Enum's attributes is slow


class Membership:
    """One peer's view of the swarm. Methods return effects; ``deadline`` says when to call :meth:`tick` next.

    ``me`` is our first record; its ``steps`` count earlier lives. A message with a record that its owner did not sign
    raises :class:`~gossip.errors.RemoteError` and changes nothing.
    """

    def __init__(
        self, me: MemberRecord, *, sign: Sign, verify: Verify, config: Config, rng: random.Random, now: float,
        misbehaviour: MisbehaviourLog | None = None,
    ) -> None:  # fmt: skip
        me = signed(acceptable(me), sign)
        self._mine = me.id
        self._config, self._rng = config, rng
        self._table = Table(me, 2 * config.internal.max_members, now)
        self._rumours = Rumours(config.internal.gossip_period_s, now)
        self._detector = Detector(self._table, self._rumours, config, rng, now)
        self._introductions = Introductions(self._table, rng, now)
        self.misbehaviour = misbehaviour if misbehaviour is not None else MisbehaviourLog()
        self._view = MemberStates(self._detector, self._introductions, sign, verify, self.misbehaviour, now)
        self._myself = Myself(me, self._table, self._rumours, sign, config, now)
        self._push_pull = PushPull(me.id, self._table, config, rng, now)
        self._heal_s = now + rng.random() * config.internal.heal_period_s
        self._left = False
        self._holding_s = math.inf  # when to tell linked members that we now hold a run
        self._woke_s = now  # when this process last resumed after it had been stopped
        self.deadline = now  # when to call tick
        self.changes = 0  # counts changes of owners()
        self.company = False  # whether another contacted member is ALIVE; drivers often read it and the two above
        self._handlers: dict[type, Callable[[PeerId, Entry | None, Any, float, list[Effect]], None]] = {
            Ping: self._on_ping,
            Ack: self._on_ack,
            PingReq: self._on_ping_req,
            Nack: self._on_nack,
            Gossip: self._on_gossip,
            Digest: self._push_pull.on_digest,
            Records: self._on_records,
        }
        self._arm()

    # -- driver --------------------------------------------------------------------------------------------------------
    def receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        """Handle a Ping, Ack, PingReq, Nack, Gossip, Digest or Records from a link to ``sender``."""
        out: list[Effect] = []
        if self._left:
            return out
        self._notice_sleep(now)
        entry = self._table.entries.get(sender)
        if entry is not None:
            entry.acked_s = now
        self._handlers[type(message)](sender, entry, message, now, out)
        if sender in self._detector.targets:
            self._detector.proved(sender, out)
        if entry is not None and (entry.state is SUSPECT or entry.state is DEAD):
            if entry.restored:
                self._view.trust(entry, entry.record, now)
            else:
                self._view.warn(entry, now, out)
        return self._done(out)

    def tick(self, now: float) -> list[Effect]:
        """Run the timers that are due."""
        out: list[Effect] = []
        if self._left:
            return out
        self._notice_sleep(now)
        if now >= self._detector.deadline:
            self._suspect(self._detector.tick(now, out), now)
        if now >= self._view.deadline:
            self._view.tick(now, out)
        if now >= self._holding_s:
            self._holding_s = math.inf
            out.extend(Send(peer, Gossip((self.me,))) for peer in sorted(self._table.links))
        if now >= self._myself.due_s:
            self._myself.tick(now)
        if now >= self._rumours.due_s:
            self._gossip(now, out)
        if now >= self._push_pull.due_s:
            self._push_pull.tick(now, out)
        if now >= self._heal_s:
            self._heal(now, out)
        if now >= self._introductions.due_s:
            self._introductions.tick(now, out)
        return self._done(out)

    def linked(self, peer: PeerId, record: MemberRecord, now: float) -> list[Effect]:
        """Note the first link to ``peer``, with the record of its Hello. Raises as :meth:`receive` does."""
        out: list[Effect] = []
        if self._left or peer == self._mine:
            return out
        self._notice_sleep(now)
        entries = self._table.entries
        known = entries.get(peer)
        stranger = known is None or known.state is not ALIVE
        same = known is not None and known.record is record  # the usual case, which needs no comparison
        if known is not None and not same and claims_more(known.record, record):
            out.append(Send(peer, Gossip((known.record,))))  # it restarted and does not know its earlier counts
        if (known is None or not same or known.restored) and self._view.is_news(record, linked=True):
            self._view.hear(record, now)
        entry = entries.get(peer)
        if entry is None:
            if self._table.forgot(peer):  # it was gone for a day and must return with a higher incarnation
                out.append(Send(peer, Gossip((self._view.own(record, True),))))
            return self._done(out)
        entry.linked = True
        self._table.links[peer] = None
        self._view.meet(entry, now)
        entry.acked_s = now
        if peer in self._detector.targets:
            self._detector.proved(peer, out)
        if entry.restored:
            self._view.trust(entry, entry.record, now)
        elif entry.state is DEAD or entry.state is SUSPECT:
            self._view.warn(entry, now, out)
        # A member that was ALIVE already shares our table, except for what gossip missed.
        alone = len(self._table.contacted) <= (entry.state is ALIVE)
        if alone or stranger:
            self._push_pull.ask(entry, now, out, everything=alone)
        return self._done(out)

    def unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        """Note that the last link to ``peer`` is gone; unless ``orderly``, probe it before any member accuses it."""
        out: list[Effect] = []
        entry = self._table.entries.get(peer)
        if entry is not None:
            entry.linked = False
            self._table.links.pop(peer, None)
            if not orderly and not self._left and entry.state in (ALIVE, SUSPECT):
                self._suspect(self._detector.doubt(entry, now, out), now)
        return self._done(out)

    def dial_failed(self, peer: PeerId, now: float) -> list[Effect]:
        """Fail the direct probe of a ``peer`` that could not be dialled; helpers are asked next."""
        out: list[Effect] = []
        entry = self._table.entries.get(peer)
        if entry is not None and not self._left:
            if not entry.contacted and self._introductions.failed(entry, now) and entry.state is ALIVE:
                self._view.suspect_ourselves(entry, now)  # any member that knows better refutes it
            self._suspect(self._detector.unreachable(entry, now, out), now)
        return self._done(out)

    def acknowledged(self, peer: PeerId, now: float) -> None:
        """Note proof of life other than a message of the membership, for example a finished exchange."""
        entry = self._table.entries.get(peer)
        if entry is not None:
            entry.acked_s = now
            if peer in self._detector.targets:
                self._detector.acknowledged(peer)
                self._arm()

    def update_me(self, now: float, **changes: Unpack[Own]) -> None:
        """Change our record, with counts of this life: :class:`Myself` signs mere progress later, the rest at once."""
        if not self._left:
            before = self.me
            self._myself.update(changes, now)
            if self.me.ready and not (before.ready and self.me.run_id == before.run_id):
                self._holding_s = now  # the next tick tells all linked members: their steps count for this run now
            self._arm()

    def leave(self, now: float) -> list[Effect]:
        """Announce LEFT to linked members and a few more. The membership sends nothing afterwards."""
        if self._left:
            return []
        self._myself.announce(now, left=True)
        self._left = True
        self._arm()
        whom = dict.fromkeys(entry.record.id for entry in self._table.sample(FAREWELLS, self._rng))
        whom |= dict.fromkeys(sorted(self._table.links))
        farewell = Gossip((self.me,))
        return [Send(peer, farewell) for peer in whom]

    # -- messages ------------------------------------------------------------------------------------------------------
    def _on_ping(self, sender: PeerId, entry: Entry | None, ping: Ping, now: float, out: list[Effect]) -> None:
        self._absorb(ping.updates, sender, entry, now, out)
        out.append(Send(sender, Ack(ping.seq, self._rumours.take(PIGGYBACK, 1, self._table.size))))

    def _on_ack(self, sender: PeerId, entry: Entry | None, ack: Ack, now: float, out: list[Effect]) -> None:
        self._absorb(ack.updates, sender, entry, now, out)
        self._detector.acked(sender, ack.seq, now)

    def _on_ping_req(self, sender: PeerId, entry: Entry | None, asked: PingReq, now: float, out: list[Effect]) -> None:
        self._absorb(asked.updates, sender, entry, now, out)
        self._detector.request(sender, asked, now, out)

    def _on_nack(self, sender: PeerId, entry: Entry | None, nack: Nack, now: float, out: list[Effect]) -> None:
        self._suspect(self._detector.nacked(sender, nack.seq), now)

    def _on_gossip(self, sender: PeerId, entry: Entry | None, gossip: Gossip, now: float, out: list[Effect]) -> None:
        self._absorb(gossip.updates, sender, entry, now, out)

    def _on_records(self, sender: PeerId, entry: Entry | None, records: Records, now: float, out: list[Effect]) -> None:
        quiet = self._push_pull.quiet(entry, now)
        self._absorb(records.records, sender, entry, now, out, quiet=quiet)
        self._push_pull.answer(sender, entry, records, out)

    def _absorb(
        self, updates: tuple[Update, ...], sender: PeerId, entry: Entry | None, now: float, out: list[Effect],
        *, quiet: bool = False,
    ) -> None:  # fmt: skip
        # Check all signatures first: a message is accepted whole, or refused with nothing changed.
        mine = self._mine
        for update in self._view.fresh(updates, sender, entry, now):
            if isinstance(update, Hint):
                if update.peer == mine:
                    self._on_own_hint(update, sender, entry, now, out)
                else:
                    self._view.accused(update, entry, now, out)
            elif update.id == mine:
                if claims_more(update, self.me) and self._myself.continue_from(update, now):
                    out.append(Notice("twin", "Another process signs with this node's key: stop one of the two."))
            else:
                self._view.hear(update, now, sender, quiet)

    def _on_own_hint(self, hint: Hint, sender: PeerId, entry: Entry | None, now: float, out: list[Effect]) -> None:
        if hint.incarnation > self.me.incarnation:
            # An earlier life at best: our record would prove it, while hints could raise our incarnation without limit.
            return
        if hint.incarnation == self.me.incarnation:
            if not self._myself.accused(now):
                return  # we have just refuted another hint; this one is refuted soon
            if self._view.accused_us(hint, now):
                self._detector.blame_ourselves(1)  # we answered some prober too slowly (Lifeguard, section IV-A)
        # A limit of its own: two that hold each other DEAD would spend that of warnings, and never answer.
        if entry is not None and entry.answered_s <= now - TELL_EVERY_S:
            entry.answered_s = now
            out.append(Send(sender, Gossip((self.me,))))

    def _suspect(self, failed: list[Entry], now: float) -> None:
        for entry in failed:
            self._view.suspect_ourselves(entry, now)

    # -- time ----------------------------------------------------------------------------------------------------------
    def _gossip(self, now: float, out: list[Effect]) -> None:
        targets = self._listeners()
        if not targets:
            self._rumours.pause()
            return
        pressing = self._rumours.pressing
        updates = self._rumours.take(MAX_UPDATES, len(targets), self._table.size) if pressing else ()
        if updates:  # Pings may have carried everything, or all but progress
            gossip = Gossip(updates)
            out.extend(Send(entry.record.id, gossip) for entry in targets)
        self._rumours.gossiped(now)

    def _listeners(self) -> list[Entry]:
        """Return the targets of one gossip frame: one random member, the others random linked ones if there are enough.

        Exchanges link random partners, and such a random graph spreads a rumour as well as random targets do. Random
        targets alone must be dialled first: six dials a second for each of 1,000 members.
        """
        fanout, links = self._config.internal.gossip_fanout, self._table.links
        if len(links) < ENOUGH_LINKS:
            return self._table.sample(fanout, self._rng, suspects=True)  # a suspect must hear of its suspicion
        targets = self._table.sample(1, self._rng, suspects=True)
        entries = self._table.entries
        for peer in self._rng.sample(list(links), fanout - 1):
            entry = entries[peer]
            if (entry.state is ALIVE or entry.state is SUSPECT) and entry not in targets:
                targets.append(entry)
        return targets

    def _heal(self, now: float, out: list[Effect]) -> None:
        """Dial a random DEAD member, which may only have been cut off, and forget members that are gone for long."""
        config, dead = self._config, self._table.dead
        self._table.forget(now - DEAD_KEPT_S)
        alone = not self._table.contacted
        self._heal_s = now + (config.internal.probe_period_s if alone else config.internal.heal_period_s)
        for peer in self._rng.sample(dead, min(len(dead), HEAL_ALONE if alone else 1)):
            entry = self._table.entries[peer]
            if entry.linked:  # this link survived the silence, so there is none to open
                self._view.warn(entry, now, out)
            elif entry.record.address is not None:
                out.append(Dial(entry.record.address, peer))

    def _done(self, out: list[Effect]) -> list[Effect]:
        self._arm()
        if self._view.before:
            self._view.changed(out)
        if self.misbehaviour.news:
            out.extend(self.misbehaviour.take())
        return out

    def _arm(self) -> None:
        table = self._table
        self.changes, self.company = table.changes, bool(table.contacted)
        if self._left:
            self.deadline = math.inf
            return
        due_s = self._detector.deadline  # runs after every message: these comparisons cost half of min()
        if self._view.deadline < due_s:
            due_s = self._view.deadline
        if self._rumours.due_s < due_s:
            due_s = self._rumours.due_s
        if self._myself.due_s < due_s:
            due_s = self._myself.due_s
        if self._push_pull.due_s < due_s:
            due_s = self._push_pull.due_s
        if self._introductions.due_s < due_s:
            due_s = self._introductions.due_s
        if self._holding_s < due_s:
            due_s = self._holding_s
        self.deadline = self._heal_s if self._heal_s < due_s else due_s

    def _notice_sleep(self, now: float) -> None:
        """Shift all timers after a stop of this process, which a timer that is late by 0.5 s shows."""
        gap_s = now - max(self.deadline, self._woke_s)
        if gap_s > self._config.internal.probe_timeout_min_s:
            self._woke_s = now  # waiting messages may come before the tick: count the gap once
            self._detector.slept(gap_s)
            self._view.slept(gap_s)

    # -- questions -----------------------------------------------------------------------------------------------------
    @property
    def me(self) -> MemberRecord:
        """Our own record, as last signed."""
        return self._myself.record

    @property
    def turnover(self) -> int:
        """A counter of members that come and go. Indexes by member are stale when it grows."""
        return self._table.changes

    def alive(self) -> list[PeerId]:
        """Return the ALIVE without ourselves, unordered, some by hearsay alone. The list is live: do not keep it."""
        return self._table.alive

    def contacted(self) -> list[PeerId]:
        """Return the ALIVE that had a link with us, likewise: possible partners, donors and owners."""
        return self._table.contacted

    def remembers(self, peer: PeerId) -> bool:
        """Return True if we had a link with this peer in this life or an earlier one."""
        entry = self._table.entries.get(peer)
        return entry is not None and entry.introducer in (None, self._mine)

    def knows(self, peer: PeerId) -> bool:
        """Return True if we had a link with this peer in this life."""
        entry = self._table.entries.get(peer)
        return entry is not None and entry.contacted

    def owners(self) -> list[PeerId]:
        """Return the sorted ids of the data's owners, ourselves included: ALIVE, ready, contacted or vouched for."""
        return self._table.owners()

    def state(self, peer: PeerId) -> MemberState | None:
        entry = self._table.entries.get(peer)
        return None if entry is None else entry.state

    def standing(self, peers: Iterable[PeerId], run_id: bytes) -> list[PeerId]:
        """Return those of ``peers`` that are ALIVE and hold the weights of this run."""
        entries = self._table.entries
        return [
            peer for peer in peers
            if (entry := entries.get(peer)) is not None and entry.state is ALIVE
            and (record := entry.record).ready and record.run_id == run_id
        ]  # fmt: skip

    def record(self, peer: PeerId) -> MemberRecord | None:
        entry = self._table.entries.get(peer)
        return None if entry is None else entry.record

    def runs(self) -> list[bytes]:
        """Return the runs of the ALIVE and ready that had a link with us, and our own once we are ready."""
        return self._table.runs()

    def sharing(self, run_id: bytes) -> list[MemberRecord]:
        """Return the records of the ALIVE and ready of this run that had a link with us. Walks the table."""
        entries = self._table.entries
        records = [entries[peer].record for peer in self._table.contacted]
        return [record for record in records if record.ready and record.run_id == run_id]

    def members(self) -> list[tuple[MemberRecord, MemberState]]:
        """Return all other members. Walks the table: for display, not for every message."""
        return [(entry.record, entry.state) for entry in self._table.entries.values() if entry is not self._table.mine]

    def rtt_s(self, peer: PeerId) -> float | None:
        """Return the smoothed round-trip time in seconds, or None before a probe was answered."""
        entry = self._table.entries.get(peer)
        return None if entry is None else entry.rtt_s

    @property
    def my_samples(self) -> int:
        """Our own samples in this life for our run."""
        return self._myself.samples

    @property
    def sharers(self) -> int:
        """The number of ALIVE and ready members of our run that had a link with us, and ourselves."""
        return max(1, self._table.sharers(self.me.run_id))

    def take_arrears(self) -> int:
        """Return, and reset, the samples that did not count for members linked since (:mod:`arrears` explains)."""
        arrears = self._table.arrears
        owed, arrears.owed = arrears.owed, 0
        return owed

    def standing_of(self, run_id: bytes) -> tuple[int, int]:
        """Return the lower median of the signed progress of the members that hold this run, and their number.

        Members count if they are ALIVE, ready and contacted, or ourselves. Walks the table.
        """
        records = self.sharing(run_id)
        if self.me.run_id == run_id:
            records.append(self.me)
        return median_low([record.progress for record in records]) if records else 0, len(records)

    def meet(self, records: Iterable[MemberRecord], now: float) -> None:
        """Add members that start together, like those of one launcher: ALIVE at once, with nothing to gossip."""
        for record in records:
            if record.id != self.me.id and self._view.is_news(record, linked=True):
                self._view.hear(record, now, quiet=True)
                if record.id in self._table.entries:
                    self._view.meet(self._table.entries[record.id], now)
        self._view.changed([])
        self._rumours.silence_all()
        self._myself.met(now, self._rng.random())
        self._arm()

    # -- between lives -------------------------------------------------------------------------------------------------
    def book(self) -> list[MemberRecord]:
        """Return at most 1,024 records of members with an address, the most recently alive first."""
        return self._table.latest(BOOK)

    def restore(self, records: Iterable[MemberRecord], now: float) -> None:
        """Add the records of a saved book as DEAD members, ungossiped and dialled at once. Skip unacceptable ones."""
        for record in records:
            try:
                news = self._view.is_news(record)
            except RemoteError:
                continue
            if news and record.id == self.me.id:
                self._myself.continue_from(record, now)
            elif record.id not in self._table.entries:
                self._table.add(record, DEAD, now, restored=True)
        self._heal_s = now
        self._arm()
