"""The schedule of mixes: by steps, by the clock and by the consensus distance."""

from __future__ import annotations

import math
import random
from collections import deque

from gossip.codecs import Machine, Taken, interval
from gossip.config import Config

__all__ = ["Schedule", "collided_s"]

FASTEST, SLOWEST = 0.25, 4.0  # bounds of ``pace``, a factor of the configured interval
QUICKER, LAZIER = 0.8, 1.25  # one control step: four mixes in a row change the pace by a factor of about 2.5
EARNED = 12  # Intervals of others' mixes to set off against our own. With 3 there are a tenth too many mixes.
COLLIDED_S, APART_S = 0.02, 0.08  # The least back-off after all partners were busy, and the width of its jitter.
SPANS, FEWEST = 8, 4  # Spans between mixes for the median step time. A span with an evaluation in it is an outlier.
WITHIN = 1.3  # a new interval within this factor of the current one changes nothing
INDIFFERENT = 0.1  # dead band around the target, against noise


class Schedule:
    """The schedule of one peer.

    ``due_steps`` and ``due_at`` are when the next mix is due, ``retry_at`` when to retry after no partner was found.
    The time between two mixes is ``pace`` times the configured interval.
    """

    def __init__(self, config: Config, rng: random.Random) -> None:
        self.config, self.rng = config, rng
        self.due_steps = 0  # step count at which the driver should call stepped()
        self.due_at = math.inf  # the time, for mixing by the clock
        self.earned_steps, self.earned_at = 0.0, math.inf  # the same, if every mix postponed ours by an interval
        # Upper bounds of both, however many mixes others initiate.
        self.latest_steps, self.latest_at = math.inf, math.inf
        self.retry_at = 0.0
        self.pace = 1.0
        # Local steps between two mixes, before `pace`.
        self.every: int | None = config.first_interval
        self.spans: deque[float] = deque(maxlen=SPANS)  # seconds of one step, between the last mixes
        self.seen: tuple[int, float] | None = None  # steps and time at the last mix
        self.behind = False  # the last mix took so long that the next was due before its end

    def due(self, steps: int, now: float, coming: int = 0) -> bool:
        """Return True if the next mix is due while ``coming`` others are in progress."""
        return (self.every is not None and steps >= self.steps_beside(coming)) or now >= self.time_beside(coming)

    def steps_beside(self, coming: int) -> int:
        """Return ``due_steps`` plus an interval for each of ``coming`` mixes in progress."""
        return self.due_steps + int(coming * self.pace * (self.every or 0))

    def time_beside(self, coming: int) -> float:
        """Return ``due_at``, postponed in the same way."""
        return self.due_at + coming * self.pace * (self.config.mix_every_s or 0.0)

    def begin(self, steps: int, now: float) -> None:
        """Start the schedule as if the loop had trained for long.

        The average number of others' mixes is set off from the start. Otherwise all nodes of a young swarm would mix a
        tenth too often.
        """
        self.mixed(steps, now)
        if self.config.pushes or self.config.partners == 0:
            return  # mixes of others postpone nothing
        self.earned_steps += EARNED / 3 * (self.every or 0)
        self.earned_at += EARNED / 3 * (self.config.mix_every_s or 0.0)
        if self.every is not None:
            self.due_steps = round(min(self.earned_steps, self.latest_steps))
        self.due_at = min(self.earned_at, self.latest_at)

    def mixed(self, steps: int, now: float, own: bool = True) -> None:
        """Schedule the next mix an interval after one by any initiator. The jitter of 25 % keeps partners out of step.

        Mixes that others initiate (not ``own``) postpone ours by one interval at most in all. Ours is due no later than
        two intervals after our last, the second one jittered. In an honest swarm half of all mixes are our own, one in
        two intervals. So we choose a partner that often, however often others ask. The excess is remembered
        (``earned``), so that all mixes together stay at one an interval.
        """
        jitter, pace = 0.75 + 0.5 * self.rng.random(), self.pace
        every, every_s = self.every, self.config.mix_every_s
        self.behind = False
        if every is not None:
            interval = pace * every
            self.behind = self.earned_steps + interval * jitter <= steps - 1 + interval / 4
            self.earned_steps = next_due(self.earned_steps, interval, jitter, steps)
            if own:  # counted from when ours was due, however long it took
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
        """Choose the interval anew after a mix from the cost of exchanges, if the configuration leaves it open.

        Args:
            steps: Local steps at the last boundary.
            boundary_at: The time of that boundary.
            exchange: The present cost of an exchange; None before the first.
            machine: The cost factors of this machine.
        """
        if not self.config.auto_interval or self.every is None:
            return
        before, self.seen = self.seen, (steps, boundary_at)
        if before is not None and steps > before[0]:
            self.spans.append((boundary_at - before[1]) / (steps - before[0]))
        if exchange is None or len(self.spans) < FEWEST:
            return
        step_s = sorted(self.spans)[len(self.spans) // 2]
        wanted = interval(step_s, exchange, machine, self.config.internal.mixing_share)
        if not self.every / WITHIN <= wanted <= self.every * WITHIN:
            self.every = wanted

    def wait(self, now: float, seconds: float) -> None:
        self.retry_at = now + seconds

    def watch(self, consensus_distance: float, step_size: float) -> None:
        """Mix more often while the nodes are further apart than ``consensus_target`` steps, less often while closer.

        Both arguments are norms over the whole vector; ``step_size`` is that of one local step. This is consensus
        control: Kong et al., "Consensus control for decentralized deep learning", ICML 2021. They bound the distance by
        the size of a step.
        """
        target = self.config.consensus_target
        if target is None or not (math.isfinite(consensus_distance) and step_size > 0):
            return
        ratio = consensus_distance / (target * step_size)
        if ratio > 1 + INDIFFERENT:
            self.pace = max(FASTEST, self.pace * QUICKER)
        elif ratio < 1 - INDIFFERENT:
            self.pace = min(SLOWEST, self.pace * LAZIER)


def collided_s(rng: random.Random) -> float:
    """Return the back-off after all partners were busy, jittered so that they do not collide again."""
    return COLLIDED_S + APART_S * rng.random()


def next_due(due: float, every: float, jitter: float, now: float) -> float:
    """Return when the next mix is due: an interval after the last was due, not after it took place.

    So a node finishes one exchange an interval, however long they take. Counted from each exchange there would be 2 ln
    2 = 1.39, since others initiate half of them. Missed mixes are not made up for, and early ones buy EARNED intervals
    at most.
    """
    return min(max(due + every * jitter, now + every / 4), now + EARNED * every)
