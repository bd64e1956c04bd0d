"""Nearest with shortcuts: mostly partners whose exchanges are fast, sometimes any member."""

from __future__ import annotations

import math
import random
from collections.abc import Container

from gossip.errors import ConfigError
from gossip.ids import PeerId
from gossip.selection.rule import Candidates, Options, Uniform, uniform

# Near choices are made among this many fastest members. In regions of eight, noise then stays within 5 % of its level
# when mixing with all seven others.
NEAR = 4
# With this many measured members, no unmeasured ones are tried. In a swarm of eight equal regions, eight of these
# members are then in our own.
ENOUGH_MEASURED = 64
MAX_MEASURED = 128  # Beyond this the slower half is forgotten, which would not be chosen anyway.
UNMEASURED_DRAWS = 8  # Draws to find an unmeasured member.
SMOOTHING = 0.25  # The weight of a new rate: one exchange on a busy link does not make a partner far.


class Nearest(Uniform):
    """A rule that picks any member with probability ``shortcut``, otherwise one of the 4 with the fastest exchanges.

    Past exchanges tell a partner's rate, in which its round trip counts. While fewer than ``known = min(64, members)``
    members are measured, another one is tried with the probability ``1 - measured / known``.

    **Spectral gap.** Members near to each other form cliques, which near choices alone never leave: gap 0. With
    shortcuts of probability p the expected mixing matrix is (1 - p) times that of near choices plus p times that of
    uniform choices. The first has eigenvalue 1 on vectors that are constant in each clique. So n exchanges, a round of
    n members, have the gap ``p n / (n - 1)``, p times that of uniform choices. That holds for any number and sizes of
    cliques; the gap is larger if near choices link them.

    The table is for 64 members in 8 regions, with round trips of 1 to 3 ms inside and 20 to 200 ms between regions. The
    cost (the mean duration of an exchange) is relative to uniform choice's. So is the simulated variance about the
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

    def __init__(self, shortcut: float = 0.1, near: int = NEAR) -> None:
        if not 0 < shortcut <= 1:
            raise ConfigError(
                f"shortcut = {shortcut:g} cannot work: it must be above 0 (without any, regions never agree) and at "
                f"most 1 (uniform); 0.1 is the default."
            )
        super().__init__()
        self.shortcut, self.near = shortcut, near
        self.rates_mb_s: dict[PeerId, float] = {}  # The smoothed rate of each measured member.
        self._by_rate: list[PeerId] = []  # The measured members, fastest first; sorted again on demand after a change.
        self._is_stale = False  # A rate has changed since ``_by_rate`` was sorted.
        self._changes = -1  # ``Candidates.changes`` when members that are gone were last forgotten; -1 before.

    @classmethod
    def from_options(cls, options: Options) -> Nearest:
        return cls(options.shortcut)

    def note_rate(self, partner: PeerId, rate_mb_s: float) -> None:
        if not 0 < rate_mb_s < math.inf:
            return
        last = self.rates_mb_s.get(partner, rate_mb_s)
        self.rates_mb_s[partner] = last + SMOOTHING * (rate_mb_s - last)
        self._is_stale = True
        if len(self.rates_mb_s) > MAX_MEASURED:
            self._sort_by_rate()
            for peer in self._by_rate[MAX_MEASURED // 2 :]:
                del self.rates_mb_s[peer]
            del self._by_rate[MAX_MEASURED // 2 :]

    def choose(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        alive, fits = swarm.alive(), swarm.fits
        if not alive:
            return None
        if rng.random() >= self.shortcut:
            if rng.random() * min(ENOUGH_MEASURED, len(alive)) >= len(self.rates_mb_s):
                unmeasured = self._draw_unmeasured(swarm, asked, rng)
                if unmeasured is not None:
                    return unmeasured
            unasked = [peer for peer in self.nearest(swarm) if peer not in asked]
            if unasked:
                return unasked[int(rng.random() * len(unasked))]
        return uniform(alive, rng, fits, asked)

    def nearest(self, swarm: Candidates) -> list[PeerId]:
        """Return the ``near`` fastest measured members that fit, fastest first."""
        if swarm.changes != self._changes:  # Forget members that are gone.
            self._changes = swarm.changes
            gone = self.rates_mb_s.keys() - set(swarm.alive())
            for peer in gone:
                del self.rates_mb_s[peer]
            self._is_stale = self._is_stale or bool(gone)
        if self._is_stale:
            self._sort_by_rate()
        nearest = []
        for peer in self._by_rate:
            if swarm.fits(peer):
                nearest.append(peer)
                if len(nearest) == self.near:
                    break
        return nearest

    def _draw_unmeasured(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        alive = swarm.alive()
        for _ in range(UNMEASURED_DRAWS):
            peer = alive[int(rng.random() * len(alive))]
            if peer not in self.rates_mb_s and peer not in asked and swarm.fits(peer):
                return peer
        return None

    def _sort_by_rate(self) -> None:
        self._by_rate = sorted(self.rates_mb_s, key=lambda peer: (-self.rates_mb_s[peer], peer))
        self._is_stale = False
