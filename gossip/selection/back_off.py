"""Back-off: partners that failed an exchange are not asked for a while.

There are two degrees:

- A partner *in back-off* is not asked for an exchange. A silent one, which did not answer an offer, is in back-off and
  not shunned. The first sign of life ends it.
- A *shunned* partner is in back-off, and its own offers are declined too. Its stream stalled, its bytes were wrong or
  its COMMIT was missing, and it held a slot until that was detected. Only time or a finished exchange ends this. A new
  link changes nothing, or an attacker could clear its record with one connection.

Silence neither shortens nor softens a shunning that still lasts.

Back-off is local: it tells other peers nothing about whether a partner is alive.
"""

from dataclasses import dataclass

from gossip.ids import PeerId
from gossip.recent import Recent

# Back-off grows to 16 times the first one: failures then cost little, and a repaired link is still soon noticed.
MAX_DOUBLINGS = 4
SILENT_FACTOR = 0.25  # Back-off of a silent partner is shorter: it has wasted no stream, and may have been busy.
RETRY_AFTER_S = 1.0  # If no other partner is left, a failed one may be asked again after this time.
MAX_FAILED = 256  # Partners remembered, as many as there may be links.


@dataclass(slots=True)
class FailedPartner:
    """A partner that has failed since its last finished exchange; its back-off lasts until ``until``."""

    failed_at: float  # The time of the last failure.
    until: float
    failure_count: int  # Failures in a row.
    is_shunned: bool


class BackOff:
    """The partners that failed, and their back-off, which doubles with each failure in a row.

    Args:
        first_s: The back-off after the first failure, in seconds.
    """

    def __init__(self, first_s: float) -> None:
        self.first_s = first_s
        self.failed = Recent[PeerId, FailedPartner](MAX_FAILED)  # The one that failed longest ago comes first.

    def note_failure(self, peer: PeerId, now: float, silent: bool = False) -> None:
        """Begin a back-off after a failed exchange; shun the partner unless it was only ``silent``."""
        earlier = self.failed.get(peer)
        earlier_failures = 0 if earlier is None else earlier.failure_count  # In a row.
        seconds = self.first_s * 2 ** min(earlier_failures, MAX_DOUBLINGS) * (SILENT_FACTOR if silent else 1.0)
        failed = self.failed[peer] = FailedPartner(now, now + seconds, earlier_failures + 1, not silent)
        if earlier is not None and earlier.is_shunned and earlier.until > now:  # The shunning still lasts.
            failed.until, failed.is_shunned = max(failed.until, earlier.until), True

    def note_success(self, peer: PeerId) -> None:
        """Forget the failures of a partner after a finished exchange."""
        self.failed.pop(peer, None)

    def note_sign_of_life(self, peer: PeerId) -> None:
        """Forget the failures of a partner whose last failure was only silence."""
        failed = self.failed.get(peer)
        if failed is not None and not failed.is_shunned:
            del self.failed[peer]

    def is_in_back_off(self, peer: PeerId, now: float) -> bool:
        """Return True if the partner must not be asked now."""
        failed = self.failed.get(peer)
        return failed is not None and now < failed.until

    def is_shunned(self, peer: PeerId, now: float) -> bool:
        """Return True if the partner's own offers must be declined now."""
        failed = self.failed.get(peer)
        return failed is not None and failed.is_shunned and now < failed.until

    def last_resorts(self, now: float) -> list[PeerId]:
        """Return failed partners to ask if no other is left, the one that failed longest ago first.

        A second after its failure any partner may be asked, even if its back-off lasts.
        """
        return [peer for peer, failed in self.failed.items() if now - failed.failed_at >= RETRY_AFTER_S]
