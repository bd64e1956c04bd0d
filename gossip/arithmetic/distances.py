"""How far two vectors of a model are apart, tensor by tensor."""

import math
from collections.abc import Iterator

import numpy as np

from gossip.arithmetic.layout import Layout, quoted
from gossip.kernel.squares import Floats


def furthest_tensor(layout: Layout, own: Floats, difference: Floats) -> tuple[float, str]:
    """Return the largest distance of a tensor, relative to its own norm, and the tensor's name ("" if all are equal).

    A tensor that is zero counts with the distance itself.

    Args:
        layout: The layout of both vectors.
        own: Our vector, float32 (layout.exchanged,).
        difference: The other vector minus ours, float32 (layout.exchanged,).
    """
    furthest = 0.0, ""
    for name, piece in exchanged_pieces(layout):
        distance = norm(difference[piece])
        if distance > 0:
            furthest = max(furthest, (distance / (norm(own[piece]) or 1.0), name))
    return furthest


def largest_share(layout: Layout, difference: Floats) -> str:
    """Return the tensor with the largest share of the squared difference, and that share, for a sentence."""
    squares = {name: norm(difference[piece]) ** 2 for name, piece in exchanged_pieces(layout)}
    name, total = max(squares, key=squares.__getitem__), sum(squares.values())
    share = f" ({squares[name] / total:.0%} of the squared difference)" if 0 < total < math.inf else ""
    return f"tensor {quoted(name)}{share}"


def exchanged_pieces(layout: Layout) -> Iterator[tuple[str, slice]]:
    """Yield the name of each tensor that exchanges carry, and its place in a vector."""
    for segment, start, stop in layout.places():
        if segment.kind in ("parameter", "buffer"):
            yield segment.name, slice(start, stop)


def norm(values: Floats) -> float:
    with np.errstate(all="ignore"):  # An overflow shows as infinity.
        return math.sqrt(float(values @ values))
