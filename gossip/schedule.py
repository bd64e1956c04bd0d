"""When the next mix is due: by steps, by the clock, and by how far apart the nodes are."""

from __future__ import annotations

import math
import random

from gossip.config import Config

__all__ = ["Schedule"]

FASTEST, SLOWEST = 0.25, 4.0  # times the interval that is configured
QUICKER, LAZIER = 0.8, 1.25  # one step of the control: four mixes in a row for a factor of about two and a half
INDIFFERENT = 0.1  # around the target nothing is changed, or noise would


class Schedule:
    """Of one peer. ``due_steps`` and ``due_at`` are when the next mix is due, ``retry_at`` when to look again after
    nobody was found. ``pace`` times the configured interval is what lies between two mixes."""

    def __init__(self, config: Config, rng: random.Random) -> None:
        self.config, self.rng = config, rng
        self.due_steps = 0  # the step count at which the driver should call stepped()
        self.due_at = math.inf  # and the time, for mixing by the clock
        self.retry_at = 0.0
        self.pace = 1.0

    def due(self, steps: int, now: float) -> bool:
        return (self.config.mix_every_steps is not None and steps >= self.due_steps) or now >= self.due_at

    def mixed(self, steps: int, now: float) -> None:
        """A mix is a mix, whoever asked: the next is due an interval later, jittered by a quarter so that two partners
        who mixed together do not stay in step."""
        jitter, pace = 0.75 + 0.5 * self.rng.random(), self.pace
        every, every_s = self.config.mix_every_steps, self.config.mix_every_s
        if every is not None:
            self.due_steps = max(steps + 1, round(next_due(self.due_steps, pace * every, jitter, steps)))
        if every_s is not None:
            self.due_at = next_due(self.due_at if self.due_at < math.inf else now, pace * every_s, jitter, now)

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


def next_due(due: float, every: float, jitter: float, now: float) -> float:
    """An interval after the last was due, and not after it took place: then a node finishes one exchange per interval,
    however long they take and whoever asks. Counted from each exchange it would be 2 ln 2 = 1.39 of them, since half
    are asked for by others. What was missed is not made up for, and what came early buys three intervals at most."""
    return min(max(due + every * jitter, now + every / 4), now + 3 * every)
