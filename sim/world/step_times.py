"""The duration of each training step of each peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.scenario.distribution import Distribution
from sim.scenario.fleet import PeerSpec, by_name
from sim.scenario.scenario import Compute
from sim.seeds import derive, generator

__all__ = ["StepTimes"]

SHORTEST_S = 1e-6  # Distributions come arbitrarily near 0, and a run of such steps would stop time.
AHEAD = 64  # Draws made at once: one call of numpy costs as much as fifty draws.


class StepTimes:
    """The durations of the steps of every peer, each from the seed and the peer's name alone."""

    def __init__(self, spec: Compute, seed: int, fleet: Sequence[PeerSpec] = ()) -> None:
        self.spec, self.seed = spec, seed
        self.own = {name: each.step_s for name, each in by_name(fleet).items() if each.step_s is not None}

    def slowdown(self, name: str) -> float:
        """Return the factor on a peer's step times: 1, or a straggler's slowdown."""
        stragglers = self.spec.stragglers
        if stragglers is None or name in self.own:
            return 1.0
        drawn = int.from_bytes(derive(self.seed, name, "straggler")[:8], "little") / 2**64
        return stragglers.slowdown if drawn < stragglers.share else 1.0

    def durations(self, name: str) -> Callable[[int], NDArray[np.float64]]:
        """Return a source of one peer's durations: each call returns the next ``count``, in seconds.

        The size of the requests changes no duration.
        """
        spec, slowdown, step_s = self.spec, self.slowdown(name), self.own.get(name, self.spec.step_s)
        if spec.per == "step" and step_s.kind != "constant":
            return Drawn(step_s, slowdown, generator(self.seed, name, "steps"))
        drawn = step_s.draw(generator(self.seed, name, "steps"), 1)[0]
        each_s = max(float(drawn) * slowdown, SHORTEST_S)
        return lambda count: np.full(count, each_s)


class Drawn:
    """Durations drawn for every step, in blocks."""

    def __init__(self, step_s: Distribution, slowdown: float, rng: np.random.Generator) -> None:
        self.step_s, self.slowdown, self.rng = step_s, slowdown, rng
        self.ahead = np.empty(0)

    def __call__(self, count: int) -> NDArray[np.float64]:
        if count > self.ahead.size:
            blocks = -(-(count - self.ahead.size) // AHEAD)
            drawn = self.step_s.draw(self.rng, blocks * AHEAD) * self.slowdown
            self.ahead = np.concatenate([self.ahead, np.maximum(drawn, SHORTEST_S)])
        taken, self.ahead = self.ahead[:count], self.ahead[count:]
        return taken
