"""When the next mix is due: by steps, by the clock, and by how far apart the nodes are."""

from __future__ import annotations

import math
import random
from collections import deque

from gossip.codecs import Machine, Taken, interval
from gossip.config import Config

__all__ = ["Schedule", "collided_s"]

FASTEST, SLOWEST = 0.25, 4.0  # times the interval that is configured
QUICKER, LAZIER = 0.8, 1.25  # one step of the control: four mixes in a row for a factor of about two and a half
EARNED = 12  # intervals, of mixes that others asked for, set off against our own: with 3 a tenth too many are mixed
COLLIDED_S, APART_S = 0.02, 0.08
SPANS, FEWEST = 8, 4  # between mixes, whose median says what a step takes: one with an evaluation in it says nothing
WITHIN = 1.3  # times the interval in use, or that part of it, within which another one changes nothing
INDIFFERENT = 0.1  # around the target nothing is changed, or noise would


class Schedule:
    """Of one peer. ``due_steps`` and ``due_at`` are when the next mix is due, ``retry_at`` when to look again after
    nobody was found. ``pace`` times the configured interval is what lies between two mixes."""

    def __init__(self, config: Config, rng: random.Random) -> None:
        self.config, self.rng = config, rng
        self.due_steps = 0  # the step count at which the driver should call stepped()
        self.due_at = math.inf  # and the time, for mixing by the clock
        self.earned_steps, self.earned_at = 0.0, math.inf  # the same, had every mix postponed ours by an interval
        self.latest_steps, self.latest_at = math.inf, math.inf  # and no later than this, whatever others ask for
        self.retry_at = 0.0
        self.pace = 1.0
        self.every = config.first_interval  # local steps between two mixes, but for the pace
        self.spans: deque[float] = deque(maxlen=SPANS)  # seconds of a step, between the last mixes
        self.seen: tuple[int, float] | None = None  # the steps and the time at the last mix
        self.behind = False  # the last mix took so long that the next one was due before it was finished

    def due(self, steps: int, now: float, coming: int = 0) -> bool:
        """Return True if the next mix is due beside ``coming`` that are under way."""
        return (self.every is not None and steps >= self.steps_beside(coming)) or now >= self.time_beside(coming)

    def steps_beside(self, coming: int) -> int:
        """Return ``due_steps``, put off by an interval for each of ``coming`` mixes that are under way."""
        return self.due_steps + int(coming * self.pace * (self.every or 0))

    def time_beside(self, coming: int) -> float:
        """Return ``due_at``, put off in the same way."""
        return self.due_at + coming * self.pace * (self.config.mix_every_s or 0.0)

    def begin(self, steps: int, now: float) -> None:
        """The loop trains from now on, as one of those who have long done so: with as much set off against its own
        mixes as others have on average, or all of a young swarm would mix a tenth too often."""
        self.mixed(steps, now)
        if self.config.pushes or self.config.partners == 0:
            return  # what others ask for postpones nothing
        self.earned_steps += EARNED / 3 * (self.every or 0)
        self.earned_at += EARNED / 3 * (self.config.mix_every_s or 0.0)
        if self.every is not None:
            self.due_steps = round(min(self.earned_steps, self.latest_steps))
        self.due_at = min(self.earned_at, self.latest_at)

    def mixed(self, steps: int, now: float, own: bool = True) -> None:
        """A mix is a mix, whoever asked: the next is due an interval later, jittered by a quarter so that two partners
        who mixed together do not stay in step.

        But those that others ask for (not ``own``) postpone our next one by one interval at most in all: it is due no
        later than two intervals, the second one jittered, after our last. Half of all mixes are one's own where nobody
        lies, one in two intervals: so often we choose for ourselves, however often others ask. What was asked for
        beyond that is not forgotten (``earned``), so that all mixes together stay one in an interval.
        """
        jitter, pace = 0.75 + 0.5 * self.rng.random(), self.pace
        every, every_s = self.every, self.config.mix_every_s
        self.behind = False
        if every is not None:
            interval = pace * every
            self.behind = self.earned_steps + interval * jitter <= steps - 1 + interval / 4
            self.earned_steps = next_due(self.earned_steps, interval, jitter, steps)
            if own:  # from when ours was due: however long it took
                self.latest_steps = max(min(self.due_steps, steps) + (1 + jitter) * interval, steps + interval / 4)
            self.due_steps = max(steps + 1, round(min(self.earned_steps, self.latest_steps)))
        if every_s is not None:
            interval = pace * every_s
            self.behind = self.behind or self.earned_at + interval * jitter <= now + interval / 4
            self.earned_at = next_due(self.earned_at if self.earned_at < math.inf else now, interval, jitter, now)
            if own:
                self.latest_at = max(min(self.due_at, now) + (1 + jitter) * interval, now + interval / 4)
            self.due_at = min(self.earned_at, self.latest_at)

    def adapt(self, steps: int, boundary_at: float, exchange: Taken | None, machine: Machine) -> None:
        """Choose the interval anew after a mix, where the configuration leaves it open: by what exchanges take here.

        Args:
            steps: Local steps at the last boundary.
            boundary_at: The time of that boundary.
            exchange: What an exchange takes at present; None before the first.
            machine: What it costs here.
        """
        if not self.config.chooses or self.every is None:
            return
        before, self.seen = self.seen, (steps, boundary_at)
        if before is not None and steps > before[0]:
            self.spans.append((boundary_at - before[1]) / (steps - before[0]))
        if exchange is None or len(self.spans) < FEWEST:
            return
        step_s = sorted(self.spans)[len(self.spans) // 2]
        wanted = interval(step_s, exchange, machine, self.config.mixing_share)
        if not self.every / WITHIN <= wanted <= self.every * WITHIN:
            self.every = wanted

    def wait(self, now: float, seconds: float) -> None:
        self.retry_at = now + seconds

    def watch(self, consensus_distance: float, step_size: float) -> None:
        """Mix more often while the nodes are further apart than ``consensus_target`` steps, more rarely while they are
        closer. Both are norms over the whole vector; ``step_size`` is that of one local step. (Consensus control: Kong
        et al., "Consensus control for decentralized deep learning", ICML 2021, who bound the distance by the size of a
        step and spend mixes on it.)"""
        target = self.config.consensus_target
        if target is None or not (math.isfinite(consensus_distance) and step_size > 0):
            return
        ratio = consensus_distance / (target * step_size)
        if ratio > 1 + INDIFFERENT:
            self.pace = max(FASTEST, self.pace * QUICKER)
        elif ratio < 1 - INDIFFERENT:
            self.pace = min(SLOWEST, self.pace * LAZIER)


def collided_s(rng: random.Random) -> float:
    """How long who found everybody busy waits: apart, or those who collided collide again."""
    return COLLIDED_S + APART_S * rng.random()


def next_due(due: float, every: float, jitter: float, now: float) -> float:
    """An interval after the last was due, and not after it took place: then a node finishes one exchange per interval,
    however long they take and whoever asks. Counted from each exchange it would be 2 ln 2 = 1.39 of them, since half
    are asked for by others. What was missed is not made up for, and what came early buys EARNED intervals at most."""
    return min(max(due + every * jitter, now + every / 4), now + EARNED * every)
