"""BALANCE: vectors that are too far away are refused, with a threshold that shrinks over training."""

from __future__ import annotations

import math

from gossip.filters.rule import Filter
from gossip.ids import PeerId

__all__ = ["Balance", "balance_accepts"]

GAMMA = 0.3  # The threshold at the beginning, as a share of our own vector's length: gamma.
KAPPA = 1.0  # The rate at which it falls, to 1/e at the end of the training: kappa.
ROUNDS = 1000.0  # The mixing rounds of the whole training, if filter_limit is not set.


class Balance(Filter):
    """A filter with a threshold that follows the length of our own vector and the progress of training."""

    def refusal(self, partner: PeerId, difference_sq: float, own_sq: float, size: int, version: float) -> str | None:
        refused = super().refusal(partner, difference_sq, own_sq, size, version)
        progress = min(version / (self.config.filter_limit or ROUNDS), 1.0)
        if refused is None and not balance_accepts(difference_sq, own_sq, GAMMA, KAPPA, progress):
            return "balance"
        return refused


def balance_accepts(difference_sq: float, own_sq: float, gamma: float, kappa: float, progress: float) -> bool:
    """Return True if ``|theirs - mine| <= gamma exp(-kappa t/T) |mine|`` with ``progress`` = t/T.

    See Fang et al., "Byzantine-robust decentralized federated learning", CCS 2024 (BALANCE).
    """
    return difference_sq <= gamma * gamma * math.exp(-2 * kappa * progress) * own_sq
