"""The coordinate-wise trimmed mean of a group."""

from __future__ import annotations

from gossip.arithmetic.group_mean import trimmed_mean
from gossip.filters.rule import Filter, Floats

__all__ = ["Trimmed"]


class Trimmed(Filter):
    """A filter that drops the ``filter_limit`` lowest and highest values (default 1), or fewer so that one is left."""

    def mean(self, vectors: Floats) -> Floats:
        return trimmed_mean(vectors, min(int(self.config.filter_limit or 1), (len(vectors) - 1) // 2))
