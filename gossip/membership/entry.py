"""One member as a peer holds it."""

from __future__ import annotations

import math

from gossip.effects import MemberState
from gossip.ids import MemberRecord, PeerId
from gossip.wire.messages import Hint

__all__ = ["VERIFIED_BURST", "VERIFIED_PER_S", "Allowance", "Entry"]

SUSPECT = MemberState.SUSPECT
VERIFIED_PER_S = 100.0  # of one link, 1.3 % of a core at 131 us each; a swarm tells of 10 a second, and of what changes
VERIFIED_BURST = 800.0  # half of a swarm of 1,600 that comes back at once
NEVER_S = -math.inf  # one object: negated anew for each entry they were 160 MB among 1,000 simulated peers


class Allowance:
    """A token bucket: ``rate`` a second, ``burst`` at once."""

    __slots__ = ("_at_s", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at_s = burst, now

    def take(self, now: float) -> bool:
        """Whether one more is within the allowance; if so it is spent."""
        self._tokens = min(self._burst, self._tokens + (now - self._at_s) * self._rate)
        self._at_s = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """Undo one :meth:`take`."""
        self._tokens = min(self._burst, self._tokens + 1)

    def widen(self, burst: float) -> None:
        """As much at once from now on; what is new of it may be spent at once, and only the first time."""
        if burst > self._burst:
            self._tokens += burst - self._burst
            self._burst = burst


class Entry:
    """One member as we hold it. Only the table changes ``record`` and ``state``."""

    __slots__ = (
        "accusers", "acked_s", "allowance", "answer_due", "answered_s", "asked_all", "asked_s", "at", "awaited",
        "digest_s", "expires_s", "hash", "home", "introducer", "life_s", "linked", "met", "named_s", "place", "record",
        "restored", "rtt_s", "shares", "since_s", "state", "told_s", "tries", "try_s", "verifying",
    )  # fmt: skip

    def __init__(self, record: MemberRecord, state: MemberState, now: float) -> None:
        self.record = record
        self.state = state
        self.since_s = now  # when it came into this state
        self.restored = False  # DEAD only because we remember it from an earlier life: no evidence, and told to nobody
        self.at = -1  # its place among those of its state
        self.shares = False  # ALIVE, ready and met
        self.awaited = -1  # samples of ours when we heard that it shares our run; -1: it does not, or we met it
        self.life_s = NEVER_S  # when we heard of its present incarnation, if not with its first record
        self.named_s = now  # when its record came, which names its homes
        self.hash = 0  # its part of the digest
        self.accusers: tuple[Hint, ...] = ()  # what was said of a SUSPECT; of a DEAD the last word
        self.expires_s = math.inf  # when a SUSPECT is DEAD
        self.linked = False
        self.met = False  # we had a finished link with it, in this life of ours
        self.introducer: PeerId | None = None  # of a stranger: who told us of it
        self.home: PeerId | None = None  # of a stranger that nobody can dial: who vouches for it
        self.place = -1  # among the met and ALIVE, or among the strangers of its introducer
        self.tries = 0  # dials to a stranger that failed
        self.try_s = NEVER_S  # when it is its turn to be dialled
        self.acked_s = NEVER_S  # latest proof of life
        self.rtt_s: float | None = None  # smoothed, from its direct Acks
        self.told_s = NEVER_S  # when we last told it what is said of it
        self.answered_s = NEVER_S  # when we last answered what it says of us
        self.asked_s = NEVER_S  # when we last sent it a Digest
        self.asked_all = False  # that one was empty
        self.answer_due = False  # it may still name the buckets that it wants in answer
        self.digest_s = NEVER_S  # when it last sent us one
        self.allowance: Allowance | None = None  # for its hints
        self.verifying: Allowance | None = None  # for records that it tells and whose signatures we must check

    @property
    def reachable(self) -> bool:
        """Whether a message can go to it: over a link, or by dialling."""
        return self.linked or self.record.address is not None

    def expect(self, records: float, now: float) -> Allowance:
        """It may tell us of so many members at once, and of VERIFIED_PER_S a second in the long run."""
        if self.verifying is None:
            self.verifying = Allowance(VERIFIED_PER_S, VERIFIED_BURST, now)
        self.verifying.widen(records)
        return self.verifying

    def hint(self) -> Hint:
        """What is said of a SUSPECT or DEAD member: as it was signed, and of a SUSPECT rather what says no more."""
        if self.state is SUSPECT:
            return next((hint for hint in self.accusers if not hint.dead), self.accusers[0])
        return self.accusers[0]

    def accused_by(self, peer: PeerId) -> bool:
        """Whether this one is among those who say so."""
        return any(hint.by == peer for hint in self.accusers)
