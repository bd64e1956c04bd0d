"""The conditions of a scenario: latency, rates, loss and cuts of the network, and churn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from sim.scenario import tables, worlds
from sim.scenario.distribution import PARAMETERS, Distribution
from sim.scenario.tables import KeyFault, refuse_unknown, require

Congestion = Literal["cubic", "bbr"]


class PresetTable(tables.KeyTable):
    """A table that a preset fills in, under the key ``preset`` of a file; other keys override it."""

    __slots__ = ()
    FILE_KEYS = ("preset",)
    PRESETS: ClassVar[str]  # The kind of its presets in worlds.toml.

    @classmethod
    def of(cls, preset: str, **changes: Any) -> Self:
        """Return the table of a preset, with changes."""
        return cls(**{**worlds.world(cls.PRESETS, preset, "preset"), **changes})

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse a scenario's table with or without a preset, or a preset's name alone."""
        table: Any = {"preset": value} if isinstance(value, str) else value
        return cls.of(**table) if isinstance(table, Mapping) and "preset" in table else tables.record(cls, table)

    def plain(self) -> dict[str, Any]:
        """Return the table that :meth:`parse` reads."""
        bases = {}
        for name in worlds.names(self.PRESETS):
            fields = tables.fields_of(self.of(name))
            bases[name] = {key: fields[key] for key in worlds.world(self.PRESETS, name, "preset")}
        return tables.nearest(tables.fields_of(self), bases)


@dataclass(frozen=True, slots=True)
class Latency(tables.KeyTable):
    """One-way latency of the pairs of a network; each pair keeps its latency.

    Attributes:
        kind: One of Distribution's kinds; "quantiles", a measured distribution by name; or "matrix", round trips
            between regions, by name or with ``regions`` and ``rtt_ms``. A peer draws its region at random.
        distribution: The distribution of a kind of Distribution.
        name: The name of measured quantiles or of a matrix.
        regions: The names of the regions.
        rtt_ms: Round trips in milliseconds, (regions, regions), symmetric. 0 on the diagonal stands for the 0.25 to 3.4
            ms between machines of one cloud region.

    Raises:
        ConfigError: A value cannot work.
    """

    kind: str
    distribution: Distribution | None = None
    name: str | None = None
    regions: tuple[str, ...] | None = None
    rtt_ms: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        tables.settle(self)
        require(self.kind in LATENCIES, "kind", self.kind, "one of " + ", ".join(LATENCIES))
        if self.kind == "quantiles":
            worlds.world("quantiles_ms", self.name, "name")
        elif self.kind == "matrix" and self.name is not None:
            worlds.world("matrix", self.name, "name")
        elif self.kind == "matrix":
            check_matrix(self.regions, self.rtt_ms)
        else:
            fits = self.distribution is not None and self.distribution.kind == self.kind
            require(fits, "distribution", self.distribution, f"a {self.kind} Distribution, as Latency.of sets it")

    @property
    def region_names(self) -> tuple[str, ...]:
        """Return the names of a matrix's regions; none for other kinds."""
        if self.kind != "matrix":
            return ()
        return self.regions or tuple(worlds.world("matrix", self.name, "name")["regions"])

    @classmethod
    def of(cls, distribution: Distribution) -> Latency:
        """Return latencies drawn from a distribution; a constant one makes all pairs alike."""
        return cls(distribution.kind, distribution)

    @classmethod
    def parse(cls, value: object) -> Latency:
        """Parse a scenario's table; times of a distribution need their unit (value_ms, median_s)."""
        if isinstance(value, Latency):
            return value
        if isinstance(value, Distribution):
            return cls.of(value)
        require(isinstance(value, Mapping), "", value, "a table, as { kind = 'constant', value_ms = 50 }")
        assert isinstance(value, Mapping)
        kind = value.get("kind")
        require(kind in LATENCIES, "kind", kind, "one of " + ", ".join(LATENCIES))
        if kind in PARAMETERS:
            for name in ("value", "low", "high", "median", "mean", "scale"):
                if name in value:
                    raise KeyFault(name, f"needs its unit: write {name}_ms, or {name}_s.")
            return cls.of(Distribution.parse(value))
        refuse_unknown(value, ["kind", "name"] if kind == "quantiles" else ["kind", "name", "regions", "rtt_ms"])
        return cls(**value)

    def plain(self) -> dict[str, Any]:
        """Return the table that :meth:`parse` reads."""
        if self.distribution is not None:
            return self.distribution.plain()
        return tables.fields_of(self)

    def __str__(self) -> str:
        if self.distribution is not None:
            return str(self.distribution)
        return f"{self.kind} of {self.name or ', '.join(self.regions or ())}"


LATENCIES = (*PARAMETERS, "quantiles", "matrix")


