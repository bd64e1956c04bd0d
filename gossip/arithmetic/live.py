"""Weights that are being trained, where they are large: added to, and read, in one pass over memory.

At a step boundary a training loop waits for memory and for nothing else. 100 million elements pass through it once for
an addition, a copy of what comes of it, and whether that is finite, by as many threads as the loop itself computes
with, whose cores have nothing else to do then. Where no compiler was, torch's own calls are faster than numpy's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gossip import kernel

__all__ = ["add_read", "divided"]

THREAD_ELEMENTS = 1 << 23  # for each thread, which takes a hundred microseconds to begin and to end
MOST_THREADS = 8  # memory is no faster with more

Floats = NDArray[np.float32]
Rows = list[tuple[Floats, Floats]]  # weights, and as many elements of a vector


def add_read(rows: Rows, weight: float | None = None, read: bool = True, threads: int = 1) -> bool:
    """``weights += weight vector``, unless that is None, then ``vector = weights`` if they are to be ``read``: whether
    all that was is finite. All are one-dimensional and contiguous. The passes have to be there."""
    passes = kernel.passes
    assert passes is not None
    elements = sum(weights.size for weights, _ in rows)
    threads = max(1, min(threads, MOST_THREADS, elements // THREAD_ELEMENTS))
    found = [True] * threads

    def work(number: int, share: Rows) -> None:
        for weights, vector in share:
            shift, out = None if weight is None else vector, vector if read else None
            found[number] &= passes.add_read(weights.size, weights, shift, out, 1.0 if weight is None else weight)

    shares = list(divided(rows, -(-elements // threads)))
    others = [threading.Thread(target=work, args=item) for item in enumerate(shares)][1:]
    for one in others:
        one.start()
    if shares:
        work(0, shares[0])
    for one in others:
        one.join()
    return all(found)


def divided(rows: Rows, elements: int) -> Iterator[Rows]:
    """The same rows in shares of so many elements."""
    share: Rows = []
    left = elements
    for weights, vector in rows:
        start = 0
        while start < weights.size:
            stop = min(weights.size, start + left)
            share.append((weights[start:stop], vector[start:stop]))
            left -= stop - start
            start = stop
            if not left:
                yield share
                share, left = [], elements
    if share:
        yield share
