"""The coordinate-wise trimmed mean of a group."""

from __future__ import annotations

from gossip.arithmetic.group_mean import trimmed_mean
from gossip.filters.rule import Filter, Floats

__all__ = ["Trimmed"]


class Trimmed(Filter):
    """A filter that drops ``trim`` values at either end, or fewer, so that one is left."""

    def mean(self, vectors: Floats) -> Floats:
        return trimmed_mean(vectors, min(self.config.trim, (len(vectors) - 1) // 2))
