"""Where randomness comes from: the scenario's seed, a peer's name and a purpose, and nothing else."""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["derive", "generator"]


def derive(seed: int, name: str, purpose: str) -> bytes:
    """32 bytes that depend on the seed, one peer's name and the purpose alone: adding a peer changes no other's."""
    return hashlib.sha256(f"{seed}/{name}/{purpose}".encode()).digest()


def generator(seed: int, name: str, purpose: str) -> np.random.Generator:
    """A numpy generator seeded with :func:`derive`."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(derive(seed, name, purpose)[:16], "little")))
