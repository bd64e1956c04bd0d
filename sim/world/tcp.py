"""What TCP makes of a link: loss is delay, and a stream begins slowly.

Pure: a :class:`Line` is one direction of one connection, and :class:`Transport` says how much later than on a line
without TCP something arrives on it. The figures are those of Linux: ten segments at first (RFC 6928), which grow
1.9-fold a round trip; a retransmission timeout of a round trip and 200 ms, doubled each time (RFC 6298, with Linux's
minimum). What kernels did over emulated links lies beside ``benchmarks/tcp_model.py``, which compares.

``cubic`` is what Linux begins with. It takes each loss for congestion: its window falls to 0.7 and grows by 0.53
segments a round trip (RFC 9438, section 4.3), which holds a long stream to ``segment / rtt * sqrt(3 / 2) /
sqrt(loss)`` (Mathis et al., 1997, equation 3). After idling it begins slowly again. ``bbr`` keeps its estimate of the
rate over losses and idle times; loss costs it rounds in which its window does not grow while it looks for the rate,
and every ten seconds of use it nearly stops for 200 ms to see the round trip (PROBE_RTT).

Not modelled: queues in routers, and what they drop; acknowledgements that are lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sim.scenario.conditions import Congestion
from sim.seeds import GOLDEN, MASK, mixed

__all__ = ["Line", "Passage", "Transport", "line_key", "syn_again_s"]

SEGMENT_BYTES = 1448  # of data in a packet of 1500 bytes, whose IP, TCP and timestamp headers take 52
PACKET_BYTES = 1500
DUPLEX = 0.9  # of its rate an end sends while data come the other way: acknowledgements, and bursts that wait for them
FIRST_SEGMENTS = 10.0  # initial window, RFC 6928
GROWTH = 1.9  # of a window in a round trip of slow start: 2, but for segments acknowledged together
TIMEOUT_S = 0.2  # the least that a retransmission timeout is longer than the round trip (Linux: TCP_RTO_MIN)
LONGEST_TIMEOUT_S = 120.0  # TCP_RTO_MAX
REORDERED = 1.25  # round trips until a gap that others follow is filled: a quarter is waited for reordering (RFC 8985)
UNFOLLOWED = 3  # so many last segments have too few after them to show a gap; a probe after two round trips does
PACED = 1.5  # of a window a round trip: as fast as bbr sends while it looks for the rate (2.89 of the rate before)
PROBE_EVERY_S, PROBE_S = 10.0, 0.2
CUBIC_BETA, CUBIC_GROWTH = 0.7, 0.53  # RFC 9438: what is left after a loss; segments a round trip, 3 (1 - b) / (1 + b)
EPOCHS = 64  # from one loss to the next, drawn each by itself; what is left then goes at Mathis' rate

ODD = 0xD1B54A32D192ED03  # another multiplier than GOLDEN, so that a line and the one back differ


class Line:
    """One direction of one connection. ``key``: 64 bits, of which all its draws are made, so that another line changes
    none of them. ``loss``: share of packets."""

    __slots__ = (
        "clear", "drawn", "free_at", "held", "key", "log_arrives", "loss", "threshold", "until_probe_s", "used_at",
        "window",
    )  # fmt: skip

    def __init__(self, key: int, now: float, loss: float = 0.0) -> None:
        self.key, self.drawn = key, 0
        self.loss, self.log_arrives = loss, math.log1p(-loss)
        self.window = FIRST_SEGMENTS
        self.threshold = math.inf  # cubic's slow start ends there, in segments
        self.clear = -1  # segments that arrive until one is lost; below 0: not drawn yet
        self.until_probe_s = -1.0  # of use; the same
        self.used_at = now
        self.free_at = now  # what is sent on it arrives no sooner: TCP keeps order
        self.held: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []  # sent into a cut, with when

    def draw(self) -> float:
        """Above 0, below 1: a hash of a counter, to be had in any order."""
        self.drawn += 1
        return ((mixed((self.key + self.drawn * GOLDEN) & MASK) >> 12) + 0.5) / (1 << 52)


class Passage(NamedTuple):
    """What TCP makes of one stream: it sends no faster than ``ceiling_bytes_s`` (of ``wire_bytes``), and its last byte
    arrives ``delay_s`` later than at that rate, or at what else limits it."""

    wire_bytes: float
    ceiling_bytes_s: float
    delay_s: float


@dataclass(frozen=True, slots=True)
class Transport:
    """How the lines of a network behave. ``tls``: a link's opening takes a round trip more.

    ``rate`` is what a stream could have at most, wire bytes a second, and ``rtt`` seconds there and back.
    """

    congestion: Congestion = "cubic"
    tls: bool = False

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
        self, line: Line, size_bytes: float, rate: float, rtt: float, now: float, duplex: bool = False
    ) -> Passage:
        """A stream of so many bytes begins on this line. ``duplex``: as much comes the other way."""
        segments = max(1.0, size_bytes / SEGMENT_BYTES)
        wire_bytes = segments * PACKET_BYTES / (DUPLEX if duplex else 1.0)
        at_s = rate * segments / wire_bytes  # segments a second, at most
        self.rest(line, rtt, now)
        if line.loss and self.congestion == "cubic":
            took_s = self.epochs(line, segments, at_s, rtt)
        else:
            took_s = self.start(line, segments, at_s, rtt)
        alone_s = segments / at_s
        late_s = self.tail_s(line, min(segments, line.window), at_s, rtt) if line.loss else 0.0
        if self.congestion == "bbr":
            late_s += self.probes_s(line, took_s)
        line.used_at = now + took_s + late_s
        if line.loss and self.congestion == "cubic" and took_s > alone_s:
            return Passage(wire_bytes, wire_bytes / took_s, late_s)
        return Passage(wire_bytes, math.inf, took_s - alone_s + late_s)

    def seconds(
        self, line: Line, size_bytes: float, rate: float, rtt: float, now: float, duplex: bool = False
    ) -> float:
        """From the first byte sent to the last one there, for a stream that has this rate all the time."""
        wire_bytes, ceiling, delay_s = self.stream(line, size_bytes, rate, rtt, now, duplex)
        return wire_bytes / min(rate, ceiling) + delay_s + rtt / 2

    # -- a window ------------------------------------------------------------------------------------------------
    def rest(self, line: Line, rtt: float, now: float) -> None:
        """cubic halves its window for each timeout for which nothing was sent (RFC 2861); bbr keeps its estimate."""
        if self.congestion == "cubic" and line.window > FIRST_SEGMENTS:
            timeouts = int((now - line.used_at) / self.timeout_s(rtt))
            if timeouts > 0:
                line.window = max(FIRST_SEGMENTS, line.window / 2 ** min(timeouts, 60))

    def start(self, line: Line, segments: float, at_s: float, rtt: float) -> float:
        """Seconds until all segments are sent: a window a round trip while that is less than the rate. A round of bbr's
        that lost something lets the window as it is, the next one does not."""
        took_s, window, held, left = 0.0, line.window, False, segments
        full = at_s * rtt if rtt else 0.0  # a rate may be infinite
        while window < full:
            if left <= window:
                line.window = window
                return took_s + left / (min(at_s, PACED * window / rtt) if self.congestion == "bbr" else at_s)
            held = not held and line.loss > 0 and self.lossy(line, window)
            left -= window
            took_s += rtt
            if not held:
                window *= GROWTH
        line.window = min(window, full) if full > FIRST_SEGMENTS else FIRST_SEGMENTS
        return took_s + left / at_s

    def lossy(self, line: Line, segments: float) -> bool:
        """Whether one of so many is lost."""
        if line.clear < 0:
            line.clear = self.gap(line)
        if line.clear >= segments:
            line.clear -= int(segments)
            return False
        line.clear = self.gap(line)
        return True

    def epochs(self, line: Line, segments: float, at_s: float, rtt: float) -> float:
        """Seconds until cubic has sent all segments, from one loss to the next. Its window never holds more than the
        rate carries."""
        took_s, left = 0.0, segments
        full = max(at_s * rtt, 2.0) if rtt else 2.0
        for _ in range(EPOCHS):
            if line.clear < 0:
                line.clear = self.gap(line)
            sent = min(left, line.clear + 1.0)
            took_s += self.epoch(line, sent, at_s, rtt, full)
            left -= sent
            if left <= 0:
                line.clear = max(0, line.clear - int(sent))
                return took_s
            line.clear = self.gap(line)
            line.window = line.threshold = max(2.0, CUBIC_BETA * line.window)
        return took_s + left * max(1 / at_s, rtt / math.sqrt(1.5 / line.loss))  # Mathis et al., equation 3

    def epoch(self, line: Line, segments: float, at_s: float, rtt: float, full: float) -> float:
        """Seconds for so many segments without a loss: slow start up to the threshold, then a line upwards."""
        took_s, left = 0.0, segments
        while line.window < min(line.threshold, full):
            if left <= line.window:
                return took_s + left / at_s
            took_s += rtt
            left -= line.window
            line.window = min(line.window * GROWTH, line.threshold, full)
        window = line.window
        if window < full:
            # r rounds carry w r + g r^2 / 2 segments; it grows until the rate is full.
            rounds = (math.sqrt(window * window + 2 * CUBIC_GROWTH * left) - window) / CUBIC_GROWTH
            most = (full - window) / CUBIC_GROWTH
            if rounds <= most:
                line.window = window + CUBIC_GROWTH * rounds
                return took_s + max(rounds * rtt, left / at_s)
            took_s += most * rtt
            left -= most * (window + full) / 2
            line.window = full
        return took_s + left / at_s

    def tail_s(self, line: Line, segments: float, at_s: float, rtt: float) -> float:
        """How much later the last byte is there for what is lost of the last window: only then nothing hides it."""
        behind = self.gap(line)  # segments after the last that was lost
        if behind >= segments:
            return 0.0
        found_s = 2 * rtt if behind < UNFOLLOWED and segments > 1 else REORDERED * rtt
        if segments <= 1:
            return self.again_s(line, rtt)
        late_s = found_s - behind / at_s
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


def line_key(sender: int, receiver: int, now: float) -> int:
    """Of the line from one to the other that opens now, of keys that are theirs alone."""
    return (sender * GOLDEN ^ receiver * ODD) + int(now * 2**30) & MASK


def syn_again_s(tries: int) -> float:
    """When a dial that was not answered knocks again, seconds after its first knock: 1, 3, 7, 15 ..."""
    return float((2 << tries) - 1)
