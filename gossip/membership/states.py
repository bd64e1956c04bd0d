"""What we hold the others to be: records and hints in, states out.

=============================== ==================================================================================
what we hear of a member        what we hold it to be then
=============================== ==================================================================================
record, higher incarnation      ALIVE, or LEFT if it says so
record, same incarnation, left  LEFT, whatever it was: final for that incarnation
record, same incarnation        as before (progress does not refute)
hint, same incarnation          ALIVE -> SUSPECT; SUSPECT: one accuser more, DEAD or not: others bury nobody for us
DEAD hint beside the record     DEAD, of one that we hear of for the first time
its suspicion runs out          DEAD; but if one other alone accuses it, or we heard from it, we ask it first
anything else                   as before; hints never raise an incarnation, only its owner does
=============================== ==================================================================================
"""

from __future__ import annotations

import heapq
import math

from gossip.conduct import NEVER, Conduct
from gossip.config import Config
from gossip.effects import Effect, MemberChanged, MemberState, Send
from gossip.ids import MemberRecord, PeerId
from gossip.membership.accusations import Accusers, accusation, is_signed
from gossip.membership.detector import Detector, suspicion_s
from gossip.membership.dissemination import Rumours, told_before
from gossip.membership.entry import VERIFIED_BURST, VERIFIED_PER_S, Allowance, Entry
from gossip.membership.strangers import Introductions
from gossip.membership.table import Table
from gossip.wire.messages import Gossip, Hint, Update
from gossip.wire.records import Sign, Verify, check, claims_more, mere_progress, newer

__all__ = ["TELL_EVERY_S", "MemberStates"]

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT

MAX_JUMP = 1_000  # incarnations at once, where others tell: its owner is believed over its own link
MAX_ACCUSERS = 4  # the first and three confirmations: more change nothing
HINTS_PER_S, HINTS_BURST = 8.0, 64.0  # believed of one sender: two frames of them, when many die at once
INTAKE_PER_S = 1_000.0  # new members, with the largest table at once
TELL_EVERY_S = 1.0  # a suspect that we hear from is told of it as often


