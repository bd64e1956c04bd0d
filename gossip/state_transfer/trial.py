"""The trial of another run's weights: the losses of the training loop decide whether we keep them."""

import math
import statistics
from collections import deque

MAX_OWN_LOSSES = 16  # Last losses of our own weights to remember.
MIN_LOSSES = 4  # Losses needed for a verdict, of our own weights and of the tried ones each.
TRIAL_S = 60.0  # A loop without a loss for this long is evaluating or paused; the trial does not wait for it.


class TrialEvaluator:
    """The trial of weights by the losses in the reports of the training loop.

    The first report after a replacement is skipped: its loss may belong to the old weights, since a GPU's loss is
    copied late.
    """

    def __init__(self) -> None:
        self.own_losses: deque[float] = deque(maxlen=MAX_OWN_LOSSES)
        self.deadline = math.inf  # Time of the verdict; infinite without a trial.
        self._last_steps = -1  # Step count of the last report; -1 before the first.
        self._has_skipped = False  # The first report of this trial has been skipped.
        self._tried_losses: list[float] = []

    @property
    def can_judge(self) -> bool:
        """Return True if enough losses of our own weights are known for a verdict."""
        return len(self.own_losses) >= MIN_LOSSES

    @property
    def on_trial(self) -> bool:
        return self.deadline < math.inf

    def begin(self, steps: int, now: float) -> None:
        self.deadline, self._last_steps, self._has_skipped, self._tried_losses = now + TRIAL_S, steps, False, []

    def end(self) -> None:
        self.deadline = math.inf

    def on_loss(self, steps: int, loss: float | None) -> bool | None:
        """Handle the loss of a report: None if it is unknown.

        Returns:
            True if the trial is passed, False if it is failed, None if it is open or absent.
        """
        if steps <= self._last_steps:
            return None
        self._last_steps = steps
        if not self.on_trial:
            if loss is not None and math.isfinite(loss):
                self.own_losses.append(loss)
            return None
        if not self._has_skipped:
            self._has_skipped = True
            return None
        self._tried_losses.append(math.inf if loss is None or not math.isfinite(loss) else loss)
        return self.verdict() if len(self._tried_losses) == MIN_LOSSES else None

    def verdict(self) -> bool:
        """Return True if the losses so far are not clearly worse; False without any.

        Their mean may be at most twice the mean of ours, or ours plus three standard deviations if that is larger.
        """
        if not self._tried_losses:
            return False
        mean = statistics.fmean(self.own_losses)
        bound = mean + max(abs(mean), 3 * statistics.pstdev(self.own_losses))
        return statistics.fmean(self._tried_losses) <= bound
