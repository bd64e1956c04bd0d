"""Whether one connection fills its path, as the kernel tells of the socket: cubic takes lost packets for a full path,
and no connection sends more in a round trip than the other side makes room for."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

__all__ = ["Loss", "PathRecord"]

# Of Linux's struct tcp_info, which only grows at its end: bytes from its beginning.
RTT_US, RETRANSMITTED, MIN_RTT_US, SENT = 68, 100, 148, 156  # and segments with data, sent again, and sent at all
BUSY_US, NO_ROOM_US = 168, 176  # 64 bits: sending, and of that held up by the other side's window
INFO_BYTES, LONG_INFO_BYTES = 160, 184
SEGMENT_BYTES = 1448

ENOUGH = 1_000  # segments, 1.4 MB,
LOOKS = 4  # in so many of which something was lost: a slow start that goes too far loses many, and once
LOSSY = 0.005  # of them sent again. Of a path that loses nothing itself a full queue costs a tenth of that
LEAST_RTT_S = 0.005  # below it what is lost is known too soon to cost much, and any window is enough
QUEUE = 1.5  # times the shortest round trip: what is lost of longer ones may have been a queue's
HELD_UP = 0.5  # of the time of sending, for want of room at the other side
BUSY_S = 1.0  # of sending, to know


@dataclass(frozen=True, slots=True)
class Loss:
    """``share`` of the segments that were sent again, ``rtt_s`` the shortest round trip."""

    share: float
    rtt_s: float

    @property
    def ceiling_mb_s(self) -> float:
        """What cubic gets of a path that loses so much, whatever it carries: ``segment / rtt * sqrt(3 / 2) /
        sqrt(loss)`` (Mathis et al., 1997, equation 3)."""
        return 1e-6 * SEGMENT_BYTES / self.rtt_s * math.sqrt(1.5 / self.share)


@dataclass(slots=True)
class PathRecord:
    """What looks at one connection have shown."""

    sent: int = 0  # segments, and those sent again, at the last look
    again: int = 0
    counted: int = 0  # of those, what was sent while no queue stood before it, and what was lost of it
    lost: int = 0
    losing: int = 0  # looks since which something had been lost
    loss: Loss | None = None  # of a link that has cubic; None where little is, or too little was sent to know
    windowed: bool = False  # held up by how much room the other side has for one connection, on a path that takes time

    @property
    def narrow(self) -> bool:
        """One connection does not fill this path."""
        return self.windowed or self.loss is not None

    def look(self, control: bytes, info: bytes) -> None:
        """At the name of the socket's congestion control, and its struct tcp_info."""
        if len(info) < INFO_BYTES:  # an old kernel, or none that tells
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
