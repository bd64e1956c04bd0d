"""What we hold the others to be: records and hints in, states out.

=============================== ==================================================================================
what we hear of a member        what we hold it to be then
=============================== ==================================================================================
record, higher incarnation      ALIVE, or LEFT if it says so
record, same incarnation, left  LEFT, whatever it was: final for that incarnation
record, same incarnation        as before (progress does not refute)
SUSPECT hint, same incarnation  ALIVE -> SUSPECT; SUSPECT: one accuser more
DEAD hint, same incarnation     ALIVE, SUSPECT -> DEAD; SUSPECT if we hear from it, or if the hint came by push-pull
anything else                   as before; hints never raise an incarnation, only its owner does
=============================== ==================================================================================
"""

from __future__ import annotations

import heapq
import math

from gossip.config import Config
from gossip.detector import Detector, suspicion_s
from gossip.effects import Effect, MemberChanged, MemberState, Send
from gossip.ids import MemberRecord, PeerId
from gossip.messages import Gossip, Hint, Update
from gossip.records import Verify, check, claims_more, mere_progress, newer
from gossip.rumours import Rumours, told_of_progress
from gossip.table import Allowance, Entry, Table

__all__ = ["TELL_EVERY_S", "View"]

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT

MAX_JUMP = 1_000  # incarnations at once
MAX_ACCUSERS = 4  # the first and three confirmations: more change nothing
MAX_ACCUSATIONS = 32  # live ones of one accuser: it probes 12 members in the suspicion time of 1,000
HINTS_PER_S, HINTS_BURST = 8.0, 64.0  # believed of one sender: two frames of them, when many die at once
INTAKE_PER_S = 1_000.0  # new members, with the largest table at once
TELL_EVERY_S = 1.0  # a suspect that we hear from is told of it as often


