"""cubic's windows over links that lose only the packets that overflow their queues.

A *window* is the number of segments that a sender may have in flight: sent and not yet acknowledged. A *round* is the
time from sending a window to receiving its acknowledgements, a round trip or longer. The model computes a stream round
by round.

**What a window costs.** A link carries rate times round trip in a round trip. The rest of a larger window stands in
the queue before the link, and a round lasts as long as the link takes for the window. An exchange is two streams in
opposite directions. The acknowledgements of each wait in the other's queue. So *both* have the rounds of the larger
window, and the stream with the smaller one sends only its share of the rate.

**How a window grows.** As in Linux, in each round without a loss:

- In *slow start*, while the window is below the threshold, it grows 1.9-fold. The first slow start has no threshold.
  It ends at a loss, or when HyStart (Ha and Rhee, 2011) sees that round trips become longer.
- Afterwards (*congestion avoidance*) it is the larger one of two, and grows by at least a twentieth before the first
  loss. One is RFC 9438's curve. It rises to a plateau, at the window of the last loss, and later beyond it. Its clock
  runs only while the stream sends. The other is the window that Reno, an older algorithm, would have.

A window that overflows its queue shrinks to 0.7, and a new curve begins.

**The stream that begins later is slower.** HyStart takes the other stream's queue for its own. Of the two streams of
an exchange the later one sees that queue first, and Linux's left slow start with a third of the other's window. It took
a quarter longer, for the first ten exchanges of a link.

Linux's measurements are in ``benchmarks/tcp_exchanges.csv``; ``tests/sim/world/test_cubic.py`` compares.
"""

import math
from collections.abc import Sequence

from sim.world.line import FIRST_SEGMENTS, Line

# -- RFC 9438 --------------------------------------------------------------------------------------------------------
LOSS_FACTOR = 0.7  # beta_cubic: the share of the window that a loss leaves (section 4.6).
CURVE_SCALE = 0.4  # C, in segments per cubic second (section 4.2).
RENO_SEGMENTS = 0.53  # alpha_cubic = 3 (1 - beta) / (1 + beta): growth of Reno's window in a round (section 4.3).
FAST_CONVERGENCE = 0.85  # (1 + beta) / 2: the factor on a peak below the peak before it (section 4.7).
MAX_GROWTH = 1.5  # The largest factor of a round on the curve (section 4.2).

# -- Linux -----------------------------------------------------------------------------------------------------------
GROWTH = 1.9  # The factor of a round in slow start: 2, reduced by segments acknowledged together.
MIN_GROWTH_BEFORE_LOSS = 1.05  # Before the first loss Linux lets a window grow by at least a twentieth in a round.
HYSTART_SEGMENTS = 16.0  # Growth of the window until HyStart has seen the eight delays that it needs.
HYSTART_DELAY_FACTOR = 1.125  # HyStart acts once the own window makes a round this many round trips long.
# HyStart also acts once the link needs this share of a round trip for the window of the other stream. The stream that
# began later is behind that queue, the earlier one before it.
OTHER_WINDOW_SEEN_BY_LATER = 0.5
OTHER_WINDOW_SEEN_BY_EARLIER = 0.87
# The part of the smaller window that lengthens rounds further: delayed acknowledgements arrive all at once, and so do
# the segments that answer them (ACK compression; Zhang, Shenker and Clark, SIGCOMM 1991). Measured: 0.25 where windows
# were 200 and 200, 200 and 95, 100 and 100 segments.
ACK_COMPRESSION = 0.25
# The share of a round's excess over a round trip by which the sender's queue delays other packets, on average. It is
# below 1/2, since the queue is short while a stream begins and ends; the rest delays acknowledgements at the other end.
# Measured delays: 19 to 23 ms at 20 Mbit/s and 60 ms at 2 Mbit/s; with this share 22 and 64 ms.
SENDER_QUEUE_SHARE = 0.375

MAX_ROUNDS = 256  # Rounds of one stream that are computed; the rest goes at the full rate.


class Stream:
    """One stream of :func:`send_together`."""

    __slots__ = ("finished_s", "left", "line", "rate")

    def __init__(self, line: Line, segments: float, rate: float) -> None:
        self.line, self.rate = line, rate
        self.left = segments  # Segments that are not sent yet; negative if the last window was not full.
        self.finished_s = 0.0  # The time of its last segment, once nothing is left.


