"""The network: latency and rate between peers, and the transport."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.arrays import F64
from sim.scenario.conditions import Congestion, Latency, NetworkSpec
from sim.scenario.fleet import PeerSpec, by_name
from sim.scenario.worlds import world
from sim.seeds import GOLDEN, derive_int
from sim.world.nat import Nat
from sim.world.tcp import Transport


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """A network in which all pairs are alike, and the interface that the swarm uses.

    ``sender`` and ``receiver`` are numbers of peers, in the order in which they were added.
    """

    latency_s: float = 0.02  # One way; 0: messages arrive at the same instant, in order.
    rate_bytes_s: float = 12.5e6  # Of one peer, 100 Mbit/s; math.inf: streams take the latency alone.
    down_rate_bytes_s: float | None = None  # The rate down, where it is not the rate up.
    loss: float = 0.0  # The share of lost packets with TCP; without it, of messages and streams that never arrive.
    # TCP's congestion control; None: no TCP, and the full rate from the first byte.
    congestion: Congestion | None = None
    tls: bool = False  # TLS over TCP.
    weight: float = 1.0  # Bytes on the wire for each byte of a vector: above 1 where the model stands for a larger one.
    connections: int = 1  # The most connections of one link, where one does not fill its path.
    nat: Nat | None = None  # The routers in front of peers; None: all peers can be dialled.

    def bytes_of(self, encoded_bytes: int) -> int:
        """Return the bytes on a link for a vector of this many encoded bytes."""
        return encoded_bytes if self.weight == 1.0 else max(1, round(self.weight * encoded_bytes))

    def add(self, name: str) -> None:
        """Add a peer, the next in number; its randomness comes from its name."""

    def latency(self, sender: int, receiver: int) -> float:
        """Return the latency in seconds. A pair's latency is constant, or messages would overtake each other."""
        return self.latency_s

    def loss_of(self, sender: int, receiver: int) -> float:
        """Return the share of packets from one peer to the other that are lost, with TCP."""
        return self.loss

    @property
    def longest_s(self) -> float:
        """Return the longest latency of any pair."""
        return self.latency_s

    def up_bytes_s(self, peer: int) -> float:
        """Return the bytes per second that this peer can send, over all its streams."""
        return self.rate_bytes_s

    def down_bytes_s(self, peer: int) -> float:
        """Return the bytes per second that this peer can receive, over all its streams."""
        return self.rate_bytes_s if self.down_rate_bytes_s is None else self.down_rate_bytes_s

    @property
    def transport(self) -> Transport | None:
        """Return the model of TCP, or None without TCP."""
        return None if self.congestion is None else Transport(self.congestion, self.tls, self.connections)

    def loses(self, rng: random.Random) -> bool:
        """Return True if this message or stream is lost for good, which TCP prevents.

        Tests use it to check that exchanges survive losses. ``rng`` belongs to the sender.
        """
        return self.congestion is None and self.loss > 0 and rng.random() < self.loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PairNetwork(NetworkModel):
    """A network in which a hash of both peers' keys picks each pair's quantile of latency.

    Nothing is stored per pair, since 10,000 peers have 50 million. Pairs are independent, unlike places on a globe: if
    A and B are near C, A need not be near B.
    """

    seed: int
    table_s: list[float] = field(repr=False)  # QUANTILES quantiles, evenly spaced.
    keys: list[int] = field(default_factory=list, repr=False)  # 64 random bits per peer.

    def add(self, name: str) -> None:
        self.keys.append(derive_int(self.seed, name, "latency"))

    @property
    def longest_s(self) -> float:
        return max(self.table_s)

    def latency(self, sender: int, receiver: int) -> float:
        keys = self.keys
        return self.table_s[((keys[sender] ^ keys[receiver]) * GOLDEN >> SHIFT) & MASK]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionNetwork(PairNetwork):
    """A network of regions. ``table_s`` applies to pairs within one region, for which the matrix has 0."""

    matrix_s: list[list[float]] = field(repr=False)  # (regions, regions), one way.
    regions: list[int] = field(default_factory=list, repr=False)  # By peer.
    # The regions of peers that do not draw one, by name.
    region_of: Mapping[str, int] = field(default_factory=dict, repr=False)

    def add(self, name: str) -> None:
        PairNetwork.add(self, name)
        # 64 random bits as a fraction of 2^64, times the number of regions.
        drawn = derive_int(self.seed, name, "region") * len(self.matrix_s) >> 64
        self.regions.append(self.region_of.get(name, drawn))

    @property
    def longest_s(self) -> float:
        return max(max(row) for row in self.matrix_s)

    def latency(self, sender: int, receiver: int) -> float:
        regions = self.regions
        latency_s = self.matrix_s[regions[sender]][regions[receiver]]
        return latency_s or PairNetwork.latency(self, sender, receiver)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNetwork(NetworkModel):
    """Another network, in which some peers have their own rates, latency or loss."""

    base: NetworkModel
    fleet: Mapping[str, PeerSpec] = field(repr=False)  # By name.
    specs: list[PeerSpec | None] = field(default_factory=list, repr=False)  # By peer; None without own properties.
    more_latency_s: list[float] = field(default_factory=list, repr=False)  # Additional latency, by peer.

    def add(self, name: str) -> None:
        self.base.add(name)
        spec = self.fleet.get(name)
        self.specs.append(spec)
        self.more_latency_s.append(0.0 if spec is None else spec.latency_ms / 1e3)

    def latency(self, sender: int, receiver: int) -> float:
        return self.base.latency(sender, receiver) + self.more_latency_s[sender] + self.more_latency_s[receiver]

    @property
    def longest_s(self) -> float:
        furthest_s = sorted((spec.latency_ms / 1e3 for spec in self.fleet.values()), reverse=True)
        return self.base.longest_s + sum(furthest_s[:2])  # The two furthest peers may be a pair.

    def loss_of(self, sender: int, receiver: int) -> float:
        arriving_share = 1 - self.base.loss_of(sender, receiver)
        for spec in (self.specs[sender], self.specs[receiver]):
            arriving_share *= 1 if spec is None else 1 - spec.loss
        return 1 - arriving_share

    def up_bytes_s(self, peer: int) -> float:
        spec = self.specs[peer]
        rate = None if spec is None else spec.rate_mbit_s
        return self.base.up_bytes_s(peer) if rate is None else rate.up_bytes_s

    def down_bytes_s(self, peer: int) -> float:
        spec = self.specs[peer]
        rate = None if spec is None else spec.rate_mbit_s
        return self.base.down_bytes_s(peer) if rate is None else rate.down_bytes_s


