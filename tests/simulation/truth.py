"""The true progress of each member: the samples behind its weights, as an onlooker counts them.

While all members of a run reach each other, this is what all of them have trained. Parts that train apart, because of
a cut or as runs of their own, have a number each, and exchanges between them bring it to the mean.

A member can show this number only if exchanges bring it as fast as others train. One exchange moves a number by two
intervals at most, so that a partner may state any number (docs/protocol.md, "Progress"). Two fast neighbours on a ring
train more than their slow neighbours can take up in that way, and the numbers drift apart for ever. ``expected``
follows this rule with the exchanges that took place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from statistics import fmean, median_low
from typing import TYPE_CHECKING

from gossip.exchange.progress import MAX_EXCHANGE_INTERVALS, TIMED_MIX_STEPS

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.world import World


class Truth:
    """The truth about one world. A host's number is ``base`` and what its part has trained since then."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._trained: dict[Hashable, float] = {}  # samples that each part's members trained
        self._part: dict[Host, Hashable] = {}
        self._base: dict[Host, float] = {}
        self._expected: dict[Host, float] = {}
        self._members: Counter[Hashable] = Counter()  # the number of members of each part
        self.unsure = 0.0  # samples by which the mean may be off, since newcomers take the number of some member

    def of(self, host: Host) -> float:
        return self._base[host] + self._trained[self._part[host]]

    def expected(self, host: Host) -> float:
        """Return the number that the exchanges which took place allow the host to show."""
        return self._expected[host]

    def __contains__(self, host: Host) -> bool:
        return host in self._part

    def part(self, host: Host) -> Hashable:
        """Return the part with which a host trains: its run, and its side of a cut."""
        sides = self.world.network.sides
        return host.peer.view.run_id, sides(host.number) if sides is not None else 0

    def train(self, host: Host, samples: int) -> None:
        part = self.place(host)
        self._trained[part] += samples
        self._expected[host] += samples * self._members[part]

    def place(self, host: Host) -> Hashable:
        """Put the host into its present part with its number unchanged; a new host gets the others' number."""
        part = self.part(host)
        if self._part.get(host) != part:
            number = self.of(host) if host in self._part else self.found(host)
            self.gone(host)
            self._part[host] = part
            self._members[part] += 1
            self._base[host] = number - self._trained.setdefault(part, 0.0)
        return part

    def gone(self, host: Host) -> None:
        """Remove the host from its part."""
        if host in self._part:
            self._members[self._part[host]] -= 1

    def found(self, host: Host) -> float:
        """Return the number that a newcomer should begin with."""
        run_id = host.peer.view.run_id
        others = [other for other in self._part if not other.gone and other.peer.view.run_id == run_id]
        near = [other for other in others if self._part[other] == self.part(host)] or others
        number = fmean(map(self.of, near)) if near else 0.0
        beyond = [self._expected[other] - self.of(other) for other in near] or [0.0]
        self._expected[host] = number + median_low(beyond)
        self.unsure += (max(beyond) - min(beyond)) / len(beyond)  # its donors may have any of these
        return number

    def moved(self) -> None:
        """Update all parts after a cut has begun or ended."""
        for host in self._part:
            if not host.gone:
                self.place(host)

    def set(self, host: Host, number: float) -> None:
        """Note that a checkpoint with so many samples behind it is loaded."""
        self.gone(host)
        part = self._part[host] = self.part(host)
        self._members[part] += 1
        self._base[host] = number - self._trained.setdefault(part, 0.0)
        self._expected[host] = number

    def mix(self, hosts: Iterable[Host]) -> None:
        """Note that all of these have averaged their weights."""
        known = [host for host in hosts if host in self._part]
        if len({self._part[host] for host in known}) > 1 or len({self._base[host] for host in known}) > 1:
            mean = fmean(map(self.of, known))
            for host in known:
                self._base[host] = mean - self._trained[self._part[host]]
        if len(known) > 1:
            mean = fmean(self._expected[host] for host in known)
            most = MAX_EXCHANGE_INTERVALS * min(map(self.interval, known))
            for host in known:
                self._expected[host] += max(-most, min(mean - self._expected[host], most))

    def interval(self, host: Host) -> float:
        """Return how much the host's number grows between two of its mixes."""
        steps = self.world.config.interval_steps or TIMED_MIX_STEPS
        return steps * host.samples * self._members[self._part[host]]
