"""The peers' choice of their intervals at the fast level, by the same rule as a node's."""

from __future__ import annotations

import dataclasses

from gossip.codecs import ExchangeCost, Machine
from gossip.exchange.durations import WAIT_PARTNERS, OwnResults, median
from gossip.recent import Recent
from gossip.schedule import Schedule

__all__ = ["Intervals"]


class Intervals:
    """The durations of the last exchanges that each peer initiated, by partner.

    ``cost`` is that of an exchange whose duration does not count, and ``machine`` the costs on each peer's machine.
    """

    def __init__(self, peers: int, cost: ExchangeCost, machine: Machine) -> None:
        self.cost, self.machine = cost, machine
        self.durations_s = [Recent[int, float](WAIT_PARTNERS) for _ in range(peers)]
        self.results = [OwnResults() for _ in range(peers)]

    def note_duration(self, peer: int, partner: int, seconds: float) -> None:
        """Record an exchange that the peer initiated, from its offer to its end."""
        self.durations_s[peer][partner] = seconds
        self.results[peer].add(failed=False)

    def note_failure(self, peer: int) -> None:
        """Record an exchange that the peer initiated and that failed."""
        self.results[peer].add(failed=True)

    def choose_interval(self, peer: int, schedule: Schedule, steps: int, boundary_at: float) -> None:
        """Let a peer choose its interval anew after a mix; its last boundary was after ``steps`` steps."""
        cost, durations_s = None, self.durations_s[peer]
        if durations_s:
            cost = dataclasses.replace(self.cost, seconds=median([durations_s[partner] for partner in durations_s]))
        schedule.adapt_interval(steps, boundary_at, cost, self.machine, self.results[peer].are_failing)

    def forget(self, peer: int) -> None:
        """Drop the durations of a peer that dies or leaves."""
        self.durations_s[peer].clear()
        self.results[peer] = OwnResults()
