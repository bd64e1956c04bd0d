"""Addition to the live weights, and their copy, in one pass over memory.

At a step boundary a training loop waits only for memory. So one pass does an addition, a copy of the result and a check
that it is finite. It uses as many threads as the loop itself, whose cores are idle then. It has no version with numpy:
without the compiled passes callers use torch's own calls, which are faster.
"""

import threading
from collections.abc import Iterator

import numpy as np

from gossip import kernel
from gossip.kernel.squares import Floats

THREAD_ELEMENTS = 1 << 23  # Fewest elements of a thread, which takes a hundred microseconds to start and to end.
MAX_THREADS = 8  # More threads do not make memory faster.

Rows = list[tuple[Floats, Floats]]  # Pieces of the weights, each with as many elements of a vector.


def add_read(rows: Rows, weight: float | None = None, read: bool = True, threads: int = 1) -> bool:
    """Set ``weights += weight vector``, then ``vector = weights``, in one pass.

    Args:
        rows: Pieces of the weights and of the vector, one-dimensional and contiguous.
        weight: The factor of the vector; None adds nothing.
        read: Copy the sum into the vector, and check it. Without it the result is always True.
        threads: The most threads to use.

    Returns:
        True if all copied values are finite.

    Raises:
        AssertionError: The compiled passes are missing.
    """
    passes = kernel.passes
    assert passes is not None
    elements = sum(weights.size for weights, _ in rows)
    threads = max(1, min(threads, MAX_THREADS, elements // THREAD_ELEMENTS))
    are_finite = [True] * threads  # By thread.

    def work(number: int, share: Rows) -> None:
        for weights, vector in share:
            shift, out = None if weight is None else vector, vector if read else None
            are_finite[number] &= passes.add_read(weights.size, weights, shift, out, 1.0 if weight is None else weight)

    shares = list(split_rows(rows, -(-elements // threads)))
    others = [threading.Thread(target=work, args=item) for item in enumerate(shares)][1:]
    for thread in others:
        thread.start()
    if shares:
        work(0, shares[0])  # The calling thread takes the first share.
    for thread in others:
        thread.join()
    return all(are_finite)


def add_scaled(values: Floats, vector: Floats, factor: float) -> None:
    """Set ``values += factor vector``."""
    if kernel.passes is not None:
        kernel.passes.add_read(values.size, values, vector, None, factor)
    else:
        values += np.float32(factor) * vector


def split_rows(rows: Rows, elements: int) -> Iterator[Rows]:
    """Yield the same rows in shares of ``elements`` elements; the last share may be smaller."""
    share: Rows = []
    room = elements
    for weights, vector in rows:
        start = 0
        while start < weights.size:
            stop = min(weights.size, start + room)
            share.append((weights[start:stop], vector[start:stop]))
            room -= stop - start
            start = stop
            if not room:
                yield share
                share, room = [], elements
    if share:
        yield share
