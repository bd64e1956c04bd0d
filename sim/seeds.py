"""Where randomness comes from: the scenario's seed, a peer's name and a purpose, and nothing else."""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["GOLDEN", "MASK", "Draws", "derive", "generator", "mixed"]

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def derive(seed: int, name: str, purpose: str) -> bytes:
    """32 bytes that depend on the seed, one peer's name and the purpose alone: adding a peer changes no other's."""
    return hashlib.sha256(f"{seed}/{name}/{purpose}".encode()).digest()


def generator(seed: int, name: str, purpose: str) -> np.random.Generator:
    """A numpy generator seeded with :func:`derive`."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(derive(seed, name, purpose)[:16], "little")))


def mixed(z: int) -> int:
    """64 bits of which each depends on all of ``z``'s; of a counter times GOLDEN they are SplitMix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


class Draws:
    """Random numbers of one peer, from the seed and its name alone. What :mod:`gossip` asks of ``random.Random`` for a
    schedule and a choice: one of those holds 2.5 KB, this holds two numbers, and 100,000 peers have one each."""

    __slots__ = ("state",)

    def __init__(self, seed: int, name: str, purpose: str) -> None:
        self.state = int.from_bytes(derive(seed, name, purpose)[:8], "little")

    def random(self) -> float:
        """From 0 to below 1."""
        self.state = (self.state + GOLDEN) & MASK
        return (mixed(self.state) >> 11) * 2.0**-53

    def choice(self, of: list[int]) -> int:
        """One of a list that is not empty."""
        return of[int(self.random() * len(of))]
