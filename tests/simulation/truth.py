"""What the progress of each member should be: the samples that are behind its weights, counted by an onlooker.

While all members of a run reach each other, this is what all of them have trained. Parts that train apart, because of
a cut or as runs of their own, have a number each, and exchanges between them bring it to the mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.world import World

__all__ = ["Truth"]


class Truth:
    """Of one world. A host's number is ``base`` and what its part has trained since ``base`` was taken."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._trained: dict[Hashable, float] = {}  # by part: all that its members trained
        self._part: dict[Host, Hashable] = {}
        self._base: dict[Host, float] = {}

    def of(self, host: Host) -> float:
        return self._base[host] + self._trained[self._part[host]]

    def __contains__(self, host: Host) -> bool:
        return host in self._part

    def part(self, host: Host) -> Hashable:
        """Those who train together: of one run and on one side of a cut."""
        sides = self.world.network.sides
        return host.peer.view.run_id, sides(host.number) if sides is not None else 0

    def train(self, host: Host, samples: int) -> None:
        part = self.place(host)
        self._trained[part] += samples

    def place(self, host: Host) -> Hashable:
        """Put the host into the part that it is of now, with its number as it is; a new one gets that of the others."""
        part = self.part(host)
        if self._part.get(host) != part:
            number = self.of(host) if host in self._part else self.found(host)
            self._part[host] = part
            self._base[host] = number - self._trained.setdefault(part, 0.0)
        return part

    def found(self, host: Host) -> float:
        run_id = host.peer.view.run_id
        others = [other for other in self._part if not other.gone and other.peer.view.run_id == run_id]
        near = [other for other in others if self._part[other] == self.part(host)]
        return fmean(map(self.of, near or others)) if others else 0.0

    def moved(self) -> None:
        """A cut begins or ends."""
        for host in self._part:
            if not host.gone:
                self.place(host)

    def set(self, host: Host, number: float) -> None:
        """A checkpoint with so many samples behind it is loaded."""
        self._part.pop(host, None)
        part = self._part[host] = self.part(host)
        self._base[host] = number - self._trained.setdefault(part, 0.0)

    def mix(self, hosts: Iterable[Host]) -> None:
        """All of these have averaged their weights."""
        known = [host for host in hosts if host in self._part]
        if len({self._part[host] for host in known}) > 1 or len({self._base[host] for host in known}) > 1:
            mean = fmean(map(self.of, known))
            for host in known:
                self._base[host] = mean - self._trained[self._part[host]]
