"""The schedule of mixes: by steps and by the clock.

A mix is due an interval after the last one, whichever side began that. Mixes that others initiate postpone ours, but
only so far: ours is due no later than two intervals after our last. So there are two due times, and the earlier counts.
The *fair* one keeps all mixes together at one an interval. The *latest* one follows from our own mixes alone.
"""

import math
import random
from collections import deque

from gossip.codecs import ExchangeCost, Machine, mix_interval
from gossip.codecs.choice import NOMINAL_STEPS
from gossip.config import Config

# Intervals by which the fair due time may lie ahead, since others began many mixes with us. With 3 instead of 12, nodes
# mix a tenth too often.
MAX_AHEAD = 12
USUAL_AHEAD = MAX_AHEAD / 3  # The average of these intervals in a swarm that has trained for long.
COLLISION_S, JITTER_S = 0.02, 0.08  # The shortest back-off after all partners were busy, and the width of its jitter.
# Step times for their median, and the least number of them. One with an evaluation in it is an outlier.
MAX_STEP_TIMES, MIN_STEP_TIMES = 8, 4
MIN_AHEAD = 0.25  # Intervals from now to the earliest due time, since missed mixes are not made up for.
MIN_CHANGE = 1.3  # A new interval within this factor of the current one changes nothing.


class Schedule:
    """The schedule of one peer."""

    def __init__(self, config: Config, rng: random.Random) -> None:
        self.config, self.rng = config, rng
        self.due_steps = 0  # Step count at which the next mix is due.
        self.due_at = math.inf  # Time at which it is due, for mixing by the clock.
        self.retry_at = 0.0  # Time to retry after no partner was found.
        # The fair due step count and time: where the next mix would be due if every mix, ours or another's, postponed
        # it by an interval. Times are infinite without mixing by the clock.
        self.fair_steps, self.fair_at = 0.0, math.inf
        # The latest due step count and time, however many mixes others initiate; infinite before our first.
        self.latest_steps, self.latest_at = math.inf, math.inf
        self.every: int | None = config.first_interval  # Local steps between two mixes.
        self.is_behind = False  # The last mix took so long that the next was due before its end.
        # Seconds of one step, on average from each of the last mixes to the next.
        self.step_times_s: deque[float] = deque(maxlen=MAX_STEP_TIMES)
        self.last_mix: tuple[int, float] | None = None  # Steps and time at the last mix.

    def is_due(self, steps: int, now: float, in_progress: int = 0) -> bool:
        """Return True if the next mix is due while this many others are in progress."""
        is_due_by_steps = self.every is not None and steps >= self.postponed_steps(in_progress)
        return is_due_by_steps or now >= self.postponed_time(in_progress)

    def postponed_steps(self, in_progress: int) -> int:
        """Return ``due_steps`` plus an interval for each of the mixes in progress."""
        return self.due_steps + in_progress * (self.every or 0)

    def postponed_time(self, in_progress: int) -> float:
        """Return ``due_at``, postponed in the same way."""
        return self.due_at + in_progress * (self.config.mix_every_s or 0.0)

    def begin(self, steps: int, now: float) -> None:
        """Start the schedule as if the loop had trained for long.

        The fair due time lies as far ahead as it usually does later. Otherwise all nodes of a young swarm would mix a
        tenth too often.
        """
        self.on_mixed(steps, now)
        if self.config.pushes or self.config.partners == 0:
            return  # Mixes of others postpone nothing.
        self.fair_steps += USUAL_AHEAD * (self.every or 0)
        self.fair_at += USUAL_AHEAD * (self.config.mix_every_s or 0.0)
        if self.every is not None:
            self.due_steps = round(min(self.fair_steps, self.latest_steps))
        self.due_at = min(self.fair_at, self.latest_at)

    def on_mixed(self, steps: int, now: float, own: bool = True) -> None:
        """Schedule the next mix an interval after one by any initiator. The jitter of 25 % keeps partners out of step.

        Mixes that others initiate (not ``own``) postpone ours by one interval at most in all. Ours is due no later than
        two intervals after our last, the second one jittered. In an honest swarm half of all mixes are our own, one in
        two intervals. So we choose a partner that often, however often others ask. The excess is remembered
        (``fair_steps``, ``fair_at``), so that all mixes together stay at one an interval.
        """
        jitter = 0.75 + 0.5 * self.rng.random()
        interval, interval_s = self.every, self.config.mix_every_s
        # Set below if the next mix is due before the earliest time that next_due allows. One step is allowed for, since
        # steps are whole numbers.
        self.is_behind = False
        if interval is not None:
            earliest = steps + MIN_AHEAD * interval
            self.is_behind = self.fair_steps + interval * jitter <= steps - 1 + MIN_AHEAD * interval
            self.fair_steps = next_due(self.fair_steps, interval, jitter, steps)
            if own:  # Counted from when ours was due, however long it took.
                self.latest_steps = max(min(self.due_steps, steps) + (1 + jitter) * interval, earliest)
            self.due_steps = max(steps + 1, round(min(self.fair_steps, self.latest_steps)))
        if interval_s is not None:
            earliest = now + MIN_AHEAD * interval_s
            self.is_behind = self.is_behind or self.fair_at + interval_s * jitter <= earliest
            self.fair_at = next_due(self.fair_at if self.fair_at < math.inf else now, interval_s, jitter, now)
            if own:
                self.latest_at = max(min(self.due_at, now) + (1 + jitter) * interval_s, earliest)
            self.due_at = min(self.fair_at, self.latest_at)

    def adapt_interval(
        self, steps: int, boundary_at: float, exchange: ExchangeCost | None, machine: Machine, is_failing: bool = False
    ) -> None:
        """Choose the interval anew after a mix from the cost of exchanges, if the configuration leaves it open.

        Args:
            steps: Local steps at the last boundary.
            boundary_at: The time of that boundary.
            exchange: The present cost of an exchange; None before the first.
            machine: The cost factors of this machine.
            is_failing: True if many of the last exchanges that this peer began have failed.
        """
        if not self.config.auto_interval or self.every is None:
            return
        if self.last_mix is not None:
            earlier_steps, earlier_at = self.last_mix
            if steps > earlier_steps:
                self.step_times_s.append((boundary_at - earlier_at) / (steps - earlier_steps))
        self.last_mix = steps, boundary_at
        if exchange is None or len(self.step_times_s) < MIN_STEP_TIMES:
            if is_failing:
                self.every = max(self.every, NOMINAL_STEPS)
            return
        step_s = sorted(self.step_times_s)[len(self.step_times_s) // 2]
        new_interval = mix_interval(step_s, exchange, machine, self.config.internal.mixing_share, is_failing)
        if not self.every / MIN_CHANGE <= new_interval <= self.every * MIN_CHANGE:
            self.every = new_interval


def next_due(due: float, interval: float, jitter: float, now: float) -> float:
    """Return when the next mix is fairly due: an interval after the last was due, not after it took place.

    So a node finishes one exchange an interval, however long they take. Counted from each exchange there would be 2 ln
    2 = 1.39, since others initiate half of them. The next mix is due MIN_AHEAD to MAX_AHEAD intervals from now, however
    late or early mixes come. All arguments but ``jitter``, a factor, are step counts, or else times.
    """
    return min(max(due + interval * jitter, now + MIN_AHEAD * interval), now + MAX_AHEAD * interval)


def collision_delay_s(rng: random.Random) -> float:
    """Return the back-off after all partners were busy, jittered so that they do not collide again."""
    return COLLISION_S + JITTER_S * rng.random()
