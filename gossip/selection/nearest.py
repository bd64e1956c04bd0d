"""Nearest with shortcuts: mostly partners whose exchanges are cheap, sometimes any member."""

from __future__ import annotations

import math
import random
from collections.abc import Container
from dataclasses import dataclass
from statistics import median

from gossip.errors import ConfigError
from gossip.ids import PeerId
from gossip.selection.rule import Candidates, Options, Uniform, uniform

# Near choices are made among this many cheapest members. In regions of eight, noise then stays within 5 % of its level
# when mixing with all seven others.
NEAR = 4
# With this many measured members, no unmeasured ones are tried. In a swarm of eight equal regions, eight of these
# members are then in our own.
ENOUGH_MEASURED = 64
MAX_MEASURED = 128  # Beyond this the costlier half is forgotten, which would not be chosen anyway.
MAX_DRAWS = 8  # Draws to find an unmeasured member.
SMOOTHING = 0.25  # The weight of a new measurement: one exchange on a busy link does not make a partner far.


@dataclass(slots=True)
class Measurement:
    """A partner's smoothed round trip and rate, None until measured."""

    round_trip_s: float | None = None
    rate_mb_s: float | None = None


class Nearest(Uniform):
    """A rule that picks any member with probability ``shortcut``, otherwise one of the 4 with the cheapest exchanges.

    An exchange costs ``round trip + vector_mb / rate`` (s, MB, MB/s), from past exchanges and probes. A partner's
    unknown value counts as the median of the known ones. While fewer than 64 members are measured, an unknown one is
    tried with the probability ``1 - measured / 64``.

    **Spectral gap.** Members near to each other form cliques, which near choices alone never leave: gap 0. With
    shortcuts of probability p the expected mixing matrix is (1 - p) times that of near choices plus p times that of
    uniform choices. The first has eigenvalue 1 on vectors that are constant in each clique. So n exchanges, a round of
    n members, have the gap ``p n / (n - 1)``, p times that of uniform choices. That holds for any number and sizes of
    cliques; the gap is larger if near choices link them.

    The table is for 64 members in 8 regions, with round trips of 1 to 3 ms inside and 20 to 200 ms between regions. The
    cost (the mean round trip of an exchange) is relative to uniform choice's. So is the simulated variance about the
    mean that unit noise in each round leaves:

        shortcut   gap a round   cost   variance (distance)
        uniform        1.016     1.00   1.00 (1.00)
        0.2            0.203     0.21   1.37 (1.17)
        0.1            0.102     0.12   1.90 (1.38)
        0.05           0.051     0.07   2.97 (1.72)

    At 0.1 exchanges cost an eighth, and members are 1.4 times as far apart, not 3 times as the gap suggests. Most of
    the disagreement that noise causes lies within a clique, and is mixed there at full speed.
    """

    name = "nearest"
    is_personal = True

    # Small worlds (Watts and Strogatz 1998): a few random links across a graph of local ones make its paths as short as
    # a random graph's. Far links are uniform and not by distance (Kleinberg 2000), since no message is routed along
    # them. A mixing matrix gains by the number of links that leave a clique, wherever they lead.

    def __init__(self, vector_mb: float = 0.0, shortcut: float = 0.1, near: int = NEAR) -> None:
        if not 0 < shortcut <= 1:
            raise ConfigError(
                f"shortcut = {shortcut:g} cannot work: it must be above 0 (without any, regions never agree) and at "
                f"most 1 (uniform); 0.1 is the default."
            )
        super().__init__()
        self.vector_mb, self.shortcut, self.near = vector_mb, shortcut, near
        self.measured: dict[PeerId, Measurement] = {}
        self._by_cost: list[PeerId] = []  # The measured members, cheapest first; sorted again on demand after a change.
        self._is_stale = False  # A measurement has changed since ``_by_cost`` was sorted.
        self._changes = -1  # ``Candidates.changes`` when members that are gone were last forgotten; -1 before.

    @classmethod
    def from_options(cls, options: Options) -> Nearest:
        return cls(options.vector_mb, options.shortcut)

    def note_measurement(self, partner: PeerId, round_trip_s: float | None, rate_mb_s: float | None) -> None:
        measurement = self.measured.get(partner) or Measurement()
        if round_trip_s is not None and 0 <= round_trip_s < math.inf:
            measurement.round_trip_s = smoothed(measurement.round_trip_s, round_trip_s)
        if rate_mb_s is not None and 0 < rate_mb_s < math.inf:
            measurement.rate_mb_s = smoothed(measurement.rate_mb_s, rate_mb_s)
        if measurement.round_trip_s is not None or measurement.rate_mb_s is not None:
            self.measured[partner] = measurement
            self._is_stale = True
            if len(self.measured) > MAX_MEASURED:
                self._sort_by_cost()
                for peer in self._by_cost[MAX_MEASURED // 2 :]:
                    del self.measured[peer]
                del self._by_cost[MAX_MEASURED // 2 :]

    def choose(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        alive, fits = swarm.alive(), swarm.fits
        if not alive:
            return None
        if rng.random() >= self.shortcut:
            if rng.random() * min(ENOUGH_MEASURED, len(alive)) >= len(self.measured):
                unmeasured = self._draw_unmeasured(swarm, asked, rng)
                if unmeasured is not None:
                    return unmeasured
            unasked = [peer for peer in self.nearest(swarm) if peer not in asked]
            if unasked:
                return unasked[int(rng.random() * len(unasked))]
        return uniform(alive, rng, fits, asked)

    def nearest(self, swarm: Candidates) -> list[PeerId]:
        """Return the ``near`` cheapest measured members that fit, cheapest first."""
        if swarm.changes != self._changes:  # Forget members that are gone.
            self._changes = swarm.changes
            gone = self.measured.keys() - set(swarm.alive())
            for peer in gone:
                del self.measured[peer]
            self._is_stale = self._is_stale or bool(gone)
        if self._is_stale:
            self._sort_by_cost()
        nearest = []
        for peer in self._by_cost:
            if swarm.fits(peer):
                nearest.append(peer)
                if len(nearest) == self.near:
                    break
        return nearest

    def _draw_unmeasured(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        alive = swarm.alive()
        for _ in range(MAX_DRAWS):
            peer = alive[int(rng.random() * len(alive))]
            if peer not in self.measured and peer not in asked and swarm.fits(peer):
                return peer
        return None

    def _sort_by_cost(self) -> None:
        costs = self._costs()
        self._by_cost = sorted(costs, key=lambda peer: (costs[peer], peer))
        self._is_stale = False

    def _costs(self) -> dict[PeerId, float]:
        """Return the seconds of an exchange with each measured member."""
        measurements = self.measured.values()
        round_trips_s = [known.round_trip_s for known in measurements if known.round_trip_s is not None]
        rates_mb_s = [known.rate_mb_s for known in measurements if known.rate_mb_s is not None]
        usual_round_trip_s, usual_rate_mb_s = median(round_trips_s or [0.0]), median(rates_mb_s or [math.inf])
        costs = {}
        for peer, measurement in self.measured.items():
            round_trip_s = usual_round_trip_s if measurement.round_trip_s is None else measurement.round_trip_s
            rate_mb_s = usual_rate_mb_s if measurement.rate_mb_s is None else measurement.rate_mb_s
            costs[peer] = round_trip_s + self.vector_mb / rate_mb_s
        return costs


def smoothed(average: float | None, measured: float) -> float:
    return measured if average is None else average + SMOOTHING * (measured - average)
