"""The membership protocol: SWIM with Lifeguard over a full table, with push-pull anti-entropy.

``states`` holds the rules for states, ``detector`` probes, ``anti_entropy`` compares tables, ``dissemination`` gossips,
``strangers`` dials members known by hearsay, ``self_record`` keeps our own record. This module handles messages and
timers. ``table`` defines contacted members, strangers, owners and homes.
"""

import math
import random
from collections.abc import Iterable
from statistics import median_low
from typing import Unpack

from gossip.config import Config
from gossip.effects import Dial, Effect, MemberState, Notice, Send
from gossip.errors import RemoteError
from gossip.ids import MemberRecord, PeerId
from gossip.membership.anti_entropy import PushPull
from gossip.membership.detector import PIGGYBACK, Detector
from gossip.membership.dissemination import Rumours, gossip_targets
from gossip.membership.entry import Entry
from gossip.membership.self_record import OwnFields, OwnRecord
from gossip.membership.states import REPEAT_S, MemberStates
from gossip.membership.strangers import Introductions
from gossip.membership.table import Table
from gossip.misbehaviour import MisbehaviourLog
from gossip.wire.messages import Ack, Digest, Gossip, Hint, Message, Nack, Ping, PingReq, Records, Update
from gossip.wire.records import Sign, Verify, claims_more, clamped_record, signed

FAREWELLS = 8  # Members, besides the linked ones, that we tell directly when we leave.
DEAD_KEPT_S = 86_400.0  # The dead are remembered and dialled for a day: longer than a cut that is repaired lasts.
HEALS_ALONE = 3  # DEAD members to dial in each probe period while no contacted member is ALIVE.
BOOK_SIZE = 1_024  # Records saved for the next start: 256 KiB.
ALIVE, SUSPECT, DEAD = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD  # Reading an Enum's attributes is slow.


