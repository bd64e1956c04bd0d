"""The state machine of the other members: records and hints in, states out.

A *hint* is a member's signed accusation that another one does not answer, and its author is an *accuser*. A *stranger*
is a member that we never had a link with.

    ALIVE --hint--> SUSPECT --time runs out--> DEAD
    A record with a higher incarnation leads from every state to ALIVE, which refutes, or to LEFT if it says so.

=============================== ==================================================================================
we receive                      the state of the member becomes
=============================== ==================================================================================
record, higher incarnation      ALIVE, or LEFT if it says so
record, same incarnation, left  LEFT from any state: final for that incarnation
record, same incarnation        unchanged (progress does not refute)
hint, same incarnation          ALIVE -> SUSPECT; SUSPECT: one more accuser, even for a DEAD hint
DEAD hint with the record       DEAD, if the same message tells of the member for the first time
its suspicion runs out          DEAD; but it is probed first if one other alone accuses it, or we heard from it
anything else                   unchanged; only the owner raises an incarnation, never a hint
=============================== ==================================================================================
"""

import heapq
import math

from gossip.effects import Effect, MemberChanged, MemberState, Send
from gossip.ids import MemberRecord, PeerId
from gossip.membership.accusations import Accusers, accusation, is_signed
from gossip.membership.detector import Detector, suspicion_s
from gossip.membership.dissemination import first_passive_sends
from gossip.membership.entry import VERIFIED_BURST, VERIFIED_PER_S, Entry, TokenBucket
from gossip.membership.strangers import Introductions
from gossip.misbehaviour import IMPOSSIBLE_COUNT, MisbehaviourLog
from gossip.wire.messages import Gossip, Hint, Update
from gossip.wire.records import Sign, Verify, check, claims_more, is_newer, is_progress_only

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT

# Number of incarnations by which a relayed record may be ahead of ours. Over its own link the owner itself is believed.
MAX_JUMP = 1_000
MAX_ACCUSATIONS = 4  # Of one suspect: the first, and three that confirm it, after which a suspicion is shortest.
# Rate limit of the hints that we believe one sender. The burst is two frames, for many members that die at once.
HINTS_PER_S, HINTS_BURST = 8.0, 64.0
NEWCOMERS_PER_S = 1_000.0  # New members a second, after a burst as large as the largest table.
# The list of suspicions is cleaned of stale ones once it has two entries for each member and this many more.
MIN_STALE = 64
REPEAT_S = 1.0  # Minimum time between two warnings, answers or digests for one member.


