"""cubic's windows over links that lose only the packets that overflow their queues.

A window larger than what the link carries in a round trip fills the queue before the link, and every packet behind it
waits. A round then lasts as long as the link takes for the window. With as much traffic the other way, the
acknowledgements of one stream wait in the other's queue. So **both** have the rounds of the larger window, and the
stream with the smaller one sends only its share of the rate. That is the cost of an exchange over cubic. Of two streams
that began together, Linux's later one left slow start (HyStart, Ha and Rhee, 2011) with a third of the other's window.
It took a quarter longer, for the first ten exchanges of a link.

Windows grow as in Linux: 1.9-fold a round in slow start; then a twentieth a round until the first loss, and by the
curve of RFC 9438 in any case, whose clock runs only while sending. A window that overflows its queue shrinks to 0.7.
Linux's measurements are in ``benchmarks/tcp_exchanges.csv``; ``tests/sim/world/test_cubic.py`` compares.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.world.line import FIRST_SEGMENTS, Line

__all__ = ["GROWTH", "grow", "note_loss", "send_together", "shrink_idle"]

GROWTH = 1.9  # Growth of a window per round trip of slow start: 2, reduced by segments acknowledged together.
BETA, CURVE, RENO = 0.7, 0.4, 0.53  # RFC 9438: the factor after a loss; segments/s^3; segments a round, 3 (1-b)/(1+b).
PEAK_FACTOR = 0.85  # (1 + b) / 2: a peak that was not reached again is set lower (section 4.7).
LEAST_GROWTH = 1.05  # Before the first loss Linux lets a window grow by at least a twentieth a round.
MAX_GROWTH = 1.5  # The fastest growth per round, whatever the curve says.
HYSTART_SEGMENTS = 16.0  # Segments acknowledged until HyStart has seen eight delays.
# HyStart sees the queue when the other stream's window takes this share of a round trip. The stream that began later is
# behind that queue, the earlier one before it.
LATER_SHARE, EARLIER_SHARE = 0.5, 0.87
# The part of the smaller window that lengthens rounds further: delayed acknowledgements arrive all at once, and so do
# the segments that answer them (ACK compression; Zhang, Shenker and Clark, SIGCOMM 1991). Measured: 0.25 where windows
# were 200 and 200, 200 and 95, 100 and 100 segments.
ACK_COMPRESSION = 0.25
# The part of a round's excess over a round trip that stands before a sender on average, less as its stream begins and
# ends; the rest delays acknowledgements at the other end. Measured: 19 to 23 ms at 20 Mbit/s, 60 at 2 (here 22, 64).
STANDS_AT_SENDER = 0.375
HYSTART_ROUND = 1.125  # In round trips: from this duration of a window on, HyStart sees the stream's own queue.
MAX_ROUNDS = 256  # Rounds of one stream; the rest goes at the full rate.


def shrink_idle(line: Line, timeouts: int) -> None:
    """Halve the window for each idle timeout (RFC 2861); the threshold remembers it."""
    if timeouts > 0 and line.window > FIRST_SEGMENTS:
        line.threshold = max(line.threshold, 0.75 * line.window)
        line.window = max(FIRST_SEGMENTS, line.window / 2 ** min(timeouts, 60))


def note_loss(line: Line) -> None:
    """Shrink the window after a lost packet, and restart the curve."""
    line.peak = PEAK_FACTOR * line.window if line.window < line.peak else line.window
    line.window = line.threshold = max(2.0, BETA * line.window)
    line.active_s = -1.0


def send_together(
    lines: Sequence[Line], segments: float, rates: Sequence[float], rtt: float, queue_s: float
) -> list[float]:
    """Send a stream on each line, round by round, and return how long each takes from its own first segment on.

    Args:
        lines: One line, or two that send to each other, of which the first began a latency earlier.
        segments: The length of each stream.
        rates: The rate of each line, in segments per second.
        rtt: The round trip in seconds.
        queue_s: The capacity of each queue, in seconds.
    """
    numbers, are_two = range(len(lines)), len(lines) == 2
    left, done, took_s, waited = [segments] * len(lines), [0.0] * len(lines), 0.0, 0.0
    for _ in range(MAX_ROUNDS):
        each_s = [lines[number].window / rates[number] if left[number] > 0 else 0.0 for number in numbers]
        both_send = are_two and min(left) > 0
        wait_s = max(each_s) + ACK_COMPRESSION * min(each_s) if both_send else max(each_s)
        round_s = max(rtt, wait_s)
        waited += round_s * (round_s - rtt)
        for number in numbers:
            line, still = lines[number], left[number]
            window = line.window
            if still <= 0:
                continue
            left[number] = still - window
            if still <= window:
                # A window that waits is spread over the round; another one is sent at once when the round begins.
                done[number] = took_s + (still / window * wait_s if wait_s > rtt else still / rates[number])
            elif each_s[number] > rtt + queue_s:
                note_loss(line)
            else:
                is_delayed = both_send and each_s[1 - number] > (LATER_SHARE if number else EARLIER_SHARE) * rtt
                grow(line, round_s, is_delayed or each_s[number] > HYSTART_ROUND * rtt)
        took_s += round_s
        if max(left) <= 0:
            break
    for line in lines:
        line.queue_s = STANDS_AT_SENDER * waited / took_s
    return [took_s + still / rate if still > 0 else end for still, rate, end in zip(left, rates, done, strict=True)]


def grow(line: Line, round_s: float, delayed: bool) -> None:
    """Grow the window after a round without a loss."""
    window = line.window
    if line.active_s >= 0:
        line.active_s += round_s
    if window < line.threshold:
        if delayed and line.threshold > 1e300:  # HyStart, which acts once.
            line.window = line.threshold = window + HYSTART_SEGMENTS
        else:
            line.window = min(GROWTH * window, line.threshold)
        return
    if line.active_s < 0:
        line.active_s, line.plateau, line.reno = round_s, max(line.peak, window), window
        line.flat_s = ((line.plateau - window) / CURVE) ** (1 / 3)  # RFC 9438, equation 2.
    curve = line.plateau + CURVE * (line.active_s - line.flat_s) ** 3  # Equation 1.
    line.reno += RENO
    line.window = min(MAX_GROWTH * window, max(window, line.reno, curve))
    if line.peak == 0.0:
        line.window = max(line.window, LEAST_GROWTH * window)
