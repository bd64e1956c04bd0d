"""The cost of mixing a part for the training thread, compared with mixing the whole model.

    python benchmarks/parts.py [--elements 268435456] [--tensors 150] [--rounds 5]

A node takes a snapshot at one step boundary, and adds the result of the exchange at the next. Bytes are those of host
vectors, read and written once each. Seconds are the median of the rounds, in the training thread. The network thread
draws a mask's positions, which is timed separately.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from gossip.arithmetic.subsets import Subset
from gossip.averaging.boundary import Boundary
from gossip.averaging.vectors import Cut
from gossip.averaging.visit import Update
from node.model.backup import KeptWeights
from node.model.pool import VectorPool
from node.model.snapshot import ModelState


def median_s(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 28, help="of the model, float32")
    parser.add_argument("--tensors", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    size = arguments.elements // arguments.tensors
    state = ModelState({f"w{number}": torch.zeros(size) for number in range(arguments.tensors)})
    pool = VectorPool(state)
    boundary = Boundary(state, pool, KeptWeights(state))
    elements = state.layout.size
    print(f"a model of {elements:,} parameters in {arguments.tensors} tensors, {4 * elements / 1e6:,.0f} MB")
    whole_s = 0.0  # seconds of a mix of the whole model, which is the first
    for text in ("all", "fragment 0/8", "mask 0.005 7", "mask 0.0005 7"):
        part = Subset.parse(text)
        assert part is not None
        positions: list[np.ndarray | None] = []

        def draw(part: Subset = part, into: list[np.ndarray | None] = positions) -> None:
            into[:] = [part.positions(elements, 0)]

        drawn_s = median_s(draw, arguments.rounds)
        cut = None if positions[0] is None else Cut(part, positions[0])

        def mix(cut: Cut | None = cut) -> None:
            boundary.request_snapshot(1, cut=cut)
            [(_, snapshot, _)] = boundary.visit(lambda vector: None).snapshots
            boundary.begin_update()
            boundary.deliver_update(Update(snapshot, positions=None if cut is None else cut.positions))
            for shift in boundary.visit(lambda vector: None).updates:
                pool.give(shift.vector)

        mix()  # the first mix of a size allocates its memory
        spent_s = median_s(mix, arguments.rounds)
        whole_s = whole_s or spent_s
        moved_mb = 2 * 4 * part.elements(elements) / 1e6
        print(
            f"{part!s:16} {moved_mb:9,.1f} MB  {1e3 * spent_s:8.1f} ms  {whole_s / spent_s:6.1f} times less"
            f"  positions {1e3 * drawn_s:6.1f} ms"
        )


if __name__ == "__main__":
    main()
