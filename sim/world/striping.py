"""Striping in a simulator: the additional connections that nodes open where ``cubic`` loses packets.

It follows node/links/stripes.py. A node watches its links (node/transport/loss.py). After a few seconds of sending it
knows that a link loses packets, and opens more connections in a few round trips. Chunks go to whichever connection has
room. So a stream takes the sum of their rates, and all connections end within a chunk of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.seeds import GOLDEN, MASK, mixed
from sim.world.line import Line

__all__ = ["CHUNK", "CHUNKS", "DEALT", "SENDING_S", "noted", "of"]

ENOUGH, SENDING_S = 1_000.0, 6.0  # Segments, and seconds of sending for four looks with losses, until a node knows.
LOSSY, LEAST_RTT_S = 0.005, 0.005
LOOK_S = 1.5  # The interval between two looks, of which half passes on average.
ROUNDS = 3.0  # Round trips for TCP, both Hellos and the admission.
# Between real nodes streams of 1 and 10 MB took a tenth longer at 100 Mbit/s than windows and losses predict. At 20
# Mbit/s, which eight windows fill, they took 1.2 times as long: the root of both squares gives that.
DEALT = 1.1
CHUNKS, CHUNK = 8, 11.3  # Chunks of a stream per connection, and the least segments of one.


def noted(line: Line, segments: float, took_s: float, rtt: float, now: float, connections: int) -> None:
    """Account for segments sent by cubic, and decide whether the link gets more connections."""
    if connections < 2 or line.wide_at < float("inf") or line.loss < LOSSY or rtt < LEAST_RTT_S:
        return
    line.sent += segments
    line.sending_s += took_s
    if line.sent >= ENOUGH and line.sending_s >= SENDING_S:
        wide_at = now + took_s + LOOK_S / 2 + ROUNDS * rtt
        for each in (line, line.back):
            if each is not None and each.wide_at > wide_at:
                each.wide_at = wide_at
                each.connections = connections


def of(line: Line, now: float) -> Sequence[Line]:
    """Return the lines that share a stream beginning now."""
    if now < line.wide_at:
        return (line,)
    while len(line.lanes) < line.connections - 1:
        key = mixed((line.key + (len(line.lanes) + 1) * GOLDEN) & MASK)
        line.lanes.append(Line(key, now, line.loss))
    return (line, *line.lanes)
