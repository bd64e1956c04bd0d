"""Which elements moved most since they were last mixed: the part that a ``top`` exchange sends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Residual", "pack_positions", "position_bytes", "unpack_positions"]

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


class Residual:
    """What a node's elements were when they were last mixed. An element that is not sent keeps what it has gathered
    since, so that sooner or later its turn comes: the error feedback of sparsified gossip (Stich, Cordonnier and Jaggi,
    NeurIPS 2018; Koloskova, Stich and Jaggi, ICML 2019), with the model itself as the memory of what was not sent.

    Positions are those of one side alone, the one that offers: only where both sides name their values can a mean be
    kept, and naming two sets would cost twice.
    """

    def __init__(self, vector: Floats) -> None:
        self.last = vector.copy()  # (elements,)

    def top(self, snapshot: Floats, elements: int) -> Positions:
        """The ``elements`` positions at which ``snapshot`` differs most from what was last mixed, ascending."""
        moved = np.abs(snapshot - self.last)
        places = np.argpartition(moved, moved.size - elements)[moved.size - elements :]
        places.sort()
        return places

    def mixed(self, positions: Positions, values: Floats) -> None:
        """These elements now hold ``values``, float32 of as many."""
        self.last[positions] = values

    def reset(self, vector: Floats) -> None:
        self.last[:] = vector


def position_bytes(elements: int) -> int:
    """What :func:`pack_positions` takes at most: a stream's size must be known before it comes. Four bytes each; gaps
    in fewer would save half of them and make the size depend on what is sent."""
    return 4 * elements


def pack_positions(positions: Positions) -> NDArray[np.uint8]:
    """As bytes: the gaps between them, little-endian, 4 bytes each."""
    gaps = np.diff(positions, prepend=-1) - 1
    return gaps.astype("<u4").view(np.uint8)


def unpack_positions(data: NDArray[np.uint8], elements: int, size: int) -> Positions | None:
    """What :func:`pack_positions` packed: ascending positions below ``size``; None for bytes that are no such thing."""
    gaps = data.view("<u4").astype(np.int64)
    if gaps.size != elements:
        return None
    positions = np.cumsum(gaps + 1) - 1
    return positions if elements == 0 or positions[-1] < size else None
