"""The drift corrections of all peers in one matrix; :mod:`gossip.arithmetic.correction` explains the equations.

A correction takes the pull of a peer's own data out of its local steps. It learns from exchanges; the displacement by
one exchange is its *lesson*. An *interval* is the local steps from one mix to the next.
"""

import numpy as np

from gossip.arithmetic.correction import LEAK, add_lesson, limit_pull, steps_between_parts
from gossip.arithmetic.live import add_scaled
from gossip.config import Config
from sim.arrays import F32, F64, I64

__all__ = ["Corrections"]


class Corrections:
    """The drift correction of each peer; a row is a peer.

    Attributes:
        pull: The correction that each model gets over one interval, float32 (peers, parameters).
        rates: The learning rate at which it was learned, (peers,); 0 until one is learned.
        noise_sq: The square that each pull has if its lessons have no common direction, (peers,).
        applied_share: The share of ``pull`` that is applied, since the rest may be noise, (peers,).
        interval_steps: Local steps in an interval, int64 (peers,).
        spread: Local steps between two additions of the pull, int64 (peers,).
    """

    def __init__(self, peers: int, parameters: int, config: Config) -> None:
        first_interval = config.first_interval
        assert first_interval is not None, "a correction counts steps"
        self.kappa = config.kappa
        self.interval_steps = np.full(peers, first_interval, np.int64)
        self.spread = np.full(peers, steps_between_parts(first_interval), np.int64)
        self.pull = np.zeros((peers, parameters), np.float32)
        self.rates, self.noise_sq, self.applied_share = np.zeros(peers), np.zeros(peers), np.zeros(peers)

    def learn(
        self, rows: I64, shifts: F32, credits: F64, own_sq: F64, rates: F64, interval_steps: I64 | None = None
    ) -> None:
        """Learn from finished exchanges of unique rows.

        Args:
            rows: The peers, shape (exchanges,).
            shifts: The differences that each model takes, ``w (Q(p) - Q(s))``, shape (exchanges, elements).
            credits: The weights from :func:`gossip.arithmetic.correction.credit`, shape (exchanges,).
            own_sq: The squared norms of the models, which bound the corrections, shape (exchanges,).
            rates: The learning rates of the peers now, shape (exchanges,).
            interval_steps: Local steps in an interval from now on, shape (exchanges,); 0 or None keeps the old number.
        """
        counting = np.flatnonzero(credits > 0)
        rows, rates, credits, own_sq = rows[counting], rates[counting], credits[counting], own_sq[counting]
        shifts = np.ascontiguousarray(shifts[counting, : self.pull.shape[1]])
        scale = self.rate_factors(rows, rates) * (1.0 - LEAK * credits)
        if interval_steps is not None:
            scale *= self.set_intervals(rows, interval_steps[counting])
        self.noise_sq[rows] *= scale * scale
        shares = self.kappa * credits
        each = zip(rows.tolist(), shifts, scale.tolist(), shares.tolist(), own_sq.tolist(), strict=True)
        for row, shift, factor, share, model_sq in each:
            shift_sq, pull_sq = add_lesson(shift, self.pull[row], factor, share)
            noise_sq = float(self.noise_sq[row]) + share * share * shift_sq
            self.applied_share[row], self.noise_sq[row] = limit_pull(
                self.pull[row], pull_sq, model_sq, int(self.interval_steps[row]), noise_sq
            )
        self.rates[rows] = np.where(rates > 0, rates, self.rates[rows])

    def set_intervals(self, rows: I64, interval_steps: I64) -> F64:
        """Set the intervals of these rows to these steps (0: no change); return the factor for each correction."""
        before = self.interval_steps[rows]
        after: I64 = np.where(interval_steps > 0, interval_steps, before)
        self.interval_steps[rows] = after
        self.spread[rows] = [steps_between_parts(steps) for steps in after.tolist()]
        return after / before

    def rate_factors(self, rows: I64, rates: F64) -> F64:
        """Return the factor for each row's correction at its current learning rate."""
        learned = self.rates[rows]
        return np.divide(rates, learned, out=np.ones(len(rows)), where=learned > 0)

    def apply(self, models: F32, rows: I64, taken: I64, rates: F64) -> None:
        """Correct models in place after a step.

        Args:
            models: The models, shape (rows, at least parameters).
            rows: Their rows, shape (rows,).
            taken: The steps that each peer has taken, shape (rows,).
            rates: Their learning rates, shape (rows,).
        """
        due = np.flatnonzero((taken % self.spread[rows] == 0) & (self.applied_share[rows] > 0))
        if not len(due):
            return
        due_rows = rows[due]
        shares = self.applied_share[due_rows] * self.spread[due_rows] / self.interval_steps[due_rows]
        shares *= self.rate_factors(due_rows, rates[due])
        corrected = models[:, : self.pull.shape[1]]
        for place, row, share in zip(due.tolist(), due_rows.tolist(), shares.tolist(), strict=True):
            add_scaled(corrected[place], self.pull[row], share)

    def reset(self, row: int) -> None:
        """Forget the correction of a peer whose weights were replaced."""
        self.pull[row] = 0
        self.noise_sq[row] = self.applied_share[row] = self.rates[row] = 0.0