def check_matrix(regions: tuple[str, ...] | None, rtt_ms: tuple[tuple[float, ...], ...] | None) -> None:
    if not regions or not rtt_ms:
        missing = "regions" if not regions else "rtt_ms"
        names = ", ".join(worlds.names("matrix"))
        raise KeyFault(missing, f"is missing: a matrix has a name ({names}), or its regions and rtt_ms.")
    is_square = len(rtt_ms) == len(regions) and all(len(row) == len(regions) for row in rtt_ms)
    require(is_square, "rtt_ms", rtt_ms, f"a row and a column for each of the {len(regions)} regions")
    for i, row in enumerate(rtt_ms):
        for j, rtt in enumerate(row):
            is_valid = rtt == rtt_ms[j][i] and (0 < rtt < math.inf or (i == j and rtt == 0))
            require(is_valid, f"rtt_ms[{i}][{j}]", rtt, "positive, and the same both ways")


@dataclass(frozen=True, slots=True)
class Rate:
    """A peer's rates up and down in Mbit/s, shared fairly among its transfers; math.inf is unlimited."""

    up: float = 100.0
    down: float = 100.0

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            value = getattr(self, name)
            value = math.inf if value == UNLIMITED else value
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            require(is_number and value > 0, name, value, f"a positive number of Mbit/s, or '{UNLIMITED}'")
            object.__setattr__(self, name, float(value))

    @classmethod
    def parse(cls, value: object) -> Rate:
        """Parse a table of up and down; a single number, or "unlimited", is both."""
        if isinstance(value, str | int | float):
            is_rate = value == UNLIMITED or not isinstance(value, str | bool)
            require(is_rate, "", value, f"a number of Mbit/s, '{UNLIMITED}', or a table of up and down")
            return cls(value, value)  # type: ignore[arg-type]
        return tables.record(cls, value)

    def plain(self) -> dict[str, Any]:
        """Return the table that :meth:`parse` reads."""
        return {name: UNLIMITED if rate == math.inf else rate for name, rate in (("up", self.up), ("down", self.down))}

    @property
    def up_bytes_s(self) -> float:
        """Return the rate up in bytes per second."""
        return self.up * 1e6 / 8

    @property
    def down_bytes_s(self) -> float:
        """Return the rate down in bytes per second."""
        return self.down * 1e6 / 8


UNLIMITED = "unlimited"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCut(tables.KeyTable):
    """A cut: from ``at_s`` to ``until_s`` the network is split into ``groups`` groups of peers."""

    at_s: float
    until_s: float
    groups: int = 2

    def __post_init__(self) -> None:
        tables.settle(self)
        require(0 <= self.at_s < math.inf, "at_s", self.at_s, "a number of seconds from 0 up")
        require(self.until_s > self.at_s, "until_s", self.until_s, f"above at_s = {self.at_s:g}")
        require(self.groups >= 2, "groups", self.groups, "2 or more: one group is no partition")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatSpec(tables.KeyTable):
    """The shares of peers by the router with NAT in front of them; peers are numbered in the order of these kinds.

    Attributes:
        public: Peers without such a router.
        mapped: Peers whose router opens a port for them, so that others can dial them as well.
        punchable: Peers whose router maps a port in the same way for all destinations.
        hard: Peers whose router maps a port anew for each destination.
        punch_success: The probability that two punchable peers can open a connection by hole punching, which a pair
            draws once.

    Raises:
        ConfigError: A value cannot work.
    """

    public: float = 0.0
    mapped: float = 0.0
    punchable: float = 0.0
    hard: float = 0.0
    punch_success: float = 0.7

    def __post_init__(self) -> None:
        tables.settle(self)
        kinds = ("public", "mapped", "punchable", "hard")
        for name in (*kinds, "punch_success"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "from 0 to 1")
        total = sum(getattr(self, name) for name in kinds)
        if abs(total - 1) > ROUNDING_ALLOWANCE:
            raise KeyFault("", f"has shares that come to {total:g}: public, mapped, punchable and hard must come to 1.")

    def dialable(self, peers: int) -> int:
        """Return how many of the peers can be dialled."""
        return round((self.public + self.mapped) * peers)

    def reachable(self, peers: int) -> int:
        """Return how many of the peers can be dialled or punched."""
        return round((1 - self.hard) * peers)


