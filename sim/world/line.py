"""One direction of one TCP connection, for as long as it lasts."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from sim.seeds import GOLDEN, MASK, splitmix

FIRST_SEGMENTS = 10.0  # The initial window of RFC 6928.
ODD = 0xD1B54A32D192ED03  # A multiplier other than GOLDEN, so that a line and its reverse differ.


class Prediction(NamedTuple):
    """The computed delay of a stream that is about to begin, made when the stream in the other direction began."""

    began_at: float  # When the stream in the other direction began.
    segments: float  # The length of the predicted stream: one of another length is computed anew.
    delay_s: float


class Line:
    """The state of one direction of a connection.

    ``key``: 64 bits that determine all its draws, so that another line changes none of them. ``loss``: the share of
    lost packets. The windows and the curve belong to TCP's congestion control; :mod:`sim.world.cubic` explains them.
    """

    __slots__ = (
        "back", "connections", "curve_s", "drawn", "free_at", "held", "key", "log_arrives", "loss", "more_lines",
        "peak", "plateau", "plateau_at_s", "prediction", "queue_delay_s", "reno_window", "sending_s", "sent_segments",
        "striped_from", "threshold", "until_loss", "until_probe_s", "used_at", "window",
    )  # fmt: skip

    def __init__(self, key: int, now: float, loss: float = 0.0) -> None:
        self.key = key
        self.drawn = 0  # Number of draws so far.
        self.loss = loss
        self.log_arrives = math.log1p(-loss)  # The logarithm of the share of packets that arrive.
        self.window = FIRST_SEGMENTS  # Segments that may be in flight.
        # Below this window cubic is in slow start. Infinite until the first slow start ends.
        self.threshold = math.inf
        self.peak = 0.0  # cubic's window at its last loss; 0: there was none.
        self.curve_s = -1.0  # Seconds of sending since cubic's curve began; below 0: there is no curve.
        # Of that curve: the height of its flat part, the time of it, and the window that Reno would have now.
        self.plateau = self.plateau_at_s = self.reno_window = 0.0
        self.prediction: Prediction | None = None
        self.until_loss = -1  # Segments until the next loss; below 0: not drawn yet.
        self.until_probe_s = -1.0  # Seconds of use until bbr's next PROBE_RTT; below 0: not drawn yet.
        self.queue_delay_s = 0.0  # The average delay at this sender for other packets while its latest stream is sent.
        self.used_at = now  # When the latest stream on it ends.
        self.free_at = now  # Data sent on it arrives no earlier: TCP keeps order.
        self.back: Line | None = None  # The reverse direction, of an open link.
        # Segments and their seconds of sending, counted until the link is known to lose packets.
        self.sent_segments = self.sending_s = 0.0
        # The time from which the link has more connections (sim.world.striping); infinite while it has only one. Then
        # the number of connections that it has from that time on.
        self.striped_from, self.connections = math.inf, 1
        self.more_lines: list[Line] = []  # The additional connections.
        # Messages sent during a cut, with their times.
        self.held: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    @property
    def last_at(self) -> float:
        """Return when the connection was last used, in either direction."""
        back = self.back
        return self.free_at if back is None or back.free_at < self.free_at else back.free_at

    def draw(self) -> float:
        """Return a hash of a counter, above 0 and below 1, which is independent of other lines."""
        self.drawn += 1
        return ((splitmix((self.key + self.drawn * GOLDEN) & MASK) >> 12) + 0.5) / (1 << 52)


def line_key(sender: int, receiver: int, now: float) -> int:
    """Return the key of the line from one peer to another that opens now; the arguments are the peers' own keys."""
    return (sender * GOLDEN ^ receiver * ODD) + int(now * 2**30) & MASK
