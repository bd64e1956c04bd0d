"""A group's mean without the ends of each element's values."""

from __future__ import annotations

from gossip.arithmetic.group_mean import trimmed_mean
from gossip.filters.rule import Filter, Floats

__all__ = ["Trimmed"]


class Trimmed(Filter):
    """As many values are left out at either end as ``trim`` says and as leave one."""

    def mean(self, vectors: Floats) -> Floats:
        return trimmed_mean(vectors, min(self.config.trim, (len(vectors) - 1) // 2))