class View:
    """The one place where the state of another changes."""

    def __init__(
        self, table: Table, rumours: Rumours, detector: Detector, verify: Verify, config: Config, now: float
    ) -> None:
        self._table, self._rumours, self._detector, self._config = table, rumours, detector, config
        self._verify = verify
        self._me = table.mine.record.id
        self._intake = Allowance(INTAKE_PER_S, float(config.max_members), now)
        self._accusations: dict[PeerId, int] = {}  # live ones by accuser
        self._suspicions: list[tuple[float, PeerId]] = []  # (when, whom); stale when it expires at another time
        self.before: dict[PeerId, MemberState | None] = {}  # states before this call, of those that changed in it
        self.deadline = math.inf  # when tick wants to be called

    def changed(self, out: list[Effect]) -> None:
        """Adds a MemberChanged for each whose state is another after this call than before it."""
        for peer, before in self.before.items():
            entry = self._table.entries.get(peer)
            if entry is not None and entry.state is not before:
                out.append(MemberChanged(peer, before, entry.state))
        self.before = {}

    # -- records -------------------------------------------------------------------------------------------------------
    def is_news(self, record: MemberRecord) -> bool:
        """Whether this record changes anything; what does is checked first, and raises if it is not acceptable."""
        entry = self._table.entries.get(record.id)
        if entry is not None:
            known = entry.record
            if entry is self._table.mine:
                if not claims_more(record, known):
                    return False
            elif not entry.restored and (record is known or not newer(record, known)):
                return False  # of one that we only remember, any word is news: it is really a member
            elif record.incarnation > known.incarnation + MAX_JUMP:
                return False
        check(record, self._verify)
        return True

    def fresh(self, updates: tuple[Update, ...]) -> list[Update]:
        """Those that may change something; raises as :meth:`is_news`."""
        known = self._table.entries.get
        # Most of what gossip brings is known; this line is where a large swarm spends its time.
        unknown = [
            update for update in updates
            if not isinstance(update, MemberRecord)
            or (entry := known(update.id)) is None or entry.record is not update or entry.restored
        ]  # fmt: skip
        return [update for update in unknown if not isinstance(update, MemberRecord) or self.is_news(update)]

    def hear(self, record: MemberRecord, now: float, quiet: bool = False, linked: bool = False) -> None:
        """Take a checked record of another that is news; ``quiet``: everyone else knows it already."""
        entry = self._table.entries.get(record.id)
        state, told = LEFT if record.left else ALIVE, 0
        if entry is None:
            if not linked and not self._intake.take(now):
                return
            entry = self._table.add(record, state, now)
            if entry is None:
                return
            self.before.setdefault(record.id, None)
            if state is ALIVE:
                self._detector.joined(record.id)
        elif entry.restored:
            self.trust(entry, record if newer(record, entry.record) else entry.record, now)
        elif not newer(record, entry.record):
            return  # a newer one stood before it in the same message, when neither was known
        elif record.incarnation > entry.record.incarnation or record.left:
            self.place(entry, record, state, now)
        elif mere_progress(record, entry.record):
            told = told_of_progress(self._table.size)
            self._table.progress(entry, record)
        else:
            self._table.place(entry, record, entry.state, now)
        if not quiet:
            self._rumours.put(record, now, told)

    def trust(self, entry: Entry, record: MemberRecord, now: float) -> None:
        """A member that we only remembered is there."""
        self.place(entry, record, LEFT if record.left else ALIVE, now)

    # -- hints ---------------------------------------------------------------------------------------------------------
    def accused(self, hint: Hint, teller: Entry | None, now: float, out: list[Effect], pushed: bool) -> None:
        """A hint about another. ``pushed``: it came by push-pull, from one who may have been cut off from the accused
        until now, so that a DEAD is only a suspicion (as memberlist merges states)."""
        entry, by = self._table.entries.get(hint.peer), hint.by
        if entry is None or hint.incarnation != entry.record.incarnation:
            return
        state = entry.state
        if entry.restored:
            if hint.dead and not entry.record.left:  # somebody has reason to say what we only assumed
                self.place(entry, entry.record, DEAD, now)
                entry.accusers = (by,)
            return
        if state is DEAD or state is LEFT or by == self._me or by == hint.peer:
            return
        recently = entry.acked_s >= now - self._config.probe_period_s
        if self.before.get(hint.peer, state) is None:  # new with this very message: then this is how it is known
            dead = hint.dead
        else:
            dead = hint.dead and not pushed and not recently
            if not dead and (by in entry.accusers or self._accusations.get(by, 0) >= MAX_ACCUSATIONS):
                return
            if teller is None or by not in self._table.entries:
                return
            if teller.allowance is None:
                teller.allowance = Allowance(HINTS_PER_S, HINTS_BURST, now)
            if not teller.allowance.take(now):
                return
        if dead:
            self._bury(entry, by, now)
        else:
            self.suspect(entry, by, now)
            if recently and entry.linked:
                self.warn(entry, now, out)  # it can refute this at once

    def suspect(self, entry: Entry, by: PeerId, now: float) -> None:
        """One accuser more, if there is use for it."""
        if entry.state is ALIVE:
            self.place(entry, entry.record, SUSPECT, now)
        elif by in entry.accusers or len(entry.accusers) >= MAX_ACCUSERS:
            return
        entry.accusers = (*entry.accusers, by)
        self._accusations[by] = self._accusations.get(by, 0) + 1
        self._until(entry, entry.since_s + suspicion_s(self._config, self._table.size, len(entry.accusers)))
        self._rumours.put(Hint(entry.record.id, entry.record.incarnation, False, by), now)

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
            if entry.acked_s >= now - self._config.probe_period_s:
                self._until(entry, now + self._config.probe_period_s)  # it has only not heard of this yet: its
                for failed in self._detector.doubt(entry, now, out):  # probe carries it
                    self.suspect(failed, self._me, now)
            else:
                self._bury(entry, self._me, now)
        self.deadline = self._suspicions[0][0] if self._suspicions else math.inf

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
            for accuser in entry.accusers:
                self._accusations[accuser] -= 1
                if not self._accusations[accuser]:
                    del self._accusations[accuser]
        entry.accusers = ()
        if state is ALIVE or state is LEFT:
            self._rumours.silence(record.id)
        if state is ALIVE and before is not SUSPECT:
            self._detector.joined(record.id)
        self._table.place(entry, record, state, now)

    def _bury(self, entry: Entry, by: PeerId, now: float) -> None:
        self.place(entry, entry.record, DEAD, now)
        entry.accusers = (by,)
        self._rumours.put(entry.hint(), now)

    def _until(self, entry: Entry, when: float) -> None:
        entry.expires_s = when
        heapq.heappush(self._suspicions, (when, entry.record.id))
        self.deadline = self._suspicions[0][0]
