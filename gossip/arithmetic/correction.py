"""The correction of one node for the bias of its own data, learned from its mixes.

Local steps move a node towards the optimum of its own data, and a mix moves it back by ``d = w (Q(p) - Q(s))``
(:mod:`gossip.arithmetic.mixing`). The displacement that mixes undo again and again is the pull of the node's own data.
The node averages it in ``c`` and corrects its weights ``x`` by it. An *interval* is the local steps between two mixes:

    c <- (1 - leak a) c + kappa a d       at each finished exchange
    x <- x + s c / H                      at each local step, with H steps in an interval

    c, the *pull*            the correction of one interval, as far as it is learned
    a, the *credit*          how much an exchange counts, from 0 to 1 (:func:`credit`)
    a d, a *lesson*          what one exchange teaches
    s, the *applied share*   the part of c that is no noise (:func:`signal_share`)

Both partners add exact negatives. So the sum of all ``c`` stays 0, and the swarm's mean takes the same path as without.
``c`` is a displacement, which follows the learning rate. It is scaled by the ratio of the current rate to the rate at
which it was learned.

Without a leak, a constant pull leaves no variance of a node about the mean; with plain means the variance tends to 3
times the pull's square. The variance from noise tends to that of plain pair means divided by ``1 - kappa/limit``
(:data:`CORRECTION_LIMIT`). Such control variates are known from SCAFFOLD (Karimireddy et al., ICML 2020),
and from ProxSkip and LED (arXiv 2310.07983), there for a server or a fixed graph.

Each exchange takes away a tenth of ``c`` (:data:`LEAK`), so that about a third of a constant pull is left. Otherwise
``c`` would add up the pushes of a patient liar in one direction, below what a filter sees: one such member in five of a
live swarm cost it nine points.

A node's pull changes as the node is corrected. With large local steps it grows as fast as the correction, without end:
one node of 32 diverged at a learning rate that plain means bear. So the correction of a step is at most
:data:`MAX_STEP_SHARE` of the weights' norm. Where this limit takes effect, the sum is no longer 0.

The correction is applied twice in an interval and not at each step, since each time costs a pass over the model.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gossip import kernel
from gossip.errors import ConfigError
from gossip.kernel.squares import Floats, squares

AddLesson = Callable[[Floats, Floats, float, float], tuple[float, float]]  # The type of add_lesson.

BLOCK_ELEMENTS = 32_768  # Elements of one pass in numpy: arrays of 128 KiB stay in cache.
MAX_INTERVALS = 64.0  # Largest number of intervals since its last mix that a partner may state.
MAX_STEP_SHARE = 1 / 256  # Longest correction of one step, as a share of the weights' norm.
LEAK = 0.1  # Share of a pull that each exchange takes away: otherwise pushes in one direction would add up.
# Additions of the pull in an interval, each a pass over the model. A single one leaves the model off after it: with
# 32 nodes, Dirichlet 0.1 and intervals of 32 steps it costs 1.8 points of accuracy. Four gain nothing over two.
PARTS_PER_INTERVAL = 2
# A pull of which noise leaves less than this share is not applied, since each time costs a pass over the model. On IID
# data of the digits most shares are below it, on Dirichlet 0.1 one in ten.
MIN_APPLIED_SHARE = 0.1
# The kappa below which disagreement contracts under random pairs of weight 1/2 that do not fail (docs/algorithms.md).
CORRECTION_LIMIT = 2 / 3


def check_correction(kappa: float) -> None:
    """Raise :class:`ConfigError` unless ``0 <= kappa < 2/3``."""
    if not 0.0 <= kappa < CORRECTION_LIMIT:
        raise ConfigError(
            f"correction is {kappa:g} and must be at least 0 and below {CORRECTION_LIMIT:.2f}: from there on it drives "
            "nodes apart. 0.2 is the default, and 0 turns it off."
        )


def steps_between_parts(interval_steps: int) -> int:
    """Return the number of local steps between two additions of the pull, for an interval of that many steps."""
    return max(1, interval_steps // PARTS_PER_INTERVAL)


def rate_ratio(current: float, learned: float) -> float:
    """Return the factor for a pull that was learned at the rate ``learned``, at the learning rate ``current``.

    It is 1 if a rate is unknown (NaN) or infinite, or ``learned`` is 0.
    """
    are_known = 0.0 < learned < math.inf and 0.0 <= current < math.inf
    return current / learned if are_known else 1.0


def fresh_zeros(elements: int) -> Floats:
    """Return zeros, which cost nothing until the first write."""
    return np.zeros(elements, np.float32)


class Lesson(NamedTuple):
    """What a finished exchange says to the correction, beside the difference and the weight of the pair."""

    credit: float  # The result of :func:`credit` for the exchange.
    own_sq: float  # ``|Q(s)|^2``, which bounds the correction.
    interval_steps: int = 0  # Local steps in an interval from now on; 0 keeps the number.


class Correction:
    """The correction of one node.

    Attributes:
        pull: The correction of one interval of local steps, float32 (elements,), 0 after ``parameters``; None before
            the first exchange.
        rate: The current learning rate; NaN if unknown.
        version: The number of changes of ``pull``, so that a copy of it on a device can be seen to be old.
        applied_share: The share of ``pull`` that is applied, since the rest may be noise.
        zeros: Allocates ``pull``.
    """

    def __init__(self, size: int, parameters: int, kappa: float, every: int) -> None:
        """Make a correction that has learned nothing.

        Args:
            size: Elements of a vector that exchanges carry.
            parameters: The first of them, which are trained. Buffers after them are averaged and never corrected.
            kappa: The share of a mix's displacement that the correction takes up.
            every: Local steps in an interval.
        """
        self.size, self.parameters, self.kappa, self.interval_steps = size, parameters, kappa, every
        self.pull: Floats | None = None
        self.zeros: Callable[[int], Floats] = fresh_zeros
        self.rate = self._learned_rate = math.nan  # The second is the rate at which ``pull`` was learned.
        self.version = 0
        self.applied_share = self._noise_sq = 0.0  # The second is the square of a pull without a common direction.

    def learn(
        self, difference: Floats, weight: float, lesson: Lesson, add: AddLesson | None = None
    ) -> bool:  # fmt: skip
        """Learn from a finished exchange. Return False if it teaches nothing, so that ``add`` was not called.

        Args:
            difference: ``Q(p) - Q(s)``, float32 (at least ``parameters``,). It is not changed.
            weight: The weight of the pair.
            lesson: What else the exchange says.
            add: Does the work of :func:`add_lesson`, and more in the same pass.
        """
        credit, own_sq, every = lesson
        share = self.kappa * weight * credit
        if share == 0.0:
            return False
        scale = rate_ratio(self.rate, self._learned_rate) * (1.0 - LEAK * credit)
        if every and every != self.interval_steps:
            scale *= every / self.interval_steps  # The pull of an interval is proportional to its length.
            self.interval_steps = every
        if self.pull is None:
            self.pull = self.zeros(self.size)
        if 0.0 < self.rate < math.inf:
            self._learned_rate = self.rate
        pull, difference = self.pull[: self.parameters], difference[: self.parameters]
        difference_sq, pull_sq = (add or add_lesson)(difference, pull, scale, share)
        noise_sq = self._noise_sq * scale * scale + share * share * difference_sq
        self.applied_share, self._noise_sq = limit_pull(pull, pull_sq, own_sq, self.interval_steps, noise_sq)
        self.version += 1
        return True

    def step_factor(self, steps: int) -> float:
        """Return the factor of ``pull`` to add after ``steps`` local steps since the last addition."""
        return (
            self.applied_share
            * min(steps, self.interval_steps)
            / self.interval_steps
            * rate_ratio(self.rate, self._learned_rate)
        )

    def reset(self) -> None:
        """Forget everything: the weights were replaced."""
        if self.pull is not None:
            self.pull.fill(0.0)
            self.version += 1
        self._learned_rate = math.nan
        self.applied_share = self._noise_sq = 0.0


def credit(ours: ArrayLike, theirs: ArrayLike, taken: ArrayLike = 1.0) -> NDArray[np.float64]:
    """Return how much exchanges count: ``r^2 min(1, t_i, t_j) / n`` with ``n = max(1, (t_i + t_j) / 2)``, from 0 to 1.

    A node that has trained less than an interval since its last mix shows less of its pull. A node with many mixes
    within an interval learns from all of them no more than from one. If either side has not trained, there is nothing
    to learn.

    Args:
        ours: The intervals t that this side has trained since its last mix.
        theirs: The partner's statement of its own. NaN counts as 1, and values are clipped at ``MAX_INTERVALS``. Both
            sides of an exchange get the same result.
        taken: The share r of the difference that a filter left, from 0 to 1. It is squared, since what an attacker's
            vectors push for would add up in the pull.
    """
    own, partner = clipped_intervals(ours), clipped_intervals(theirs)
    mean = np.maximum(1.0, (own + partner) / 2)
    credits: NDArray[np.float64] = np.square(taken) * np.minimum(np.minimum(own, partner), 1.0) / mean
    return credits


def clipped_intervals(intervals: ArrayLike) -> NDArray[np.float64]:
    """Return stated numbers of intervals clipped to [0, ``MAX_INTERVALS``], and 1 for NaN."""
    stated = np.asarray(intervals, np.float64)
    return np.where(np.isnan(stated), 1.0, np.clip(stated, 0.0, MAX_INTERVALS))


def limit_pull(
    pull: Floats, pull_sq: float, own_sq: float, interval_steps: int, noise_sq: float
) -> tuple[float, float]:  # fmt: skip
    """Shorten a pull to its limit in place, and return its applied share and the noise that it holds now.

    Args:
        pull: The pull, float32 (parameters,).
        pull_sq: Its squared norm.
        own_sq: ``|Q(s)|^2``, which bounds it.
        interval_steps: Local steps in an interval.
        noise_sq: The square of the pull that these lessons leave if they have no common direction.
    """
    factor = limit_factor(pull_sq, own_sq, interval_steps)
    if factor == 0.0:
        pull.fill(0.0)  # Multiplying infinities would leave NaN.
    elif factor < 1.0:
        pull *= np.float32(factor)
    left = factor * factor
    return signal_share(pull_sq * left, noise_sq * left), noise_sq * left if factor else 0.0


def limit_factor(pull_sq: float, own_sq: float, interval_steps: int) -> float:
    """Return the factor, at most 1, that brings a pull of this squared norm within its limit; 0 after an overflow."""
    if not math.isfinite(pull_sq):
        return 0.0
    max_norm = MAX_STEP_SHARE * interval_steps * math.sqrt(max(own_sq, 0.0))
    return 1.0 if pull_sq <= max_norm * max_norm else max_norm / math.sqrt(pull_sq)


def signal_share(pull_sq: float, noise_sq: float) -> float:
    """Return the share of a pull that is applied: ``1 - noise_sq / pull_sq``, or 0 below ``MIN_APPLIED_SHARE``.

    The squares of lessons without a common direction add up, as those of noise do, and the pull has the square
    ``noise_sq``. (The positive part of James and Stein's estimator, 1961.)
    """
    share = 1.0 - noise_sq / pull_sq if 0.0 < pull_sq < math.inf else 0.0
    return share if share >= MIN_APPLIED_SHARE else 0.0


def add_lesson(difference: Floats, pull: Floats, scale: float, share: float) -> tuple[float, float]:
    """Set ``pull <- scale pull + share difference``; return the squared norms of ``difference`` and the new pull."""
    if kernel.passes is not None:
        return kernel.passes.mix(pull.size, difference, None, None, None, pull, 0.0, 0.0, 0.0, scale, share)
    for start in range(0, pull.size, BLOCK_ELEMENTS):  # In blocks that stay in cache.
        block = slice(start, start + BLOCK_ELEMENTS)
        pull[block] *= np.float32(scale)
        pull[block] += np.float32(share) * difference[block]
    return squares(difference), squares(pull)