class MemberStates:
    """The one place where the state of another changes."""

    def __init__(
        self, table: Table, rumours: Rumours, detector: Detector, introductions: Introductions, sign: Sign,
        verify: Verify, config: Config, now: float, conduct: Conduct,
    ) -> None:  # fmt: skip
        self._conduct = conduct
        self._table, self._rumours, self._detector, self._config = table, rumours, detector, config
        self._introductions = introductions
        self._sign, self._verify = sign, verify
        self._me = table.mine.record.id
        self._intake = Allowance(INTAKE_PER_S, float(config.max_members), now)
        self._strangers = Allowance(VERIFIED_PER_S, VERIFIED_BURST, now)  # of all links to those not in the table
        self._accusers = Accusers()
        self._suspicions: list[tuple[float, PeerId]] = []  # (when, whom); stale when it expires at another time
        self.before: dict[PeerId, MemberState | None] = {}  # states before this call, of those that changed in it
        self.deadline = math.inf  # when tick wants to be called

    def changed(self, out: list[Effect]) -> None:
        """Adds a MemberChanged for each that we met and whose state is another after this call than before it. Of
        hearsay nothing is said: one member can tell of thousands that are nobody, and each would be a line of a log."""
        for peer, before in self.before.items():
            entry = self._table.entries.get(peer)
            if entry is not None and entry.met and entry.state is not before:
                out.append(MemberChanged(peer, before, entry.state))
        self.before = {}

    # -- records -------------------------------------------------------------------------------------------------------
    def is_news(self, record: MemberRecord, linked: bool = False) -> bool:
        """Whether this record changes anything; what does is checked first, and raises if it is not acceptable.
        ``linked``: it came from its owner itself, over its own link."""
        if not self._may_change(record, linked):
            return False
        check(record, self._verify)
        return True

    def _may_change(self, record: MemberRecord, linked: bool) -> bool:
        """Whether it is worth its check: of most records that come we hold a newer one, or this very one."""
        entry = self._table.entries.get(record.id)
        if entry is not None:
            known = entry.record
            if entry is self._table.mine:
                if not claims_more(record, known):
                    return False
            elif not entry.restored and (record is known or not newer(record, known)):
                return False  # of one that we only remember, any word is news: it is really a member
            elif record.incarnation > known.incarnation + MAX_JUMP and not linked:
                return False  # told by others; accusations can drive a member so far while we hear nothing of it
        return True

    def fresh(self, updates: tuple[Update, ...], sender: PeerId, teller: Entry | None, now: float) -> list[Update]:
        """Those that may change something; raises as :meth:`is_news`. To check a signature takes longer than to make a
        record that needs it, so one link may ask for a bounded number of checks; what is beyond is dropped unread, and
        gossip or push-pull bring it again if it was true."""
        known = self._table.entries.get
        # Most of what gossip brings is known; this line is where a large swarm spends its time.
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
            self._conduct.note(sender, "flood", now, dropped / VERIFIED_BURST)
        return fresh

    def hear(self, record: MemberRecord, now: float, by: PeerId | None = None, quiet: bool = False) -> None:
        """Take a checked record of another that is news. ``by``: who told us of it; None: it came from its owner, in
        the Hello of a link. ``quiet``: everyone else knows it already."""
        if max(record.samples, record.progress, record.version) > NEVER:
            self._conduct.note(record.id, "claims", now)  # its own signature is under it, whoever brings it
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
            return  # a newer one stood before it in the same message, when neither was known
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
        """A member that we only remembered is there."""
        self.place(entry, record, LEFT if record.left else ALIVE, now)

    # -- hints ---------------------------------------------------------------------------------------------------------
    def accused(self, hint: Hint, teller: Entry | None, now: float, out: list[Effect]) -> None:
        """A hint about another."""
        entry, by = self._table.entries.get(hint.peer), hint.by
        if entry is None or hint.incarnation != entry.record.incarnation:
            return
        state = entry.state
        if entry.restored:
            if hint.dead and not entry.record.left:  # somebody has reason to say what we only assumed
                self.place(entry, entry.record, DEAD, now)
                entry.accusers = (hint,)
            return
        if state is DEAD or state is LEFT or by == hint.peer or (by == self._me and entry.met):
            return  # but a stranger may be one that we buried in an earlier life
        if hint.dead and self.before.get(hint.peer, state) is None:
            # New with this very message: then this is how it is known, and whoever tells of it could as well not have.
            self.place(entry, entry.record, DEAD, now)
            entry.accusers = (hint,)
            self._rumours.put(hint, now)
        elif self._believes(hint, entry, teller, now):
            self._suspect(entry, hint, now)
            if entry.linked and entry.acked_s >= now - self._config.probe_period_s:
                self.warn(entry, now, out)  # it can refute this at once

    def _believes(self, hint: Hint, entry: Entry, teller: Entry | None, now: float) -> bool:
        """Whether this accusation counts: new, of one who has a say, told by one who does not tell too many, signed."""
        accuser = self._table.entries.get(hint.by)
        if teller is None or accuser is None or entry.accused_by(hint.by) or len(entry.accusers) >= MAX_ACCUSERS:
            return False
        if not self._accusers.heard(hint.by, accuser.met, now):
            return False
        if teller.allowance is None:
            teller.allowance = Allowance(HINTS_PER_S, HINTS_BURST, now)
        return teller.allowance.take(now) and is_signed(hint, accuser.record.public_key, self._verify)

    def accused_us(self, hint: Hint, now: float) -> bool:
        """A hint about ourselves, which we have just refuted: whether it is one to take to heart, since it was made by
        somebody who is not always wrong. Asked a few times a second at most."""
        accuser = self._table.entries.get(hint.by)
        if accuser is None or not is_signed(hint, accuser.record.public_key, self._verify):
            return False
        silent = self._accusers.silent(hint.by, accuser.met, now)
        self._accusers.judged(hint.by, accuser.met, False, now)
        self._conduct.note(hint.by, "accusations", now)
        return not silent

    def own(self, record: MemberRecord, dead: bool) -> Hint:
        """Our accusation of this member."""
        return accusation(record.id, record.incarnation, dead, self._me, self._sign)

    def suspect_ourselves(self, entry: Entry, now: float) -> None:
        """A probe of ours failed."""
        if not entry.accused_by(self._me) and len(entry.accusers) < MAX_ACCUSERS:
            self._suspect(entry, self.own(entry.record, False), now)

    def _suspect(self, entry: Entry, hint: Hint, now: float) -> None:
        """One accuser more."""
        if entry.state is ALIVE:
            self.place(entry, entry.record, SUSPECT, now)
        entry.accusers = (*entry.accusers, hint)
        self._accusers.began(hint.by)
        self._until(entry, entry.since_s + suspicion_s(self._config, self._table.size, len(entry.accusers)))
        self._rumours.put(hint, now)

    def warn(self, entry: Entry, now: float, out: list[Effect]) -> None:
        """Tell a SUSPECT or DEAD member that we hear from, so that it refutes."""
        if entry.told_s <= now - TELL_EVERY_S:
            entry.told_s = now
            out.append(Send(entry.record.id, Gossip((entry.hint(),))))

    # -- time ----------------------------------------------------------------------------------------------------------
    def tick(self, now: float, out: list[Effect]) -> None:
        """Bury those whose suspicion ran out."""
        while self._suspicions and self._suspicions[0][0] <= now:
            when, peer = heapq.heappop(self._suspicions)
            entry = self._table.entries.get(peer)
            if entry is None or entry.state is not SUSPECT or entry.expires_s != when:
                continue
            recently = entry.acked_s >= now - self._config.probe_period_s
            if recently or (len(entry.accusers) == 1 and entry.met and not entry.accused_by(self._me)):
                # It has only not heard of this yet, and the probe carries it; and nobody is buried by the word of one.
                self._until(entry, now + self._config.probe_period_s)
                for failed in self._detector.doubt(entry, now, out):
                    self.suspect_ourselves(failed, now)
            else:
                self.place(entry, entry.record, DEAD, now)
                entry.accusers = (self.own(entry.record, True),)
                self._rumours.put(entry.hint(), now, told_before(self._table.size))  # the others bury it as well
        self._settle()

    def _settle(self) -> None:
        """A timer of one who is suspected no more, or until another time, would wake the driver for nothing."""
        suspicions, entries = self._suspicions, self._table.entries
        while suspicions:
            when, peer = suspicions[0]
            entry = entries.get(peer)
            if entry is not None and entry.state is SUSPECT and entry.expires_s == when:
                break
            heapq.heappop(suspicions)
        self.deadline = suspicions[0][0] if suspicions else math.inf

    def slept(self, gap_s: float) -> None:
        """Nobody is judged by the time in which this process was stopped."""
        for peer in self._table.suspects:
            entry = self._table.entries[peer]
            self._until(entry, entry.expires_s + gap_s)

    # -- states --------------------------------------------------------------------------------------------------------
    def place(self, entry: Entry, record: MemberRecord, state: MemberState, now: float) -> None:
        """Another state, or another incarnation. The caller names the accusers of a SUSPECT or DEAD."""
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
        """It is ALIVE, and was not."""
        if entry.met:
            self._detector.joined(entry.record.id)
        else:
            self._introductions.heard(entry, now)

    def meet(self, entry: Entry, now: float) -> None:
        """We have a link with it."""
        if not entry.met:
            self._table.meet(entry, now)
            self._introductions.over(entry.record.id)
            self._rumours.somebody(now)
            if entry.state is ALIVE:
                self.before[entry.record.id] = None  # what was said of it is news only now
                self._detector.joined(entry.record.id)

    def _judge(self, entry: Entry, state: MemberState, now: float) -> None:
        """Whether those who accused a SUSPECT were right. Of one we never met nobody is proved right by its silence: it
        may have been made up to be accused."""
        true = False if state is ALIVE else True if state is DEAD and entry.met else None
        entries = self._table.entries
        for hint in entry.accusers:
            if hint.by == self._me:
                self._accusers.ended(hint.by, True, None, now)
            else:
                accuser = entries.get(hint.by)
                self._accusers.ended(hint.by, accuser is not None and accuser.met, true, now)

    def _until(self, entry: Entry, when: float) -> None:
        entry.expires_s = when
        heapq.heappush(self._suspicions, (when, entry.record.id))
        self._settle()
