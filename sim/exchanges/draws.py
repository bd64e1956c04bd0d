"""Random numbers of one peer, each a hash of its key and a counter."""

from __future__ import annotations

from sim.seeds import derive

__all__ = ["Draws"]

# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). A generator of
# Python's holds 2.5 KB, these hold two numbers: 100,000 peers have one each.
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


class Draws:
    """From the seed and the peer's name alone: adding a peer changes no other's. What :mod:`gossip` asks of
    ``random.Random`` for a schedule and a choice."""

    __slots__ = ("state",)

    def __init__(self, seed: int, name: str) -> None:
        self.state = int.from_bytes(derive(seed, name, "exchanges")[:8], "little")

    def random(self) -> float:
        """From 0 to below 1."""
        self.state = x = (self.state + GOLDEN) & MASK
        x = (x ^ (x >> 30)) * FIRST & MASK
        x = (x ^ (x >> 27)) * SECOND & MASK
        return ((x ^ (x >> 31)) >> 11) * 2.0**-53

    def choice(self, of: list[int]) -> int:
        """One of a list that is not empty."""
        return of[int(self.random() * len(of))]
