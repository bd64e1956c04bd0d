"""BALANCE: what is far is refused, and ever less counts as near."""

from __future__ import annotations

import math

from gossip.filters.rule import Filter
from gossip.ids import PeerId

__all__ = ["Balance", "balance_accepts"]


class Balance(Filter):
    """By the length of one's own vector, and the rounds that training has."""

    def judge(self, partner: PeerId, difference_sq: float, own_sq: float, size: int, version: float) -> str | None:
        config = self.config
        refused = super().judge(partner, difference_sq, own_sq, size, version)
        progress = min(version / config.balance_rounds, 1.0)
        if refused is None and not balance_accepts(
            difference_sq, own_sq, config.balance_gamma, config.balance_kappa, progress
        ):
            return "balance"
        return refused


def balance_accepts(difference_sq: float, own_sq: float, gamma: float, kappa: float, progress: float) -> bool:
    """``|theirs - mine| <= gamma exp(-kappa t/T) |mine|`` with ``progress`` = t/T (Fang et al., "Byzantine-robust
    decentralized federated learning", CCS 2024: BALANCE)."""
    return difference_sq <= gamma * gamma * math.exp(-2 * kappa * progress) * own_sq
