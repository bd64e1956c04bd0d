"""The mean of a group's vectors: their slices, the test that refuses broken rows, and the trimmed mean."""

import math
from collections.abc import Callable, Collection
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gossip.arithmetic.mixing import subtract
from gossip.codecs import ALIGN
from gossip.kernel.squares import Floats, squares


def member_slices(elements: int, members: int) -> list[slice]:
    """Return each member's slice of a vector: contiguous, and of equal length up to rounding to whole codec blocks.

    The last slice may be empty.
    """
    blocks = -(-elements // ALIGN)
    ends = [min(blocks * (place + 1) // members * ALIGN, elements) for place in range(members)]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def group_mean(
    rows: Floats, own_place: int, mean: Callable[[Floats], Floats], bound: float, absent: Collection[int] = ()
) -> tuple[Floats, dict[int, str]]:  # fmt: skip
    """Return the mean of ``rows``, float32 (elements,), and why members were refused, by place (row number).

    A row is refused if it is not finite, or further from our row than the norm bound allows.

    Args:
        rows: One slice of all members' vectors, float32 (members, elements).
        own_place: The place of our row.
        mean: Computes the mean of the accepted rows, as the node's filter against attackers does.
        bound: The norm bound of :func:`norm_refusal`.
        absent: The places whose rows have not come, which are left out.
    """
    ours = rows[own_place]
    own_sq = squares(ours)
    accepted, refused = [own_place], dict[int, str]()
    difference = np.empty_like(ours)
    for place, theirs in enumerate(rows):
        if place == own_place or place in absent:
            continue
        code = norm_refusal(subtract(theirs, ours, difference)[0], own_sq, ours.size, bound)
        if code is None:
            accepted.append(place)
        else:
            refused[place] = code
    is_whole = len(accepted) == len(rows)  # Copy rows only if some are left out.
    return mean(rows if is_whole else rows[sorted(accepted)]), refused


def norm_refusal(difference_sq: float, own_sq: float, size: int, bound: float) -> Literal["not-finite", "norm"] | None:
    """Return the reason to refuse a partner's vector, or None to accept it.

    ``difference_sq`` is ``|theirs - mine|^2`` and ``own_sq`` is ``|mine|^2``, both over ``size`` elements. A vector is
    accepted if

        |theirs - mine| <= bound * (|mine| + sqrt(size))

    ``sqrt(size)`` is the norm of a vector of ones: a model that starts at zero must be able to take weights, and an rms
    of 1 per element is generous for weights. Sums that are not finite are refused whatever the bound: one NaN in an
    average would spread to the whole swarm.
    """
    if not math.isfinite(difference_sq) or not math.isfinite(own_sq):
        return "not-finite"
    return None if math.sqrt(difference_sq) <= bound * (math.sqrt(own_sq) + math.sqrt(size)) else "norm"


def trimmed_mean(vectors: NDArray[np.float32], trim: int) -> NDArray[np.float32]:
    """Return each element's mean without its ``trim`` smallest and largest values (Yin et al., ICML 2018).

    ``vectors`` is (members, elements) with more than ``2 trim`` members. The result is float32 (elements,).
    """
    members = len(vectors)
    assert members > 2 * trim, "a trimmed mean needs more members than it trims"
    if trim == 0:
        return np.asarray(vectors.mean(axis=0, dtype=np.float32))
    ordered = np.partition(vectors, (trim, members - trim - 1), axis=0)
    return np.asarray(ordered[trim : members - trim].mean(axis=0, dtype=np.float32))
