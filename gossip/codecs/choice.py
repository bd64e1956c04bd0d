"""Which codec brings a vector over a link soonest: on a link as fast as memory raw floats win."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AUTO", "fastest"]

AUTO = "auto"
"""The setting that leaves the choice to each link."""

CPU_S_PER_GB: Mapping[bool, Mapping[str, float]] = {
    False: {"fp32": 0.0, "bf16": 0.49, "int8": 0.95},
    True: {"fp32": 0.0, "bf16": 0.03, "int8": 0.08},
}
"""Seconds of one core for a GB of float32, to encode, and to subtract the partner's beyond what fp32 takes for that: in
numpy, and by the passes in C, where the fewer bytes to check pay for most of it (`make bench-codecs`)."""
SHARE: Mapping[str, float] = {"fp32": 1.0, "bf16": 0.5, "int8": 0.2510}  # of the bytes


def fastest(rate_mb_s: float | None, compiled: bool) -> str:
    """The codec with the least of ``bytes / rate + CPU`` at this rate of the link; bf16 where it is not known yet.

    By the passes in C int8 below 5,000 MB/s, which a socket rarely has; in numpy fp32 from about 1,000 MB/s on, int8
    below about 540 MB/s, bf16 between them; at an infinite one, where no byte is carried, fp32. ``compiled`` is the
    caller's to say, and not asked of this machine, since a simulated peer decides alike everywhere. Coarser codecs
    trade accuracy for bytes and are nobody's choice but the user's.
    """
    if rate_mb_s is None or rate_mb_s <= 0:
        return "bf16"
    cpu = CPU_S_PER_GB[compiled]
    return min(SHARE, key=lambda name: SHARE[name] * 1000.0 / rate_mb_s + cpu[name])
