"""The step boundaries of every peer: when its training steps end. A boundary is numbered by the steps done there."""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.engine.host import Times

__all__ = ["Clocks", "ConstantClocks", "DrawnClocks"]

I64 = NDArray[np.int64]
AHEAD = 64  # step end times drawn at once


class Clocks(Protocol):
    """The step times of all peers. A peer's steps, like its batches, are counted over all its lives."""

    def begin(self, peer: int, done: int, now: float, phase: float) -> None:
        """Start a peer's loop with ``done`` steps counted and the fraction ``phase`` of its first step done."""

    def time(self, peer: int, steps: int) -> float:
        """Return the virtual time at which the peer has done ``steps`` steps."""

    def after(self, peer: int, when: float) -> int:
        """Return the number of steps done at the first boundary after ``when``."""

    def done(self, peers: I64, when: float) -> I64:
        """Return the number of steps that each peer has done at ``when``, shape (peers,)."""


class ConstantClocks:
    """Clocks of peers whose own steps all take the same time."""

    def __init__(self, peers: int) -> None:
        self.origin, self.step = [0.0] * peers, [0.0] * peers  # seconds; step number s ends at origin + s * step

    def add(self, peer: int, times: Times) -> None:
        self.step[peer] = float(times(1)[0])

    def begin(self, peer: int, done: int, now: float, phase: float) -> None:
        self.origin[peer] = now - (done + phase) * self.step[peer]

    def time(self, peer: int, steps: int) -> float:
        return self.origin[peer] + steps * self.step[peer]

    def after(self, peer: int, when: float) -> int:
        origin, step = self.origin[peer], self.step[peer]
        steps = int((when - origin) / step) + 1
        if origin + steps * step <= when:  # correct a quotient that was rounded down
            return steps + 1
        return steps - 1 if origin + (steps - 1) * step > when else steps

    def done(self, peers: I64, when: float) -> I64:
        origin, step = np.array(self.origin)[peers], np.array(self.step)[peers]
        steps = ((when - origin) / step).astype(np.int64) + 1
        steps += origin + steps * step <= when
        steps -= origin + (steps - 1) * step > when
        done: I64 = steps - 1
        return done


class DrawnClocks:
    """Clocks that draw the time of every step."""

    def __init__(self, peers: int) -> None:
        self.times: list[Times | None] = [None] * peers
        self.ends: list[list[float]] = [[] for _ in range(peers)]
        self.first = [0] * peers  # number of steps done at the first entry of `ends`

    def add(self, peer: int, times: Times) -> None:
        self.times[peer] = times

    def begin(self, peer: int, done: int, now: float, phase: float) -> None:
        times = self.times[peer]
        assert times is not None
        self.first[peer] = done + 1
        self.ends[peer] = [now + float(times(1)[0]) * (1.0 - phase)]

    def extend(self, peer: int) -> None:
        times, ends = self.times[peer], self.ends[peer]
        assert times is not None
        when = ends[-1]
        for step_s in times(AHEAD).tolist():
            when += step_s
            ends.append(when)

    def time(self, peer: int, steps: int) -> float:
        while steps - self.first[peer] >= len(self.ends[peer]):
            self.extend(peer)
        return self.ends[peer][steps - self.first[peer]]

    def after(self, peer: int, when: float) -> int:
        ends = self.ends[peer]
        while ends[-1] <= when:
            self.extend(peer)
        place = bisect_right(ends, when)
        if place > 2 * AHEAD:  # old end times are never asked for again
            del ends[: place - AHEAD]
            self.first[peer] += place - AHEAD
            place = AHEAD
        return self.first[peer] + place

    def done(self, peers: I64, when: float) -> I64:
        return np.array([self.after(peer, when) for peer in peers.tolist()], np.int64) - 1
