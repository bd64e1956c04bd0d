"""One member in the table of a peer."""

from __future__ import annotations

import math

from gossip.effects import MemberState
from gossip.ids import MemberRecord, PeerId
from gossip.wire.messages import Hint

__all__ = ["VERIFIED_BURST", "VERIFIED_PER_S", "Allowance", "Entry"]

SUSPECT = MemberState.SUSPECT
# Signature checks for one link: 1.3 % of a core at 131 us each. A swarm gossips 10 records a second, plus changes.
VERIFIED_PER_S = 100.0
VERIFIED_BURST = 800.0  # half of a swarm of 1,600 members that comes back at once
NEVER_S = -math.inf  # one shared object: a new negative infinity for each entry took 160 MB with 1,000 simulated peers


class Allowance:
    """A token bucket: ``rate`` tokens a second, at most ``burst`` at once."""

    __slots__ = ("_at_s", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at_s = burst, now

    def take(self, now: float, spare: int = 0) -> bool:
        """Take one token. Return False if fewer than ``spare`` would be left."""
        self._tokens = min(self._burst, self._tokens + (now - self._at_s) * self._rate)
        self._at_s = now
        if self._tokens < 1 + spare:
            return False
        self._tokens -= 1
        return True

    def wait_s(self, spare: int = 0) -> float:
        """Return the seconds from the last :meth:`take` until the next one can succeed."""
        return max(0.0, 1 + spare - self._tokens) / self._rate

    def give_back(self) -> None:
        """Undo one :meth:`take`."""
        self._tokens = min(self._burst, self._tokens + 1)

    def widen(self, burst: float) -> None:
        """Raise the burst to ``burst``. The difference can be spent at once, but only the first time."""
        if burst > self._burst:
            self._tokens += burst - self._burst
            self._burst = burst


class Entry:
    """One member in our table. Only the table changes ``record`` and ``state``."""

    __slots__ = (
        "accusers",
        "acked_s",
        "allowance",
        "answer_due",
        "answered_s",
        "asked_all",
        "asked_s",
        "at",
        "awaited",
        "contacted",
        "digest_s",
        "expires_s",
        "hash",
        "home",
        "introducer",
        "life_s",
        "linked",
        "named_s",
        "place",
        "record",
        "restored",
        "rtt_s",
        "shares",
        "since_s",
        "state",
        "told_s",
        "tries",
        "try_s",
        "turn",
        "verifying",
    )  # fmt: skip

    def __init__(self, record: MemberRecord, state: MemberState, now: float) -> None:
        self.record = record
        self.state = state
        self.since_s = now  # when it entered this state
        # DEAD only because an earlier life of ours remembers it. This is no evidence and is not gossiped.
        self.restored = False
        self.at = -1  # its index in the list of its state
        self.shares = False  # it is ALIVE, ready and had a link with us
        # Our sample count when we heard that it shares our run; -1 if it does not, or had a link with us.
        self.awaited = -1
        self.life_s = NEVER_S  # when we heard of its present incarnation, unless that was its first record
        self.named_s = now  # when we received its record, which names its homes
        self.hash = 0  # its part of the digest
        self.accusers: tuple[Hint, ...] = ()  # the accusations of a SUSPECT; the last hint about a DEAD member
        self.expires_s = math.inf  # when a SUSPECT becomes DEAD
        self.linked = False
        self.contacted = False  # it had a complete link with us in this life of ours
        self.introducer: PeerId | None = None  # for a stranger: the member that told us of it
        self.home: PeerId | None = None  # for an undialable stranger: the home that vouches for it
        self.place = -1  # its index in `contacted` of the table, or among the strangers of its introducer
        self.turn = -1  # its index among the strangers of its introducer that can be dialled
        self.tries = 0  # failed dials to a stranger
        self.try_s = NEVER_S  # when it may be dialled next
        self.acked_s = NEVER_S  # latest proof of life
        self.rtt_s: float | None = None  # smoothed RTT in seconds, from direct Acks
        self.told_s = NEVER_S  # when we last told it of the accusations against it
        self.answered_s = NEVER_S  # when we last answered an accusation against us from it
        self.asked_s = NEVER_S  # when we last sent it a Digest
        self.asked_all = False  # our last Digest was empty: we asked for everything
        self.answer_due = False  # it may still answer with the buckets that it wants
        self.digest_s = NEVER_S  # when it last sent us a Digest
        self.allowance: Allowance | None = None  # rate limiter of hints from it
        self.verifying: Allowance | None = None  # rate limiter of the signature checks that its records cause

    @property
    def reachable(self) -> bool:
        """Return True if a message can reach it over a link or by dialling."""
        return self.linked or self.record.address is not None

    def expect(self, records: float, now: float) -> Allowance:
        """Let it send ``records`` records at once, and VERIFIED_PER_S a second in the long run."""
        if self.verifying is None:
            self.verifying = Allowance(VERIFIED_PER_S, VERIFIED_BURST, now)
        self.verifying.widen(records)
        return self.verifying

    def hint(self) -> Hint:
        """Return the signed hint about a SUSPECT or DEAD member. For a SUSPECT, prefer one that does not say DEAD."""
        if self.state is SUSPECT:
            return next((hint for hint in self.accusers if not hint.dead), self.accusers[0])
        return self.accusers[0]

    def accused_by(self, peer: PeerId) -> bool:
        """Return True if this peer is one of its accusers."""
        return any(hint.by == peer for hint in self.accusers)
