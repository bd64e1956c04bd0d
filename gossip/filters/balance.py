"""BALANCE: vectors that are too far away are refused, with a threshold that shrinks over training."""

from __future__ import annotations

import math

from gossip.filters.rule import Filter
from gossip.ids import PeerId

__all__ = ["Balance", "balance_accepts"]


class Balance(Filter):
    """A filter by the length of our own vector and the progress of training."""

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
    """Return True if ``|theirs - mine| <= gamma exp(-kappa t/T) |mine|`` with ``progress`` = t/T.

    See Fang et al., "Byzantine-robust decentralized federated learning", CCS 2024 (BALANCE).
    """
    return difference_sq <= gamma * gamma * math.exp(-2 * kappa * progress) * own_sq
