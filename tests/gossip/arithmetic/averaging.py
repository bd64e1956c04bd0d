"""Helpers for tests of mixing: one exchange as its two sides compute it, and the spread of the nodes."""

from __future__ import annotations

import numpy as np

from gossip.arithmetic.mixing import OuterStep, subtract


def exchange(a, b, codec, weight=0.5, steps=None):
    """Return both shifts of one exchange, each computed from that side's vector and the other's bytes."""
    steps = steps or (OuterStep(a.size, 0.0, 1.0), OuterStep(a.size, 0.0, 1.0))
    shifts = []
    for mine, theirs, step in ((a, b, steps[0]), (b, a, steps[1])):
        data = bytearray(codec.encoded_bytes(theirs.size))
        codec.encode(theirs, data)
        received, own, out = np.empty_like(theirs), np.empty_like(mine), np.empty_like(mine)
        codec.decode(data, received)
        codec.quantised(mine, own)
        subtract(received, own, out)
        shifts.append(step.shift(mine, out, weight))
    return shifts


def spread(values):
    """Return V = sum |x_i - mean|^2 over nodes, in float64; ``values`` is (nodes, elements)."""
    values = values.astype(np.float64)
    return float(((values - values.mean(axis=0)) ** 2).sum())
