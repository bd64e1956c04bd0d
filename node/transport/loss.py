"""Detection of connections that do not fill their path, from the kernel's statistics of the socket.

There are two causes. Cubic takes lost packets for congestion. And no connection sends more per round trip than the
receiver's window allows.
"""

import math
import struct
from dataclasses import dataclass

# Byte offsets in Linux's struct tcp_info, which only grows at its end. Times are in microseconds.
RTT_US, RETRANSMITTED, MIN_RTT_US, SENT = 68, 100, 148, 156  # RETRANSMITTED and SENT count segments with data.
BUSY_US, WINDOWED_US = 168, 176  # 64-bit times of sending, and of waiting for the receiver's window.
INFO_BYTES, LONG_INFO_BYTES = 160, 184  # The size up to SENT, and up to WINDOWED_US.
SEGMENT_BYTES = 1448  # Of an Ethernet packet of 1500 bytes.

MIN_SEGMENTS = 1_000  # Segments (1.4 MB) before a verdict on losses.
# Updates with new losses before a verdict: a slow start that overshoots loses many segments, but only once.
MIN_LOSSY_UPDATES = 4
LOSSY_SHARE = 0.005  # A path is lossy from this share of lost segments on. A full queue causes a tenth of that.
MIN_RTT_S = 0.005  # On a path with a shorter round trip losses are repaired fast, and any window suffices.
QUEUED_RTT = 1.5  # Losses do not count above this multiple of the shortest round trip, since a queue may cause them.
WINDOWED_SHARE = 0.5  # A connection is window-limited if it waits this share of its sending time for the window.
MIN_BUSY_S = 1.0  # Sending time before a verdict on the window.


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss on a path."""

    share: float  # The share of the segments that were retransmitted.
    rtt_s: float  # The shortest round trip, in seconds.

    @property
    def ceiling_mb_s(self) -> float:
        """Return the rate that cubic reaches on such a path, in MB/s, even if the path could carry more.

        ``segment / rtt * sqrt(3 / 2) / sqrt(loss)`` (Mathis et al., 1997, equation 3).
        """
        return 1e-6 * SEGMENT_BYTES / self.rtt_s * math.sqrt(1.5 / self.share)


@dataclass(slots=True)
class PathRecord:
    """The statistics of one connection so far."""

    sent: int = 0  # Segments with data up to the last update.
    retransmitted: int = 0  # Those of them that were retransmitted.
    judged: int = 0  # Segments that were sent while no queue had built up, so that their losses count.
    lost: int = 0  # Of these, the segments that were lost.
    lossy_updates: int = 0  # Updates that found new losses.
    loss: Loss | None = None  # Set for cubic only. None if there are few losses, or too few segments for a verdict.
    is_window_limited: bool = False  # The receiver's window limits the rate, on a path with a long round trip.

    @property
    def is_narrow(self) -> bool:
        """Return True if one connection does not fill this path."""
        return self.is_window_limited or self.loss is not None

    def update(self, control: bytes, info: bytes) -> None:
        """Update the statistics from the name of the socket's congestion control and its struct tcp_info."""
        if len(info) < INFO_BYTES:  # An old kernel, or none that provides it.
            return
        rtt_us, retransmitted, min_rtt_us, sent = (
            struct.unpack_from("=I", info, offset)[0] for offset in (RTT_US, RETRANSMITTED, MIN_RTT_US, SENT)
        )
        new_sent, new_lost = sent - self.sent, retransmitted - self.retransmitted
        self.sent, self.retransmitted = sent, retransmitted
        is_long = min_rtt_us >= 1e6 * MIN_RTT_S
        if control.rstrip(b"\0") == b"cubic" and is_long and rtt_us <= QUEUED_RTT * min_rtt_us:
            self.judged += new_sent
            self.lost += new_lost
            self.lossy_updates += new_lost > 0
            is_known = self.judged >= MIN_SEGMENTS and self.lossy_updates >= MIN_LOSSY_UPDATES
            is_lossy = is_known and self.lost >= LOSSY_SHARE * self.judged
            self.loss = Loss(min(self.lost / self.judged, 1.0), 1e-6 * min_rtt_us) if is_lossy else None
        if len(info) >= LONG_INFO_BYTES:
            busy_us, windowed_us = struct.unpack_from("=QQ", info, BUSY_US)
            is_busy = busy_us >= 1e6 * MIN_BUSY_S
            self.is_window_limited = is_long and is_busy and windowed_us >= WINDOWED_SHARE * busy_us
