"""What a peer accepts from others."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["Refusal", "norm_accepts"]

Refusal = Literal["not-finite", "norm"]


def norm_accepts(difference_sq: float, own_sq: float, size: int, bound: float) -> Refusal | None:
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
