"""Deterministic randomness: every draw depends only on the scenario's seed, a peer's name and a purpose."""

import hashlib
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, an odd number: its multiples lie evenly spread modulo 2^64.
MASK = (1 << 64) - 1  # Selects the low 64 bits.

Bits = TypeVar("Bits", int, NDArray[Any])  # 64 bits, or an array of them, uint64.


def derive(seed: int, name: str, purpose: str) -> bytes:
    """Derive 32 bytes from the seed, a peer's name and a purpose; adding a peer changes those of no other peer."""
    return hashlib.sha256(f"{seed}/{name}/{purpose}".encode()).digest()


def derive_int(seed: int, name: str, purpose: str) -> int:
    """Return 64 bits of :func:`derive` as an integer."""
    return int.from_bytes(derive(seed, name, purpose)[:8], "little")


def generator(seed: int, name: str, purpose: str) -> np.random.Generator:
    """Create a numpy generator seeded with :func:`derive`."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(derive(seed, name, purpose)[:16], "little")))


def splitmix(z: Bits) -> Bits:
    """Hash 64 bits, so that each bit of the result depends on all bits of ``z``.

    Applied to a counter times GOLDEN, this is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014).
    """
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    hashed: Bits = z ^ (z >> 31)
    return hashed


class Draws:
    """A small random number generator for one peer, seeded by :func:`derive`.

    It has the methods of ``random.Random`` that :mod:`gossip` calls for schedules and choices. ``random.Random`` takes
    2.5 KB, and 100,000 peers need a generator each.
    """

    __slots__ = ("state",)

    def __init__(self, seed: int, name: str, purpose: str) -> None:
        self.state = derive_int(seed, name, purpose)

    def random(self) -> float:
        """Draw a number from [0, 1)."""
        self.state = (self.state + GOLDEN) & MASK
        return (splitmix(self.state) >> 11) * 2.0**-53  # The 53 high bits, as many as a float has.

    def choice(self, values: list[int]) -> int:
        """Draw an element of a list that is not empty."""
        return values[int(self.random() * len(values))]
