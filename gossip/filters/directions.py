"""A limit on movement in one direction, which finds lies that pull one way together.

The filter :mod:`gossip.filters.clip` shortens a difference to the clip radius, about the distance between honest nodes.
Most of that distance is the noise of gradients. It points in all directions, so that the movement along any one of them
is a small part of a radius. Members that lie for a purpose all pull in one direction, by a whole radius at each
exchange. They make recent differences largest along it, and there they stand out. With x the sketches
(:mod:`gossip.arithmetic.sketch`) of the last 64 differences, in radii and at most one radius long:

    u, v    the two directions in which the x are largest: the right singular vectors of the two largest singular values
    m       the median of <x, u>
    usual   the smaller of the standard deviation of <x, u>, estimated from the lower quartile of |<x, u> - m|, and the
            root mean square of <x, v>
    limit   the largest of 2 usual, the upper tercile of |<x, u> - m|, and the median of |<x, u> - m| over the last 8
    share   of a new difference y that is taken: min(1, (limit / |<y, u> - m|)^2)

Honest differences are about as large along v as along u: in simulated swarms without liars the variance along u is
1.2 to 1.4 times that along v (2.5 times in one case of 100 with Dirichlet 0.1). One liar in ten makes it 3 times, and
two in ten 9 times, because honest nodes that were pulled at different times are apart along u too.

Source: filters of robust mean estimation along the top eigenvector (Diakonikolas, Kamath, Kane, Li, Moitra and Stewart,
"Robust estimators in high dimensions without the computational intractability", 2016), which Shejwalkar and Houmansadr
("Manipulating the Byzantine", NDSS 2021) apply to gradients at a server. Here one node applies them to its own
exchanges, one after the other.

A difference moves the node along u by at most half of ``m + limit``. Fewer than a quarter of lies among the remembered
differences leave m and the lower quartile within the range of honest ones. Lies within 2 usual are not found. In a
swarm that walks at random the worst of them move the mean a fifth as far as the longest lies did without this limit
(``tests/gossip/filters/test_directions.py``), and lies in four directions by turns two fifths as far.
"""

import math

import numpy as np

from gossip.arithmetic.sketch import WIDTH, Floats

# Differences that are remembered. With 48, lies at 0.8 of the model's length cost 0.7 points more; 128 gain nothing.
MEMORY = 64
# Fewest differences that set a limit. With 8, nodes forty times slower than others could not follow them at first.
MIN_MEMORY = 16
# The limit in usual movements. It shortens 2 to 10 % of honest differences, and takes 1 to 2.5 % of their whole length.
# With 3, one patient liar of eight moved the others nearly as far as without a limit.
DEVIATIONS = 2.0
# The lower quartile of the distance from 0 in a standard normal distribution. A lie moves its receiver away from all
# others along u, which raises the standard deviation and the median, but not the lower quartile.
LOWER_QUARTILE = 0.3186
# Lies are few. If a third of the differences are as far away, halves of a swarm were apart, and must meet. If half of
# the newest 8 are, our own steps took us far from all others. Without the second exception, nodes that a high learning
# rate throws off stay away for up to three times as long.
FAR_SHARE = 1 / 3
NEWEST = 8
LAST = np.arange(1, NEWEST + 1)  # The numbers of the newest differences, counted back from the next.


class Directions:
    """The recent differences of one node, and the limit in the direction in which they move it most."""

    def __init__(self) -> None:
        self.sketches = np.empty((0, WIDTH), np.float32)  # The last sketches; sketch k is in row k % MEMORY.
        self.count = 0  # Number of sketches in all.
        self.axes = np.zeros((2, WIDTH), np.float32)  # u and v, or zeros before they are known.

    def take(self, sketch: Floats) -> float:
        """Remember a difference, and return the share of it that is taken.

        Args:
            sketch: The sketch of the difference in clip radii, at most about one long: float32 (WIDTH,).
        """
        along, along_axes = self.axes @ self.sketches.T, self.axes @ sketch
        share = 1.0
        if self.count >= MIN_MEMORY:
            share = self.share_for(float(along_axes[0]), along[0], along[1])
        if self.count < MEMORY:
            self.sketches = np.concatenate([self.sketches, sketch[None]])
            along = np.concatenate([along, along_axes[:, None]], axis=1)
        else:
            self.sketches[self.count % MEMORY] = sketch
            along[:, self.count % MEMORY] = along_axes
        self.count += 1
        self.update_axes(along, sketch)
        return share

    def share_for(self, movement: float, along_u: Floats, along_v: Floats) -> float:
        """Return the share that is taken of a difference that moves the node by ``movement`` along u.

        ``along_u`` and ``along_v`` are the movements by the remembered differences, float32 (count,).
        """
        count = len(along_u)
        median = np.sort(along_u)[count // 2]
        distances = np.abs(along_u - median)
        # Difference k is at place k % MEMORY, also of ``along_u``.
        deviations, newest = np.sort(distances), np.sort(distances[(self.count - LAST) % MEMORY])
        usual = min(float(deviations[count // 4]) / LOWER_QUARTILE, math.sqrt(float(along_v @ along_v) / count))
        common = max(deviations[int((1 - FAR_SHARE) * count)], newest[NEWEST // 2])
        limit, distance = max(DEVIATIONS * usual, float(common)), abs(movement - float(median))
        return 1.0 if distance <= limit else (limit / distance) ** 2

    def update_axes(self, along: Floats, newest: Floats) -> None:
        """Turn u and v by one step of the orthogonal iteration, which converges over successive exchanges.

        ``along`` are the movements by the remembered differences along both, float32 (2, count).
        """
        axes = along @ self.sketches
        first = axes[0] = unit(axes[0], newest)
        second = axes[1] - (axes[1] @ first) * first
        axes[1] = unit(second, newest - (newest @ first) * first)
        self.axes = axes


def unit(vector: Floats, other: Floats) -> Floats:
    """Return a vector of length 1 in the direction of ``vector``, of ``other`` if that is 0, or 0 if both are."""
    for each in (vector, other):
        length = math.sqrt(float(each @ each))
        if length > 0:
            return each * np.float32(1 / length)
    return other
