"""How long the messages and streams of an exchange take, and how much they carry."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gossip.recent import Recent
from sim.engine.links import CLOSED_S
from sim.seeds import Draws, derive
from sim.world.line import Line, line_key
from sim.world.network import NetworkModel
from sim.world.tcp import Back

__all__ = ["StreamTimes"]

TIMED = 65_536  # durations kept; beyond it every second one goes, and from then on half as many are added
LINES = 16  # for each peer, of those used lately: one that rested for long begins slowly again, as a new one does


class StreamTimes:
    """Vectors of so many bytes, between the peers ``names``. ``moving`` holds how many exchanges each of them has,
    which share its rates."""

    def __init__(self, network: NetworkModel, size_bytes: int, names: Sequence[str], seed: int) -> None:
        self.network, self.size_bytes = network, size_bytes
        self.latency, self.transport = network.latency, network.transport
        self.near = network.longest_s == 0 and self.transport is None  # a message takes no time,
        self.instant = self.near and math.isinf(
            min(min(network.up_bytes_s(peer), network.down_bytes_s(peer)) for peer in range(len(names)))
        )  # and nor does a stream
        self.moving: list[int] = []
        self.keys = [int.from_bytes(derive(seed, name, "lines")[:8], "little") for name in names]
        self.lines = Recent[int, Line](LINES * len(names))  # by sender and receiver, as they were used last
        self.durations_s: list[float] = []  # of exchanges, from the wish for a snapshot to the mix
        self.every = 1  # how many mixes one of these stands for
        self.sent = 0  # bytes of streams that have begun, as far as they have been counted
        self._begin: list[float] = []  # when the others do
        self._left = 1

    def line(self, sender: int, receiver: int, now: float) -> Line:
        """From the one to the other, with draws of this pair and this time."""
        keys, place = self.keys, sender * len(self.keys) + receiver
        line = self.lines.get(place)
        if line is None:
            line = Line(line_key(keys[sender], keys[receiver], now), now, self.network.loss_of(sender, receiver))
        self.lines[place] = line
        return line

    def message(self, sender: int, receiver: int, now: float) -> float:
        """How long a message takes that is sent then: what is lost comes late, and what is behind it after it."""
        latency, transport = self.latency(sender, receiver), self.transport
        if transport is None or not self.network.loss_of(sender, receiver):
            return latency
        line = self.line(sender, receiver, now)
        line.free_at = max(line.free_at, now + latency + transport.late_s(line, 2 * latency))
        return line.free_at - now

    def stream(self, sender: int, receiver: int, now: float, piece_bytes: int | None = None) -> float:
        """From the first byte, which is sent then, to the last, which arrives, beside what both have under way: of a
        vector, or with ``piece_bytes`` of a piece of one one way."""
        size_bytes = self.size_bytes if piece_bytes is None else piece_bytes
        if piece_bytes is not None:
            self.sent += piece_bytes
        transport = self.transport
        rate, latency = self.rate(sender, receiver), self.latency(sender, receiver)
        if transport is None:
            return size_bytes / rate + latency
        line = self.line(sender, receiver, now)
        back = None
        if piece_bytes is None:
            back = Back(self.line(receiver, sender, now), self.rate(receiver, sender))
        seconds = transport.seconds(line, size_bytes, rate, 2 * latency, now, back)
        line.free_at = max(line.free_at, now + seconds)
        return line.free_at - now

    def rate(self, sender: int, receiver: int) -> float:
        """Of one stream beside what both have under way, bytes a second."""
        network, moving = self.network, self.moving
        up, down = network.up_bytes_s(sender), network.down_bytes_s(receiver)
        return min(up / max(moving[sender], 1), down / max(moving[receiver], 1))

    def closed_s(self, draws: Draws) -> float:
        """From the death of a process to the end of its sockets."""
        low, high = CLOSED_S
        return 0.0 if self.transport is None else low + (high - low) * draws.random()

    def begin(self, *when: float) -> None:
        """Streams begin then."""
        self._begin += when

    def bytes_sent(self, now: float) -> int:
        """Of all streams that have begun, whole."""
        later = [when for when in self._begin if when > now]
        self.sent += self.size_bytes * (len(self._begin) - len(later))
        self._begin = later
        return self.sent

    def timed(self, seconds: float) -> None:
        """An exchange took so long: of many every other one is kept, and so on."""
        self._left -= 1
        if self._left:
            return
        self._left = self.every
        self.durations_s.append(seconds)
        if len(self.durations_s) >= TIMED:
            del self.durations_s[::2]
            self.every *= 2
