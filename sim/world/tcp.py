"""TCP on a link: loss is delay, and a stream begins slowly.

A :class:`~sim.world.line.Line` is one direction of one connection. :class:`Transport` computes how much later than
without TCP data arrives on it. The constants are Linux's: ten segments at first (RFC 6928), growing 1.9-fold per round
trip; a retransmission timeout of a round trip and 200 ms, doubled each time (RFC 6298, with Linux's minimum).
Measurements of kernels over emulated links are in ``benchmarks/tcp_kernel.csv``, which ``tests/sim/world/test_tcp.py``
compares.

``cubic`` is Linux's default. It takes each loss for congestion: its window falls to 0.7 and grows by its curve, or by
0.53 segments a round trip where that is more (RFC 9438, section 4.3). That limits a long stream to ``segment / rtt *
sqrt(3 / 2) / sqrt(loss)`` (Mathis et al., 1997, equation 3). After idling it begins slowly again. Without random losses
it fills the queue before the slowest link, and two streams that meet wait in each other's (:mod:`sim.world.cubic`).

``bbr`` keeps its estimate of the rate over losses and idle times, and its queues short. While it looks for the rate, a
round with a loss does not grow its window. Every ten seconds of use it nearly stops for 200 ms to measure the round
trip (PROBE_RTT).

A queue also delays other packets (``Line.queue_delay_s``): messages that a sender has for others meanwhile. Not
modelled: queues that streams of several links share; lost acknowledgements.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.scenario.conditions import Congestion
from sim.world import cubic, striping
from sim.world.cubic import GROWTH, HYSTART_DELAY_FACTOR, LOSS_FACTOR, RENO_SEGMENTS
from sim.world.line import FIRST_SEGMENTS, Line, Prediction

SEGMENT_BYTES = 1448  # Data in a packet of 1500 bytes, whose IP, TCP and timestamp headers take 52.
PACKET_BYTES = 1500
# Factor on packets' bytes with as much traffic the other way: 52 bytes more for every second one.
ACK_FACTOR = 1.0173
TIMEOUT_S = 0.2  # The least excess of a retransmission timeout over the round trip (Linux: TCP_RTO_MIN).
LONGEST_TIMEOUT_S = 120.0  # TCP_RTO_MAX.
# Round trips from sending a segment that is lost to the arrival of its retransmission, if the segments behind it show
# the gap: a quarter of one allows for reordering (RFC 8985).
RECOVERY_ROUNDS = 1.25
MIN_FOLLOWERS = 3  # Fewer segments behind a lost one show no gap; a probe after two round trips does.
PACED_WINDOWS = 1.5  # Windows per round trip that bbr sends while it looks for the rate (2.89 of the rate before).
# bbr lets two round trips of the rate be in flight, and six segments on top. A part of what exceeds one round trip
# stands in the queue. At 50 ms and 20, 10 and 2 Mbit/s this part was 19, 36 and 46 ms; here it is 24, 26 and 39 ms.
QUEUED_SHARE, EXTRA_SEGMENTS = 0.45, 6
PROBE_EVERY_S, PROBE_S = 10.0, 0.2  # The interval of PROBE_RTT, and its duration.
# While nothing answers, this time passes from one SYN to the next, at first so many times and then twice as long each
# time. The kernel's timer of 1 s is 2 % late: 1.02, 2.04, 3.07, 4.09, 5.11, 7.13 s were measured.
SYN_S, EVEN_SYNS = 1.02, 5
# Losses of one stream that are drawn one by one, each with the epoch (the segments) before it. The rest of the stream
# goes at Mathis' rate.
MAX_EPOCHS = 64
QUEUE_S = 0.1  # The queue of a home router before a slow link, in seconds at its rate.
LEAST_QUEUE_BYTES = 65_536  # The least size of that queue.


class Passage(NamedTuple):
    """TCP's effect on one stream.

    It sends ``wire_bytes`` no faster than ``ceiling_bytes_s``. Its last byte arrives ``delay_s`` later than at that
    rate, or at any other limit.
    """

    wire_bytes: float
    ceiling_bytes_s: float
    delay_s: float


class Back(NamedTuple):
    """The reverse direction of a line with as much traffic, and its rate in wire bytes per second."""

    line: Line
    rate: float


@dataclass(frozen=True, slots=True)
class Transport:
    """The behaviour of a network's connections.

    ``tls``: opening a link takes a round trip more. ``connections``: the most of one link. A *segment* is the data of
    one packet, and the *window* the segments that may be in flight. In the methods ``rate`` is the most that a stream
    could have, in wire bytes per second, ``pace`` the same in segments per second, and ``rtt`` the round trip in
    seconds.
    """

    congestion: Congestion = "cubic"
    tls: bool = False
    connections: int = 1

    def timeout_s(self, rtt: float) -> float:
        """Return the time until unacknowledged data is first sent again."""
        return rtt + TIMEOUT_S

    def retransmitted_at(self, sent_at: float, now: float, rtt: float) -> float:
        """Return the next time at which data sent at ``sent_at`` and never acknowledged is sent again."""
        again_at, timeout_s = sent_at, self.timeout_s(rtt)
        while again_at < now:
            again_at += timeout_s
            timeout_s = min(2 * timeout_s, LONGEST_TIMEOUT_S)
        return again_at

    def draw_until_loss(self, line: Line) -> int:
        """Draw how many segments arrive until one is lost."""
        return int(math.log(line.draw()) / line.log_arrives)

    def late_s(self, line: Line, rtt: float) -> float:
        """Draw the delay of a message of one segment by losses: it is never lost for good."""
        return self.draw_timeouts_s(line, rtt) if self.lost(line) else 0.0

    def draw_timeouts_s(self, line: Line, rtt: float) -> float:
        """Draw the delay of a lost segment that nothing follows, until a retransmission arrives."""
        waited_s, timeout_s = 0.0, self.timeout_s(rtt)
        line.until_loss = -1
        while True:
            waited_s += timeout_s
            timeout_s = min(2 * timeout_s, LONGEST_TIMEOUT_S)
            if not self.lost(line):
                return waited_s

    def lost(self, line: Line) -> bool:
        """Draw whether the next packet is lost."""
        if not line.loss:
            return False
        if line.until_loss < 0:
            line.until_loss = self.draw_until_loss(line)
        line.until_loss -= 1
        return line.until_loss < 0

    def stream(
        self, line: Line, size_bytes: float, rate: float, rtt: float, now: float, back: Back | None = None
    ) -> Passage:
        """Begin a stream on this line; ``back`` describes one in the other direction, None if there is none."""
        segments = max(1.0, size_bytes / SEGMENT_BYTES)
        packet_bytes = PACKET_BYTES * (1.0 if back is None else ACK_FACTOR)
        wire_bytes, pace = segments * packet_bytes, rate / packet_bytes
        full_rate_s = segments / pace
        if self.congestion == "cubic" and not line.loss:
            delay_s = self.queueing_s(line, segments, pace, rtt, now, back, packet_bytes)
            line.used_at = now + full_rate_s + delay_s
            return Passage(wire_bytes, math.inf, delay_s)
        if self.congestion == "cubic":
            took_s = self.lossy_cubic_s(striping.lines_for(line, now), segments, pace, rtt, now)
            striping.note_sent(line, segments, took_s, rtt, now, self.connections)
            return Passage(wire_bytes, wire_bytes / took_s if took_s > full_rate_s else math.inf, 0.0)
        took_s = self.bbr_s(line, segments, pace, rtt)
        late_s = self.tail_s(line, min(segments, line.window), pace, rtt) if line.loss else 0.0
        late_s += self.probes_s(line, took_s)
        line.used_at = now + took_s + late_s
        return Passage(wire_bytes, math.inf, took_s - full_rate_s + late_s)

    def seconds(
        self, line: Line, size_bytes: float, rate: float, rtt: float, now: float, back: Back | None = None
    ) -> float:
        """Return the time from the first byte sent to the last one received, for a stream at a constant rate."""
        wire_bytes, ceiling, delay_s = self.stream(line, size_bytes, rate, rtt, now, back)
        return wire_bytes / min(rate, ceiling) + delay_s + rtt / 2

    # -- a window ------------------------------------------------------------------------------------------------
    def shrink_idle(self, line: Line, rtt: float, now: float) -> None:
        """Restart slowly after idling with cubic; bbr keeps its estimate."""
        if self.congestion == "cubic":
            cubic.shrink_idle(line, int((now - line.used_at) / self.timeout_s(rtt)))

    def queueing_s(
        self, line: Line, segments: float, pace: float, rtt: float, now: float, back: Back | None, packet_bytes: float
    ) -> float:
        """Return how much later than at the full rate cubic's last byte arrives, if only full queues lose packets.

        Of two streams that meet, the one that begins first computes it for both.
        """
        prediction, line.prediction = line.prediction, None
        if prediction is not None and prediction.segments == segments and now - prediction.began_at <= 2 * rtt:
            return prediction.delay_s
        if not rtt:
            return 0.0  # Acknowledgements arrive at once, so that no window limits the stream.
        lines, rates = [line], [pace]
        if back is not None and back.line.used_at <= now:
            lines.append(back.line)
            rates.append(back.rate / packet_bytes)
        queue_capacity_s = max(QUEUE_S, LEAST_QUEUE_BYTES / packet_bytes / min(rates))
        for each in lines:
            self.shrink_idle(each, rtt, now)
        took_s = cubic.send_together(lines, segments, rates, rtt, queue_capacity_s)
        if len(lines) == 2:
            lines[1].prediction = Prediction(now, segments, took_s[1] - segments / rates[1])
        return took_s[0] - segments / pace

    def bbr_s(self, line: Line, segments: float, pace: float, rtt: float) -> float:
        """Return the seconds until bbr has sent all segments.

        It sends a window per round trip while that is less than the rate. A round with a loss does not grow the window,
        but the next one does.
        """
        took_s, window, had_loss, left = 0.0, line.window, False, segments
        line.queue_delay_s = 0.0
        full_window = pace * rtt if rtt else 0.0  # The window that fills the rate. The rate itself may be infinite.
        while window < full_window:
            if left <= window:
                line.window = window
                return took_s + left / min(pace, PACED_WINDOWS * window / rtt)
            had_loss = not had_loss and line.loss > 0 and self.draw_loss_among(line, window)
            left -= window
            took_s += rtt
            if not had_loss:
                window *= GROWTH
        line.window = min(window, full_window) if full_window > FIRST_SEGMENTS else FIRST_SEGMENTS
        rest_s = left / pace  # The time at the full rate, with a queue.
        excess_s = rtt + EXTRA_SEGMENTS / pace
        line.queue_delay_s = QUEUED_SHARE * excess_s * rest_s / (took_s + rest_s) if rtt else 0.0
        return took_s + rest_s

    def draw_loss_among(self, line: Line, segments: float) -> bool:
        """Draw whether one of this many segments is lost."""
        if line.until_loss < 0:
            line.until_loss = self.draw_until_loss(line)
        if line.until_loss >= segments:
            line.until_loss -= int(segments)
            return False
        line.until_loss = self.draw_until_loss(line)
        return True

    def lossy_cubic_s(self, lines: Sequence[Line], segments: float, pace: float, rtt: float, now: float) -> float:
        """Return the seconds until all segments that cubic sends over these lines have arrived.

        Each of several lines has its last chunk to itself; earlier chunks go to any line that has room.
        """
        for line in lines:
            self.shrink_idle(line, rtt, now)
        if len(lines) == 1:
            took_s = self.lossy_line_s(lines[0], segments, pace, rtt)
        else:
            # Compute how long each line takes for an equal share without its last chunk. Together they then take the
            # harmonic mean, as the lines share all of it in proportion to their rates. The last chunks follow.
            chunk = max(segments / (striping.CHUNKS * len(lines)), min(striping.MIN_CHUNK, segments))
            lines = lines[: math.ceil(segments / chunk)]
            last_chunk = min(chunk, segments / len(lines))
            earlier = segments / len(lines) - last_chunk
            rates = [1.0 / self.lossy_line_s(line, earlier, pace / len(lines), rtt) for line in lines if earlier > 0]
            took_s = len(rates) / sum(rates) if rates else 0.0
            took_s += max(self.lossy_line_s(line, last_chunk, pace / len(lines), rtt) for line in lines)
            took_s = math.hypot(striping.CHUNKS_FACTOR * took_s, segments / pace)  # Full windows wait in the queue.
        for line in lines:
            line.used_at = now + took_s
        return took_s

    def lossy_line_s(self, line: Line, segments: float, pace: float, rtt: float) -> float:
        """Return the seconds until all of cubic's segments have arrived, computed from one loss to the next.

        Its window never exceeds what the rate carries.
        """
        took_s, left, recovers = 0.0, segments, False
        full_window = max(pace * rtt, 2.0) if rtt else 2.0
        for _ in range(MAX_EPOCHS):
            if line.until_loss < 0:
                line.until_loss = self.draw_until_loss(line)
            sent = min(left, line.until_loss + 1.0)
            took_s += self.epoch_s(line, sent, pace, rtt, full_window, recovers, sent > line.until_loss)
            left -= sent
            if sent <= line.until_loss:
                line.until_loss -= int(sent)
                return took_s
            line.until_loss = self.draw_until_loss(line)
            flight = line.window  # The window: as many segments follow before the sender learns of the loss.
            cubic.note_loss(line)
            line.window = line.threshold = max(2.0, float(int(LOSS_FACTOR * flight)))
            if left < flight:
                return took_s + left / pace + self.recovery_s(line, left, segments, pace, rtt)
            took_s += max(flight / pace, rtt)
            left -= flight
            recovers = True
            if line.draw() < line.loss:  # The retransmission is lost too.
                took_s += self.draw_timeouts_s(line, rtt)
        return took_s + left * max(1 / pace, rtt / math.sqrt(1.5 / line.loss))  # Mathis et al., equation 3.

    def epoch_s(
        self, line: Line, segments: float, pace: float, rtt: float, full_window: float, recovers: bool, loses: bool
    ) -> float:
        """Return the seconds for this many segments until a loss.

        Slow start lasts up to the threshold, or until HyStart sees its own queue; then the curve follows. ``recovers``:
        the window does not grow for one round, while lost segments are sent again. ``loses``: the last segment is lost,
        and those before it in its round let the window grow.
        """
        took_s, left = 0.0, segments
        if recovers and line.window < full_window:
            if left <= line.window:
                return left * max(1 / pace, rtt / line.window)
            took_s, left = RECOVERY_ROUNDS * rtt, left - line.window
        while line.window < min(line.threshold, HYSTART_DELAY_FACTOR * full_window):
            if left <= line.window:
                if loses:
                    line.window = min(line.window + (GROWTH - 1) * left, line.threshold)
                return took_s + left / pace
            took_s += max(rtt, line.window / pace)
            left -= line.window
            line.window = min(line.window * GROWTH, line.threshold)
        while line.window < full_window:
            window = line.window
            if left <= window:
                if loses:
                    line.window += RENO_SEGMENTS * left / window
                return took_s + max(left / window * rtt, left / pace)
            took_s += rtt
            left -= window
            cubic.grow(line, rtt, False)
        line.window = min(line.window, full_window)
        return took_s + left / pace

    def tail_s(self, line: Line, segments: float, pace: float, rtt: float) -> float:
        """Return the delay of the last byte by losses in the last window; earlier ones are hidden."""
        behind = self.draw_until_loss(line)  # Segments after the last one that was lost.
        return self.recovery_s(line, behind, segments, pace, rtt) if behind < segments else 0.0

    def recovery_s(self, line: Line, behind: float, segments: float, pace: float, rtt: float) -> float:
        """Return how much later a lost segment arrives than the last of the ``behind`` segments that follow it."""
        if segments <= 1:
            return self.draw_timeouts_s(line, rtt)
        late_s = (2 * rtt if behind < MIN_FOLLOWERS else RECOVERY_ROUNDS * rtt) - behind / pace
        if line.draw() < line.loss:  # The retransmission is lost too, and waits for the timeout.
            late_s += self.draw_timeouts_s(line, rtt)
        return max(0.0, late_s)

    def probes_s(self, line: Line, took_s: float) -> float:
        """Return the time of bbr's PROBE_RTT phases, whose start is random: connections did not begin together."""
        if line.until_probe_s < 0:
            line.until_probe_s = PROBE_EVERY_S * line.draw()
        line.until_probe_s -= took_s
        if line.until_probe_s >= 0:
            return 0.0
        probes = math.ceil(-line.until_probe_s / PROBE_EVERY_S)
        line.until_probe_s += probes * PROBE_EVERY_S
        return probes * PROBE_S


def syn_again_s(tries: int) -> float:
    """Return the time at which an unanswered dial sends its next SYN, in seconds after its first.

    The kernel's intervals lead to 1, 2, 3, 4, 5, 7, 11 ... s; the first are even since Linux 6.5
    (tcp_syn_linear_timeouts).
    """
    even = min(tries + 1, EVEN_SYNS)
    return SYN_S * (even + 2 * (2.0 ** (tries + 1 - even) - 1))
