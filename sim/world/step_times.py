"""The duration of each training step of each peer."""

from collections.abc import Callable, Sequence

import numpy as np

from sim.arrays import F64
from sim.scenario.distribution import Distribution
from sim.scenario.fleet import PeerSpec, by_name
from sim.scenario.scenario import Compute
from sim.seeds import derive_int, generator

SHORTEST_S = 1e-6  # Distributions come arbitrarily near 0, and a run of such steps would stop time.
DRAWN_AT_ONCE = 64  # Draws made at once: one call of numpy costs as much as fifty draws.


class StepTimes:
    """The durations of the steps of every peer, each from the seed and the peer's name alone."""

    def __init__(self, spec: Compute, seed: int, fleet: Sequence[PeerSpec] = ()) -> None:
        self.spec, self.seed = spec, seed
        self.own_step_s = {name: spec.step_s for name, spec in by_name(fleet).items() if spec.step_s is not None}

    def slowdown(self, name: str) -> float:
        """Return the factor on a peer's step times: 1, or a straggler's slowdown."""
        stragglers = self.spec.stragglers
        if stragglers is None or name in self.own_step_s:
            return 1.0
        drawn = derive_int(self.seed, name, "straggler") / 2**64
        return stragglers.slowdown if drawn < stragglers.share else 1.0

    def durations(self, name: str) -> Callable[[int], F64]:
        """Return a source of one peer's durations: each call returns the next ``count``, in seconds.

        The size of the requests changes no duration.
        """
        spec, slowdown, step_s = self.spec, self.slowdown(name), self.own_step_s.get(name, self.spec.step_s)
        if spec.per == "step" and step_s.kind != "constant":
            return DrawnDurations(step_s, slowdown, generator(self.seed, name, "steps"))
        drawn = step_s.draw(generator(self.seed, name, "steps"), 1)[0]
        each_s = max(float(drawn) * slowdown, SHORTEST_S)
        return lambda count: np.full(count, each_s)


class DrawnDurations:
    """Durations drawn for every step, in blocks."""

    def __init__(self, step_s: Distribution, slowdown: float, rng: np.random.Generator) -> None:
        self.step_s, self.slowdown, self.rng = step_s, slowdown, rng
        self.drawn_ahead = np.empty(0)

    def __call__(self, count: int) -> F64:
        if count > self.drawn_ahead.size:
            blocks = -(-(count - self.drawn_ahead.size) // DRAWN_AT_ONCE)
            drawn = self.step_s.draw(self.rng, blocks * DRAWN_AT_ONCE) * self.slowdown
            self.drawn_ahead = np.concatenate([self.drawn_ahead, np.maximum(drawn, SHORTEST_S)])
        taken, self.drawn_ahead = self.drawn_ahead[:count], self.drawn_ahead[count:]
        return taken