class MemberStates:
    """The states of the other members. No other place changes them. Methods append messages to ``effects``."""

    def __init__(
        self, detector: Detector, introductions: Introductions, sign: Sign, verify: Verify,
        misbehaviour: MisbehaviourLog, now: float,
    ) -> None:  # fmt: skip
        self._detector, self._introductions, self._misbehaviour = detector, introductions, misbehaviour
        table, config = detector.table, detector.config
        self._table, self._rumours, self._config = table, detector.rumours, config
        self._sign, self._verify = sign, verify
        self._my_id = table.mine.record.id
        self._newcomer_tokens = TokenBucket(NEWCOMERS_PER_S, float(config.internal.max_members), now)
        # Signature checks for links to peers outside the table, which share them.
        self._outsider_tokens = TokenBucket(VERIFIED_PER_S, VERIFIED_BURST, now)
        self._accusers = Accusers()
        # A heap of times and the members whose suspicion runs out then. An entry is stale once its member has another
        # time.
        self._suspicions: list[tuple[float, PeerId]] = []
        # Members whose state changed in this call, and their states before it.
        self.earlier_states: dict[PeerId, MemberState | None] = {}
        self.deadline = math.inf  # Time to call tick.

    def report_changes(self, effects: list[Effect]) -> None:
        """Append a MemberChanged for each contacted member whose state differs from that before this call.

        Strangers are left out. A liar can tell of thousands that do not exist, and each would be a line of a log.
        """
        for peer, before in self.earlier_states.items():
            entry = self._table.entries.get(peer)
            if entry is not None and entry.was_contacted and entry.state is not before:
                effects.append(MemberChanged(peer, before, entry.state))
        self.earlier_states = {}

    # -- records -------------------------------------------------------------------------------------------------
    def is_news(self, record: MemberRecord, from_owner: bool = False) -> bool:
        """Return True if this record changes anything. Raise RemoteError if it would but is not acceptable.

        ``from_owner``: the record came from its owner itself, over its own link.
        """
        if not self._may_change(record, from_owner):
            return False
        check(record, self._verify)
        return True

    def _may_change(self, record: MemberRecord, from_owner: bool) -> bool:
        """Return True if the record is worth a signature check. Most records are known, or older than ours."""
        entry = self._table.entries.get(record.id)
        if entry is None:
            return True
        known_record = entry.record
        if entry is self._table.mine:
            return claims_more(record, known_record)
        if not entry.is_restored and (record is known_record or not is_newer(record, known_record)):
            return False  # Any record of a restored member is news, since it proves a member.
        # Accusations can raise an incarnation by MAX_JUMP at most while we hear nothing of the member.
        return record.incarnation <= known_record.incarnation + MAX_JUMP or from_owner

    def news_among(self, updates: tuple[Update, ...], sender: PeerId, relay: Entry | None, now: float) -> list[Update]:
        """Return the updates that may change something; raise as :meth:`is_news`. ``relay`` is the sender's entry.

        Checking a signature takes longer than making a record that needs the check. The checks for one link are
        therefore rate limited. The excess is dropped unread; gossip or push-pull bring it again if it was genuine.
        """
        find_entry = self._table.entries.get
        # Most gossip is known already, so that a large swarm spends its time in this line.
        unknown = [
            update for update in updates
            if not isinstance(update, MemberRecord)
            or (entry := find_entry(update.id)) is None or entry.record is not update or entry.is_restored
        ]  # fmt: skip
        news: list[Update] = []
        dropped_count = 0
        for update in unknown:
            if isinstance(update, MemberRecord):
                if not self._may_change(update, update.id == sender):
                    continue
                tokens = self._outsider_tokens if relay is None else relay.check_tokens or relay.allow_records(0, now)
                if not tokens.take(now):
                    dropped_count += 1
                    continue
                check(update, self._verify)
            news.append(update)
        if dropped_count:
            self._misbehaviour.note(sender, "flood", now, dropped_count / VERIFIED_BURST)
        return news

    def apply_record(
        self, record: MemberRecord, now: float, introducer: PeerId | None = None, gossips: bool = True
    ) -> None:  # fmt: skip
        """Apply a checked record of another member that is news.

        Args:
            record: The record.
            now: The current time.
            introducer: The peer that relayed it; None if it came from its owner in a Hello.
            gossips: False if all others know it already.
        """
        if max(record.samples, record.progress, record.version) > IMPOSSIBLE_COUNT:
            self._misbehaviour.note(record.id, "claims", now)  # The owner signed it, no matter which peer relays it.
        entry = self._table.entries.get(record.id)
        state = LEFT if record.left else ALIVE
        passive_sends: int | None = None  # None: gossip the record in frames of its own.
        if entry is None:
            if introducer is not None and not self._newcomer_tokens.take(now):
                return
            entry = self._table.add(record, state, now, introducer=introducer)
            if entry is None:
                return
            self.earlier_states.setdefault(record.id, None)
            if state is ALIVE:
                self._schedule_contact(entry, now)
        elif entry.is_restored:
            self.accept_restored(entry, record if is_newer(record, entry.record) else entry.record, now)
        elif not is_newer(record, entry.record):
            return  # The same message held a newer record before this one, when we knew neither.
        elif record.incarnation > entry.record.incarnation or record.left:
            self.change_state(entry, record, state, now)
        elif is_progress_only(record, entry.record):
            passive_sends = first_passive_sends(self._table.size)
            self._table.update_progress(entry, record, now)
        else:
            self._table.update(entry, record, entry.state, now)
        if introducer is not None and introducer in record.homes:
            home = self._table.entries.get(introducer)
            if home is not None:
                self._table.vouch(entry, home)
        if gossips:
            self._rumours.put(record, now, passive_sends)

    def accept_restored(self, entry: Entry, record: MemberRecord, now: float) -> None:
        """Accept a member as present that we only knew from the address book."""
        self.change_state(entry, record, LEFT if record.left else ALIVE, now)

    # -- hints ---------------------------------------------------------------------------------------------------
    def on_hint(self, hint: Hint, relay: Entry | None, now: float, effects: list[Effect]) -> None:
        """Handle a hint about another member, which ``relay`` sent us."""
        entry, accuser = self._table.entries.get(hint.peer), hint.by
        if entry is None or hint.incarnation != entry.record.incarnation:
            return
        state = entry.state
        if entry.is_restored:
            if hint.dead and not entry.record.left:  # The accuser has evidence for what we only assumed.
                self.change_state(entry, entry.record, DEAD, now)
                entry.accusations = (hint,)
            return
        # Our own hints come back to us, and count only about a stranger, which we may have accused in an earlier life.
        is_own_echo = accuser == self._my_id and entry.was_contacted
        if state is DEAD or state is LEFT or accuser == hint.peer or is_own_echo:
            return
        if hint.dead and self.earlier_states.get(hint.peer, state) is None:
            # This message introduced the member, so it starts as DEAD. The sender could as well have hidden it.
            self.change_state(entry, entry.record, DEAD, now)
            entry.accusations = (hint,)
            self._rumours.put(hint, now)
        elif self._is_believed(hint, entry, relay, now):
            self._add_accuser(entry, hint, now)
            if entry.is_linked and entry.alive_at >= now - self._config.internal.probe_period_s:
                self.warn(entry, now, effects)  # It can refute the hint at once.

    def _is_believed(self, hint: Hint, entry: Entry, relay: Entry | None, now: float) -> bool:
        """Return True if this hint counts: new, signed, by a credible accuser, within the relay's rate limit."""
        accuser = self._table.entries.get(hint.by)
        is_full = len(entry.accusations) >= MAX_ACCUSATIONS
        if relay is None or accuser is None or is_full or entry.is_accused_by(hint.by):
            return False
        if not self._accusers.may_accuse(hint.by, accuser.was_contacted, now):
            return False
        if relay.hint_tokens is None:
            relay.hint_tokens = TokenBucket(HINTS_PER_S, HINTS_BURST, now)
        return relay.hint_tokens.take(now) and is_signed(hint, accuser.record.public_key, self._verify)

    def on_refuted(self, hint: Hint, now: float) -> bool:
        """Handle a hint about ourselves that we have just refuted, a few times a second at most.

        Return True if its author was credible: then it should lower our local health.
        """
        accuser = self._table.entries.get(hint.by)
        if accuser is None or not is_signed(hint, accuser.record.public_key, self._verify):
            return False
        was_silenced = self._accusers.is_silenced(hint.by, accuser.was_contacted, now)
        self._accusers.record_verdict(hint.by, accuser.was_contacted, False, now)
        self._misbehaviour.note(hint.by, "accusations", now)
        return not was_silenced

    def accuse(self, entry: Entry, now: float) -> None:
        """Suspect a member after a failed probe of our own."""
        if not entry.is_accused_by(self._my_id) and len(entry.accusations) < MAX_ACCUSATIONS:
            self._add_accuser(entry, self.own_hint(entry.record, False), now)

    def accuse_failed(self, now: float) -> None:
        """Suspect the members that the detector's own probes have found to fail."""
        failed, self._detector.failed = self._detector.failed, []
        for entry in failed:
            self.accuse(entry, now)

    def own_hint(self, record: MemberRecord, dead: bool) -> Hint:
        """Return our signed accusation of this member."""
        return accusation(record.id, record.incarnation, dead, self._my_id, self._sign)

    def _add_accuser(self, entry: Entry, hint: Hint, now: float) -> None:
        if entry.state is ALIVE:
            self.change_state(entry, entry.record, SUSPECT, now)
        entry.accusations = (*entry.accusations, hint)
        self._accusers.open_accusation(hint.by, now)
        self._set_expiry(entry, entry.state_since + suspicion_s(self._config, self._table.size, len(entry.accusations)))
        self._rumours.put(hint, now)

    def warn(self, entry: Entry, now: float, effects: list[Effect]) -> None:
        """Tell a SUSPECT or DEAD member that we hear from of its state, so that it can refute."""
        if entry.warned_at <= now - REPEAT_S:
            entry.warned_at = now
            effects.append(Send(entry.record.id, Gossip((entry.hint,))))

    # -- suspicions ----------------------------------------------------------------------------------------------
    def tick(self, now: float, effects: list[Effect]) -> None:
        """Declare members DEAD whose suspicion ran out, or probe them first."""
        while self._suspicions and self._suspicions[0][0] <= now:
            expires_at, peer = heapq.heappop(self._suspicions)
            if not self._is_current(expires_at, peer):
                continue
            entry = self._table.entries[peer]
            is_heard = entry.alive_at >= now - self._config.internal.probe_period_s
            has_one_accuser = len(entry.accusations) == 1 and not entry.is_accused_by(self._my_id)
            if is_heard or (has_one_accuser and entry.was_contacted):
                # It may not have heard of the suspicion, or it has one accuser only. The probe tells it, and decides.
                self._set_expiry(entry, now + self._config.internal.probe_period_s)
                self._detector.probe_now(entry, now, effects)
                self.accuse_failed(now)
            else:
                self.change_state(entry, entry.record, DEAD, now)
                entry.accusations = (self.own_hint(entry.record, True),)
                # The others declare it DEAD by themselves as well.
                self._rumours.put(entry.hint, now, first_passive_sends(self._table.size))
        self._update_deadline()

    def shift_timers(self, gap_s: float) -> None:
        """Shift all suspicions by the time in which this process was stopped, so that no member is judged by it."""
        for peer in self._table.suspects:
            entry = self._table.entries[peer]
            entry.state_since += gap_s  # Later accusers count the suspicion from here.
            self._set_expiry(entry, entry.expires_at + gap_s)

    def _set_expiry(self, entry: Entry, expires_at: float) -> None:
        entry.expires_at = expires_at
        heapq.heappush(self._suspicions, (expires_at, entry.record.id))
        if len(self._suspicions) > 2 * len(self._table.entries) + MIN_STALE:
            # Members that are accused and refute again and again leave stale entries behind.
            self._suspicions = [suspicion for suspicion in {*self._suspicions} if self._is_current(*suspicion)]
            heapq.heapify(self._suspicions)
        self._update_deadline()

    def _is_current(self, expires_at: float, peer: PeerId) -> bool:
        """Return True if this member's suspicion runs out at this time."""
        entry = self._table.entries.get(peer)
        return entry is not None and entry.state is SUSPECT and entry.expires_at == expires_at

    def _update_deadline(self) -> None:
        """Drop stale timers in front, which would wake the driver for nothing, and set the deadline."""
        suspicions = self._suspicions
        while suspicions and not self._is_current(*suspicions[0]):
            heapq.heappop(suspicions)
        self.deadline = suspicions[0][0] if suspicions else math.inf

    # -- changes -------------------------------------------------------------------------------------------------
    def change_state(self, entry: Entry, record: MemberRecord, state: MemberState, now: float) -> None:
        """Change the state or the incarnation. For SUSPECT or DEAD, the caller sets the accusations afterwards."""
        earlier_state = entry.state
        assert record.incarnation >= entry.record.incarnation
        is_renewed = record.incarnation > entry.record.incarnation or entry.is_restored
        assert earlier_state is not LEFT or state is LEFT or is_renewed
        self.earlier_states.setdefault(record.id, None if entry.is_restored else earlier_state)
        if earlier_state is SUSPECT:
            self._judge_accusers(entry, state, now)
        entry.accusations = ()
        if state is ALIVE or state is LEFT:
            self._rumours.drop_hint(record.id)
        self._table.update(entry, record, state, now)
        if state is ALIVE and earlier_state is not SUSPECT:
            self._schedule_contact(entry, now)

    def on_contact(self, entry: Entry, now: float) -> None:
        """Handle a link with this member, which is no stranger from the first one on."""
        if not entry.was_contacted:
            self._table.mark_contacted(entry)
            self._introductions.on_answer(entry.record.id)
            self._rumours.resume(now)
            if entry.state is ALIVE:
                self.earlier_states[entry.record.id] = None  # The driver has not heard of this state yet.
                self._detector.add_member(entry.record.id)

    def _schedule_contact(self, entry: Entry, now: float) -> None:
        """Schedule the probe of a member that became ALIVE, or the dial of a stranger."""
        if entry.was_contacted:
            self._detector.add_member(entry.record.id)
        else:
            self._introductions.schedule(entry, now)

    def _judge_accusers(self, entry: Entry, state: MemberState, now: float) -> None:
        """Judge the accusers of a SUSPECT by its new state.

        The silence of a stranger proves no accuser right: the stranger may have been made up to be accused.
        """
        is_true: bool | None = None  # None: neither proven nor refuted.
        if state is ALIVE:
            is_true = False
        elif state is DEAD and entry.was_contacted:
            is_true = True
        entries = self._table.entries
        for hint in entry.accusations:
            if hint.by == self._my_id:  # We do not judge ourselves.
                self._accusers.close_accusation(hint.by, True, None, now)
            else:
                accuser = entries.get(hint.by)
                was_contacted = accuser is not None and accuser.was_contacted
                self._accusers.close_accusation(hint.by, was_contacted, is_true, now)
