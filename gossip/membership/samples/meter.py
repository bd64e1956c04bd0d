"""How fast we train: the rate that our record states, and with which others reckon until our next one."""

from __future__ import annotations

from collections import deque

__all__ = ["Meter"]

MARK_S = 2.0  # between two marks
MARKS = 16  # so the rate is that of the last half minute, or of the last 15 reports where these are rarer
PAUSED = 2.0  # times the longest time between two reports of late, without any: nothing is made at present
FADES = 0.9  # of that longest time, with each report
ANEW, ANEW_S = 8.0, 60.0  # times that, and seconds: who pauses so long is not slower afterwards


class Meter:
    """``last_s``: when the latest samples were reported. A report in which nothing is new is none."""

    def __init__(self, now: float) -> None:
        self.last_s = now
        self._samples = self._reports = 0
        self._longest_s = 0.0  # between two reports
        # (when, samples). What came before the first step counts until the second report: better than nothing.
        self._marks: deque[tuple[float, int]] = deque([(now, 0)], MARKS)

    def report(self, samples: int, now: float) -> None:
        """So many were made in this life by now, which are more than at the last report."""
        marks, passed_s = self._marks, now - self.last_s
        if self._reports < 2:
            if self._reports:
                marks.popleft()
            self._longest_s = passed_s
        elif passed_s > max(ANEW * self._longest_s, ANEW_S):
            marks.clear()
        else:
            self._longest_s = max(passed_s, FADES * self._longest_s)
        self._samples, self.last_s = samples, now
        self._reports += 1
        if self._reports == 1 or not marks or now >= marks[-1][0] + MARK_S:
            marks.append((now, samples))

    @property
    def paused_s(self) -> float:
        """From when on training has stopped, or is held, unless something is reported before."""
        return self.last_s + PAUSED * self._longest_s

    def rate(self, now: float) -> float:
        """Samples a second; 0.0 while nothing is made, or too little is known."""
        if not self._reports or now >= self.paused_s:
            return 0.0
        since_s, samples = self._marks[0]
        return (self._samples - samples) / (self.last_s - since_s) if self.last_s > since_s else 0.0
