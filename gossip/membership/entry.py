"""One member in the table of a peer."""

import math
from dataclasses import dataclass

from gossip.effects import MemberState
from gossip.ids import MemberRecord, PeerId
from gossip.wire.messages import Hint

SUSPECT = MemberState.SUSPECT
# Records that are checked for one link: 1.3 % of a core at 131 us a signature. A swarm gossips 10 records a second, and
# its changes.
VERIFIED_PER_S = 100.0
VERIFIED_BURST = 800.0  # Records checked at once: half of a swarm of 1,600 members that comes back at once.
NEVER = -math.inf  # The time of an event that has not happened.
NOT_WAITING = -1  # Value of ``Entry.samples_when_heard`` for a member that is linked, or not in our run.


class TokenBucket:
    """A rate limiter: ``rate`` tokens a second, at most ``burst`` at once."""

    __slots__ = ("_burst", "_filled_at", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._filled_at = burst, now

    def take(self, now: float, spare: int = 0) -> bool:
        """Take one token. Return False if fewer than ``spare`` would be left."""
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
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

    def raise_burst(self, burst: float) -> None:
        """Raise the burst to ``burst``. The added tokens can be spent at once, but only the first time."""
        if burst > self._burst:
            self._tokens += burst - self._burst
            self._burst = burst


@dataclass(slots=True, eq=False)
class Entry:
    """One member in our table. Only the table changes ``record``, ``state`` and the indexes."""

    record: MemberRecord
    state: MemberState
    state_since: float  # Time at which the member entered this state.
    record_at: float  # Time at which we received its record.
    incarnation_at: float = NEVER  # Time at which its incarnation rose; NEVER since its first record.
    # The member is DEAD only because our address book from before our restart names it. That is no evidence of its
    # death, and is not gossiped.
    is_restored: bool = False

    # Contact.
    is_linked: bool = False
    was_contacted: bool = False  # It had a complete link with us since our start.
    alive_at: float = NEVER  # Time of the latest proof of life.
    rtt_s: float | None = None  # Smoothed round-trip time, from direct Acks.
    hint_tokens: TokenBucket | None = None  # Rate limiter of the hints that it relays.
    check_tokens: TokenBucket | None = None  # Rate limiter of the signature checks that its messages cause.

    # Accusations.
    accusations: tuple[Hint, ...] = ()  # The accusations of a SUSPECT; the last hint about a DEAD member.
    expires_at: float = math.inf  # Time at which a SUSPECT becomes DEAD.
    warned_at: float = NEVER  # Time at which we last told it of the accusations against it.
    answered_at: float = NEVER  # Time at which we last answered an accusation of us that it relayed.

    # Push-pull: :mod:`gossip.membership.anti_entropy` defines digests and buckets.
    digest_sent_at: float = NEVER  # Time at which we last sent it a Digest.
    asked_for_all: bool = False  # Our last Digest to it was empty, which asks for the whole table.
    answer_due: bool = False  # It may still answer that Digest with the buckets that it wants.
    digest_received_at: float = NEVER  # Time at which it last sent us a Digest.

    # Strangers, which are members without a link to us yet.
    introducer: PeerId | None = None  # The member that told us of a stranger; ourselves for one of our address book.
    voucher: PeerId | None = None  # The home that vouches for an undialable stranger (:mod:`gossip.membership.table`).
    failed_dials: int = 0
    dial_at: float = NEVER  # Time from which it may be dialled; NEVER means at once.
    # Our sample count when we heard that a stranger is in our run. Once we have a link with it, our samples since then
    # count for it too, see :mod:`gossip.membership.arrears`.
    samples_when_heard: int = NOT_WAITING

    # Indexes of the table.
    is_run_member: bool = False  # It is ALIVE, ready and contacted, so that it counts for its run.
    digest_part: int = 0  # Its hash in the digest; 0 while it is not there, since XOR with 0 changes nothing.

    @property
    def is_reachable(self) -> bool:
        """Return True if a message can reach it over a link or by dialling."""
        return self.is_linked or self.record.address is not None

    @property
    def hint(self) -> Hint:
        """Return an accusation of a SUSPECT or DEAD member. For a SUSPECT, prefer one that does not say DEAD."""
        if self.state is SUSPECT:
            return next((hint for hint in self.accusations if not hint.dead), self.accusations[0])
        return self.accusations[0]

    def is_accused_by(self, peer: PeerId) -> bool:
        return any(hint.by == peer for hint in self.accusations)

    def allow_records(self, records: float, now: float) -> TokenBucket:
        """Allow bursts of ``records``, VERIFIED_BURST at least, and VERIFIED_PER_S a second in the long run."""
        if self.check_tokens is None:
            self.check_tokens = TokenBucket(VERIFIED_PER_S, VERIFIED_BURST, now)
        self.check_tokens.raise_burst(records)
        return self.check_tokens
