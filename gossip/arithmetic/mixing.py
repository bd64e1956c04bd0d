"""How two vectors become closer: the weight of a pair, their difference, and the outer momentum step.

Float arithmetic keeps the mean here: both sides compute ``w (Q(p) - Q(s))`` from the same two quantised vectors and the
same ``w``; IEEE subtraction and rounding are symmetric, so the two results are exact negatives (see codecs.py), unless
a filter has one side cut off more than the other.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gossip import kernel
from gossip.arithmetic.correction import Correction
from gossip.errors import ConfigError
from gossip.kernel.squares import PIECE, summed

__all__ = [
    "OuterStep",
    "check_outer",
    "difference",
    "finite",
    "outer_step",
    "outer_step_beside",
    "pair_cap",
    "pair_weight",
    "push_mass",
    "stability_limit",
]

Floats = NDArray[np.float32]

BLOCK_ELEMENTS = 32_768
"""Of the outer step in numpy: five arrays of 128 KiB stay in cache, one pass over memory and not eight."""


def pair_weight(gap: float, exponent: float, cap: float = 0.5) -> float:
    """How much of the difference each side takes: ``cap * (1 + floor(|gap|)) ** -exponent``.

    ``gap`` is the difference of the two versions (mixing rounds behind the weights); by its absolute value both sides
    compute one weight and the exchange stays symmetric. ``cap`` 1/2 and gap 0 is the pair's mean. A gap that is not a
    number weighs nothing. (Staleness weight of asynchronous federated optimisation: Xie, Koyejo and Gupta, 2019.)
    """
    gap = abs(gap)
    if gap < 1.0:
        return cap  # as nearly always
    return 0.0 if math.isnan(gap) else cap * (1.0 + float(np.floor(gap))) ** -exponent


def push_mass(mass: float, pushes: int, conserves: bool) -> tuple[float, float]:
    """(what one of ``pushes`` partners is given, what stays) of a vector with this mass.

    Push-sum (Kempe, Dobra and Gehrke, FOCS 2003; SGP: Assran et al., ICML 2019) gives each of the partners and itself
    equal shares of its mass, and the receiver takes ``x <- (M x + m p) / (M + m)``, ``M <- M + m``. With ``x`` the
    de-biased vector itself, giving away leaves it as it is, and the sums of M and of M x over the swarm, what is in
    flight included, never change. Row-stochastic mixing (Epidemic Learning: de Vos et al., NeurIPS 2023) is the same
    with nothing conserved: every vector counts as one, and so does one's own at the beginning of each round, so that k
    vectors received leave the mean of k + 1.
    """
    if not conserves:
        return 1.0, 1.0
    given = mass / (pushes + 1)
    return given, mass - given


def difference(
    theirs: Floats, mine_quantised: Floats, out: Floats, before: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """``out = theirs - mine_quantised``; ``out`` may be ``theirs``. Returns the sums of squares of ``out`` and of
    ``mine_quantised``, added to those ``before``: what is cut at multiples of 4,096 elements has the same in the end.

    The first is Inf or NaN when anything in either was not finite, so one pass is the finite check as well. From 2e18
    on it overflows to infinity: such a vector is refused, as it would be by its norm.
    """
    if kernel.passes is not None:
        return kernel.passes.difference(out.size, theirs, mine_quantised, out, *before)
    apart_sq, own_sq = before
    for first in range(0, out.size, PIECE):  # summed while it is in cache
        piece = slice(first, first + PIECE)
        with np.errstate(all="ignore"):  # what it would warn of is what the result tells
            np.subtract(theirs[piece], mine_quantised[piece], out=out[piece])
        apart_sq, own_sq = summed(out[piece], apart_sq), summed(mine_quantised[piece], own_sq)
    return apart_sq, own_sq


def finite(values: Floats) -> bool:
    """Whether no element is NaN or infinite. A sum of squares sees it at the memory's rate; where that overflows, each
    is looked at."""
    with np.errstate(all="ignore"):
        return math.isfinite(values.dot(values)) or bool(np.isfinite(values).all())


def stability_limit(alpha: float, group: int = 2) -> float:
    """The outer rate below which disagreement contracts under random pairs, ``2 (1 - alpha^2)``, or random groups.

    In a large swarm a node's deviation ``f`` from the mean, the mean ``h`` of the other ``group - 1`` (independent of
    it, with variance ``E[f^2] / (group - 1)``) and its momentum ``m`` obey ``m' = alpha m + beta a (h - f)`` and
    ``f' = f + m'``, with ``a = (group - 1) / group``. Setting the second moments ``E[f^2]``, ``E[f m]`` and ``E[m^2]``
    equal before and after gives ``2 (1 - alpha^2) / (1 + alpha - 2 alpha a)``: for pairs as above, and for groups of
    everybody the heavy ball's own ``2 (1 + alpha)``. With unit noise in every node's parameters at each round pairs
    come to a variance of ``beta (1 + alpha) / (limit - beta)``: 1.3125 at alpha 0.5, beta 0.7.
    """
    share = (group - 1) / group
    return 2.0 * (1.0 - alpha * alpha) / (1.0 + alpha - 2.0 * alpha * share)


def check_outer(alpha: float, beta: float, group: int = 2) -> None:
    """Raise :class:`ConfigError`, naming the numbers that would do, unless ``0 <= alpha < 1``, ``0 < beta < limit``."""
    if not 0.0 <= alpha < 1.0:
        raise ConfigError(f"outer_momentum is {alpha:g} and must be at least 0 and below 1: 0 is the plain mean.")
    limit = stability_limit(alpha, group)
    if 0.0 < beta < limit:
        return
    # Rounded down, so that the numbers named do work; a hundredth of the limit is kept as distance from it.
    advice = f"use an outer_rate below {_down(0.99 * limit)}"
    if group != 2:
        raise ConfigError(
            f"outer_rate {beta:g} with outer_momentum {alpha:g} drives groups of {group} apart, because it is not "
            f"between 0 and {limit:.3g}: {advice}, or larger groups."
        )
    advice += f" (least disagreement near {limit / 2:.3g})"
    if 0.0 < beta < 1.98:
        advice += f" or an outer_momentum of at most {_down(math.sqrt(1.0 - beta / 1.98))}"
    raise ConfigError(
        f"outer_rate {beta:g} with outer_momentum {alpha:g} drives the nodes apart, because it is not between 0 and "
        f"2 (1 - outer_momentum^2): {advice}."
    )


class OuterStep:
    """The outer momentum step of one node: what a finished exchange adds to its live parameters.

    With ``phi`` the parameters after the last mix and ``mean = s + w d`` over the pair (NoLoCo, Kolehmainen et al.
    2025, with its two rates equal, so that one vector is on the wire and not two):

        m <- alpha m + beta (mean - phi);   phi <- phi + m;   theta <- phi

    on the first ``parameters`` elements; whatever lies behind them (buffers) is averaged plainly.
    ``alpha = 0, beta = 1`` is the plain pair mean everywhere, and then nothing is kept. Not safe to call from two
    threads at once: one exchange is applied after another. ``group``: how many vectors a mix averages. ``correction``:
    what else the node learns from its mixes, where it does.
    """

    __slots__ = ("_momentum", "_phi", "alpha", "beta", "correction", "parameters")

    def __init__(self, parameters: int, alpha: float, beta: float, group: int = 2) -> None:
        check_outer(alpha, beta, group)
        self.parameters = parameters
        self.alpha = alpha
        self.beta = beta
        self._phi: Floats | None = None  # (parameters,), allocated at the first reset, or taken over
        self._momentum: Floats | None = None  # (parameters,)
        self.correction: Correction | None = None

    @property
    def plain(self) -> bool:
        """No momentum: a mix is the pair mean and there is no state."""
        return self.alpha == 0.0 and self.beta == 1.0

    @property
    def begun(self) -> bool:
        """Whether it is known from which weights mixing starts, as far as anybody asks."""
        return self.plain or self._phi is not None

    def begin(self, vector: Floats) -> None:
        """As the first :meth:`reset`, without a copy: the first ``parameters`` elements are the outer step's own from
        now on, wherever they lie."""
        if self.plain:
            return
        self._phi = vector[: self.parameters]
        self._momentum = np.zeros(self.parameters, np.float32)  # which costs nothing until something is written there

    def owns(self, vector: Floats) -> bool:
        """Whether :meth:`begin` took elements of this one."""
        return self._phi is not None and np.may_share_memory(self._phi, vector)

    def reset(self, vector: Floats) -> None:
        """Mixing starts from ``vector`` (at least ``parameters`` elements): at the start, after joining or settling."""
        if self.plain:
            return
        if self._phi is None or self._momentum is None:
            self._phi = np.empty(self.parameters, np.float32)
            self._momentum = np.empty(self.parameters, np.float32)
        self._phi[:] = vector[: self.parameters]
        self._momentum.fill(0.0)

    def replace(self, vector: Floats) -> None:
        """Mixing starts from other weights, of which no correction has been learned: as :meth:`reset` beside that."""
        if self.correction is not None:
            self.correction.reset()
        self.reset(vector)

    def rest(self) -> None:
        """The momentum is forgotten, as nothing is trained any more: the next mix takes the plain mean of what has been
        mixed before."""
        if self._momentum is not None:
            self._momentum.fill(0.0)

    def shift(
        self, snapshot: Floats, difference: Floats, weight: float, positions: NDArray[np.int64] | None = None,
        late: bool = False, plain: bool = False, since: Floats | None = None,
    ) -> Floats:  # fmt: skip
        """What to ADD to the live vector, float32, for the exchange that gave ``difference = Q(p) - Q(s)``.

        ``snapshot`` is ``s`` as it was taken; with ``positions`` both are of these elements alone, and so is the
        result, which is ``difference`` itself, overwritten. Moves the state: call once for an exchange that both sides
        committed, and never for one that failed.

        ``late``: a newer snapshot was mixed, and the local progress that this one holds is counted. The plain
        difference then, by which ``phi`` moves as the parameters do, so that it is nobody's progress.

        ``plain``: ``phi`` moves to the mean, and the momentum rests.

        ``since``: the sum of what other mixes have added to the live vector after the snapshot was taken, of the same
        elements. ``phi`` holds that already, so that ``snapshot + since - phi`` is the local progress that nobody has
        counted.
        """
        if self.plain:
            difference *= np.float32(weight)
            return difference
        if late:
            return self.shift_late(difference, weight, positions)
        if since is not None:
            return self.shift_beside(snapshot, difference, weight, positions, plain, since)
        if plain:
            return self.shift_plainly(snapshot, difference, weight, positions)
        if positions is not None:
            return self.shift_at(snapshot, difference, weight, positions)
        phi, momentum = self._phi, self._momentum
        assert phi is not None, "reset() before the first mix"
        assert momentum is not None
        difference[self.parameters :] *= np.float32(weight)
        own = slice(self.parameters)
        outer_step(difference[own], snapshot[own], phi, momentum, weight, self.alpha, self.beta)
        return difference

    def shift_late(self, difference: Floats, weight: float, positions: NDArray[np.int64] | None) -> Floats:
        phi = self._phi
        assert phi is not None, "reset() before the first mix"
        difference *= np.float32(weight)
        if positions is None:
            phi += difference[: self.parameters]
        else:
            own = int(np.searchsorted(positions, self.parameters))
            phi[positions[:own]] += difference[:own]
        return difference

    def shift_beside(
        self, snapshot: Floats, difference: Floats, weight: float, positions: NDArray[np.int64] | None, plain: bool,
        since: Floats,
    ) -> Floats:  # fmt: skip
        phi, momentum = self._phi, self._momentum
        assert phi is not None, "reset() before the first mix"
        assert momentum is not None
        own = slice(self.parameters if positions is None else int(np.searchsorted(positions, self.parameters)))
        difference[own.stop :] *= np.float32(weight)
        d, s, lacks = difference[own], snapshot[own], since[own]
        if plain:
            d *= np.float32(weight)
            phi[own if positions is None else positions[own]] = s + lacks + d
        elif positions is None:
            outer_step_beside(d, s, lacks, phi, momentum, weight, self.alpha, self.beta)
        else:
            places = positions[own]
            f, m = phi[places], momentum[places]
            outer_step_beside(d, s, lacks, f, m, weight, self.alpha, self.beta)
            phi[places], momentum[places] = f, m
        return difference

    def shift_plainly(
        self, snapshot: Floats, difference: Floats, weight: float, positions: NDArray[np.int64] | None
    ) -> Floats:
        phi = self._phi
        assert phi is not None, "reset() before the first mix"
        difference *= np.float32(weight)
        if positions is None:
            np.add(snapshot[: self.parameters], difference[: self.parameters], out=phi)
        else:
            own = int(np.searchsorted(positions, self.parameters))
            phi[positions[:own]] = snapshot[:own] + difference[:own]
        return difference

    def shift_at(self, snapshot: Floats, difference: Floats, weight: float, positions: NDArray[np.int64]) -> Floats:
        """The same for some of the elements; the momentum of the others rests."""
        phi, momentum = self._phi, self._momentum
        assert phi is not None, "reset() before the first mix"
        assert momentum is not None
        difference *= np.float32(weight)
        own = int(np.searchsorted(positions, self.parameters))  # behind them are buffers, averaged plainly
        places = positions[:own]
        f = phi[places]
        m = np.float32(self.alpha) * momentum[places]
        m += np.float32(self.beta) * (snapshot[:own] + difference[:own] - f)
        f += m
        phi[places], momentum[places] = f, m
        np.subtract(f, snapshot[:own], out=difference[:own])
        return difference


def outer_step(
    difference: Floats, snapshot: Floats, phi: Floats, momentum: Floats, weight: float, alpha: float, beta: float
) -> None:
    """The outer momentum step of one node, or of many as rows: ``phi`` and ``momentum`` move towards ``snapshot +
    weight difference``, and ``difference`` becomes what is to be added to the live parameters. All are contiguous."""
    if kernel.passes is not None:
        kernel.passes.outer_step(difference.size, difference, snapshot, phi, momentum, weight, alpha, beta)
        return
    w, a, b = np.float32(weight), np.float32(alpha), np.float32(beta)
    length = BLOCK_ELEMENTS if difference.ndim == 1 else max(len(difference), 1)
    for start in range(0, len(difference), length):
        block = slice(start, start + length)
        d, s, f, m = difference[block], snapshot[block], phi[block], momentum[block]
        if weight != 1.0:
            d *= w
        d += s  # the mean
        d -= f
        d *= b
        m *= a
        m += d
        f += m
        np.subtract(f, s, out=d)


def outer_step_beside(
    difference: Floats, snapshot: Floats, since: Floats, phi: Floats, momentum: Floats, weight: float, alpha: float,
    beta: float,
) -> None:  # fmt: skip
    """The outer momentum step of one node for a mix beside others, whose sum is ``since``.

    The local progress ``snapshot + since - phi`` takes the step, and ``weight difference`` is added plainly: with a
    momentum of their own, several differences from one disagreement would take the node beyond the mean. All are
    contiguous, and ``difference`` becomes what is to be added to the live parameters.
    """
    w, a, b = np.float32(weight), np.float32(alpha), np.float32(beta)
    for start in range(0, len(difference), BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        d, f, m = difference[block], phi[block], momentum[block]
        progress = snapshot[block] + since[block]
        progress -= f
        d *= w
        m *= a
        m += b * progress
        f += m
        f += d
        d += m
        d -= progress


def pair_cap(moving: int) -> float:
    """The largest weight of a pair beside others, ``moving`` of them in all: 1/2 for one exchange, 1/3 for the second
    at the same time, 1/4 for the third. What concurrent differences take from one vector stays below about one, so that
    nobody overshoots."""
    return 1 / (1 + max(moving, 1))


def _down(value: float) -> str:
    """Rounded down to three decimals, so that the number said is on the safe side."""
    return f"{math.floor(value * 1000) / 1000:g}"
