"""One direction of one TCP connection, as long as it lasts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from sim.seeds import GOLDEN, MASK, mixed

__all__ = ["FIRST_SEGMENTS", "Line", "Met", "line_key"]

FIRST_SEGMENTS = 10.0  # initial window, RFC 6928
ODD = 0xD1B54A32D192ED03  # another multiplier than GOLDEN, so that a line and the one back differ


class Met(NamedTuple):
    """What a stream that began on the line back found out about the one that is to come the other way."""

    at: float  # when it began
    segments: float
    delay_s: float


class Line:
    """``key``: 64 bits, of which all its draws are made, so that another line changes none of them. ``loss``: share of
    packets."""

    __slots__ = (
        "active_s", "back", "clear", "connections", "drawn", "flat_s", "free_at", "held", "key", "lanes", "log_arrives",
        "loss", "met", "peak", "plateau", "queue_s", "reno", "sending_s", "sent", "threshold", "until_probe_s",
        "used_at", "wide_at", "window",
    )  # fmt: skip

    def __init__(self, key: int, now: float, loss: float = 0.0) -> None:
        self.key, self.drawn = key, 0
        self.loss, self.log_arrives = loss, math.log1p(-loss)
        self.window = FIRST_SEGMENTS
        self.threshold = math.inf  # cubic's slow start ends there, in segments
        self.peak = 0.0  # cubic's window at its last loss; 0: there was none
        self.active_s = -1.0  # of sending since cubic's window began to grow slowly; below 0: it has not yet
        self.plateau = self.flat_s = self.reno = (
            0.0  # where and when cubic's curve is flat; what Reno's window would be
        )
        self.met: Met | None = None
        self.clear = -1  # segments that arrive until one is lost; below 0: not drawn yet
        self.until_probe_s = -1.0  # of use until bbr's next PROBE_RTT; the same
        self.queue_s = 0.0  # what others' packets wait at its sender while its latest stream is sent, on average
        self.used_at = now
        self.free_at = now  # what is sent on it arrives no sooner: TCP keeps order
        self.back: Line | None = None  # the other direction, of a link that is open
        self.sent = self.sending_s = 0.0  # segments, and how long it took, as far as is needed to know that it is lossy
        self.wide_at, self.connections = math.inf, 1  # from then on this is the first of so many
        self.lanes: list[Line] = []  # the others
        self.held: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []  # sent into a cut, with when

    @property
    def last_at(self) -> float:
        """When something last went over this connection, in either direction."""
        back = self.back
        return self.free_at if back is None or back.free_at < self.free_at else back.free_at

    def draw(self) -> float:
        """Above 0, below 1: a hash of a counter, to be had in any order."""
        self.drawn += 1
        return ((mixed((self.key + self.drawn * GOLDEN) & MASK) >> 12) + 0.5) / (1 << 52)


def line_key(sender: int, receiver: int, now: float) -> int:
    """Of the line from one to the other that opens now, of keys that are theirs alone."""
    return (sender * GOLDEN ^ receiver * ODD) + int(now * 2**30) & MASK
