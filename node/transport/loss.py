"""Whether a link's congestion control takes lost packets for a full path, as the kernel tells of the socket."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from node.transport.byte_stream import ByteStream, PlainStream

__all__ = ["Loss", "loss_of"]

# Of Linux's struct tcp_info, which only grows at its end: bytes from its beginning.
RTT_US, RETRANSMITTED, MIN_RTT_US, SENT = 68, 100, 148, 156  # and segments with data, sent again, and sent at all
INFO_BYTES = 160
SEGMENT_BYTES = 1448

ENOUGH = 5_000  # segments, 7 MB: of 1 % lost then 35 to 65 are sent again
LOSSY = 0.005  # of them sent again. Of a path that loses nothing itself a full queue costs a tenth of that
LEAST_RTT_S = 0.005  # below it what is lost is known too soon to cost much
QUEUE = 1.5  # times the shortest round trip: what is lost of longer ones may have been a queue's


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


def loss_of(stream: ByteStream) -> Loss | None:
    """What is lost on the way of a link that has cubic; None where little is, where queues lose it, where too little
    was sent to know, and where the kernel does not say."""
    while (inner := getattr(stream, "inner", None)) is not None:
        stream = inner
    return judged(*stream.tcp_info()) if isinstance(stream, PlainStream) else None


def judged(control: bytes, info: bytes) -> Loss | None:
    """Of the name of a socket's congestion control, and its struct tcp_info."""
    if control.rstrip(b"\0") != b"cubic" or len(info) < INFO_BYTES:
        return None
    rtt_us, again, least_us, sent = (struct.unpack_from("=I", info, at)[0] for at in (
        RTT_US, RETRANSMITTED, MIN_RTT_US, SENT,
    ))  # fmt: skip
    lost = sent >= ENOUGH and again >= LOSSY * sent
    if not lost or least_us < 1e6 * LEAST_RTT_S or rtt_us > QUEUE * least_us:
        return None
    return Loss(min(again / sent, 1.0), 1e-6 * least_us)
