"""The coordinate-wise trimmed mean of a group, and a radius for the pairs of members that settle."""

from gossip.arithmetic.group_mean import trimmed_mean
from gossip.config import Config
from gossip.filters.clip import Clip
from gossip.filters.rule import Floats


class Trimmed(Clip):
    """A filter that drops the ``filter_limit`` lowest and highest values (default 1), or fewer so that one is left."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.fixed_radius = None

    def on_group(self, difference_sq: float, size: int) -> None:
        self.donors_sq = difference_sq / size

    def mean(self, vectors: Floats) -> Floats:
        return trimmed_mean(vectors, min(int(self.config.filter_limit or 1), (len(vectors) - 1) // 2))
