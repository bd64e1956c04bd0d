"""The failure model of Decoupled DiLoCo: the share of possible steps that a learner of many chips takes.

In Decoupled DiLoCo (arXiv:2604.21428) each chip fails once a year. It states the goodput of 150,000 to 2.4 million
chips. The summaries of the report that we read do not state how long a learner pauses for a failure. :data:`PAUSES`
fits its thirty figures best: within 4.3 points, 2.1 rms (docs/results/goodput.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

YEAR_S = 365.25 * 86_400  # mean time between two failures of one chip
CHIPS = 1_200_000
PUBLISHED = {1: 58, 2: 70, 4: 82, 8: 88, 16: 93}  # goodput in % from table 1, by the number of elastic learners
LARGEST_COUNT = 10_000  # A bound on the failures of a learner in one round.


class Pauses(NamedTuple):
    """Seconds for which a failure stops a learner.

    An elastic learner gives up the failed slice and goes on. A rigid learner waits until all its chips work again.
    """

    elastic: float
    rigid: float


PAUSES = Pauses(22.5, 78.0)


def failure_s(chips: float) -> float:
    """Return the mean time between failures of a job of ``chips`` chips, in seconds."""
    return YEAR_S / chips


def availability(chips: float, pause_s: float) -> float:
    """Return the share of time that a learner of ``chips`` trains.

    It is the mean time between failures, divided by itself plus the pause. Failures during a pause cost nothing more,
    because the learner restarts with the chips that work by then.
    """
    up_s = failure_s(chips)
    return up_s / (up_s + pause_s)


def barrier(learners: int, chips: float, pause_s: float, round_s: float) -> float:
    """Return the goodput of learners that wait for each other after each ``round_s`` of training, as in DiLoCo.

    A round takes as long as the learner with the most failures in it, whose number is Poisson. Failures while a learner
    waits are left out, so this is an upper bound.
    """
    mean = round_s / failure_s(chips / learners)
    most = 0.0  # E[max] = sum over k of P(max > k)
    probability = below = math.exp(-mean)
    for count in range(1, LARGEST_COUNT):
        above = 1.0 - min(1.0, below) ** learners
        most += above
        if above < 1e-12 and count > mean:
            break
        probability *= mean / count
        below += probability
    return round_s / (round_s + pause_s * most)
