"""Another run's weights on trial: what the training loop's own losses say of them, before they are ours."""

from __future__ import annotations

import math
import statistics
from collections import deque

__all__ = ["Judge"]

REMEMBERED = 16  # losses of our own weights
ENOUGH = 4  # losses to judge by, of ours and of those on trial
TRIAL_S = 60.0  # a loop that says no loss for so long (it evaluates, or stands) is not waited for


class Judge:
    """Hears the loss of each report. A report's loss may be of a step before the weights were replaced (a GPU's is
    copied behind), so the first after that is not counted."""

    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=REMEMBERED)
        self.deadline = math.inf  # of the trial; infinite: there is none
        self._steps = -1
        self._skipped = False
        self._after: list[float] = []

    @property
    def sees(self) -> bool:
        """Whether enough losses are known to judge others by."""
        return len(self.before) >= ENOUGH

    @property
    def on_trial(self) -> bool:
        return self.deadline < math.inf

    def begin(self, steps: int, now: float) -> None:
        self.deadline, self._steps, self._skipped, self._after = now + TRIAL_S, steps, False, []

    def end(self) -> None:
        self.deadline = math.inf

    def heard(self, steps: int, loss: float | None) -> bool | None:
        """A report. Of a trial: True when it is passed, False when it is failed, None while neither is known."""
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
        """Whether the losses so far are not clearly worse: their mean is at most the larger of twice the mean of ours
        and that mean plus three standard deviations. Nothing heard is no proof."""
        if not self._after:
            return False
        mean = statistics.fmean(self.before)
        bound = mean + max(abs(mean), 3 * statistics.pstdev(self.before))
        return statistics.fmean(self._after) <= bound