ROUNDING_ALLOWANCE = 1e-6  # Of the sum of shares.


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec(PresetTable):
    """The links between peers.

    In a scenario ``preset`` (lan, datacentre, fibre, wan, home) gives latency, rate and loss, and other keys override
    it; in Python :meth:`of` does.

    Attributes:
        latency: The latency of the pairs.
        rate_mbit_s: The rates of each peer in Mbit/s.
        loss: The share of lost packets, which TCP sends again.
        congestion: TCP's congestion control: "cubic", the default of Linux, or "bbr", which a node selects where the
            kernel has it. None: no TCP; lost messages and streams are not sent again, to test a method with failures.
        tls: Links use TLS, whose handshake takes a round trip more.
        partitions: Cuts, which may not overlap.
        nat: The routers in front of peers; None: all peers can be dialled.

    Raises:
        ConfigError: A value cannot work.
    """

    PRESETS = "network"

    latency: Latency = field(default_factory=lambda: Latency.of(Distribution.constant(0.02)))
    rate_mbit_s: Rate = Rate()
    loss: float = 0.0
    congestion: Congestion | None = "cubic"
    tls: bool = False
    partitions: tuple[NetworkCut, ...] = ()
    nat: NatSpec | None = None

    def __post_init__(self) -> None:
        tables.settle(self)
        require(0 <= self.loss < 1, "loss", self.loss, "from 0 to below 1: the share of packets that are lost")
        require(not self.tls or self.congestion is not None, "tls", True, "left out where there is no TCP")
        has_links = self.nat is None or self.congestion is not None
        require(has_links, "congestion", "none", "'cubic' or 'bbr' beside nat, whose tunnels are connections of TCP")
        ordered = sorted(enumerate(self.partitions), key=lambda item: item[1].at_s)
        for (_, earlier), (place, later) in itertools.pairwise(ordered):
            lies_apart = later.at_s >= earlier.until_s
            wanted = f"{earlier.until_s:g} or more, when the cut before has ended: no overlap"
            require(lies_apart, f"partitions[{place}].at_s", later.at_s, wanted)

    @property
    def perfect(self) -> bool:
        """Return True if latency and loss are 0 and rates unlimited, so that TCP has no effect."""
        distribution, rate = self.latency.distribution, self.rate_mbit_s
        has_no_latency = distribution is not None and distribution.kind == "constant" and distribution.mean == 0
        return has_no_latency and rate.up == rate.down == math.inf and not self.loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnSpec(PresetTable):
    """The times at which peers come and go: times up and down drawn alternately for each peer, or a trace.

    In a scenario ``preset`` (a name in worlds.toml, like spot_v100_2023_02) gives ``up`` and ``down``, and other keys
    override it; in Python :meth:`of` does.

    Attributes:
        up: The length of sessions.
        down: The time between sessions; None: a peer that leaves never comes back.
        trace: A CSV file of columns peer (0 .. peers-1), from_s and until_s; a peer not in it is never up.
        start: "together", all are up at 0 and begin a session; or "steady", as if churn had gone on for ever.
        farewell: The share of sessions that end with a farewell.
        silent: The share of the other sessions that end by loss of power, without a sign; the rest end as by kill -9.

    Raises:
        ConfigError: A value cannot work.
    """

    PRESETS = "churn"

    up: Distribution | None = None
    down: Distribution | None = None
    trace: str | None = None
    start: Literal["together", "steady"] = "together"
    farewell: float = 0.0
    silent: float = 0.0

    def __post_init__(self) -> None:
        tables.settle(self)
        for name in ("farewell", "silent"):
            share = getattr(self, name)
            require(0 <= share <= 1, name, share, "a share from 0 to 1")
        if self.trace is not None:
            require(bool(self.trace), "trace", self.trace, "the name of a CSV file")
            require(self.up is None and self.down is None, "trace", self.trace, "alone: it replaces up and down")
            require(self.start == "together", "start", self.start, "'together': a trace says which peers are up at 0")
            return
        if self.up is None:
            raise KeyFault("up", "is missing: give preset, up (and down), or trace.")
        for name, times in (("up", self.up), ("down", self.down)):
            require(times is None or times.mean > 0, name, times and str(times), "longer than 0 s on average")
        if self.start == "steady" and self.down is None:
            raise KeyFault("down", "is missing: in a steady state peers that leave come back.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSpec(tables.KeyTable):
    """How peers know each other.

    Attributes:
        mode: The whole membership "protocol", or an "ideal" sampler that always knows which peers are up. None: the
            protocol if a scenario is played message by message, and the sampler at the fast level.
        start: "together": the first peers know each other and hold one model at 0. "seed": peer 0 is alone and the
            others join through it.
        join_every_s: Seconds between two peers that join.

    Raises:
        ConfigError: A value cannot work.
    """

    mode: Literal["protocol", "ideal"] | None = None
    start: Literal["together", "seed"] = "together"
    join_every_s: float = 0.0

    def __post_init__(self) -> None:
        tables.settle(self)
        require(0 <= self.join_every_s < math.inf, "join_every_s", self.join_every_s, "a number of seconds from 0 up")
        unused = self.start == "together" and self.join_every_s > 0
        require(
            not unused, "join_every_s", self.join_every_s, "left out, or start = 'seed': it spaces the peers that join"
        )
