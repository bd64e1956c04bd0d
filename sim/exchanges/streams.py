"""The sizes and transfer times of the messages and streams of an exchange, and a count of the bytes sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gossip.arithmetic.subsets import ALL
from gossip.codecs import get_codec
from gossip.recent import Recent
from gossip.wire import frames
from gossip.wire.messages import Accept, Busy, Commit, Fetch, Offer, Serving
from sim.engine.links import CLOSED_S
from sim.seeds import Draws, derive
from sim.world.line import Line, line_key
from sim.world.network import NetworkModel
from sim.world.tcp import Back

__all__ = ["Sizes", "StreamTimes", "is_instant"]

TIMED = 65_536  # durations kept; when full, every second one is dropped and the sampling rate is halved
LINES = 16  # recently used lines kept per peer; a line idle for long restarts TCP's slow start, like a new one

SESSION, RUN, VERSION = 1 << 61, bytes(16), 1.5  # values of the usual encoded length


class Sizes:
    """The sizes in bytes of each kind of message, and of the stream of a vector."""

    def __init__(self, codec: str, elements: int) -> None:
        offer = Offer(SESSION, f"vector of {elements}", RUN, VERSION, 0.5, codec, "pair", 0.0, str(ALL))
        self.offer = len(frames.encode(offer))
        self.accept = len(frames.encode(Accept(SESSION, VERSION, 0.5, codec)))
        self.busy, self.commit = (len(frames.encode(kind(SESSION))) for kind in (Busy, Commit))
        fetch = Fetch(SESSION, (), 0, elements)
        self.piece = len(frames.encode(fetch)) + len(frames.encode(Serving(SESSION, VERSION, RUN, (), ())))
        self.stream = get_codec(codec).encoded_bytes(elements)


class StreamTimes:
    """The transfer times between the peers ``names``, for vectors of ``size_bytes``.

    ``slow`` is True if steps take so long that a peer may background an exchange. ``moving`` (peers,) holds the number
    of exchanges in progress at each peer, which share its bandwidth.
    """

    def __init__(
        self, network: NetworkModel, size_bytes: int, names: Sequence[str], seed: int, slow: bool = False
    ) -> None:
        self.network, self.size_bytes = network, size_bytes
        self.latency, self.transport = network.latency, network.transport
        self.near = network.longest_s == 0 and self.transport is None  # messages take no time
        self.instant = is_instant(network, len(names))
        self.patient = not self.near or slow  # anything takes so long that a peer may background it
        self.moving: list[int] = []
        self.keys = [int.from_bytes(derive(seed, name, "lines")[:8], "little") for name in names]
        self.lines = Recent[int, Line](LINES * len(names))  # LRU cache, keyed by sender and receiver
        self.durations_s: list[float] = []  # seconds from the request for a snapshot to the mix
        self.every = 1  # one mix in `every` has its duration kept
        self.sent = 0  # bytes of the streams counted so far
        self._begin: list[float] = []  # begin times of streams that are not counted yet
        self._left = 1  # mixes until the next duration is kept

    def line(self, sender: int, receiver: int, now: float) -> Line:
        """Return the line between two peers; a new one's random draws depend only on the pair and the time."""
        keys, place = self.keys, sender * len(self.keys) + receiver
        line = self.lines.get(place)
        if line is None:
            line = Line(line_key(keys[sender], keys[receiver], now), now, self.network.loss_of(sender, receiver))
        self.lines[place] = line
        return line

    def message(self, sender: int, receiver: int, now: float) -> float:
        """Return how long a message sent at ``now`` takes: a loss delays it and the messages behind it."""
        latency, transport = self.latency(sender, receiver), self.transport
        if transport is None or not self.network.loss_of(sender, receiver):
            return latency
        line = self.line(sender, receiver, now)
        line.free_at = max(line.free_at, now + latency + transport.late_s(line, 2 * latency))
        return line.free_at - now

    def stream(self, sender: int, receiver: int, now: float, piece_bytes: int | None = None) -> float:
        """Return the seconds from sending the first byte, at ``now``, to the arrival of the last one.

        The stream shares bandwidth with the exchanges in progress. It carries a whole vector, and as much flows back;
        with ``piece_bytes`` it carries a piece, in one direction only.
        """
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
        """Return the rate of one stream, in bytes/s, next to the exchanges in progress at both peers."""
        network, moving = self.network, self.moving
        up, down = network.up_bytes_s(sender), network.down_bytes_s(receiver)
        return min(up / max(moving[sender], 1), down / max(moving[receiver], 1))

    def closed_s(self, draws: Draws) -> float:
        """Return the seconds from the death of a process until the kernel closes its sockets."""
        low, high = CLOSED_S
        return 0.0 if self.transport is None else low + (high - low) * draws.random()

    def begin(self, *when: float) -> None:
        """Record streams that begin at these times."""
        self._begin += when

    def bytes_sent(self, now: float) -> int:
        """Return the total bytes of all streams that have begun by ``now``; each counts in full."""
        later = [when for when in self._begin if when > now]
        self.sent += self.size_bytes * (len(self._begin) - len(later))
        self._begin = later
        return self.sent

    def timed(self, seconds: float) -> None:
        """Record the duration of one mix in ``every``."""
        self._left -= 1
        if self._left:
            return
        self._left = self.every
        self.durations_s.append(seconds)
        if len(self.durations_s) >= TIMED:
            del self.durations_s[::2]
            self.every *= 2


def is_instant(network: NetworkModel, peers: int) -> bool:
    """Return True if neither messages nor streams between the peers take any time."""
    if network.longest_s > 0 or network.transport is not None:
        return False
    return math.isinf(min(min(network.up_bytes_s(peer), network.down_bytes_s(peer)) for peer in range(peers)))
