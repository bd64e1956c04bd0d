"""Several connections of one link, in a simulator: what nodes open where ``cubic`` loses packets (node/links/lanes.py).

A node watches its links (node/transport/loss.py): of one that has sent enough, and loses enough, it knows after a few
seconds of sending, and opens the others in a few round trips. Chunks are dealt as connections have room, so that a
stream takes the sum of their rates, and all end within a chunk of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.seeds import GOLDEN, MASK, mixed
from sim.world.line import Line

__all__ = ["CHUNK", "CHUNKS", "DEALT", "SENDING_S", "noted", "of"]

ENOUGH, SENDING_S = 1_000.0, 6.0  # segments, and seconds of sending for four looks that saw losses, until a node knows
LOSSY, LEAST_RTT_S = 0.005, 0.005
LOOK_S = 1.5  # between two looks: half of it is waited on average, and
ROUNDS = 3.0  # round trips for TCP and both hellos, and the word that a connection was let in
# Between real nodes streams of 1 and 10 MB took a tenth longer at 100 Mbit/s than windows and losses say; and at 20
# Mbit/s, which eight windows fill, 1.2 times as long: the root of both squares gives it.
DEALT = 1.1
CHUNKS, CHUNK = 8, 11.3  # of a stream for each connection, of so many segments at least


def noted(line: Line, segments: float, took_s: float, rtt: float, now: float, connections: int) -> None:
    """So much was sent there, by cubic, which took so long: whether the link gets more connections."""
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
    """What shares a stream that begins now."""
    if now < line.wide_at:
        return (line,)
    while len(line.lanes) < line.connections - 1:
        key = mixed((line.key + (len(line.lanes) + 1) * GOLDEN) & MASK)
        line.lanes.append(Line(key, now, line.loss))
    return (line, *line.lanes)
