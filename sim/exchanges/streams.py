"""The sizes and transfer times of the messages and streams of an exchange, and a count of the bytes sent.

A *stream* carries a vector; a *line* is one direction of a TCP connection (:class:`sim.world.line.Line`).
"""

import math
from collections.abc import Sequence

from gossip.arithmetic.subsets import ALL
from gossip.codecs import get_codec
from gossip.recent import Recent
from gossip.wire import frames
from gossip.wire.messages import Accept, Busy, Commit, Fetch, Offer, Serving
from sim.engine.links import SOCKETS_CLOSE_S
from sim.level import DurationSample
from sim.seeds import Draws, derive_int
from sim.world.line import Line, line_key
from sim.world.network import NetworkModel
from sim.world.tcp import Back

LINES_PER_PEER = 16  # Recently used lines kept; a line idle for long restarts TCP's slow start, like a new one.

SESSION, RUN, VERSION = 1 << 61, bytes(16), 1.5  # Examples for messages' fields, of the usual encoded length.


class Sizes:
    """The encoded sizes in bytes: of an Offer, Accept, Busy, Commit, of a piece's messages, and of a vector."""

    def __init__(self, codec: str, elements: int) -> None:
        offer = Offer(SESSION, f"vector of {elements}", RUN, VERSION, 0.5, codec, "pair", 0.0, str(ALL))
        self.offer_bytes = len(frames.encode(offer))
        self.accept_bytes = len(frames.encode(Accept(SESSION, VERSION, 0.5, codec)))
        self.busy_bytes, self.commit_bytes = (len(frames.encode(kind(SESSION))) for kind in (Busy, Commit))
        fetch = Fetch(SESSION, (), 0, elements)
        self.piece_bytes = len(frames.encode(fetch)) + len(frames.encode(Serving(SESSION, VERSION, RUN, (), ())))
        self.vector_bytes = get_codec(codec).encoded_bytes(elements)


class StreamTimes:
    """The transfer times between the peers ``names``, for vectors of ``vector_bytes``.

    ``has_slow_steps`` is True if steps take so long that a peer may background an exchange. ``used_slots`` (peers,)
    holds the number of exchanges in progress at each peer, which share its bandwidth.
    """

    def __init__(
        self, network: NetworkModel, vector_bytes: int, names: Sequence[str], seed: int, has_slow_steps: bool = False
    ) -> None:
        self.network, self.vector_bytes = network, vector_bytes
        self.latency, self.transport = network.latency, network.transport
        self.has_instant_messages = network.longest_s == 0 and self.transport is None
        self.are_instant = self.has_instant_messages and all(
            math.isinf(network.up_bytes_s(peer)) and math.isinf(network.down_bytes_s(peer))
            for peer in range(len(names))
        )
        # Messages, streams or steps may take so long that a peer backgrounds an exchange.
        self.can_be_slow = not self.has_instant_messages or has_slow_steps
        self.used_slots: list[int] = []
        self.line_seeds = [derive_int(seed, name, "lines") for name in names]
        self.lines = Recent[int, Line](LINES_PER_PEER * len(names))  # LRU cache, keyed by sender and receiver.
        self.durations = DurationSample()
        self._counted_bytes = 0  # Bytes of pieces, and of streams that had begun at the last count.
        self._uncounted: list[float] = []  # Begin times of streams of whole vectors that are not counted yet.

    def message_s(self, sender: int, receiver: int, now: float) -> float:
        """Return how long a message sent at ``now`` takes: a loss delays it and the messages behind it."""
        latency, transport = self.latency(sender, receiver), self.transport
        if transport is None or not self.network.loss_of(sender, receiver):
            return latency
        line = self.line(sender, receiver, now)
        late_s = transport.late_s(line, 2 * latency)  # Beyond the latency, by a loss.
        line.free_at = max(line.free_at, now + latency + late_s)
        return line.free_at - now

    def stream_s(self, sender: int, receiver: int, now: float, piece_bytes: int | None = None) -> float:
        """Return the seconds from sending the first byte, at ``now``, to the arrival of the last one.

        The stream shares bandwidth with the exchanges in progress. It carries a whole vector, and as much flows back;
        with ``piece_bytes`` it carries a piece, in one direction only.
        """
        if piece_bytes is None:
            size_bytes = self.vector_bytes
        else:
            size_bytes = piece_bytes
            self._counted_bytes += piece_bytes
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

    def line(self, sender: int, receiver: int, now: float) -> Line:
        """Return the line between two peers; a new one's random draws depend only on the pair and the time."""
        seeds, key = self.line_seeds, sender * len(self.line_seeds) + receiver
        line = self.lines.get(key)
        if line is None:
            line = Line(line_key(seeds[sender], seeds[receiver], now), now, self.network.loss_of(sender, receiver))
        self.lines[key] = line
        return line

    def rate(self, sender: int, receiver: int) -> float:
        """Return the rate of one stream, in bytes/s, next to the exchanges in progress at both peers."""
        network, used_slots = self.network, self.used_slots
        up, down = network.up_bytes_s(sender), network.down_bytes_s(receiver)
        return min(up / max(used_slots[sender], 1), down / max(used_slots[receiver], 1))

    def draw_closing_s(self, draws: Draws) -> float:
        """Draw the seconds from the death of a process until the kernel closes its sockets."""
        low, high = SOCKETS_CLOSE_S
        return 0.0 if self.transport is None else low + (high - low) * draws.random()

    def count(self, *begin_times: float) -> None:
        """Count streams of whole vectors that begin at these times."""
        self._uncounted += begin_times

    def sent_bytes(self, now: float) -> int:
        """Return the total bytes of all streams that have begun by ``now``; each counts in full."""
        later = [when for when in self._uncounted if when > now]
        self._counted_bytes += self.vector_bytes * (len(self._uncounted) - len(later))
        self._uncounted = later
        return self._counted_bytes
