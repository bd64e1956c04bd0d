"""Striping in the simulator: the additional connections that nodes open on a link where ``cubic`` loses packets.

A *line* is one direction of a connection (:mod:`sim.world.line`), and a *segment* the data of one packet.
It follows node/links/stripes.py. A node looks at intervals whether its links lose packets (node/transport/loss.py).
After a few seconds of sending it knows that one does, and opens more connections in a few round trips. The chunks of a
stream go to any connection that has room. So a stream has the sum of their rates, and all connections end within a
chunk of each other.
"""

from collections.abc import Sequence

from sim.seeds import GOLDEN, MASK, splitmix
from sim.world.line import Line

# A link that has sent this many segments and seconds is known to lose packets: four looks have then seen losses.
MIN_SEGMENTS, SENDING_S = 1_000.0, 6.0
MIN_LOSS, MIN_RTT_S = 0.005, 0.005  # Links with less loss or a shorter round trip get no more connections.
LOOK_S = 1.5  # The interval between two looks. The next look comes half of it later, on average.
OPENING_ROUNDS = 3.0  # Round trips for TCP, both Hellos and the admission.
# Between real nodes streams of 1 and 10 MB took a tenth longer at 100 Mbit/s than windows and losses predict. At 20
# Mbit/s, which eight windows fill, they took 1.2 times as long. The root of the sum of two squares gives that: of this
# factor times the predicted time, and of the time at the full rate.
CHUNKS_FACTOR = 1.1
CHUNKS, MIN_CHUNK = 8, 11.3  # Chunks of a stream per connection, and the least segments of one.


def note_sent(line: Line, segments: float, took_s: float, rtt: float, now: float, connections: int) -> None:
    """Count segments sent by cubic, and decide whether the link gets more connections."""
    if connections < 2 or line.striped_from < float("inf") or line.loss < MIN_LOSS or rtt < MIN_RTT_S:
        return  # Striping cannot help, or has been decided already.
    line.sent_segments += segments
    line.sending_s += took_s
    if line.sent_segments >= MIN_SEGMENTS and line.sending_s >= SENDING_S:
        striped_from = now + took_s + LOOK_S / 2 + OPENING_ROUNDS * rtt
        for direction in (line, line.back):
            if direction is not None and direction.striped_from > striped_from:
                direction.striped_from = striped_from
                direction.connections = connections


def lines_for(line: Line, now: float) -> Sequence[Line]:
    """Return the lines that share a stream beginning now."""
    if now < line.striped_from:
        return (line,)
    while len(line.more_lines) < line.connections - 1:
        key = splitmix((line.key + (len(line.more_lines) + 1) * GOLDEN) & MASK)
        line.more_lines.append(Line(key, now, line.loss))
    return (line, *line.more_lines)