def network_of(
    spec: NetworkSpec, seed: int, ideal: bool = False, fleet: Sequence[PeerSpec] = (), weight: float = 1.0,
    connections: int = 1,
) -> NetworkModel:  # fmt: skip
    """Return the network that a scenario describes, without its cuts, which are events of the swarm.

    It has no TCP if it is perfect or the scenario excludes TCP. An ``ideal`` membership without packet loss has no TCP
    either, since it leaves out links and their delays. ``weight`` and ``connections`` are those of NetworkModel.
    """
    common: dict[str, Any] = {"loss": spec.loss, "weight": weight}
    if has_tcp(spec, ideal, fleet):
        common |= {"congestion": spec.congestion, "tls": spec.tls, "connections": connections}
    base = base_network(spec, seed, common, by_name(fleet))
    with_own_links = [each for each in fleet if each.has_own_links]
    if not with_own_links:
        return base
    return FleetNetwork(base.latency_s, base.rate_bytes_s, **common, base=base, fleet=by_name(with_own_links))


def has_tcp(spec: NetworkSpec, ideal: bool, fleet: Sequence[PeerSpec]) -> bool:
    """Return True if links use TCP, by the rules of :func:`network_of`."""
    if spec.congestion is None:
        return False
    if ideal:
        return spec.loss > 0 or any(each.loss for each in fleet)
    return not spec.perfect or any(each.has_own_links for each in fleet)


def base_network(spec: NetworkSpec, seed: int, common: dict[str, Any], fleet: Mapping[str, PeerSpec]) -> NetworkModel:
    """Return the network without single peers' own properties, except their regions."""
    rate, latency = spec.rate_mbit_s, spec.latency
    rates: dict[str, Any] = {"rate_bytes_s": rate.up_bytes_s, "down_rate_bytes_s": rate.down_bytes_s}
    if latency.kind == "constant":
        assert latency.distribution is not None
        return NetworkModel(latency.distribution.mean, **rates, **common)
    table_s = quantiles_s(latency).tolist()
    median_s = table_s[QUANTILES // 2]
    if latency.kind != "matrix":
        return PairNetwork(median_s, **rates, **common, seed=seed, table_s=table_s)
    rtt_ms = latency.rtt_ms if latency.name is None else world("matrix", latency.name, "name")["rtt_ms"]
    matrix_s = [[rtt / 2e3 for rtt in row] for row in rtt_ms or ()]
    region_of = {
        name: latency.region_names.index(each.region) for name, each in fleet.items() if each.region is not None
    }
    return RegionNetwork(
        median_s, **rates, **common, seed=seed, table_s=table_s, matrix_s=matrix_s, region_of=region_of
    )  # fmt: skip


QUANTILE_BITS = 12
# Steps of 0.03 ms in the middle half of the internet's latencies, of 15 ms in the last hundredth; 128 KiB.
QUANTILES = 1 << QUANTILE_BITS
# Multiplicative hashing: the high bits of the product with GOLDEN (D. Knuth, The Art of Computer Programming, volume 3,
# section 6.4). The keys are random, so one product is enough, and costs 0.1 us.
SHIFT, MASK = 64 - QUANTILE_BITS, QUANTILES - 1
SAME_REGION_RTT_MS = (0.25, 3.4)  # The cloud's figures in worlds.toml.


def quantiles_s(latency: Latency) -> F64:
    """Return QUANTILES one-way latencies in seconds at evenly spaced shares; picking one at random draws from them."""
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    if latency.distribution is not None:
        return latency.distribution.quantiles(shares)
    if latency.kind == "matrix":
        low, high = SAME_REGION_RTT_MS
        return (low + shares * (high - low)) / 2e3
    figures = world("quantiles_ms", latency.name, "name")  # p5, p25 ...: between them the quantile function is linear.
    at_ms = np.interp(shares, [float(name[1:]) / 100 for name in figures], list(figures.values()))
    return np.asarray(at_ms, np.float64) / 1e3
