"""The rate at which a relay passes the bytes of tunnels on."""

from collections.abc import Callable

SHARE = 0.25  # The share of a node's own rate that all tunnels through it together may take.
LEAST_RATE = 1e6  # Bytes a second that tunnels may take whatever the node's own rate is.


class RelayRate:
    """The bytes a second that all tunnels through one node may take; ``rate`` follows the node's own traffic."""

    def __init__(self) -> None:
        self.rate, self.counted, self.counted_at = LEAST_RATE, 0, 0.0

    def update(self, own_bytes: Callable[[], int], now: float) -> float:
        """Measure the node's own rate once a second, and return the rate for tunnels.

        Args:
            own_bytes: Returns the bytes that the node's own links have sent and received so far.
            now: The time in seconds.
        """
        if now >= self.counted_at + 1.0:
            moved = own_bytes()
            if self.counted_at:
                own_rate = (moved - self.counted) / (now - self.counted_at)
                self.rate = max(LEAST_RATE, 0.9 * self.rate, SHARE * own_rate)
            self.counted, self.counted_at = moved, now
        return self.rate