class Membership:
    """One peer's view of the swarm. Methods return effects; ``deadline`` says when to call :meth:`tick` next.

    ``me`` is our first record; its ``steps`` count earlier lives. A message with a record that its owner did not sign
    raises :class:`~gossip.errors.RemoteError` and changes nothing.

    Private methods append to ``effects``, the list that the public method returns. ``entry`` is the sender's entry, or
    None for a sender outside the table.
    """

    def __init__(
        self, me: MemberRecord, *, sign: Sign, verify: Verify, config: Config, rng: random.Random, now: float
    ) -> None:
        me = signed(clamped_record(me), sign)
        self._my_id = me.id
        self._config, self._rng = config, rng
        self._table = Table(me, 2 * config.internal.max_members, now)
        self._rumours = Rumours(config.internal.gossip_period_s, now)
        self.sign, self.verify = sign, verify
        self._detector = Detector(self._table, self._rumours, config, rng, now)
        self._introductions = Introductions(self._table, rng, now)
        self.misbehaviour = MisbehaviourLog()
        self._states = MemberStates(self._detector, self._introductions, sign, verify, self.misbehaviour, now)
        self._own_record = OwnRecord(me, self._table, self._rumours, sign, config, now)
        self._push_pull = PushPull(me.id, self._table, config, rng, now)
        self._heal_at = now + rng.random() * config.internal.heal_period_s
        self._announce_at = math.inf  # Time to send our record to linked members.
        self._has_left = False
        self._woke_at = now  # Time at which this process last resumed after it had been stopped.
        self.deadline = now  # Time to call tick.
        # Two facts that drivers often read: a count of changes of owners(), and whether another contacted member is
        # ALIVE.
        self.changes = 0
        self.has_company = False
        self._update_deadline()

    # -- events --------------------------------------------------------------------------------------------------
    def receive(self, sender: PeerId, message: Message, now: float) -> list[Effect]:
        """Handle a Ping, Ack, PingReq, Nack, Gossip, Digest or Records from a link to ``sender``."""
        effects: list[Effect] = []
        if self._has_left:
            return effects
        self._notice_sleep(now)
        entry = self._table.entries.get(sender)
        if entry is not None:
            entry.alive_at = now
        self._on_message(sender, entry, message, now, effects)
        if sender in self._detector.targets:
            self._detector.on_message(sender, effects)
        if entry is not None and entry.state is not ALIVE:
            self._correct_state(entry, now, effects)
        return self._complete(effects)

    def tick(self, now: float) -> list[Effect]:
        """Run the timers that are due."""
        effects: list[Effect] = []
        if self._has_left:
            return effects
        self._notice_sleep(now)
        if now >= self._detector.deadline:
            self._detector.tick(now, effects)
            self._states.accuse_failed(now)
        if now >= self._states.deadline:
            self._states.tick(now, effects)
        if now >= self._announce_at:
            self._announce_at = math.inf
            effects.extend(Send(peer, Gossip((self.me,))) for peer in sorted(self._table.links))
        if now >= self._own_record.due_at:
            self._own_record.tick(now)
        if now >= self._rumours.due_at:
            targets = gossip_targets(self._table, self._config.internal.gossip_fanout, self._rng)
            self._rumours.send_frame(targets, self._table.size, now, effects)
        if now >= self._push_pull.due_at:
            self._push_pull.tick(now, effects)
        if now >= self._heal_at:
            self._heal(now, effects)
        elif self._table.dead and not self._table.contacted:  # The last member is lost: do not wait for its usual time.
            self._heal_at = min(self._heal_at, now + self._config.internal.probe_period_s)
        if now >= self._introductions.due_at:
            self._introductions.tick(now, effects)
        return self._complete(effects)

    def on_linked(self, peer: PeerId, record: MemberRecord, now: float) -> list[Effect]:
        """Handle the first link to ``peer``, with the record of its Hello. Raises as :meth:`receive` does."""
        effects: list[Effect] = []
        if self._has_left or peer == self._my_id:
            return effects
        self._notice_sleep(now)
        earlier_entry = self._table.entries.get(peer)
        was_alive = earlier_entry is not None and earlier_entry.state is ALIVE
        # Usually the record is the one that we hold, which needs no comparison.
        is_known_record = earlier_entry is not None and earlier_entry.record is record
        if earlier_entry is not None and not is_known_record and claims_more(earlier_entry.record, record):
            # It restarted and does not know its earlier counts.
            effects.append(Send(peer, Gossip((earlier_entry.record,))))
        may_be_news = earlier_entry is None or earlier_entry.is_restored or not is_known_record
        if may_be_news and self._states.is_news(record, from_owner=True):
            self._states.apply_record(record, now)
        entry = self._table.entries.get(peer)
        if entry is None:
            if self._table.was_dropped(peer):  # It was gone for a day and must return with a higher incarnation.
                effects.append(Send(peer, Gossip((self._states.own_hint(record, True),))))
            return self._complete(effects)
        entry.is_linked = True
        self._table.links[peer] = None
        self._states.on_contact(entry, now)
        entry.alive_at = now
        if peer in self._detector.targets:
            self._detector.on_message(peer, effects)
        self._correct_state(entry, now, effects)
        # A member that was ALIVE already shares our table, except for what gossip missed.
        is_only_contact = all(other == peer for other in self._table.contacted)
        if is_only_contact or not was_alive:
            self._push_pull.send_digest(entry, now, effects, ask_for_all=is_only_contact)
        return self._complete(effects)

    def on_unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        """Handle the end of the last link to ``peer``; unless ``orderly``, probe it before any member accuses it."""
        effects: list[Effect] = []
        entry = self._table.entries.get(peer)
        if entry is not None:
            entry.is_linked = False
            self._table.links.pop(peer, None)
            if not orderly and not self._has_left and entry.state in (ALIVE, SUSPECT):
                self._detector.probe_now(entry, now, effects)
                self._states.accuse_failed(now)
        return self._complete(effects)

    def on_dial_failed(self, peer: PeerId, now: float) -> list[Effect]:
        """Handle a failed dial of ``peer``: a direct probe of it fails, and helpers are asked next."""
        effects: list[Effect] = []
        entry = self._table.entries.get(peer)
        if entry is not None and not self._has_left:
            if not entry.was_contacted and self._introductions.on_dial_failed(entry, now) and entry.state is ALIVE:
                self._states.accuse(entry, now)  # Any member that knows better refutes it.
            self._detector.on_dial_failed(entry, now, effects)
            self._states.accuse_failed(now)
        return self._complete(effects)

    def on_proof_of_life(self, peer: PeerId, now: float) -> None:
        """Handle proof of life other than a message of the membership, for example a finished exchange."""
        entry = self._table.entries.get(peer)
        if entry is not None:
            entry.alive_at = now
            if peer in self._detector.targets:
                self._detector.on_proof_of_life(peer)
                self._update_deadline()

    # -- our own record ------------------------------------------------------------------------------------------
    def update_me(self, now: float, **changes: Unpack[OwnFields]) -> None:
        """Change our record, with counts of this life: mere progress is signed later, the rest at once."""
        if not self._has_left:
            earlier = self.me
            self._own_record.update(changes, now)
            if self.me.ready and not (earlier.ready and self.me.run_id == earlier.run_id):
                self._announce_at = now  # In the next tick: the steps of linked members count for this run now.
            self._update_deadline()

    def announce(self, now: float) -> None:
        """Sign our record now, and send it to linked members in the next tick."""
        if not self._has_left:
            self._own_record.publish(now)
            self._announce_at = now
            self._update_deadline()

    def leave(self, now: float) -> list[Effect]:
        """Announce LEFT to linked members and a few more. The membership sends nothing afterwards."""
        if self._has_left:
            return []
        self._own_record.publish(now, left=True)
        self._has_left = True
        self._update_deadline()
        peers = dict.fromkeys(entry.record.id for entry in self._table.sample(FAREWELLS, self._rng))
        peers |= dict.fromkeys(sorted(self._table.links))
        farewell = Gossip((self.me,))
        return [Send(peer, farewell) for peer in peers]

    # -- messages ------------------------------------------------------------------------------------------------
    def _on_message(
        self, sender: PeerId, entry: Entry | None, message: Message, now: float, effects: list[Effect]
    ) -> None:  # fmt: skip
        match message:
            case Ping(seq, updates):
                self._apply(updates, sender, entry, now, effects)
                effects.append(Send(sender, Ack(seq, self._rumours.take(PIGGYBACK, 1, self._table.size))))
            case Ack(seq, updates):
                self._apply(updates, sender, entry, now, effects)
                self._detector.on_ack(sender, seq, now)
            case PingReq():
                self._apply(message.updates, sender, entry, now, effects)
                self._detector.on_ping_req(sender, message, now, effects)
            case Nack(seq):
                self._detector.on_nack(sender, seq)
                self._states.accuse_failed(now)
            case Gossip(updates):
                self._apply(updates, sender, entry, now, effects)
            case Digest():
                self._push_pull.on_digest(sender, entry, message, now, effects)
            case Records():
                is_whole_table = self._push_pull.is_whole_table(entry, now)
                self._apply(message.records, sender, entry, now, effects, gossips=not is_whole_table)
                self._push_pull.send_wanted(sender, entry, message, effects)

    def _apply(
        self, updates: tuple[Update, ...], sender: PeerId, entry: Entry | None, now: float, effects: list[Effect],
        *, gossips: bool = True,
    ) -> None:  # fmt: skip
        """Apply records and hints. ``news_among`` checks all signatures first: a message is accepted whole or not."""
        my_id = self._my_id
        for update in self._states.news_among(updates, sender, entry, now):
            if isinstance(update, Hint):
                if update.peer == my_id:
                    self._on_own_hint(update, sender, entry, now, effects)
                else:
                    self._states.on_hint(update, entry, now, effects)
            elif update.id == my_id:
                if claims_more(update, self.me) and self._own_record.continue_from(update, now):
                    effects.append(Notice("twin", "Another process signs with this node's key: stop one of the two."))
            else:
                self._states.apply_record(update, now, sender, gossips)

    def _on_own_hint(
        self, hint: Hint, sender: PeerId, entry: Entry | None, now: float, effects: list[Effect]
    ) -> None:  # fmt: skip
        """Handle an accusation of ourselves: refute it, and tell the sender."""
        if hint.incarnation > self.me.incarnation:
            # It is about an earlier life of ours at best, whose record would tell us of it. If we followed hints, they
            # could raise our incarnation without limit.
            return
        if hint.incarnation == self.me.incarnation:
            if not self._own_record.on_accusation(now):
                return  # We have just refuted another hint; this one is refuted soon.
            if self._states.on_refuted(hint, now):
                self._detector.adjust_health(1)  # We answered some prober too slowly (Lifeguard, section IV-A).
        # Answers have a rate limit apart from that of warnings. Two members that hold each other DEAD would otherwise
        # spend it on warnings, and never answer.
        if entry is not None and entry.answered_at <= now - REPEAT_S:
            entry.answered_at = now
            effects.append(Send(sender, Gossip((self.me,))))

    def _correct_state(self, entry: Entry, now: float, effects: list[Effect]) -> None:
        """Accept a restored member that we hear from, and let a SUSPECT or DEAD one refute."""
        if entry.is_restored:
            self._states.accept_restored(entry, entry.record, now)
        elif entry.state is DEAD or entry.state is SUSPECT:
            self._states.warn(entry, now, effects)

    # -- timers --------------------------------------------------------------------------------------------------
    def _heal(self, now: float, effects: list[Effect]) -> None:
        """Dial a random DEAD member, which may only have been cut off, and drop members that are gone for long."""
        internal, dead = self._config.internal, self._table.dead
        self._table.drop_gone(now - DEAD_KEPT_S)
        is_alone = not self._table.contacted
        self._heal_at = now + (internal.probe_period_s if is_alone else internal.heal_period_s)
        for peer in self._rng.sample(dead, min(len(dead), HEALS_ALONE if is_alone else 1)):
            entry = self._table.entries[peer]
            if entry.is_linked:
                self._states.warn(entry, now, effects)
            # A link that survived a cut is silent until TCP's next retransmission, which may come two minutes late.
            is_silent = not entry.is_linked or entry.alive_at < now - self._config.stall_s
            if is_silent and entry.record.address is not None:
                effects.append(Dial(entry.record.address, peer))

    def _complete(self, effects: list[Effect]) -> list[Effect]:
        """Add the changes of states and the new misbehaviour to the effects of a call."""
        self._update_deadline()
        if self._states.earlier_states:
            self._states.report_changes(effects)
        if self.misbehaviour.news:
            effects.extend(self.misbehaviour.take())
        return effects

    def _update_deadline(self) -> None:
        table = self._table
        self.changes, self.has_company = table.changes, bool(table.contacted)
        if self._has_left:
            self.deadline = math.inf
            return
        due_at = self._detector.deadline  # This runs after every message: min() would cost twice as much.
        if self._states.deadline < due_at:
            due_at = self._states.deadline
        for part in (self._rumours, self._own_record, self._push_pull, self._introductions):
            if part.due_at < due_at:
                due_at = part.due_at
        if self._announce_at < due_at:
            due_at = self._announce_at
        self.deadline = self._heal_at if self._heal_at < due_at else due_at

    def _notice_sleep(self, now: float) -> None:
        """Shift all timers after a stop of this process, which a timer that is late by 0.5 s shows."""
        gap_s = now - max(self.deadline, self._woke_at)
        if gap_s > self._config.internal.probe_timeout_min_s:
            # Waiting messages may come before the tick: count the gap once.
            self._woke_at = self.misbehaviour.woke_at = now
            self._detector.shift_timers(gap_s)
            self._states.shift_timers(gap_s)

    # -- queries about the swarm ---------------------------------------------------------------------------------
    @property
    def me(self) -> MemberRecord:
        """Our own record, as last signed."""
        return self._own_record.record

    @property
    def my_samples(self) -> int:
        """Our own samples in all lives, signed or not."""
        return self._own_record.samples

    @property
    def turnover(self) -> int:
        """A counter of members that come and go. Indexes by member are stale when it grows."""
        return self._table.changes

    def alive(self) -> list[PeerId]:
        """Return the ALIVE without ourselves, unordered, strangers included. The list is live: do not keep it."""
        return self._table.alive

    def contacted(self) -> list[PeerId]:
        """Return the ALIVE that had a link with us, likewise: possible partners, donors and owners."""
        return self._table.contacted

    def members(self) -> list[tuple[MemberRecord, MemberState]]:
        """Return all other members. Walks the table: for display, not for every message."""
        return [(entry.record, entry.state) for entry in self._table.entries.values() if entry is not self._table.mine]

    def owners(self) -> list[PeerId]:
        """Return the sorted ids of the data's owners, ourselves included: ALIVE, ready, contacted or vouched for."""
        return self._table.owners()

    def take_arrears(self) -> int:
        """Return, once, the samples that did not count for members linked since (:mod:`arrears` explains)."""
        return self._table.arrears.take()

    # -- queries about one member --------------------------------------------------------------------------------
    def state(self, peer: PeerId) -> MemberState | None:
        entry = self._table.entries.get(peer)
        return None if entry is None else entry.state

    def record(self, peer: PeerId) -> MemberRecord | None:
        entry = self._table.entries.get(peer)
        return None if entry is None else entry.record

    def rtt_s(self, peer: PeerId) -> float | None:
        """Return the smoothed round-trip time in seconds, or None before a probe was answered."""
        entry = self._table.entries.get(peer)
        return None if entry is None else entry.rtt_s

    def was_contacted(self, peer: PeerId) -> bool:
        """Return True if we had a link with this peer in this life."""
        entry = self._table.entries.get(peer)
        return entry is not None and entry.was_contacted

    def remembers(self, peer: PeerId) -> bool:
        """Return True if we had a link with this peer in this life or an earlier one."""
        entry = self._table.entries.get(peer)
        return entry is not None and self._table.was_ever_contacted(entry)

    # -- queries about runs --------------------------------------------------------------------------------------
    def runs(self) -> list[bytes]:
        """Return the runs of the ALIVE and ready that had a link with us, and our own once we are ready."""
        return self._table.runs()

    def run_members(self, run_id: bytes) -> list[MemberRecord]:
        """Return the records of the ALIVE and ready of this run that had a link with us. Walks the table."""
        entries = self._table.entries
        records = [entries[peer].record for peer in self._table.contacted]
        return [record for record in records if record.ready and record.run_id == run_id]

    @property
    def run_size(self) -> int:
        """The number of ALIVE and ready members of our run that had a link with us, and ourselves."""
        return max(1, self._table.run_size(self.me.run_id))

    def run_standing(self, run_id: bytes) -> tuple[int, int]:
        """Return the lower median of the signed progress of the members that hold this run, and their number.

        Members count if they are ALIVE, ready and contacted, or ourselves. Walks the table.
        """
        records = self.run_members(run_id)
        if self.me.run_id == run_id:
            records.append(self.me)
        return median_low([record.progress for record in records]) if records else 0, len(records)

    def ready_among(self, peers: Iterable[PeerId], run_id: bytes) -> list[PeerId]:
        """Return those of ``peers`` that are ALIVE and hold the weights of this run."""
        entries = self._table.entries
        return [
            peer for peer in peers
            if (entry := entries.get(peer)) is not None and entry.state is ALIVE
            and (record := entry.record).ready and record.run_id == run_id
        ]  # fmt: skip

    # -- the start of a life -------------------------------------------------------------------------------------
    def book(self) -> list[MemberRecord]:
        """Return the address book: at most 1,024 records with an address, the most recently alive first."""
        return self._table.recently_alive(BOOK_SIZE)

    def restore(self, records: Iterable[MemberRecord], now: float) -> None:
        """Add the records of a saved book as DEAD members, which are dialled at once. Skip unacceptable ones."""
        for record in records:
            try:
                is_news = self._states.is_news(record)
            except RemoteError:
                continue
            if is_news and record.id == self.me.id:
                self._own_record.continue_from(record, now)
            elif record.id not in self._table.entries:
                self._table.add(record, DEAD, now, is_restored=True)
        self._heal_at = now
        self._update_deadline()

    def add_founders(self, records: Iterable[MemberRecord], now: float) -> None:
        """Add members that start together, like those of one launcher: ALIVE at once, with nothing to gossip."""
        for record in records:
            if record.id != self.me.id and self._states.is_news(record, from_owner=True):
                self._states.apply_record(record, now, gossips=False)
                if record.id in self._table.entries:
                    self._states.on_contact(self._table.entries[record.id], now)
        self._states.report_changes([])
        self._rumours.clear()
        self._own_record.set_phase(now, self._rng.random())
        self._update_deadline()
