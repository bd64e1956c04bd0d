"""How long a message takes from one peer to another, how much each can carry, and what carries it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gossip.errors import ConfigError
from sim.scenario.conditions import Congestion, Latency, NetworkSpec
from sim.scenario.fleet import PeerSpec, by_name
from sim.scenario.worlds import world
from sim.seeds import derive
from sim.world.tcp import Transport

__all__ = ["NetworkModel", "has_tcp", "network_of"]


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """Every pair of peers alike. The swarm asks these methods alone, so that another network answers them differently:
    ``sender`` and ``receiver`` are numbers of peers, in the order in which they were added.

    Raises :class:`~gossip.errors.ConfigError` for numbers that no network has.
    """

    latency_s: float = 0.02  # one way; 0: what is sent arrives at the same instant, after what was sent before
    rate_bytes_s: float = 12.5e6  # of one peer, 100 Mbit/s each way; math.inf: streams take the latency alone
    loss: float = 0.0  # of packets, where there is TCP; else of messages and of streams, which then never arrive
    congestion: Congestion | None = None  # of TCP; None: there is none, and a rate is a rate from the first byte
    tls: bool = False  # over TCP
    weight: float = 1.0  # of a byte of a vector, where a small model stands for a large one
    connections: int = 1  # of one link at most, where one does not fill its path

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ConfigError("latency_s must be a number of seconds from 0 up, as 0.02.")
        if not self.rate_bytes_s > 0:
            raise ConfigError("rate_bytes_s must be positive: bytes a second, as 12.5e6 for 100 Mbit/s.")
        if not 0 <= self.loss < 1:
            raise ConfigError("loss must lie from 0 to below 1: a share of packets.")
        if self.congestion not in (None, *get_args(Congestion)):
            raise ConfigError(f"congestion must be one of {', '.join(get_args(Congestion))}, or None.")
        if self.tls and self.congestion is None:
            raise ConfigError("tls needs a congestion control: it is spoken over TCP.")

    def bytes_of(self, encoded_bytes: int) -> int:
        """What a link carries of a vector that is encoded in so many bytes."""
        return encoded_bytes if self.weight == 1.0 else max(1, round(self.weight * encoded_bytes))

    def add(self, name: str) -> None:
        """A new peer, the next in number; its randomness comes from its name."""

    def latency(self, sender: int, receiver: int) -> float:
        """Seconds from the one to the other. One pair's is the same at all times, or messages would overtake."""
        return self.latency_s

    def loss_of(self, sender: int, receiver: int) -> float:
        """The share of packets from the one to the other that are lost, where there is TCP."""
        return self.loss

    @property
    def longest_s(self) -> float:
        """The longest latency of any pair."""
        return self.latency_s

    def up_bytes_s(self, peer: int) -> float:
        """What this peer can send, all its streams together."""
        return self.rate_bytes_s

    def down_bytes_s(self, peer: int) -> float:
        """What this peer can receive, all its streams together."""
        return self.rate_bytes_s

    @property
    def transport(self) -> Transport | None:
        """What TCP makes of its links."""
        return None if self.congestion is None else Transport(self.congestion, self.tls, self.connections)

    def loses(self, rng: random.Random) -> bool:
        """Whether this message or stream is lost for good, as none is over TCP: tests lose some to see that exchanges
        survive it. ``rng`` is the sender's own."""
        return self.congestion is None and self.loss > 0 and rng.random() < self.loss


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenNetwork(NetworkModel):
    """Pairs alike, with another rate down than up (``rate_bytes_s``)."""

    down_rate_bytes_s: float = 12.5e6

    def down_bytes_s(self, peer: int) -> float:
        return self.down_rate_bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PairNetwork(UnevenNetwork):
    """Each pair has the quantile that a hash of both peers' keys picks: nothing is kept for a pair, and 10,000 peers
    have 50 million. Pairs are independent, unlike places on a globe: near A and near B does not mean A near B.
    """

    seed: int
    table_s: list[float] = field(repr=False)  # TABLE quantiles, evenly spaced
    keys: list[int] = field(default_factory=list, repr=False)  # 64 random bits a peer

    def add(self, name: str) -> None:
        self.keys.append(int.from_bytes(derive(self.seed, name, "latency")[:8], "little"))

    @property
    def longest_s(self) -> float:
        return max(self.table_s)

    def latency(self, sender: int, receiver: int) -> float:
        keys = self.keys
        return self.table_s[pick(keys[sender] ^ keys[receiver])]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionNetwork(PairNetwork):
    """Each peer lives in a region; ``table_s`` is of pairs within one, where the matrix has nothing to say (0)."""

    matrix_s: list[list[float]] = field(repr=False)  # (regions, regions), one way
    regions: list[int] = field(default_factory=list, repr=False)  # of each peer
    placed: Mapping[str, int] = field(default_factory=dict, repr=False)  # by name, who does not draw one

    def add(self, name: str) -> None:
        PairNetwork.add(self, name)
        drawn = int.from_bytes(derive(self.seed, name, "region")[:8], "little") * len(self.matrix_s) >> 64
        self.regions.append(self.placed.get(name, drawn))

    @property
    def longest_s(self) -> float:
        return max(max(row) for row in self.matrix_s)

    def latency(self, sender: int, receiver: int) -> float:
        regions = self.regions
        latency_s = self.matrix_s[regions[sender]][regions[receiver]]
        return latency_s or PairNetwork.latency(self, sender, receiver)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNetwork(NetworkModel):
    """Another network, in which some peers have rates, latency or loss of their own."""

    base: NetworkModel
    fleet: Mapping[str, PeerSpec] = field(repr=False)  # by name
    own: list[PeerSpec | None] = field(default_factory=list, repr=False)  # of each peer
    further_s: list[float] = field(default_factory=list, repr=False)  # the same

    def add(self, name: str) -> None:
        self.base.add(name)
        spec = self.fleet.get(name)
        self.own.append(spec)
        self.further_s.append(0.0 if spec is None else spec.latency_ms / 1e3)

    def latency(self, sender: int, receiver: int) -> float:
        return self.base.latency(sender, receiver) + self.further_s[sender] + self.further_s[receiver]

    @property
    def longest_s(self) -> float:
        furthest = sorted((spec.latency_ms / 1e3 for spec in self.fleet.values()), reverse=True)
        return self.base.longest_s + sum(furthest[:2])

    def loss_of(self, sender: int, receiver: int) -> float:
        arrive = 1 - self.base.loss_of(sender, receiver)
        for spec in (self.own[sender], self.own[receiver]):
            arrive *= 1 if spec is None else 1 - spec.loss
        return 1 - arrive

    def up_bytes_s(self, peer: int) -> float:
        spec = self.own[peer]
        rate = None if spec is None else spec.rate_mbit_s
        return self.base.up_bytes_s(peer) if rate is None else rate.up_bytes_s

    def down_bytes_s(self, peer: int) -> float:
        spec = self.own[peer]
        rate = None if spec is None else spec.rate_mbit_s
        return self.base.down_bytes_s(peer) if rate is None else rate.down_bytes_s


