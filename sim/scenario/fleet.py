"""Peers that differ from the others: a real fleet, machine by machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sim.scenario import tables
from sim.scenario.conditions import NetworkSpec, Rate
from sim.scenario.distribution import Distribution
from sim.scenario.tables import KeyFault, require


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec(tables.KeyTable):
    """The properties of one peer, or of all from ``number`` to ``to``; what it leaves out is as for all peers.

    Attributes:
        number: The peer's number, from 0.
        to: The last number of a range.
        name: A name for reports.
        rate_mbit_s: Its rates in Mbit/s.
        latency_ms: One-way latency of its own line, in addition to that of its pairs.
        loss: Packet loss on its own line, in addition to that of its pairs.
        step_s: Its step times, to which no straggler's slowdown applies.
        region: Its region, in a network whose latency is a matrix.

    Raises:
        ConfigError: A value cannot work.
    """

    number: int
    to: int | None = None
    name: str | None = None
    rate_mbit_s: Rate | None = None
    latency_ms: float = 0.0
    loss: float = 0.0
    step_s: Distribution | None = None
    region: str | None = None

    def __post_init__(self) -> None:
        tables.settle(self)
        require(self.number >= 0, "number", self.number, "a peer's number, from 0 up")
        require(self.to is None or self.to >= self.number, "to", self.to, f"{self.number} or more: the last of a range")
        require(self.name is None or bool(self.name), "name", self.name, "a name, or left out")
        require(0 <= self.latency_ms < math.inf, "latency_ms", self.latency_ms, "a number of milliseconds from 0 up")
        require(0 <= self.loss < 1, "loss", self.loss, "from 0 to below 1: the share of packets that are lost")

    @property
    def numbers(self) -> range:
        return range(self.number, (self.number if self.to is None else self.to) + 1)

    @property
    def has_own_links(self) -> bool:
        """Return True if its rates, latency or loss differ from those of all peers."""
        return self.rate_mbit_s is not None or self.latency_ms > 0 or self.loss > 0

    def __str__(self) -> str:
        """Return its own properties as text."""
        numbers = f"{self.number}" if self.to is None else f"{self.number} to {self.to}"
        rate = self.rate_mbit_s
        properties = [
            "" if rate is None else f"{rate.up:g} Mbit/s up, {rate.down:g} down",
            f"{self.latency_ms:g} ms further" if self.latency_ms else "",
            f"{100 * self.loss:g} % of packets lost" if self.loss else "",
            "" if self.step_s is None else f"steps of {self.step_s}",
            f"in {self.region}" if self.region else "",
        ]
        name = self.name or ("peer" if self.to is None else "peers")
        return f"{name} ({numbers}): " + ", ".join(filter(None, properties))


def check_fleet(fleet: Sequence[PeerSpec], peers: int, network: NetworkSpec) -> None:
    """Raise a :class:`KeyFault` for a peer that does not fit the number of peers or this network."""
    place_of: dict[int, int] = {}  # The place in the fleet at which each number is named.
    latency = network.latency
    for place, spec in enumerate(fleet):
        table, last = f"fleet[{place}]", spec.numbers[-1]
        key = "number" if spec.to is None else "to"
        require(last < peers, f"{table}.{key}", last, f"below peers = {peers}, counted from 0")
        for number in spec.numbers:
            if number in place_of:
                raise KeyFault(
                    f"{table}.number", f"= {number} is named in fleet[{place_of[number]}] already: name it once."
                )
            place_of[number] = place
        is_possible = not spec.loss or network.congestion is not None
        require(
            is_possible, f"{table}.loss", spec.loss,
            "0 where network.congestion is 'none': without TCP all lines lose alike",
        )  # fmt: skip
        if spec.step_s is not None:
            positive = "longer than 0 s: time would stand still"
            require(spec.step_s.mean > 0, f"{table}.step_s", str(spec.step_s), positive)
        if spec.region is not None:
            regions = latency.region_names
            require(bool(regions), f"{table}.region", spec.region, "left out, or network.latency a matrix of regions")
            require(spec.region in regions, f"{table}.region", spec.region, "one of " + ", ".join(regions))


def by_name(fleet: Sequence[PeerSpec]) -> dict[str, PeerSpec]:
    """Return each peer's own properties, by the name that its randomness comes from."""
    return {str(number): spec for spec in fleet for number in spec.numbers}
