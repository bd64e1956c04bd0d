"""BALANCE: vectors that are too far away are refused, with a threshold that shrinks over training."""

import math

from gossip.filters.rule import Filter
from gossip.ids import PeerId

GAMMA = 0.3  # The paper's gamma: the threshold at the beginning, as a share of our own vector's length.
KAPPA = 1.0  # The paper's kappa: the rate at which the threshold falls, here to 1/e at the end of the training.
ROUNDS = 1000.0  # The mixing rounds of the whole training, if filter_limit does not state them.


class Balance(Filter):
    """A filter with a threshold that follows the length of our own vector and the progress of training."""

    def refusal(self, partner: PeerId, difference_sq: float, own_sq: float, size: int, version: float) -> str | None:
        reason = super().refusal(partner, difference_sq, own_sq, size, version)
        progress = min(version / (self.config.filter_limit or ROUNDS), 1.0)
        if reason is None and not balance_accepts(difference_sq, own_sq, GAMMA, KAPPA, progress):
            return "balance"
        return reason


def balance_accepts(difference_sq: float, own_sq: float, gamma: float, kappa: float, progress: float) -> bool:
    """Return True if ``|theirs - ours| <= gamma exp(-kappa t/T) |ours|`` with ``progress`` = t/T.

    See Fang et al., "Byzantine-robust decentralized federated learning", CCS 2024 (BALANCE).
    """
    return difference_sq <= gamma * gamma * math.exp(-2 * kappa * progress) * own_sq
