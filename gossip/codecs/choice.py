"""The cheapest way to spend a byte: in which codec a vector travels over a link, and how often a node mixes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["AUTO", "COMPILED", "MOST_INTERVAL", "NUMPY", "Machine", "Taken", "fastest", "interval"]

AUTO = "auto"
"""The setting that leaves the codec to each link, or the interval to each node."""

SHARE: Mapping[str, float] = {"fp32": 1.0, "bf16": 0.5, "int8": 0.2510}  # of the bytes


# Seconds of CPU for a GB of float32 (`make bench`, 400 MB with the outer step): what the training thread spends at its
# boundary, the four passes of a correction included, and what carrying, checking and averaging take beside it.
BOUNDARY_S_PER_GB = 0.4
CARRYING_S_PER_GB = 1.4


@dataclass(frozen=True, slots=True)
class Machine:
    """What exchanges cost on one machine, in seconds of one core for a GB of float32.

    Attributes:
        coding_s_per_gb: To encode it and to subtract the partner's, beyond what fp32 takes, by codec.
        cores: The processors that training and exchanges share.
        weight: How many elements one of a vector's stands for, where a simulated model is smaller than what it plays.
    """

    coding_s_per_gb: Mapping[str, float]
    cores: int = 2
    weight: float = 1.0

    def coding_s(self, codec: str) -> float:
        """Return what coding costs in this codec; one that was not measured counts as int8."""
        return self.weight * self.coding_s_per_gb.get(codec, self.coding_s_per_gb["int8"])

    def work_s(self, codec: str) -> float:
        """Return how much longer training takes by an exchange: the boundary stops it, and the cores share the rest."""
        beside_s = self.weight * CARRYING_S_PER_GB + self.coding_s(codec)
        return self.weight * BOUNDARY_S_PER_GB + beside_s / self.cores


# The simulator decides alike on every machine, so it takes these (`make bench-codecs`).
COMPILED = Machine({"fp32": 0.0, "bf16": 0.03, "int8": 0.08})
NUMPY = Machine({"fp32": 0.0, "bf16": 0.49, "int8": 0.95})

BYTES_PER_ELEMENT_STEP = 0.5
"""The bytes that mixing may send for each element in each local step: those of fp32 every 8 steps."""

SLACK = 0.05  # the share of a limit that rounding may exceed: int8 has 0.4 % for its scales
MOST_INTERVAL = 64  # local steps: mixing more rarely than that nodes drift apart on any data
SHORTEST_S = 1e-9
LINK = 1.0  # of the time between two mixes, the longest share that an exchange may take: later the next one is due


def fastest(rate_mb_s: float | None, machine: Machine) -> str:
    """Return the codec with the least of ``bytes / rate + CPU`` at this rate of the link; bf16 while it is not known.

    With the compiled passes int8 wins below 5,000 MB/s, which a socket rarely has. With numpy fp32 wins from about
    1,000 MB/s on, int8 below about 540 MB/s, and bf16 between them. At an infinite rate, where no byte is carried, fp32
    wins. Coarser codecs trade accuracy for bytes, so only the user chooses them.
    """
    if rate_mb_s is None or rate_mb_s <= 0:
        return "bf16"
    return min(SHARE, key=lambda name: SHARE[name] * 1000.0 / rate_mb_s + machine.coding_s(name))


@dataclass(frozen=True, slots=True)
class Taken:
    """What one exchange takes: ``elements`` mixed, in ``codec``, ``sent_bytes`` of them each way, for ``seconds``."""

    elements: int
    codec: str
    sent_bytes: int
    seconds: float


def interval(step_s: float, exchange: Taken, machine: Machine, share: float) -> int:
    """Return the fewest local steps between two mixes that keep within three limits, from 1 to ``MOST_INTERVAL``.

    - Mixing sends no more bytes than fp32 every 8 steps, whatever the link.
    - An exchange is over before the next one is due.
    - Mixing costs at most ``share`` of the time of training (:meth:`Machine.work_s`).

    Args:
        step_s: Seconds of a local step; the bytes alone count below ``SHORTEST_S``, where a clock was not read.
        exchange: What an exchange takes at present.
        machine: What it costs here.
        share: The share of a step's time that mixing may cost, above 0.
    """
    by_bytes = exchange.sent_bytes / (BYTES_PER_ELEMENT_STEP * max(exchange.elements, 1))
    if step_s < SHORTEST_S:
        return whole(by_bytes)
    work_s = 4e-9 * exchange.elements * machine.work_s(exchange.codec)
    return whole(max(by_bytes, exchange.seconds / (LINK * step_s), work_s / share / step_s))


def whole(steps: float) -> int:
    """Return whole steps within the bounds, rounded up past ``SLACK``."""
    return max(1, min(math.ceil(min(steps, 2 * MOST_INTERVAL) * (1.0 - SLACK)), MOST_INTERVAL))
