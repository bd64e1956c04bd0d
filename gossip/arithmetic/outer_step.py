"""The outer momentum step of a node, the momentum that it measures, and the rates that keep a swarm together.

:mod:`gossip.arithmetic.mixing` names the vectors: ``s`` is a node's snapshot and ``w`` the weight of the pair.
"""

import math

import numpy as np
from numpy.typing import NDArray

from gossip import kernel
from gossip.arithmetic.correction import AddLesson, Correction, Lesson, add_lesson, fresh_zeros
from gossip.errors import ConfigError
from gossip.kernel.squares import Floats

STABLE_SHARE = 0.99  # Rates that an error advises stay a hundredth of the stable limit below it.
# Elements of one pass of the outer step in numpy: five arrays of 128 KiB stay in cache, and one pass over memory
# replaces eight.
BLOCK_ELEMENTS = 32_768
# Of a measured momentum. It rises while successive outer steps point less than a fifth alike: noise alone leaves -1/4.
ALIKE = 0.2
MOMENTUM_GAIN = 0.05
MAX_MOMENTUM = 0.5
SAMPLED = 16_384  # Elements, evenly spread, of which steps are compared.


def stability_limit(alpha: float, group: int = 2) -> float:
    """Return the outer rate ``beta`` below which disagreement contracts under random pairs or groups.

    ``alpha`` is the outer momentum, and a group has ``group`` members. For pairs the limit is ``2 (1 - alpha^2)``. In a
    large swarm a node has a deviation ``f`` from the mean and a momentum ``m``. The mean ``h`` of the other ``group -
    1`` deviations is independent of it, with variance ``E[f^2] / (group - 1)``. They obey ``m' = alpha m + beta a (h -
    f)`` and ``f' = f + m'``, with ``a = (group - 1) / group``.

    Setting the second moments ``E[f^2]``, ``E[f m]`` and ``E[m^2]`` equal before and after gives ``2 (1 - alpha^2) / (1
    + alpha - 2 alpha a)``. For pairs this is the value above, and for groups of all members the heavy ball's own ``2 (1
    + alpha)``. With unit noise in every node's parameters at each round, pairs reach a variance of ``beta (1 + alpha) /
    (limit - beta)``: 1.3125 at alpha 0.5, beta 0.7.
    """
    share = (group - 1) / group
    return 2.0 * (1.0 - alpha * alpha) / (1.0 + alpha - 2.0 * alpha * share)


def measured_momentum(alpha: float, before: Floats, after: Floats) -> float:
    """Return the outer momentum to take next, from two successive outer steps of one node, or from samples of them.

    With noise alone, plain pair means leave successive steps a correlation of -1/4: a node moves back and forth, and
    momentum averages that out. Steps that point alike already, as those of an inner optimizer with a memory of its own,
    gain nothing from it, and overshoot. So ``alpha`` rises by ``MOMENTUM_GAIN (ALIKE - correlation)``, between 0 and
    :data:`MAX_MOMENTUM`.
    """
    with np.errstate(all="ignore"):
        squares = float(before.dot(before)) * float(after.dot(after))
        product = float(before.dot(after))
    if not (0.0 < squares < math.inf and math.isfinite(product)):
        return alpha
    return min(max(alpha + MOMENTUM_GAIN * (ALIKE - product / math.sqrt(squares)), 0.0), MAX_MOMENTUM)


def closest_rate(alpha: float) -> float:
    """Return the outer rate with which pairs stay closest, half of the stable limit: ``1 - alpha^2``."""
    return 1.0 - alpha * alpha


