"""What was refused or cut off."""

from __future__ import annotations

from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["Refusals"]

REFUSALS = 256  # partners and reasons counted apart: what one node ever needs to show


class Refusals:
    """How often what was refused, from whom and why."""

    def __init__(self) -> None:
        self.counts = Recent[tuple[PeerId, str], int](REFUSALS)

    def add(self, partner: PeerId, code: str) -> None:
        key = (partner, code)
        self.counts[key] = self.counts.get(key, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())
