"""Which codec brings a vector over a link soonest: on a fast link raw floats win."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AUTO", "fastest"]

AUTO = "auto"
"""The setting that leaves the choice to each link."""

CPU_S_PER_GB: Mapping[str, float] = {"fp32": 0.0, "bf16": 0.49, "int8": 0.95}
"""Seconds to encode, quantise the own and decode the partner's, a GB of float32, one core (`make bench-codecs`)."""
SHARE: Mapping[str, float] = {"fp32": 1.0, "bf16": 0.5, "int8": 0.2510}  # of the bytes


def fastest(rate_mb_s: float | None) -> str:
    """The codec with the least of ``bytes / rate + CPU`` at this rate of the link; bf16 where it is not known yet.

    fp32 from about 1,000 MB/s on, int8 below about 540 MB/s, bf16 between them. Coarser codecs trade accuracy for bytes
    and are nobody's choice but the user's.
    """
    if rate_mb_s is None or rate_mb_s <= 0:
        return "bf16"
    return min(SHARE, key=lambda name: SHARE[name] * 1000.0 / rate_mb_s + CPU_S_PER_GB[name])
