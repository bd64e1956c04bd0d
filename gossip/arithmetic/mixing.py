"""The arithmetic of a mix: the weight of a pair, and the difference of its vectors.

``s`` is a node's own vector (its snapshot), ``p`` the partner's, ``w`` the weight of the pair, and ``Q`` encodes and
decodes with the codec of the exchange. Both sides compute ``w (Q(p) - Q(s))`` from the same two quantised vectors and
the same ``w``. IEEE subtraction and rounding are symmetric. So the two results are exact negatives, and the pair's mean
is preserved, unless a filter against attackers shortens the difference more on one side.
"""

import math

import numpy as np

from gossip import kernel
from gossip.kernel.squares import PIECE, Floats, squares_numpy

MAX_MASS = 2.0**32  # Largest acceptable mass of a vector: the masses of the largest swarm sum up to less.
MIN_MASS = 2.0**-64  # Smallest mass of a model: an honest one that only gives reaches it after 64 pushes.
BLOCK_ELEMENTS = 32_768  # Elements that are compared at once.


def pair_weight(gap: float, exponent: float, cap: float = 0.5) -> float:
    """Return the share of the difference that each side takes: ``cap * (1 + floor(|gap|)) ** -exponent``.

    ``gap`` is the difference of the two models' versions, which count mixing rounds and may be fractions. Its absolute
    value gives both sides one weight, so the exchange stays symmetric. With ``cap`` 1/2 and gap 0 it is the pair's
    mean. A NaN gap weighs nothing. (Staleness weight of asynchronous federated optimisation: Xie, Koyejo and Gupta,
    2019.)
    """
    gap = abs(gap)
    if gap < 1.0:
        return cap
    return 0.0 if math.isnan(gap) else cap * (1.0 + float(np.floor(gap))) ** -exponent


def push_mass(mass: float, pushes: int, conserves: bool) -> tuple[float, float]:
    """Split a vector's mass: return the part for each of ``pushes`` partners, and the rest that the vector keeps.

    Push-sum (Kempe, Dobra and Gehrke, FOCS 2003; SGP: Assran et al., ICML 2019) gives each partner and itself equal
    shares of its mass. The receiver takes ``x <- (M x + m p) / (M + m)``, ``M <- M + m``. ``x`` is the de-biased vector
    itself, so giving mass away does not change it. The sums of M and of M x over the swarm, including messages in
    flight, never change.

    Row-stochastic mixing (Epidemic Learning: de Vos et al., NeurIPS 2023) is the same without conservation. Every
    vector has mass one, and so has a node's own at the beginning of each round. So k received vectors leave the mean of
    k + 1.
    """
    if not conserves:
        return 1.0, 1.0
    # Only members that lie about masses leave these bounds. Our own pushes must still be acceptable to others.
    mass = min(max(mass, MIN_MASS), MAX_MASS)
    share = mass / (pushes + 1)
    return share, mass - share


def subtract(
    theirs: Floats, mine_quantised: Floats, out: Floats, before: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """Set ``out = theirs - mine_quantised``; ``out`` may be ``theirs``.

    Returns:
        The sums of squares of ``out`` and of ``mine_quantised``, added to ``before``. Chunks cut at multiples of 4,096
        elements give the same sums. The first is infinite or NaN if a value is not finite, so callers need no other
        check. Values from 2e18 overflow to infinity: such a vector is refused, as its norm would be.
    """
    if kernel.passes is not None:
        return kernel.passes.difference(out.size, theirs, mine_quantised, out, *before)
    difference_sq, own_sq = before
    for first in range(0, out.size, PIECE):  # Sum each piece while it is in cache.
        piece = slice(first, first + PIECE)
        # No warnings: the result shows overflows.
        with np.errstate(all="ignore"):
            np.subtract(theirs[piece], mine_quantised[piece], out=out[piece])
        difference_sq = squares_numpy(out[piece], difference_sq)
        own_sq = squares_numpy(mine_quantised[piece], own_sq)
    return difference_sq, own_sq


def is_finite(values: Floats) -> bool:
    """Return True if no element is NaN or infinite.

    A sum of squares checks this at memory speed; if it overflows, each element is checked.
    """
    with np.errstate(all="ignore"):
        return math.isfinite(values.dot(values)) or bool(np.isfinite(values).all())


def join_weight(difference: Floats, weight: float) -> float:
    """Return the weight with which a side joins: 1 if the partner's vector is larger than ours, 0 if it is smaller.

    The first element in which they differ decides, and both sides see it. Equal vectors keep ``weight``.
    """
    for first in range(0, difference.size, BLOCK_ELEMENTS):
        block = difference[first : first + BLOCK_ELEMENTS]
        differs = block != 0
        if differs.any():
            return 1.0 if block[differs.argmax()] > 0 else 0.0
    return weight


def pair_cap(exchanges: int) -> float:
    """Return the largest weight of a pair if ``exchanges`` run at the same time: ``1 / (1 + exchanges)``.

    All of them together then move a node by less than one whole difference, so that it does not overshoot.
    """
    return 1 / (1 + max(exchanges, 1))
