"""The correction of one node: where its own data pull it away from the swarm, learned from its mixes.

Local steps move a node towards the optimum of its own data, and a mix moves it back by ``d = w (Q(p) - Q(s))``. What
mixes bring back again and again is the pull of the node's own data. The node averages it in ``c`` and takes it out of
its local steps:

    c <- (1 - leak a) c + kappa a d       at each finished exchange, with a = r^2 l / n
    x <- x + s c / H                      at each local step, with H steps in an interval

``n`` is at least 1, and else the intervals that both partners have trained since their last mixes, on average; ``l`` is
at most 1, and else the intervals of the one that has trained less. ``r`` is the share of the difference that a filter
left, 1 as a rule: what attackers push would add up in ``c`` (:func:`credit`). ``s`` is the share of ``c`` that is no
noise (:func:`signal`). Both partners add exact negatives, so that the sum of all ``c`` stays
0 and the mean of the swarm takes the same path as without. ``c`` is a displacement, which follows the learning rate: it
is scaled by the ratio of the rate now to the rate at which it was learned. Without a leak the variance of a node about
the mean tends to the plain pair mean's divided by ``1 - kappa/limit`` for noise, and to 0 for a constant pull (3 times
its square with plain means); :func:`correction_limit` is the limit. Control variates of this kind are those of SCAFFOLD
(Karimireddy et al., ICML 2020) and of ProxSkip and LED (arXiv 2310.07983), there for a server or a fixed graph.

Each exchange takes away a tenth of ``c`` (:data:`LEAK`), so that about a third of a constant pull is left. Without that
``c`` would add up the pushes of a patient liar in one direction, below what a filter sees: one member in five of a live
swarm cost it nine points.

A node's pull changes as the node is corrected. Where local steps are large it grows as fast as the correction, and
nothing would end that: one node of 32 ran away at a learning rate that plain means bear. The correction of a step is
therefore at most :data:`MOST` of the weights' norm. The limit breaks the sum of 0 where it takes effect.

The correction is applied a few times in an interval and not at each step, which costs a pass over the model each time.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gossip.errors import ConfigError

__all__ = [
    "KEPT",
    "LEAK",
    "MOST",
    "NOISE",
    "PARTS",
    "Correction",
    "check_correction",
    "correction_limit",
    "credit",
    "mean_lesson",
    "settled",
    "spread",
]

Floats = NDArray[np.float32]

BLOCK_ELEMENTS = 32_768  # of one pass in numpy: its arrays of 128 KiB stay in cache

MOST_INTERVALS = 64.0  # that a partner may state it has trained since its last mix

MOST = 1 / 256  # of the weights' norm, the longest correction of one step

NOISE = 0.4  # of the mean square of what exchanges teach, the square of a correction that has learned noise alone
KEPT = 0.9  # of the mean, at each exchange
LEAK = 0.1  # of a correction, what each exchange takes away, or pushes in one direction would add up without end

PARTS = 4  # times that a correction is applied in one interval; one part at the mix would spoil the model just after it


def correction_limit(failing: float = 0.0, weight: float = 0.5) -> float:
    """Return the kappa below which disagreement contracts under random pairs, of which a share ``failing`` comes to
    nothing: ``2 (1 - w)(1 - q) / (1 + w + (1 - w) q)``, 2/3 where none fails."""
    kept = 1.0 - weight
    return 2.0 * kept * (1.0 - failing) / (1.0 + weight + kept * failing)


def check_correction(kappa: float) -> None:
    """Raise :class:`ConfigError` unless ``0 <= kappa < 2/3``."""
    limit = correction_limit()
    if not 0.0 <= kappa < limit:
        raise ConfigError(
            f"correction is {kappa:g} and must be at least 0 and below {limit:.2f}: from there on it drives nodes "
            "apart. 0.2 is the default, and 0 turns it off."
        )


def spread(every: int) -> int:
    """Return the local steps between two parts of the correction, for ``every`` steps in an interval."""
    return max(1, every // PARTS)


def ratio(now: float, then: float) -> float:
    """Return by what a correction that was learned at the rate ``then`` is multiplied at the rate ``now``. A rate that
    is not known, 0 or no number scales nothing."""
    known = 0.0 < then < math.inf and 0.0 <= now < math.inf
    return now / then if known else 1.0


class Correction:
    """The correction of one node.

    Attributes:
        pull: What one interval of local steps is to be corrected by, float32 (elements,), 0 behind ``parameters``; None
            before the first exchange.
        rate: The learning rate at present; NaN where nobody says it.
        version: Counts the changes of ``pull``.
        signal: The share of ``pull`` that is applied, since the rest may be noise.
    """

    __slots__ = (
        "_learned_at", "_lessons_sq", "every", "kappa", "parameters", "pull", "rate", "signal", "size", "version",
    )  # fmt: skip

    def __init__(self, size: int, parameters: int, kappa: float, every: int) -> None:
        """Make one that has learned nothing.

        Args:
            size: Elements of a vector that exchanges carry.
            parameters: Of them, the first that are trained: buffers behind them are averaged and never corrected.
            kappa: The share of a mix's displacement that the correction takes up.
            every: Local steps in an interval.
        """
        self.size, self.parameters, self.kappa, self.every = size, parameters, kappa, every
        self.pull: Floats | None = None
        self.rate = self._learned_at = math.nan
        self.version = 0
        self.signal = self._lessons_sq = 0.0

    def learn(self, difference: Floats, weight: float, credit: float, own_sq: float, every: int = 0) -> None:
        """Take up a finished exchange.

        Args:
            difference: ``Q(p) - Q(s)``, float32 (at least ``parameters``,). It is not changed.
            weight: The weight of the pair.
            credit: What :func:`credit` says of the exchange.
            own_sq: ``|Q(s)|^2``, which bounds the correction.
            every: Local steps in an interval from now on; 0: as many as before.
        """
        share = self.kappa * weight * credit
        if share == 0.0:
            return
        scale = ratio(self.rate, self._learned_at) * (1.0 - LEAK * credit)
        if every and every != self.every:  # the pull of an interval is as much longer as the interval
            scale *= every / self.every
            self.every = every
        if self.pull is None:
            self.pull = np.zeros(self.size, np.float32)
        self._learned_at = self.rate if 0.0 < self.rate < math.inf else self._learned_at
        pull = self.pull[: self.parameters]
        taught = difference[: self.parameters]
        add_scaled(pull, scale, taught, share)
        lesson_sq = (weight * credit) ** 2 * float(taught.dot(taught))
        self._lessons_sq = mean_lesson(self._lessons_sq * scale * scale, lesson_sq)
        self.signal = settled(pull, own_sq, self.every, self._lessons_sq)
        self.version += 1

    def part(self, steps: int) -> float:
        """Return the factor by which ``pull`` is to be added after ``steps`` local steps since it was added last."""
        return self.signal * min(steps, self.every) / self.every * ratio(self.rate, self._learned_at)

    def reset(self) -> None:
        """Forget all: these are other weights."""
        if self.pull is not None:
            self.pull.fill(0.0)
            self.version += 1
        self._learned_at = math.nan
        self.signal = self._lessons_sq = 0.0


def credit(ours: ArrayLike, theirs: ArrayLike, taken: ArrayLike = 1.0) -> NDArray[np.float64]:
    """Return how far exchanges count: ``r^2 min(1, t_i, t_j) / n`` with ``n = max(1, (t_i + t_j) / 2)``, from 0 to 1.

    A node that has trained less than an interval since its last mix shows less of its pull, and one that is asked for
    many mixes within an interval learns from all of them together no more than from one. Where either has trained
    nothing there is nothing to learn.

    Args:
        ours: The intervals t that this side has trained since its last mix.
        theirs: The same of the other side, as it states it: what is no number counts as 1, and none as more than
            ``MOST_INTERVALS``. Both sides of an exchange come to the same.
        taken: The share r of the difference that a filter left, from 0 to 1.
    """
    one, other = known(ours), known(theirs)
    mean = np.maximum(1.0, (one + other) / 2)
    counts: NDArray[np.float64] = np.square(taken) * np.minimum(np.minimum(one, other), 1.0) / mean
    return counts


def known(intervals: ArrayLike) -> NDArray[np.float64]:
    """Return a statement of trained intervals within its bounds."""
    stated = np.asarray(intervals, np.float64)
    return np.where(np.isnan(stated), 1.0, np.clip(stated, 0.0, MOST_INTERVALS))


def settled(pull: Floats, own_sq: float, every: int, lessons_sq: float) -> float:
    """Bring a correction that has just learned within its limit, in place, and return the share that is applied.

    Args:
        pull: The correction, float32 (parameters,).
        own_sq: ``|Q(s)|^2``, which bounds it.
        every: Local steps in an interval.
        lessons_sq: The running mean of what exchanges teach, squared.
    """
    pull_sq = float(pull.dot(pull))
    within = shortening(pull_sq, own_sq, every)
    if within == 0.0:
        pull.fill(0.0)  # of infinities nothing else would be left but NaN
    elif within < 1.0:
        pull *= np.float32(within)
    return signal(pull_sq * within * within, lessons_sq)


def shortening(pull_sq: float, own_sq: float, every: int) -> float:
    """Return the factor that brings a correction of this squared length within its limit, at most 1. One that has
    overflowed comes to nothing."""
    most = MOST * every * math.sqrt(max(own_sq, 0.0))
    if math.isfinite(pull_sq):
        return 1.0 if pull_sq <= most * most else most / math.sqrt(pull_sq)
    return 0.0


def mean_lesson(before: float, lesson_sq: float) -> float:
    """Return the running mean of what exchanges teach, squared, after one more; 0 before the first."""
    return lesson_sq if before == 0.0 else KEPT * before + (1.0 - KEPT) * lesson_sq


def signal(pull_sq: float, lessons_sq: float) -> float:
    """Return the share of a correction that is applied: ``1 - NOISE lessons_sq / pull_sq``, and 0 where that is less.

    Lessons without a common direction leave a correction of about a tenth to two fifths of their mean square, and it
    would move the node by noise. (The positive part of James and Stein's estimator, 1961.)
    """
    return max(0.0, 1.0 - NOISE * lessons_sq / pull_sq) if 0.0 < pull_sq < math.inf else 0.0


def add_scaled(pull: Floats, scale: float, difference: Floats, share: float) -> None:
    """``pull <- scale pull + share difference``, in blocks that stay in cache."""
    for start in range(0, pull.size, BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        if scale != 1.0:
            pull[block] *= np.float32(scale)
        pull[block] += np.float32(share) * difference[block]
