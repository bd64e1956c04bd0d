"""The trial of another run's weights: the losses of the training loop decide whether we keep them."""

from __future__ import annotations

import math
import statistics
from collections import deque

__all__ = ["TrialEvaluator"]

REMEMBERED = 16  # losses of our own weights to keep
ENOUGH = 4  # losses needed for a verdict, of our weights and of the tried ones
TRIAL_S = 60.0  # a loop without a loss for this long is evaluating or paused; the trial does not wait for it


class TrialEvaluator:
    """The trial of weights by the losses in the reports of the training loop.

    The first report after a replacement is skipped: its loss may belong to the old weights, since a GPU's loss is
    copied late.
    """

    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=REMEMBERED)
        self.deadline = math.inf  # deadline of the trial; infinite without one
        self._steps = -1
        self._skipped = False
        self._after: list[float] = []

    @property
    def sees(self) -> bool:
        """Return True if enough losses of our own weights are known for a verdict."""
        return len(self.before) >= ENOUGH

    @property
    def on_trial(self) -> bool:
        return self.deadline < math.inf

    def begin(self, steps: int, now: float) -> None:
        self.deadline, self._steps, self._skipped, self._after = now + TRIAL_S, steps, False, []

    def end(self) -> None:
        self.deadline = math.inf

    def heard(self, steps: int, loss: float | None) -> bool | None:
        """Handle a report. Return True if the trial is passed, False if it is failed, None if it is open or absent."""
        if steps <= self._steps:
            return None
        self._steps = steps
        if not self.on_trial:
            if loss is not None and math.isfinite(loss):
                self.before.append(loss)
            return None
        if not self._skipped:
            self._skipped = True
            return None
        self._after.append(math.inf if loss is None or not math.isfinite(loss) else loss)
        return self.verdict() if len(self._after) == ENOUGH else None

    def verdict(self) -> bool:
        """Return True if the losses so far are not clearly worse; False without any.

        Their mean may be at most twice the mean of ours, or ours plus three standard deviations if that is larger.
        """
        if not self._after:
            return False
        mean = statistics.fmean(self.before)
        bound = mean + max(abs(mean), 3 * statistics.pstdev(self.before))
        return statistics.fmean(self._after) <= bound