def sample_of(momentum: Floats) -> Floats:
    """Return evenly spread elements of a momentum, at most :data:`SAMPLED`, as a view."""
    return momentum[:: -(-momentum.size // SAMPLED) or 1]


def check_outer(alpha: float, beta: float, group: int = 2) -> None:
    """Raise :class:`ConfigError`, naming numbers that work, unless ``0 <= alpha < 1`` and ``0 < beta < limit``."""
    if not 0.0 <= alpha < 1.0:
        raise ConfigError(f"outer_momentum is {alpha:g} and must be at least 0 and below 1: 0 is the plain mean.")
    limit = stability_limit(alpha, group)
    if 0.0 < beta < limit:
        return
    advice = f"use an outer_rate below {rounded_down(STABLE_SHARE * limit)}"
    if group != 2:
        raise ConfigError(
            f"outer_rate {beta:g} with outer_momentum {alpha:g} drives groups of {group} apart, because it is not "
            f"between 0 and {limit:.3g}: {advice}, or larger groups."
        )
    advice += f" (least disagreement near {limit / 2:.3g})"
    largest_beta = STABLE_SHARE * stability_limit(0.0)  # Without momentum.
    if 0.0 < beta < largest_beta:
        advice += f" or an outer_momentum of at most {rounded_down(math.sqrt(1.0 - beta / largest_beta))}"
    raise ConfigError(
        f"outer_rate {beta:g} with outer_momentum {alpha:g} drives the nodes apart, because it is not between 0 and "
        f"2 (1 - outer_momentum^2): {advice}."
    )


class OuterStep:
    """The outer momentum step of one node: it computes the shift that a finished exchange adds to live parameters.

    This is NoLoCo's step (Kolehmainen et al. 2025), with its two rates equal, so that only one vector is sent. Let
    ``phi`` be the parameters after the last mix and ``mean = s + w d`` the pair's mean:

        m <- alpha m + beta (mean - phi);   phi <- phi + m;   theta <- phi

    ``m`` is the momentum and ``theta`` are the live parameters, without the steps that they take meanwhile. This
    applies to the first ``parameters`` elements; the rest (buffers) is averaged plainly. ``alpha = 0, beta = 1`` is the
    plain pair mean everywhere, without state. Not thread-safe: exchanges are applied one after another.

    Args:
        parameters: The number of leading elements with momentum.
        alpha: The momentum.
        beta: The outer rate.
        group: The number of vectors that a mix averages.
        measures: The momentum follows the steps from ``alpha`` on (:func:`measured_momentum`), and the rate the
            momentum (:func:`closest_rate`).
    """

    def __init__(self, parameters: int, alpha: float, beta: float, group: int = 2, measures: bool = False) -> None:
        check_outer(alpha, beta, group)
        self.parameters = parameters
        self.alpha = alpha
        self.beta = beta
        self.measures = measures
        self._phi: Floats | None = None  # (Parameters,), allocated at the first reset, or taken over.
        self._momentum: Floats | None = None  # (Parameters,).
        self.correction: Correction | None = None

    @property
    def is_plain(self) -> bool:
        """Return True without momentum: a mix is the pair mean, and there is no state."""
        return self.alpha == 0.0 and self.beta == 1.0 and not self.measures

    @property
    def has_weights(self) -> bool:
        """Return True if ``phi`` is set, or not needed because a mix is the plain mean."""
        return self.is_plain or self._phi is not None

    def state(self) -> tuple[Floats, Floats]:
        """Return ``phi`` and the momentum, which exist from the first :meth:`reset` or :meth:`take_over` on."""
        assert self._phi is not None, "reset() before the first mix"
        assert self._momentum is not None
        return self._phi, self._momentum

    def take_over(self, vector: Floats) -> None:
        """Start mixing from ``vector`` without a copy: its first ``parameters`` elements become ``phi``."""
        if self.is_plain:  # Without state.
            return
        self._phi = vector[: self.parameters]
        self._momentum = fresh_zeros(self.parameters)

    def has_taken_over(self, vector: Floats) -> bool:
        """Return True if :meth:`take_over` took elements of this vector."""
        return self._phi is not None and np.may_share_memory(self._phi, vector)

    def reset(self, vector: Floats) -> None:
        """Start mixing from a copy of ``vector`` (at least ``parameters`` elements), without momentum.

        Called at the start, and after the weights were replaced by a run's or by the mean at the end of training.
        """
        if self.is_plain:
            return
        if self._phi is None or self._momentum is None:
            self._phi = fresh_zeros(self.parameters)
            self._momentum = fresh_zeros(self.parameters)
        self._phi[:] = vector[: self.parameters]
        self._momentum.fill(0.0)

    def replace(self, vector: Floats) -> None:
        """Start mixing from other weights: :meth:`reset`, and forget the correction and what was measured."""
        if self.correction is not None:
            self.correction.reset()
        if self.measures:
            self.alpha, self.beta = 0.0, 1.0
        self.reset(vector)

    def forget_momentum(self) -> None:
        """Set the momentum to 0 once training has ended: the next mix takes the plain mean."""
        if self._momentum is not None:
            self._momentum.fill(0.0)

    def shift(
        self, snapshot: Floats, difference: Floats, weight: float, positions: NDArray[np.int64] | None = None,
        is_late: bool = False, plain: bool = False, added_since: Floats | None = None, lesson: Lesson | None = None,
    ) -> Floats:  # fmt: skip
        """Return the float32 shift to ADD to the live vector for an exchange with ``difference = Q(p) - Q(s)``.

        It changes the state: call it once for an exchange that both sides committed, and never for a failed one.

        Args:
            snapshot: ``s`` as it was taken.
            difference: ``Q(p) - Q(s)``. It is overwritten and returned.
            weight: The pair's weight.
            positions: If given, the positions in the vector of the elements of ``snapshot`` and ``difference``.
            is_late: A newer snapshot was mixed, so this one's local progress ``snapshot - phi``, by local steps since
                the last mix, is already counted. The shift is then the plain difference. ``phi`` moves by it as the
                parameters do, so that it counts as no progress.
            plain: ``phi`` moves to the mean, and the momentum is not used.
            added_since: The sum of other mixes' shifts after the snapshot, of the same elements. ``phi`` includes it:
                ``snapshot + added_since - phi`` is the local progress that is not counted yet.
            lesson: What the exchange teaches the correction; None if it teaches nothing, as for some of the elements.
        """
        takes_step = not (self.is_plain or is_late or plain or added_since is not None or positions is not None)
        if lesson is not None and not takes_step:
            self.learn(difference, weight, lesson)
        if self.is_plain:
            difference[: self.places(positions)[0]] *= np.float32(weight)
            return difference
        if is_late:
            return self.shift_late(difference, weight, positions)
        if added_since is not None:
            return self.shift_overlapping(snapshot, difference, weight, positions, plain, added_since)
        if plain:
            return self.shift_plainly(snapshot, difference, weight, positions)
        if positions is not None:
            return self.shift_at(snapshot, difference, weight, positions)
        count, before = self.parameters, self.sample()
        vectors = snapshot[:count], *self.state()
        factors = weight, self.alpha, self.beta

        def add(difference: Floats, pull: Floats, scale: float, share: float) -> tuple[float, float]:
            return learn_and_step(difference, pull, scale, share, *vectors, factors)

        if lesson is None or not self.learn(difference, weight, lesson, add):
            outer_step(difference[:count], *vectors, *factors)
        self.measure(before)
        return difference

    def learn(self, difference: Floats, weight: float, lesson: Lesson, add: AddLesson | None = None) -> bool:
        """Let the correction learn, if there is one: :meth:`gossip.arithmetic.correction.Correction.learn`."""
        return self.correction is not None and self.correction.learn(difference, weight, lesson, add)

    def sample(self) -> Floats | None:
        """Return a copy of some of the momentum, which :meth:`measure` compares; None for a fixed momentum."""
        return sample_of(self.state()[1]).copy() if self.measures else None

    def measure(self, before: Floats | None) -> None:
        """Set the momentum of the next step, from a sample before the last one."""
        if before is not None:
            self.alpha = measured_momentum(self.alpha, before, sample_of(self.state()[1]))
            self.beta = closest_rate(self.alpha)

    def places(self, positions: NDArray[np.int64] | None) -> tuple[int, slice | NDArray[np.int64]]:
        """Return how many of these ascending positions are parameters, and which; all of them without positions.

        Those of buffers come after them.
        """
        if positions is None:
            return self.parameters, slice(None)
        count = int(np.searchsorted(positions, self.parameters))
        return count, positions[:count]

    def shift_late(self, difference: Floats, weight: float, positions: NDArray[np.int64] | None) -> Floats:
        """Add the plain difference to ``phi`` too, so that it counts as no progress."""
        phi, _ = self.state()
        count, places = self.places(positions)
        difference[:count] *= np.float32(weight)
        phi[places] += difference[:count]
        return difference

    def shift_overlapping(
        self, snapshot: Floats, difference: Floats, weight: float, positions: NDArray[np.int64] | None, plain: bool,
        added_since: Floats,
    ) -> Floats:  # fmt: skip
        """Shift for a mix that overlaps with others, which have added ``added_since`` after the snapshot."""
        phi, momentum = self.state()
        count, places = self.places(positions)
        of_parameters, snapshot, added_since = difference[:count], snapshot[:count], added_since[:count]
        if plain:
            of_parameters *= np.float32(weight)
            phi[places] = snapshot + added_since + of_parameters
            return difference
        before = self.sample()
        phi_there, momentum_there = phi[places], momentum[places]
        outer_step_overlapping(
            of_parameters, snapshot, added_since, phi_there, momentum_there, weight, self.alpha, self.beta
        )
        if positions is not None:  # Indexing by positions has copied the elements.
            phi[places], momentum[places] = phi_there, momentum_there
        self.measure(before)
        return difference

    def shift_plainly(
        self, snapshot: Floats, difference: Floats, weight: float, positions: NDArray[np.int64] | None
    ) -> Floats:
        """Move ``phi`` to the mean without momentum."""
        phi, _ = self.state()
        count, places = self.places(positions)
        phi[places] = snapshot[:count]
        return self.shift_late(difference, weight, positions)

    def shift_at(self, snapshot: Floats, difference: Floats, weight: float, positions: NDArray[np.int64]) -> Floats:
        """Take the outer step for some of the elements; the momentum of the others stays as it is."""
        phi, momentum = self.state()
        count, places = self.places(positions)
        difference[:count] *= np.float32(weight)
        new_phi = phi[places]  # A copy.
        new_momentum = np.float32(self.alpha) * momentum[places]
        new_momentum += np.float32(self.beta) * (snapshot[:count] + difference[:count] - new_phi)
        new_phi += new_momentum
        phi[places], momentum[places] = new_phi, new_momentum
        np.subtract(new_phi, snapshot[:count], out=difference[:count])
        return difference


def outer_step(
    difference: Floats, snapshot: Floats, phi: Floats, momentum: Floats, weight: float, alpha: float, beta: float
) -> None:
    """Apply the outer momentum step of one node, or of many as rows.

    ``phi`` and ``momentum`` move towards ``snapshot + weight difference``. ``difference`` becomes the shift to add
    to the live parameters. All arrays are contiguous.
    """
    learn_and_step(difference, None, 1.0, 0.0, snapshot, phi, momentum, (weight, alpha, beta))


def learn_and_step(
    difference: Floats, pull: Floats | None, scale: float, share: float, snapshot: Floats, phi: Floats,
    momentum: Floats, factors: tuple[float, float, float],
) -> tuple[float, float]:  # fmt: skip
    """Do :func:`gossip.arithmetic.correction.add_lesson` and then :func:`outer_step` in one pass over memory.

    ``factors`` are the last three arguments of ``outer_step``. Without a ``pull`` nothing is learned.
    """
    weight, alpha, beta = factors
    if kernel.passes is not None:
        return kernel.passes.mix(
            difference.size, difference, snapshot, phi, momentum, pull, weight, alpha, beta, scale, share
        )
    sums = (0.0, 0.0) if pull is None else add_lesson(difference, pull, scale, share)
    w, a, b = np.float32(weight), np.float32(alpha), np.float32(beta)
    length = BLOCK_ELEMENTS if difference.ndim == 1 else max(len(difference), 1)  # Rows of many nodes: one block.
    for start in range(0, len(difference), length):
        block = slice(start, start + length)
        d, s, f, m = difference[block], snapshot[block], phi[block], momentum[block]
        # d <- w d + s - f is the distance from phi (f) to the pair's mean; at the end d is the shift.
        if weight != 1.0:
            d *= w
        d += s
        d -= f
        d *= b
        m *= a
        m += d
        f += m
        np.subtract(f, s, out=d)
    return sums


def outer_step_overlapping(
    difference: Floats, snapshot: Floats, added_since: Floats, phi: Floats, momentum: Floats, weight: float,
    alpha: float, beta: float,
) -> None:  # fmt: skip
    """Apply the outer momentum step for a mix that overlaps with others, whose sum is ``added_since``.

    The local progress ``snapshot + added_since - phi`` takes the step, and ``weight difference`` is added plainly. If
    several differences from one disagreement had momentum, they would take the node beyond the mean. All arrays are
    contiguous. ``difference`` becomes the shift to add to the live parameters.
    """
    w, a, b = np.float32(weight), np.float32(alpha), np.float32(beta)
    for start in range(0, len(difference), BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        d, f, m = difference[block], phi[block], momentum[block]  # As in outer_step: f is phi.
        progress = snapshot[block] + added_since[block]
        progress -= f
        d *= w
        m *= a
        m += b * progress
        f += m
        f += d
        d += m
        d -= progress


def rounded_down(value: float) -> str:
    """Return the value rounded down to three decimals, so that the named number is safe."""
    return f"{math.floor(value * 1000) / 1000:g}"
