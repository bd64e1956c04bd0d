"""What TCP makes of a link: loss is delay, and a stream begins slowly.

Pure: a :class:`~sim.world.line.Line` is one direction of one connection, and :class:`Transport` says how much later
than on a line without TCP something arrives on it. The figures are those of Linux: ten segments at first (RFC 6928),
which grow 1.9-fold a round trip; a retransmission timeout of a round trip and 200 ms, doubled each time (RFC 6298, with
Linux's minimum). What kernels did over emulated links lies beside ``benchmarks/tcp_model.py``, which compares.

``cubic`` is what Linux begins with. It takes each loss for congestion: its window falls to 0.7 and grows by its curve,
or by 0.53 segments a round trip where that is more (RFC 9438, section 4.3), which holds a long stream to ``segment /
rtt * sqrt(3 / 2) / sqrt(loss)`` (Mathis et al., 1997, equation 3). After idling it begins slowly again. Where nothing
is lost at random it fills the queue before the slowest link, and two streams that meet wait in each other's
(:mod:`sim.world.cubic`).
``bbr`` keeps its estimate of the rate over losses and idle times, and its queues short; loss costs it rounds in which
its window does not grow while it looks for the rate, and every ten seconds of use it nearly stops for 200 ms to see the
round trip (PROBE_RTT).

What stands in a queue keeps other packets as well (``Line.queue_s``): messages that a sender has for others meanwhile.

Not modelled: queues that streams of several links share; acknowledgements that are lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.scenario.conditions import Congestion
from sim.world import cubic, lanes
from sim.world.cubic import BETA, GROWTH, RENO, STANDS
from sim.world.line import FIRST_SEGMENTS, Line, Met

__all__ = ["Back", "Passage", "Transport", "syn_again_s"]

SEGMENT_BYTES = 1448  # of data in a packet of 1500 bytes, whose IP, TCP and timestamp headers take 52
PACKET_BYTES = 1500
ACKNOWLEDGES = 1.0173  # packets' bytes while as much comes the other way: 52 bytes more for every second one
TIMEOUT_S = 0.2  # the least that a retransmission timeout is longer than the round trip (Linux: TCP_RTO_MIN)
LONGEST_TIMEOUT_S = 120.0  # TCP_RTO_MAX
REORDERED = 1.25  # round trips until a gap that others follow is filled: a quarter is waited for reordering (RFC 8985)
UNFOLLOWED = 3  # so many last segments have too few after them to show a gap; a probe after two round trips does
PACED = 1.5  # of a window a round trip: as fast as bbr sends while it looks for the rate (2.89 of the rate before)
# bbr lets two round trips of the rate be in flight, and three quanta of two segments: of what is more than one round
# trip so much stands in the queue on average. At 50 ms and 20, 10 and 2 Mbit/s 19, 36 and 46 ms did (here 24, 26, 39).
STANDING, QUANTA = 0.45, 6
PROBE_EVERY_S, PROBE_S = 10.0, 0.2
# From one SYN to the next, while nobody answers: its timer goes off 2 % late (1.02, 2.04, 3.07, 4.09, 5.11, 7.13 s).
SYN_S, SYN_EVEN = 1.02, 5
EPOCHS = 64  # from one loss to the next, drawn each by itself; what is left then goes at Mathis' rate
QUEUE_S = 0.1  # what a home's router holds before a slow link, of its rate,
LEAST_QUEUE_BYTES = 65_536  # and this much at least


class Passage(NamedTuple):
    """What TCP makes of one stream: it sends no faster than ``ceiling_bytes_s`` (of ``wire_bytes``), and its last byte
    arrives ``delay_s`` later than at that rate, or at what else limits it."""

    wire_bytes: float
    ceiling_bytes_s: float
    delay_s: float


class Back(NamedTuple):
    """The other direction of a line, on which as much comes the other way, and the wire bytes a second that it has."""

    line: Line
    rate: float


@dataclass(frozen=True, slots=True)
class Transport:
    """How the lines of a network behave. ``tls``: a link's opening takes a round trip more. ``connections``: of one
    link at most.

    ``rate`` is what a stream could have at most, wire bytes a second, and ``rtt`` seconds there and back.
    """

    congestion: Congestion = "cubic"
    tls: bool = False
    connections: int = 1

    def timeout_s(self, rtt: float) -> float:
        """Until what was not acknowledged is sent again for the first time."""
        return rtt + TIMEOUT_S

    def retransmitted_at(self, sent_at: float, now: float, rtt: float) -> float:
        """When what was sent then, and has not been acknowledged since, is sent again next."""
        at, timeout_s = sent_at, self.timeout_s(rtt)
        while at < now:
            at += timeout_s
            timeout_s = min(2 * timeout_s, LONGEST_TIMEOUT_S)
        return at

    def gap(self, line: Line) -> int:
        """How many segments arrive until one is lost."""
        return int(math.log(line.draw()) / line.log_arrives)

    def late_s(self, line: Line, rtt: float) -> float:
        """How much later a message of one segment arrives, for having been lost: it is never lost for good."""
        return self.again_s(line, rtt) if self.lost(line) else 0.0

    def again_s(self, line: Line, rtt: float) -> float:
        """A segment was lost that nothing follows: until one of those sent again arrives."""
        waited_s, timeout_s = 0.0, self.timeout_s(rtt)
        line.clear = -1
        while True:
            waited_s += timeout_s
            timeout_s = min(2 * timeout_s, LONGEST_TIMEOUT_S)
            if not self.lost(line):
                return waited_s

    def lost(self, line: Line) -> bool:
        """Whether the next packet is."""
        if not line.loss:
            return False
        if line.clear < 0:
            line.clear = self.gap(line)
        line.clear -= 1
        return line.clear < 0

    def stream(
        self, line: Line, size_bytes: float, rate: float, rtt: float, now: float, back: Back | None = None
    ) -> Passage:
        """A stream of so many bytes begins on this line, and ``back`` says which one comes the other way."""
        segments = max(1.0, size_bytes / SEGMENT_BYTES)
        packet_bytes = PACKET_BYTES * (1.0 if back is None else ACKNOWLEDGES)
        wire_bytes, at_s = segments * packet_bytes, rate / packet_bytes  # segments a second, at most
        alone_s = segments / at_s
        if self.congestion == "cubic" and not line.loss:
            delay_s = self.queued(line, segments, at_s, rtt, now, back, packet_bytes)
            line.used_at = now + alone_s + delay_s
            return Passage(wire_bytes, math.inf, delay_s)
        if self.congestion == "cubic":
            took_s = self.lossy_s(lanes.of(line, now), segments, at_s, rtt, now)
            lanes.noted(line, segments, took_s, rtt, now, self.connections)
            return Passage(wire_bytes, wire_bytes / took_s if took_s > alone_s else math.inf, 0.0)
        took_s = self.start(line, segments, at_s, rtt)
        late_s = self.tail_s(line, min(segments, line.window), at_s, rtt) if line.loss else 0.0
        late_s += self.probes_s(line, took_s)
        line.used_at = now + took_s + late_s
        return Passage(wire_bytes, math.inf, took_s - alone_s + late_s)

    def seconds(
        self, line: Line, size_bytes: float, rate: float, rtt: float, now: float, back: Back | None = None
    ) -> float:
        """From the first byte sent to the last one there, for a stream that has this rate all the time."""
        wire_bytes, ceiling, delay_s = self.stream(line, size_bytes, rate, rtt, now, back)
        return wire_bytes / min(rate, ceiling) + delay_s + rtt / 2

    # -- a window ------------------------------------------------------------------------------------------------
    def rest(self, line: Line, rtt: float, now: float) -> None:
        """cubic begins slowly again; bbr keeps its estimate."""
        if self.congestion == "cubic":
            cubic.rest(line, int((now - line.used_at) / self.timeout_s(rtt)))

    def queued(
        self, line: Line, segments: float, at_s: float, rtt: float, now: float, back: Back | None, packet_bytes: float
    ) -> float:
        """How much longer than at the full rate cubic takes where only queues lose something. Of two streams that meet
        the one that begins first finds it out for both."""
        met, line.met = line.met, None
        if met is not None and met.segments == segments and now - met.at <= 2 * rtt:
            return met.delay_s
        if not rtt:
            return 0.0  # an acknowledgement is there at once
        lines, rates = [line], [at_s]
        if back is not None and back.line.used_at <= now:
            lines.append(back.line)
            rates.append(back.rate / packet_bytes)
        queue_s = max(QUEUE_S, LEAST_QUEUE_BYTES / packet_bytes / min(rates))
        for each in lines:
            self.rest(each, rtt, now)
        took_s = cubic.rounds(lines, segments, rates, rtt, queue_s)
        if len(lines) == 2:
            lines[1].met = Met(now, segments, took_s[1] - segments / rates[1])
        return took_s[0] - segments / at_s

    def start(self, line: Line, segments: float, at_s: float, rtt: float) -> float:
        """Seconds until bbr has sent all segments: a window a round trip while that is less than the rate. A round that
        lost something lets the window as it is, the next one does not."""
        took_s, window, held, left = 0.0, line.window, False, segments
        line.queue_s = 0.0
        full = at_s * rtt if rtt else 0.0  # a rate may be infinite
        while window < full:
            if left <= window:
                line.window = window
                return took_s + left / min(at_s, PACED * window / rtt)
            held = not held and line.loss > 0 and self.lossy(line, window)
            left -= window
            took_s += rtt
            if not held:
                window *= GROWTH
        line.window = min(window, full) if full > FIRST_SEGMENTS else FIRST_SEGMENTS
        full_s = left / at_s
        line.queue_s = STANDING * (rtt + QUANTA / at_s) * full_s / (took_s + full_s) if rtt else 0.0
        return took_s + full_s

    def lossy(self, line: Line, segments: float) -> bool:
        """Whether one of so many is lost."""
        if line.clear < 0:
            line.clear = self.gap(line)
        if line.clear >= segments:
            line.clear -= int(segments)
            return False
        line.clear = self.gap(line)
        return True

    def lossy_s(self, lines: Sequence[Line], segments: float, at_s: float, rtt: float, now: float) -> float:
        """Seconds until all segments are there that cubic has sent over these: of several each has its last chunk to
        itself, and what is before it goes as they have room."""
        for line in lines:
            self.rest(line, rtt, now)
        if len(lines) == 1:
            took_s = self.epochs(lines[0], segments, at_s, rtt)
        else:
            chunk = max(segments / (lanes.CHUNKS * len(lines)), min(lanes.CHUNK, segments))
            lines = lines[: math.ceil(segments / chunk)]
            last = min(chunk, segments / len(lines))
            before = segments / len(lines) - last
            rates = [1.0 / self.epochs(line, before, at_s / len(lines), rtt) for line in lines if before > 0]
            took_s = len(rates) / sum(rates) if rates else 0.0
            took_s += max(self.epochs(line, last, at_s / len(lines), rtt) for line in lines)
            took_s = math.hypot(lanes.DEALT * took_s, segments / at_s)  # windows that fill the path wait in its queue
        for line in lines:
            line.used_at = now + took_s
        return took_s

    def epochs(self, line: Line, segments: float, at_s: float, rtt: float) -> float:
        """Seconds until all segments are there that cubic has sent, from one loss to the next. Its window never holds
        more than the rate carries."""
        took_s, left, recovers = 0.0, segments, False
        full = max(at_s * rtt, 2.0) if rtt else 2.0
        for _ in range(EPOCHS):
            if line.clear < 0:
                line.clear = self.gap(line)
            sent = min(left, line.clear + 1.0)
            took_s += self.epoch(line, sent, at_s, rtt, full, recovers, sent > line.clear)
            left -= sent
            if sent <= line.clear:
                line.clear -= int(sent)
                return took_s
            line.clear = self.gap(line)
            flight = line.window  # what is sent until the loss is known
            cubic.lost(line)
            line.window = line.threshold = max(2.0, float(int(BETA * flight)))
            if left < flight:
                return took_s + left / at_s + self.found_s(line, left, segments, at_s, rtt)
            took_s += max(flight / at_s, rtt)
            left -= flight
            recovers = True
            if line.draw() < line.loss:  # what was sent again is lost too
                took_s += self.again_s(line, rtt)
        return took_s + left * max(1 / at_s, rtt / math.sqrt(1.5 / line.loss))  # Mathis et al., equation 3

    def epoch(
        self, line: Line, segments: float, at_s: float, rtt: float, full: float, recovers: bool, loses: bool
    ) -> float:
        """Seconds for so many segments until a loss: slow start up to the threshold, or until HyStart sees a queue of
        its own, then the curve. ``recovers``: for a round the window does not grow, since what was lost before it
        is sent again; ``loses``: the last of them is lost, and those before it in its round let the window grow."""
        took_s, left = 0.0, segments
        if recovers and line.window < full:
            if left <= line.window:
                return left * max(1 / at_s, rtt / line.window)
            took_s, left = REORDERED * rtt, left - line.window
        while line.window < min(line.threshold, STANDS * full):
            if left <= line.window:
                if loses:
                    line.window = min(line.window + (GROWTH - 1) * left, line.threshold)
                return took_s + left / at_s
            took_s += max(rtt, line.window / at_s)
            left -= line.window
            line.window = min(line.window * GROWTH, line.threshold)
        while line.window < full:
            window = line.window
            if left <= window:
                if loses:
                    line.window += RENO * left / window
                return took_s + max(left / window * rtt, left / at_s)
            took_s += rtt
            left -= window
            cubic.grow(line, rtt, False)
        line.window = min(line.window, full)
        return took_s + left / at_s

    def tail_s(self, line: Line, segments: float, at_s: float, rtt: float) -> float:
        """How much later the last byte is there for what is lost of the last window: only then nothing hides it."""
        behind = self.gap(line)  # segments after the last that was lost
        return self.found_s(line, behind, segments, at_s, rtt) if behind < segments else 0.0

    def found_s(self, line: Line, behind: float, segments: float, at_s: float, rtt: float) -> float:
        """A segment was lost that only so many follow: how much later it is there than the last of these."""
        if segments <= 1:
            return self.again_s(line, rtt)
        late_s = (2 * rtt if behind < UNFOLLOWED else REORDERED * rtt) - behind / at_s
        if line.draw() < line.loss:  # it is lost again, and waits for the timeout
            late_s += self.again_s(line, rtt)
        return max(0.0, late_s)

    def probes_s(self, line: Line, took_s: float) -> float:
        """bbr's PROBE_RTT: the time of its connections is not aligned, since no two began at once."""
        if line.until_probe_s < 0:
            line.until_probe_s = PROBE_EVERY_S * line.draw()
        line.until_probe_s -= took_s
        if line.until_probe_s >= 0:
            return 0.0
        probes = math.ceil(-line.until_probe_s / PROBE_EVERY_S)
        line.until_probe_s += probes * PROBE_EVERY_S
        return probes * PROBE_S


def syn_again_s(tries: int) -> float:
    """When a dial that was not answered knocks again, seconds after its first knock: after 1, 2, 3, 4, 5, 7, 11 ... of
    the kernel's seconds, of which the first are even since Linux 6.5 (tcp_syn_linear_timeouts)."""
    even = min(tries + 1, SYN_EVEN)
    return SYN_S * (even + 2 * (2.0 ** (tries + 1 - even) - 1))
