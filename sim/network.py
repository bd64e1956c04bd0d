"""How long a message and a stream take from one peer to another, and whether they arrive."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from gossip.errors import ConfigError

__all__ = ["Network"]


@dataclass(frozen=True, slots=True)
class Network:
    """Every pair of peers alike. The swarm asks these methods alone, so that another network answers them differently:
    ``sender`` and ``receiver`` are numbers of peers, in the order in which they were added.

    Raises :class:`~gossip.errors.ConfigError` for numbers that no network has.
    """

    latency_s: float = 0.02  # one way
    rate_bytes_s: float = 12.5e6  # of one stream, 100 Mbit/s; math.inf: streams take the latency alone
    loss: float = 0.0  # share of messages, and of streams, that never arrive

    def __post_init__(self) -> None:
        if not (self.latency_s > 0 and math.isfinite(self.latency_s)):
            raise ConfigError("latency_s must be a positive number of seconds, as 0.02: nothing arrives at once.")
        if not self.rate_bytes_s > 0:
            raise ConfigError("rate_bytes_s must be positive: bytes a second, as 12.5e6 for 100 Mbit/s.")
        if not 0 <= self.loss < 1:
            raise ConfigError("loss must lie from 0 to below 1: the share of messages that never arrive.")

    def latency(self, sender: int, receiver: int) -> float:
        """Seconds from the one to the other. One pair's is the same at all times, or messages would overtake."""
        return self.latency_s

    def stream_s(self, sender: int, receiver: int, size_bytes: int) -> float:
        """Seconds that a stream takes to be sent, without the latency."""
        return size_bytes / self.rate_bytes_s

    def loses(self, rng: random.Random) -> bool:
        """Whether this message or stream is lost; ``rng`` is the sender's own."""
        return self.loss > 0 and rng.random() < self.loss
