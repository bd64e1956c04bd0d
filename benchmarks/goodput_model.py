"""The failure model of Decoupled DiLoCo: the share of possible steps that a learner of many chips takes.

In Decoupled DiLoCo (arXiv:2604.21428) each chip fails once a year. It states the goodput of 150,000 to 2.4 million
chips (:data:`PUBLISHED`). The summaries of the report that we read do not state how long a learner pauses for a
failure. :func:`fitted` finds it from the published figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["CHIPS", "PUBLISHED", "Pauses", "availability", "barrier", "failure_s", "fitted", "predicted", "published"]

YEAR_S = 365.25 * 86_400  # mean time between two failures of one chip
CHIPS = 1_200_000
SCALES = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
# Goodput in % from table 1, at each of SCALES. "rigid" and "elastic" are one job of all chips. A number is the number
# of learners of Decoupled DiLoCo.
PUBLISHED: dict[str | int, tuple[int, ...]] = {
    "rigid": (72, 57, 38, 27, 18),
    "elastic": (88, 80, 69, 58, 40),
    2: (94, 88, 80, 70, 54),
    4: (96, 93, 89, 82, 73),
    8: (98, 96, 94, 88, 80),
    16: (99, 98, 96, 93, 86),
}
LONGEST_S, GRID_S = 600.0, 0.5  # Pauses up to the first are tried, in steps of the second.
LARGEST_COUNT = 10_000  # A bound on the failures of a learner in one round.


class Pauses(NamedTuple):
    """Seconds for which a failure stops a learner.

    An elastic learner gives up the failed slice and goes on. A rigid learner waits until all its chips work again.
    """

    elastic: float
    rigid: float


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


def published(kind: str | int, chips: int = CHIPS) -> int | None:
    """Return the published goodput in %, or None if the table has none."""
    row = PUBLISHED.get(kind)
    return None if row is None or chips not in SCALES else row[SCALES.index(chips)]


def predicted(kind: str | int, chips: float, pauses: Pauses) -> float:
    """Return the model's goodput, 0 to 1, for one job of all ``chips`` or for ``kind`` elastic learners."""
    if kind == "rigid":
        return availability(chips, pauses.rigid)
    learners = 1 if kind == "elastic" else int(kind)
    return availability(chips / learners, pauses.elastic)


def misses(pauses: Pauses) -> Iterator[float]:
    """Yield the predicted minus the published goodput, in points, for every published figure."""
    for kind, row in PUBLISHED.items():
        for chips, figure in zip(SCALES, row, strict=True):
            yield 100 * predicted(kind, chips, pauses) - figure


def fitted() -> Pauses:
    """Return the two pauses that fit :data:`PUBLISHED` best (least squares, to half a second)."""
    grid = [GRID_S * number for number in range(1, int(LONGEST_S / GRID_S) + 1)]

    def square(pause_s: float, rigid: bool) -> float:
        """Sum the squared misses of the figures that this pause decides."""
        return sum(
            (100 * predicted(kind, chips, Pauses(pause_s, pause_s)) - figure) ** 2
            for kind, row in PUBLISHED.items()
            if (kind == "rigid") == rigid
            for chips, figure in zip(SCALES, row, strict=True)
        )

    return Pauses(*(min(grid, key=lambda pause_s: square(pause_s, rigid)) for rigid in (False, True)))


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
