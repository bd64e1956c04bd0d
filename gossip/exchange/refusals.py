"""What was refused or cut off."""

from __future__ import annotations

from gossip.ids import PeerId

__all__ = ["Refusals"]

REFUSALS = 256  # partners and reasons counted apart: what one node ever needs to show


class Refusals:
    """How often what was refused, from whom and why."""

    def __init__(self) -> None:
        self.counts: dict[tuple[PeerId, str], int] = {}

    def add(self, partner: PeerId, code: str) -> None:
        key = (partner, code)
        self.counts[key] = self.counts.pop(key, 0) + 1  # the one of longest ago goes first
        if len(self.counts) > REFUSALS:
            del self.counts[next(iter(self.counts))]

    @property
    def total(self) -> int:
        return sum(self.counts.values())
