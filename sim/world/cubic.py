"""cubic's windows over links that lose nothing but what their queues cannot hold.

A window that is larger than what the link carries in a round trip stands in the queue before it, and every packet
behind waits: a round then lasts as long as the link takes for the window. Where as much comes the other way, the
acknowledgements of the one stream wait in the other's queue, so that **both** have the rounds of the larger window, and
who has the smaller one sends only its share of the rate. That is what an exchange over cubic costs: of two that began
at once Linux' later one left slow start (HyStart, Ha and Rhee, 2011) with a third of the other's window and took a
quarter longer, for the first ten exchanges of a link.

Windows grow as Linux lets them: 1.9-fold a round in slow start; then a twentieth a round until the first loss, and the
curve of RFC 9438 in any case, whose time is that of sending alone; 0.7 of a window is left when it overflows its queue.
What Linux measured lies in ``benchmarks/tcp_exchanges.csv``; ``tests/sim/world/test_cubic.py`` compares.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.world.line import FIRST_SEGMENTS, Line

__all__ = ["GROWTH", "lost", "rest", "rounds"]

GROWTH = 1.9  # of a window in a round trip of slow start: 2, but for segments acknowledged together
BETA, CURVE, RENO = 0.7, 0.4, 0.53  # RFC 9438: what is left after a loss; segments/s^3; segments a round, 3 (1-b)/(1+b)
CONVERGES = 0.85  # (1 + b) / 2: a peak that was not reached again is set lower (section 4.7)
UNTRIED = 1.05  # before the first loss Linux lets a window grow by a twentieth a round at least
STEEPEST = 1.5  # of a window in a round, whatever the curve says
SEEN = 16.0  # segments acknowledged until HyStart has seen eight delays
# The share of a round trip that the other stream's window takes when HyStart sees its queue: the stream that began
# later is behind it, the earlier one before it.
BEHIND, BEFORE = 0.5, 0.87
# Of the smaller window, which makes rounds longer still: acknowledgements that waited come all at once, and so do the
# segments that answer them (Zhang, Shenker and Clark, SIGCOMM 1991). Measured: 0.25 where windows were 200 and 200, 200
# and 95, 100 and 100 segments.
COMPRESSED = 0.25
# Of what rounds are longer than a round trip: that much stands before a sender on average, less as its stream begins
# and ends; the rest keeps acknowledgements at the other end. Measured: 19 to 23 ms at 20 Mbit/s, 60 at 2 (here 22, 64).
HERE = 0.375
STANDS = 1.125  # of a round trip: HyStart sees its own queue
ROUNDS = 256  # of one stream; what is left then goes at the full rate


def rest(line: Line, timeouts: int) -> None:
    """For each timeout for which nothing was sent the window is halved (RFC 2861); the threshold remembers it."""
    if timeouts > 0 and line.window > FIRST_SEGMENTS:
        line.threshold = max(line.threshold, 0.75 * line.window)
        line.window = max(FIRST_SEGMENTS, line.window / 2 ** min(timeouts, 60))


def lost(line: Line) -> None:
    """A packet was: the window shrinks, and the curve begins anew."""
    line.peak = CONVERGES * line.window if line.window < line.peak else line.window
    line.window = line.threshold = max(2.0, BETA * line.window)
    line.active_s = -1.0


def rounds(lines: Sequence[Line], segments: float, rates: Sequence[float], rtt: float, queue_s: float) -> list[float]:
    """Seconds from its own first segment until each line has sent so many segments: one, or two that send to each other
    at once, of which the first began a latency earlier. ``rates``: segments a second; ``queue_s``: of each."""
    places, met = range(len(lines)), len(lines) == 2
    left, done, took_s, waited = [segments] * len(lines), [0.0] * len(lines), 0.0, 0.0
    for _ in range(ROUNDS):
        each_s = [lines[place].window / rates[place] if left[place] > 0 else 0.0 for place in places]
        both = met and min(left) > 0
        wait_s = max(each_s) + COMPRESSED * min(each_s) if both else max(each_s)
        round_s = max(rtt, wait_s)
        waited += round_s * (round_s - rtt)
        for place in places:
            line, still = lines[place], left[place]
            window = line.window
            if still <= 0:
                continue
            left[place] = still - window
            if still <= window:
                # A window that waits is sent all over the round, another one at once when the round begins.
                done[place] = took_s + (still / window * wait_s if wait_s > rtt else still / rates[place])
            elif each_s[place] > rtt + queue_s:
                lost(line)
            else:
                behind = both and each_s[1 - place] > (BEHIND if place else BEFORE) * rtt
                grow(line, round_s, behind or each_s[place] > STANDS * rtt)
        took_s += round_s
        if max(left) <= 0:
            break
    for line in lines:
        line.queue_s = HERE * waited / took_s
    return [took_s + still / rate if still > 0 else end for still, rate, end in zip(left, rates, done, strict=True)]


def grow(line: Line, round_s: float, delayed: bool) -> None:
    """After a round without a loss."""
    window = line.window
    if line.active_s >= 0:
        line.active_s += round_s
    if window < line.threshold:
        if delayed and line.threshold > 1e300:  # HyStart, which works once
            line.window = line.threshold = window + SEEN
        else:
            line.window = min(GROWTH * window, line.threshold)
        return
    if line.active_s < 0:
        line.active_s, line.plateau, line.reno = round_s, max(line.peak, window), window
        line.flat_s = ((line.plateau - window) / CURVE) ** (1 / 3)  # RFC 9438, equation 2
    curve = line.plateau + CURVE * (line.active_s - line.flat_s) ** 3  # equation 1
    line.reno += RENO
    line.window = min(STEEPEST * window, max(window, line.reno, curve))
    if line.peak == 0.0:
        line.window = max(line.window, UNTRIED * window)
