"""Detection of connections that do not fill their path, from the kernel's statistics of the socket.

Cubic takes lost packets for congestion, and no connection sends more per round trip than the receiver's window allows.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

__all__ = ["Loss", "PathRecord"]

# Byte offsets in Linux's struct tcp_info, which only grows at its end.
RTT_US, RETRANSMITTED, MIN_RTT_US, SENT = 68, 100, 148, 156  # Segments with data: retransmitted, and sent at all.
BUSY_US, NO_ROOM_US = 168, 176  # 64-bit times: sending, and held up by the receiver's window.
INFO_BYTES, LONG_INFO_BYTES = 160, 184
SEGMENT_BYTES = 1448

ENOUGH = 1_000  # Segments (1.4 MB) before a verdict.
LOOKS = 4  # Looks with a loss before a verdict: a slow start that overshoots loses many, but only once.
LOSSY = 0.005  # The share of retransmitted segments from which a path is lossy; a full queue causes a tenth of that.
LEAST_RTT_S = 0.005  # On a shorter round trip losses are repaired fast, and any window suffices.
QUEUE = 1.5  # Factor on the shortest round trip: losses at longer ones may be caused by a queue.
HELD_UP = 0.5  # The share of sending time held up by the receiver's window.
BUSY_S = 1.0  # Sending time before a verdict on the window.


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss on a path: ``share`` of the segments retransmitted, ``rtt_s`` the shortest round trip."""

    share: float
    rtt_s: float

    @property
    def ceiling_mb_s(self) -> float:
        """Return the rate that cubic reaches on such a path, in MB/s, even if the path could carry more.

        ``segment / rtt * sqrt(3 / 2) / sqrt(loss)`` (Mathis et al., 1997, equation 3).
        """
        return 1e-6 * SEGMENT_BYTES / self.rtt_s * math.sqrt(1.5 / self.share)


@dataclass(slots=True)
class PathRecord:
    """The statistics of one connection so far."""

    sent: int = 0  # Segments at the last look: sent, and retransmitted (`again`).
    again: int = 0
    counted: int = 0  # Segments sent while no queue had built up, and those of them that were lost.
    lost: int = 0
    losing: int = 0  # Looks that found new losses.
    loss: Loss | None = None  # Set for cubic only; None where losses are few or too few segments were sent to know.
    windowed: bool = False  # Limited by the receiver's window, on a path with a long round trip.

    @property
    def narrow(self) -> bool:
        """Return True if one connection does not fill this path."""
        return self.windowed or self.loss is not None

    def look(self, control: bytes, info: bytes) -> None:
        """Update the statistics from the name of the socket's congestion control and its struct tcp_info."""
        if len(info) < INFO_BYTES:  # An old kernel, or none that provides it.
            return
        rtt_us, again, least_us, sent = (
            struct.unpack_from("=I", info, at)[0] for at in (RTT_US, RETRANSMITTED, MIN_RTT_US, SENT)
        )
        new_sent, new_again = sent - self.sent, again - self.again
        self.sent, self.again = sent, again
        far = least_us >= 1e6 * LEAST_RTT_S
        if control.rstrip(b"\0") == b"cubic" and far and rtt_us <= QUEUE * least_us:
            self.counted += new_sent
            self.lost += new_again
            self.losing += new_again > 0
            known = self.counted >= ENOUGH and self.losing >= LOOKS
            lossy = known and self.lost >= LOSSY * self.counted
            self.loss = Loss(min(self.lost / self.counted, 1.0), 1e-6 * least_us) if lossy else None
        if len(info) >= LONG_INFO_BYTES:
            busy_us, no_room_us = struct.unpack_from("=QQ", info, BUSY_US)
            self.windowed = far and busy_us >= 1e6 * BUSY_S and no_room_us >= HELD_UP * busy_us
