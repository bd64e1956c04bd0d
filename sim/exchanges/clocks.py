"""The step boundaries of every peer: when its training steps end. A boundary is numbered by the steps done there."""

from bisect import bisect_right

import numpy as np

from sim.arrays import I64
from sim.engine.host import DurationSource

ENDS_AT_ONCE = 64  # Step end times that are drawn in one call.


class ConstantClocks:
    """Clocks of peers whose own steps all take the same time: step number n ends at ``origins + n step_s``.

    A peer's steps, like its batches, are counted over all its lives.
    """

    def __init__(self, peers: int) -> None:
        self.origins, self.step_s = [0.0] * peers, [0.0] * peers

    def add(self, peer: int, draw_durations: DurationSource) -> None:
        """Set the source of a peer's step durations; ``draw_durations(n)`` draws the next n of them."""
        self.step_s[peer] = float(draw_durations(1)[0])

    def begin(self, peer: int, steps: int, now: float, phase: float) -> None:
        """Start a peer's loop with ``steps`` counted and the fraction ``phase`` of its next step done."""
        self.origins[peer] = now - (steps + phase) * self.step_s[peer]

    def time_of(self, peer: int, steps: int) -> float:
        """Return the virtual time at which the peer has done ``steps`` steps."""
        return self.origins[peer] + steps * self.step_s[peer]

    def next_boundary(self, peer: int, when: float) -> int:
        """Return the number of steps done at the first boundary after ``when``."""
        origin, step_s = self.origins[peer], self.step_s[peer]
        steps = int((when - origin) / step_s) + 1
        if origin + steps * step_s <= when:  # The quotient was rounded down.
            return steps + 1
        return steps - 1 if origin + (steps - 1) * step_s > when else steps  # Correct one that was rounded up.

    def steps_done(self, peers: I64, when: float) -> I64:
        """Return the number of steps that each peer has done at ``when``, shape (peers,)."""
        origin, step_s = np.array(self.origins)[peers], np.array(self.step_s)[peers]
        steps = ((when - origin) / step_s).astype(np.int64) + 1
        # Correct quotients that were rounded, as next_boundary() does.
        steps += origin + steps * step_s <= when
        steps -= origin + (steps - 1) * step_s > when
        done: I64 = steps - 1
        return done


class DrawnClocks:
    """Clocks like :class:`ConstantClocks` that draw the time of every step."""

    def __init__(self, peers: int) -> None:
        self.sources: list[DurationSource | None] = [None] * peers
        self.ends: list[list[float]] = [[] for _ in range(peers)]  # End times of steps, by peer.
        self.first_steps = [0] * peers  # Steps done at the first entry of `ends`.

    def add(self, peer: int, draw_durations: DurationSource) -> None:
        self.sources[peer] = draw_durations

    def begin(self, peer: int, steps: int, now: float, phase: float) -> None:
        draw_durations = self.sources[peer]
        assert draw_durations is not None
        self.first_steps[peer] = steps + 1
        self.ends[peer] = [now + float(draw_durations(1)[0]) * (1.0 - phase)]

    def draw_ends(self, peer: int) -> None:
        draw_durations, ends = self.sources[peer], self.ends[peer]
        assert draw_durations is not None
        when = ends[-1]
        for step_s in draw_durations(ENDS_AT_ONCE).tolist():
            when += step_s
            ends.append(when)

    def time_of(self, peer: int, steps: int) -> float:
        while steps - self.first_steps[peer] >= len(self.ends[peer]):
            self.draw_ends(peer)
        return self.ends[peer][steps - self.first_steps[peer]]

    def next_boundary(self, peer: int, when: float) -> int:
        ends = self.ends[peer]
        while ends[-1] <= when:
            self.draw_ends(peer)
        place = bisect_right(ends, when)
        if place > 2 * ENDS_AT_ONCE:  # Old end times are never asked for again.
            del ends[: place - ENDS_AT_ONCE]
            self.first_steps[peer] += place - ENDS_AT_ONCE
            place = ENDS_AT_ONCE
        return self.first_steps[peer] + place

    def steps_done(self, peers: I64, when: float) -> I64:
        return np.array([self.next_boundary(peer, when) for peer in peers.tolist()], np.int64) - 1


Clocks = ConstantClocks | DrawnClocks
