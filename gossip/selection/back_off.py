"""Back-off: partners that failed an exchange are not asked for a while.

This is local: it tells other peers nothing about whether a partner is alive.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["MAX_BENCHED", "BackOff"]

# 10 s, 20 s ... 160 s: one failure costs others half a second of a slot, and a repaired link is soon noticed.
MAX_DOUBLINGS = 4
SILENT_SHARE = 0.25  # Share of that time for a silent partner: it has wasted no stream, and may have been busy.
PARDON_S = 1.0  # If no other partner is left, a failed one is tried again after this time.
MAX_BENCHED = 256  # Partners remembered, as many as there may be links.


@dataclass(slots=True)
class Benched:
    """A partner in back-off."""

    since: float
    until: float
    failure_count: int  # Failures in a row.
    is_shunned: bool  # Its own offers are declined too.


class BackOff:
    """The partners in back-off, whose time doubles with each failure in a row.

    *Silence*, an offer without an answer, only keeps us from asking, and ends with the first sign of life. A stalled
    stream, wrong bytes or a missing COMMIT hold a slot until they are detected. Offers of such a partner are declined
    too. A new link changes nothing, or an attacker could clear its record with one connection.
    """

    def __init__(self, first_s: float) -> None:
        self.first_s = first_s  # Back-off after the first failure.
        self.benched = Recent[PeerId, Benched](MAX_BENCHED)  # The one that failed longest ago first.

    def note_failure(self, peer: PeerId, now: float, silent: bool = False) -> None:
        before = self.benched.get(peer)
        failure_count = 0 if before is None else before.failure_count
        seconds = self.first_s * 2 ** min(failure_count, MAX_DOUBLINGS) * (SILENT_SHARE if silent else 1.0)
        benched = self.benched[peer] = Benched(now, now + seconds, failure_count + 1, not silent)
        if before is not None and before.is_shunned and before.until > now:
            benched.until, benched.is_shunned = max(benched.until, before.until), True

    def note_success(self, peer: PeerId) -> None:
        self.benched.pop(peer, None)

    def note_sign_of_life(self, peer: PeerId) -> None:
        """End the back-off of a partner that was only silent."""
        benched = self.benched.get(peer)
        if benched is not None and not benched.is_shunned:
            del self.benched[peer]

    def is_benched(self, peer: PeerId, now: float) -> bool:
        """Return True if the partner must not be asked now."""
        benched = self.benched.get(peer)
        return benched is not None and now < benched.until

    def is_shunned(self, peer: PeerId, now: float) -> bool:
        """Return True if the partner's own offers must be declined too."""
        benched = self.benched.get(peer)
        return benched is not None and benched.is_shunned and now < benched.until

    def pardonable(self, now: float) -> list[PeerId]:
        """Return the partners in back-off that may be tried again, the one that failed longest ago first."""
        return [peer for peer, benched in self.benched.items() if now - benched.since >= PARDON_S]