def network_of(
    spec: NetworkSpec, seed: int, ideal: bool = False, fleet: Sequence[PeerSpec] = (), weight: float = 1.0,
    connections: int = 1,
) -> NetworkModel:  # fmt: skip
    """The network that a scenario describes, without its cuts: those are events of the swarm. A perfect one has no
    TCP, nor one that is said to have none; nor has that of an ``ideal`` membership, unless it loses packets: there
    links are left out, and with them what they take."""
    common: dict[str, Any] = {"loss": spec.loss, "weight": weight}
    if has_tcp(spec, ideal, fleet):
        common |= {"congestion": spec.congestion, "tls": spec.tls, "connections": connections}
    base, own = base_of(spec, seed, common, by_name(fleet)), [each for each in fleet if each.links]
    if not own:
        return base
    return FleetNetwork(base.latency_s, base.rate_bytes_s, **common, base=base, fleet=by_name(own))


def has_tcp(spec: NetworkSpec, ideal: bool, fleet: Sequence[PeerSpec]) -> bool:
    """Whether links are TCP's, for which :func:`network_of` says why."""
    if spec.congestion is None:
        return False
    if ideal:
        return spec.loss > 0 or any(each.loss for each in fleet)
    return not spec.perfect or any(each.links for each in fleet)


def base_of(spec: NetworkSpec, seed: int, common: dict[str, Any], fleet: Mapping[str, PeerSpec]) -> NetworkModel:
    """Without what is single peers' own, but for the regions in which they are."""
    rate, latency = spec.rate_mbit_s, spec.latency
    rates: dict[str, Any] = {"rate_bytes_s": rate.up_bytes_s, "down_rate_bytes_s": rate.down_bytes_s}
    if latency.kind == "constant":
        assert latency.distribution is not None
        return UnevenNetwork(latency.distribution.mean, **rates, **common)
    table_s = quantiles_s(latency).tolist()
    middle_s = table_s[TABLE // 2]
    if latency.kind != "matrix":
        return PairNetwork(middle_s, **rates, **common, seed=seed, table_s=table_s)
    rtt_ms = latency.rtt_ms if latency.name is None else world("matrix", latency.name, "name")["rtt_ms"]
    matrix_s = [[rtt / 2e3 for rtt in row] for row in rtt_ms or ()]
    placed = {name: latency.places.index(each.region) for name, each in fleet.items() if each.region is not None}
    return RegionNetwork(
        middle_s, **rates, **common, seed=seed, table_s=table_s, matrix_s=matrix_s, placed=placed
    )  # fmt: skip


TABLE_BITS = 12
TABLE = (
    1 << TABLE_BITS
)  # steps of 0.03 ms in the middle half of the internet's, of 15 ms in its last hundredth; 128 KiB
# Multiplicative hashing: the high bits of the product with 2**64 over the golden ratio (D. Knuth, The Art of Computer
# Programming, volume 3, section 6.4). The keys are random, so one product is enough, and costs 0.1 us.
GOLDEN = 0x9E3779B97F4A7C15
SHIFT, MASK = 64 - TABLE_BITS, TABLE - 1
SAME_REGION_RTT_MS = (0.25, 3.4)  # as worlds.toml says of the cloud's


def pick(key: int) -> int:
    """A place in the table for a pair's 64 bits."""
    return (key * GOLDEN >> SHIFT) & MASK


def quantiles_s(latency: Latency) -> NDArray[np.float64]:
    """TABLE one-way latencies, seconds, at evenly spaced shares: a pair that picks one at random draws from it."""
    shares = (np.arange(TABLE) + 0.5) / TABLE
    if latency.distribution is not None:
        return latency.distribution.quantiles(shares)
    if latency.kind == "matrix":
        low, high = SAME_REGION_RTT_MS
        return (low + shares * (high - low)) / 2e3
    figures = world("quantiles_ms", latency.name, "name")  # p5, p25 ...: the share below is linear between them
    at_ms = np.interp(shares, [float(name[1:]) / 100 for name in figures], list(figures.values()))
    return np.asarray(at_ms, np.float64) / 1e3
