"""The mean of a group's vectors, slice by slice, and which of them are left out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.mixing import difference
from gossip.codecs import ALIGN
from gossip.kernel.squares import squares

__all__ = ["group_mean", "norm_accepts", "slices", "trimmed_mean"]

Floats = NDArray[np.float32]


def slices(elements: int, members: int) -> list[slice]:
    """Each member's slice of a vector: contiguous, alike but for rounding to whole blocks; the last may be empty."""
    blocks = -(-elements // ALIGN)
    ends = [min(blocks * (place + 1) // members * ALIGN, elements) for place in range(members)]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def group_mean(parts: Floats, own: int, mean: Callable[[Floats], Floats], bound: float) -> tuple[Floats, list[int]]:
    """The mean of ``parts`` (members, elements), one member's slice of everybody's vectors, and whose were refused.

    What is not finite, or further from the ``own``-th row than the norm bound allows, is left out, and ``mean`` is of
    the others, as a filter has it.
    """
    ours = parts[own]
    own_sq = squares(ours)
    kept, refused = [own], []
    apart = np.empty_like(ours)
    for place, theirs in enumerate(parts):
        if place == own:
            continue
        if norm_accepts(difference(theirs, ours, apart)[0], own_sq, ours.size, bound) is None:
            kept.append(place)
        else:
            refused.append(place)
    taken = parts[sorted(kept)] if refused else parts  # a copy only where some are left out
    return mean(taken), refused


def norm_accepts(difference_sq: float, own_sq: float, size: int, bound: float) -> Literal["not-finite", "norm"] | None:
    """None to accept a partner's vector, else the code of the reason to refuse it.

    ``difference_sq`` is ``|theirs - mine|^2`` and ``own_sq`` is ``|mine|^2``, both over ``size`` elements. Accepts iff

        |theirs - mine| <= bound * (|mine| + sqrt(size))

    ``sqrt(size)`` is the norm of a vector of ones: a model that starts at zero must be able to
    take weights, and an rms of 1 per element is generous for weights. Sums that are not finite, or overflow to
    infinity, are refused whatever the bound: one NaN averaged in would spread to the whole swarm.
    """
    if not math.isfinite(difference_sq) or not math.isfinite(own_sq):
        return "not-finite"
    return None if math.sqrt(difference_sq) <= bound * (math.sqrt(own_sq) + math.sqrt(size)) else "norm"


def trimmed_mean(vectors: NDArray[np.float32], trim: int) -> NDArray[np.float32]:
    """Of ``vectors`` (members, elements), the mean of each element without its ``trim`` smallest and largest values
    (Yin et al., ICML 2018). Needs more than ``2 trim`` members. The result is float32 (elements,)."""
    members = len(vectors)
    assert members > 2 * trim, "a trimmed mean needs members beside those it trims"
    if trim == 0:
        return np.asarray(vectors.mean(axis=0, dtype=np.float32))
    ordered = np.partition(vectors, (trim, members - trim - 1), axis=0)
    return np.asarray(ordered[trim : members - trim].mean(axis=0, dtype=np.float32))