def shrink_idle(line: Line, timeouts: int) -> None:
    """Halve the window for each timeout without traffic (RFC 2861).

    The threshold becomes at least 3/4 of the old window, so that slow start soon brings most of it back.
    """
    if timeouts > 0 and line.window > FIRST_SEGMENTS:
        line.threshold = max(line.threshold, 0.75 * line.window)
        line.window = max(FIRST_SEGMENTS, line.window / 2 ** min(timeouts, 60))


def note_loss(line: Line) -> None:
    """Shrink the window after a lost packet, and end its curve; the next growth begins another."""
    line.peak = FAST_CONVERGENCE * line.window if line.window < line.peak else line.window
    line.window = line.threshold = max(2.0, LOSS_FACTOR * line.window)
    line.curve_s = -1.0


def send_together(
    lines: Sequence[Line], segments: float, rates: Sequence[float], rtt: float, queue_capacity_s: float
) -> list[float]:
    """Send a stream on each line, round by round, and return how long each takes from its own first segment on.

    Each line keeps its new window, and the delay in its queue.

    Args:
        lines: One line, or two that send to each other, of which the first began a latency earlier.
        segments: The length of each stream.
        rates: The rate of each line, in segments per second.
        rtt: The round trip in seconds.
        queue_capacity_s: The capacity of each queue, in seconds at its rate.
    """
    streams = [Stream(line, segments, rate) for line, rate in zip(lines, rates, strict=True)]
    sending = len(streams)  # Streams that have segments left.
    elapsed_s = 0.0
    excess_s2 = 0.0  # The integral over time of a round's excess over a round trip.
    for _ in range(MAX_ROUNDS):
        # The seconds that the link needs for each stream's window.
        windows_s = [stream.line.window / stream.rate if stream.left > 0 else 0.0 for stream in streams]
        both_send = sending == 2
        drain_s = max(windows_s)  # The time in which the link carries all that is sent in this round.
        if both_send:
            drain_s += ACK_COMPRESSION * min(windows_s)
        round_s = max(rtt, drain_s)
        excess_s2 += round_s * (round_s - rtt)
        for number, stream in enumerate(streams):
            line, left, window = stream.line, stream.left, stream.line.window
            if left <= 0:
                continue
            stream.left = left - window
            if left <= window:
                # With a queue, the segments are spread over the round. Otherwise they are sent at once when it begins.
                sending -= 1
                stream.finished_s = elapsed_s + (left / window * drain_s if drain_s > rtt else left / stream.rate)
            elif windows_s[number] > rtt + queue_capacity_s:  # The window overflows the queue.
                note_loss(line)
            else:
                began_later = number == 1
                seen_share = OTHER_WINDOW_SEEN_BY_LATER if began_later else OTHER_WINDOW_SEEN_BY_EARLIER
                sees_other_queue = both_send and windows_s[1 - number] > seen_share * rtt
                sees_own_queue = windows_s[number] > HYSTART_DELAY_FACTOR * rtt
                grow(line, round_s, sees_other_queue or sees_own_queue)
        elapsed_s += round_s
        if not sending:
            break
    for stream in streams:
        stream.line.queue_delay_s = SENDER_QUEUE_SHARE * excess_s2 / elapsed_s
    return [
        elapsed_s + stream.left / stream.rate if stream.left > 0 else stream.finished_s  # The rest goes at full rate.
        for stream in streams
    ]


def grow(line: Line, round_s: float, is_delayed: bool) -> None:
    """Grow the window after a round without a loss that took ``round_s``; ``is_delayed``: HyStart saw a queue."""
    if line.curve_s >= 0:
        line.curve_s += round_s
    if line.window >= line.threshold:
        follow_curve(line, round_s)
    elif is_delayed and math.isinf(line.threshold):  # HyStart acts only in the first slow start.
        line.window = line.threshold = line.window + HYSTART_SEGMENTS
    else:
        line.window = min(GROWTH * line.window, line.threshold)


def follow_curve(line: Line, round_s: float) -> None:
    """Grow the window in congestion avoidance (RFC 9438, sections 4.2 and 4.3)."""
    window = line.window
    if line.curve_s < 0:
        line.curve_s = round_s
        line.plateau = max(line.peak, window)  # W_max.
        line.plateau_at_s = ((line.plateau - window) / CURVE_SCALE) ** (1 / 3)  # K.
        line.reno_window = window  # W_est.
    on_curve = line.plateau + CURVE_SCALE * (line.curve_s - line.plateau_at_s) ** 3  # W_cubic(t).
    line.reno_window += RENO_SEGMENTS
    line.window = min(MAX_GROWTH * window, max(window, line.reno_window, on_curve))
    if not line.peak:  # There was no loss yet.
        line.window = max(line.window, MIN_GROWTH_BEFORE_LOSS * window)
