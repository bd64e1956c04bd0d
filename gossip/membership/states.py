"""The state machine of the other members: records and hints in, states out.

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

from __future__ import annotations

import heapq
import math

from gossip.effects import Effect, MemberChanged, MemberState, Send
from gossip.ids import MemberRecord, PeerId
from gossip.membership.accusations import Accusers, accusation, is_signed
from gossip.membership.detector import Detector, suspicion_s
from gossip.membership.dissemination import told_before
from gossip.membership.entry import VERIFIED_BURST, VERIFIED_PER_S, Allowance, Entry
from gossip.membership.strangers import Introductions
from gossip.misbehaviour import NEVER, MisbehaviourLog
from gossip.wire.messages import Gossip, Hint, Update
from gossip.wire.records import Sign, Verify, check, claims_more, mere_progress, newer

__all__ = ["TELL_EVERY_S", "MemberStates"]

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT

MAX_JUMP = 1_000  # Incarnations that a relayed record may skip. The owner itself is believed over its own link.
MAX_ACCUSERS = 4  # the first and three confirmations: more change nothing
# Hints of one sender that we believe: two frames of them, when many members die at once.
HINTS_PER_S, HINTS_BURST = 8.0, 64.0
INTAKE_PER_S = 1_000.0  # new members a second, after a burst as large as the largest table
TELL_EVERY_S = 1.0  # how often a suspect that we hear from is told of its suspicion


class MemberStates:
    """The states of the other members. No other place changes them."""

    def __init__(
        self, detector: Detector, introductions: Introductions, sign: Sign, verify: Verify,
        misbehaviour: MisbehaviourLog, now: float,
    ) -> None:  # fmt: skip
        self._detector, self._introductions, self._misbehaviour = detector, introductions, misbehaviour
        table, config = detector.table, detector.config
        self._table, self._rumours, self._config = table, detector.rumours, config
        self._sign, self._verify = sign, verify
        self._me = table.mine.record.id
        self._intake = Allowance(INTAKE_PER_S, float(config.internal.max_members), now)
        # Shared by all links to peers outside the table.
        self._strangers = Allowance(VERIFIED_PER_S, VERIFIED_BURST, now)
        self._accusers = Accusers()
        # (when, whom). An entry is stale if its member expires at another time.
        self._suspicions: list[tuple[float, PeerId]] = []
        self.before: dict[PeerId, MemberState | None] = {}  # earlier states of the members that changed in this call
        self.deadline = math.inf  # when to call tick

    def changed(self, out: list[Effect]) -> None:
        """Append a MemberChanged for each contacted member whose state differs from that before this call.

        Hearsay members are left out. A liar can tell of thousands that do not exist, and each would be a line of a log.
        """
        for peer, before in self.before.items():
            entry = self._table.entries.get(peer)
            if entry is not None and entry.contacted and entry.state is not before:
                out.append(MemberChanged(peer, before, entry.state))
        self.before = {}

    # -- records -------------------------------------------------------------------------------------------------------
    def is_news(self, record: MemberRecord, linked: bool = False) -> bool:
        """Return True if this record changes anything. Raise RemoteError if it would but is not acceptable.

        ``linked``: it came from its owner itself, over its own link.
        """
        if not self._may_change(record, linked):
            return False
        check(record, self._verify)
        return True

    def _may_change(self, record: MemberRecord, linked: bool) -> bool:
        """Return True if the record is worth a signature check. Most records are known, or older than ours."""
        entry = self._table.entries.get(record.id)
        if entry is not None:
            known = entry.record
            if entry is self._table.mine:
                if not claims_more(record, known):
                    return False
            elif not entry.restored and (record is known or not newer(record, known)):
                return False  # any record of a restored member is news, since it proves a member
            elif record.incarnation > known.incarnation + MAX_JUMP and not linked:
                # Relayed. Accusations can raise an incarnation so far while we hear nothing of the member.
                return False
        return True

    def fresh(self, updates: tuple[Update, ...], sender: PeerId, teller: Entry | None, now: float) -> list[Update]:
        """Return the updates that may change something; raise as :meth:`is_news`.

        Checking a signature takes longer than making a record that needs the check. The checks for one link are
        therefore rate limited. The excess is dropped unread; gossip or push-pull bring it again if it was genuine.
        """
        known = self._table.entries.get
        # Most gossip is known already. A large swarm spends its time in this line.
        unknown = [
            update for update in updates
            if not isinstance(update, MemberRecord)
            or (entry := known(update.id)) is None or entry.record is not update or entry.restored
        ]  # fmt: skip
        fresh: list[Update] = []
        dropped = 0
        for update in unknown:
            if isinstance(update, MemberRecord):
                if not self._may_change(update, update.id == sender):
                    continue
                allowance = self._strangers if teller is None else teller.verifying or teller.expect(0, now)
                if not allowance.take(now):
                    dropped += 1
                    continue
                check(update, self._verify)
            fresh.append(update)
        if dropped:
            self._misbehaviour.note(sender, "flood", now, dropped / VERIFIED_BURST)
        return fresh

    def hear(self, record: MemberRecord, now: float, by: PeerId | None = None, quiet: bool = False) -> None:
        """Apply a checked record of another member that is news.

        Args:
            record: The record.
            now: The current time.
            by: The peer that told us of it; None if it came from its owner in a Hello.
            quiet: All others know it already, so that it is not gossiped.
        """
        if max(record.samples, record.progress, record.version) > NEVER:
            self._misbehaviour.note(record.id, "claims", now)  # the owner signed it, no matter which peer relays it
        entry = self._table.entries.get(record.id)
        state, progress = LEFT if record.left else ALIVE, None
        if entry is None:
            if by is not None and not self._intake.take(now):
                return
            entry = self._table.add(record, state, now, introducer=by)
            if entry is None:
                return
            self.before.setdefault(record.id, None)
            if state is ALIVE:
                self._came(entry, now)
        elif entry.restored:
            self.trust(entry, record if newer(record, entry.record) else entry.record, now)
        elif not newer(record, entry.record):
            return  # the same message held a newer record before this one, when we knew neither
        elif record.incarnation > entry.record.incarnation or record.left:
            self.place(entry, record, state, now)
        elif mere_progress(record, entry.record):
            progress = told_before(self._table.size)
            self._table.progress(entry, record, now)
        else:
            self._table.place(entry, record, entry.state, now)
        if by is not None and by in record.homes and (home := self._table.entries.get(by)) is not None:
            self._table.vouch(entry, home)
        if not quiet:
            self._rumours.put(record, now, progress)

    def trust(self, entry: Entry, record: MemberRecord, now: float) -> None:
        """Accept a member that we only remembered as present."""
        self.place(entry, record, LEFT if record.left else ALIVE, now)

    # -- hints ---------------------------------------------------------------------------------------------------------
    def accused(self, hint: Hint, teller: Entry | None, now: float, out: list[Effect]) -> None:
        """Handle a hint about another member."""
        entry, by = self._table.entries.get(hint.peer), hint.by
        if entry is None or hint.incarnation != entry.record.incarnation:
            return
        state = entry.state
        if entry.restored:
            if hint.dead and not entry.record.left:  # the accuser has evidence for what we only assumed
                self.place(entry, entry.record, DEAD, now)
                entry.accusers = (hint,)
            return
        if state is DEAD or state is LEFT or by == hint.peer or (by == self._me and entry.contacted):
            return  # a stranger may be one that we accused in an earlier life
        if hint.dead and self.before.get(hint.peer, state) is None:
            # This message introduced the member, so it starts as DEAD. The sender could as well have hidden it.
            self.place(entry, entry.record, DEAD, now)
            entry.accusers = (hint,)
            self._rumours.put(hint, now)
        elif self._believes(hint, entry, teller, now):
            self._suspect(entry, hint, now)
            if entry.linked and entry.acked_s >= now - self._config.internal.probe_period_s:
                self.warn(entry, now, out)  # it can refute the hint at once

    def _believes(self, hint: Hint, entry: Entry, teller: Entry | None, now: float) -> bool:
        """Return True if this hint counts: new, signed, by a credible accuser, within the sender's rate limit."""
        accuser = self._table.entries.get(hint.by)
        if teller is None or accuser is None or entry.accused_by(hint.by) or len(entry.accusers) >= MAX_ACCUSERS:
            return False
        if not self._accusers.heard(hint.by, accuser.contacted, now):
            return False
        if teller.allowance is None:
            teller.allowance = Allowance(HINTS_PER_S, HINTS_BURST, now)
        return teller.allowance.take(now) and is_signed(hint, accuser.record.public_key, self._verify)

    def accused_us(self, hint: Hint, now: float) -> bool:
        """Return True if a hint about ourselves, just refuted, should lower our local health.

        It should if its author is credible. Called a few times a second at most.
        """
        accuser = self._table.entries.get(hint.by)
        if accuser is None or not is_signed(hint, accuser.record.public_key, self._verify):
            return False
        silent = self._accusers.silent(hint.by, accuser.contacted, now)
        self._accusers.judged(hint.by, accuser.contacted, False, now)
        self._misbehaviour.note(hint.by, "accusations", now)
        return not silent

    def own(self, record: MemberRecord, dead: bool) -> Hint:
        """Return our accusation of this member."""
        return accusation(record.id, record.incarnation, dead, self._me, self._sign)

    def suspect_ourselves(self, entry: Entry, now: float) -> None:
        """Suspect a member after a failed probe of our own."""
        if not entry.accused_by(self._me) and len(entry.accusers) < MAX_ACCUSERS:
            self._suspect(entry, self.own(entry.record, False), now)

    def _suspect(self, entry: Entry, hint: Hint, now: float) -> None:
        """Add one accuser."""
        if entry.state is ALIVE:
            self.place(entry, entry.record, SUSPECT, now)
        entry.accusers = (*entry.accusers, hint)
        self._accusers.began(hint.by)
        self._until(entry, entry.since_s + suspicion_s(self._config, self._table.size, len(entry.accusers)))
        self._rumours.put(hint, now)

    def warn(self, entry: Entry, now: float, out: list[Effect]) -> None:
        """Tell a SUSPECT or DEAD member that we hear from of its state, so that it can refute."""
        if entry.told_s <= now - TELL_EVERY_S:
            entry.told_s = now
            out.append(Send(entry.record.id, Gossip((entry.hint(),))))

    # -- time ----------------------------------------------------------------------------------------------------------
    def tick(self, now: float, out: list[Effect]) -> None:
        """Declare members DEAD whose suspicion ran out."""
        while self._suspicions and self._suspicions[0][0] <= now:
            when, peer = heapq.heappop(self._suspicions)
            entry = self._table.entries.get(peer)
            if entry is None or entry.state is not SUSPECT or entry.expires_s != when:
                continue
            recently = entry.acked_s >= now - self._config.internal.probe_period_s
            if recently or (len(entry.accusers) == 1 and entry.contacted and not entry.accused_by(self._me)):
                # It may not have heard of the suspicion, or it has one accuser only. The probe tells it, and decides.
                self._until(entry, now + self._config.internal.probe_period_s)
                for failed in self._detector.doubt(entry, now, out):
                    self.suspect_ourselves(failed, now)
            else:
                self.place(entry, entry.record, DEAD, now)
                entry.accusers = (self.own(entry.record, True),)
                # The others declare it DEAD by themselves as well.
                self._rumours.put(entry.hint(), now, told_before(self._table.size))
        self._settle()

    def _settle(self) -> None:
        """Drop stale timers in front, which would wake the driver for nothing, and set the deadline."""
        suspicions, entries = self._suspicions, self._table.entries
        while suspicions:
            when, peer = suspicions[0]
            entry = entries.get(peer)
            if entry is not None and entry.state is SUSPECT and entry.expires_s == when:
                break
            heapq.heappop(suspicions)
        self.deadline = suspicions[0][0] if suspicions else math.inf

    def slept(self, gap_s: float) -> None:
        """Shift all suspicions by the time in which this process was stopped, so that no member is judged by it."""
        for peer in self._table.suspects:
            entry = self._table.entries[peer]
            self._until(entry, entry.expires_s + gap_s)

    # -- states --------------------------------------------------------------------------------------------------------
    def place(self, entry: Entry, record: MemberRecord, state: MemberState, now: float) -> None:
        """Change the state or the incarnation. For SUSPECT or DEAD, the caller sets the accusers afterwards."""
        before = entry.state
        assert record.incarnation >= entry.record.incarnation
        assert before is not LEFT or state is LEFT or record.incarnation > entry.record.incarnation or entry.restored
        self.before.setdefault(record.id, None if entry.restored else before)
        if before is SUSPECT:
            self._judge(entry, state, now)
        entry.accusers = ()
        if state is ALIVE or state is LEFT:
            self._rumours.silence(record.id)
        self._table.place(entry, record, state, now)
        if state is ALIVE and before is not SUSPECT:
            self._came(entry, now)

    def _came(self, entry: Entry, now: float) -> None:
        """Schedule probes or an introduction of a member that became ALIVE."""
        if entry.contacted:
            self._detector.joined(entry.record.id)
        else:
            self._introductions.heard(entry, now)

    def meet(self, entry: Entry, now: float) -> None:
        """Note a link with this member."""
        if not entry.contacted:
            self._table.meet(entry, now)
            self._introductions.over(entry.record.id)
            self._rumours.resume(now)
            if entry.state is ALIVE:
                self.before[entry.record.id] = None  # the driver has not heard of this state yet
                self._detector.joined(entry.record.id)

    def _judge(self, entry: Entry, state: MemberState, now: float) -> None:
        """Judge the accusers of a SUSPECT by its new state.

        The silence of a stranger proves no accuser right: the stranger may have been made up to be accused.
        """
        true = False if state is ALIVE else True if state is DEAD and entry.contacted else None
        entries = self._table.entries
        for hint in entry.accusers:
            if hint.by == self._me:
                self._accusers.ended(hint.by, True, None, now)
            else:
                accuser = entries.get(hint.by)
                self._accusers.ended(hint.by, accuser is not None and accuser.contacted, true, now)

    def _until(self, entry: Entry, when: float) -> None:
        entry.expires_s = when
        heapq.heappush(self._suspicions, (when, entry.record.id))
        self._settle()
