"""Back-off: partners that failed an exchange are not asked for a while.

This is local: it tells other peers nothing about whether a partner is alive.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["BENCHED", "BackOff"]

# 10 s, 20 s ... 160 s: one failure costs others half a second of a slot, and a repaired link is soon noticed.
DOUBLINGS = 4
SILENCE = 0.25  # Share of that time for a silent partner: it has wasted no stream, and may have been busy.
PARDON_S = 1.0  # If no other partner is left, a failed one is tried again after this time.
BENCHED = 256  # Partners remembered, as many as there may be links.


@dataclass(slots=True)
class Benched:
    """A partner in back-off."""

    since: float
    until: float
    failures: int  # Failures in a row.
    shunned: bool  # Its own offers are declined too.


class BackOff:
    """The partners in back-off, whose time doubles with each failure in a row.

    *Silence*, an offer without an answer, only keeps us from asking, and ends with the first sign of life. A stalled
    stream, wrong bytes or a missing COMMIT hold a slot until they are detected. Offers of such a partner are declined
    too. A new link changes nothing, or an attacker could clear its record with one connection.
    """

    def __init__(self, first_s: float) -> None:
        self.first_s = first_s
        self.benched = Recent[PeerId, Benched](BENCHED)  # The one that failed longest ago first.

    def failed(self, peer: PeerId, now: float, silent: bool = False) -> None:
        before = self.benched.get(peer)
        failures = 0 if before is None else before.failures
        seconds = self.first_s * 2 ** min(failures, DOUBLINGS) * (SILENCE if silent else 1.0)
        one = self.benched[peer] = Benched(now, now + seconds, failures + 1, not silent)
        if before is not None and before.shunned and before.until > now:
            one.until, one.shunned = max(one.until, before.until), True

    def succeeded(self, peer: PeerId) -> None:
        self.benched.pop(peer, None)

    def answers(self, peer: PeerId) -> None:
        """End a silent partner's back-off after a sign of life."""
        one = self.benched.get(peer)
        if one is not None and not one.shunned:
            del self.benched[peer]

    def sits_out(self, peer: PeerId, now: float) -> bool:
        """Return True if the partner must not be asked now."""
        one = self.benched.get(peer)
        return one is not None and now < one.until

    def shuns(self, peer: PeerId, now: float) -> bool:
        """Return True if the partner's own offers must be declined too."""
        one = self.benched.get(peer)
        return one is not None and one.shunned and now < one.until

    def pardonable(self, now: float) -> list[PeerId]:
        """Return the partners in back-off that may be tried again, the one that failed longest ago first."""
        return [peer for peer, one in self.benched.items() if now - one.since >= PARDON_S]
