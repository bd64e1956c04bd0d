"""Routers with NAT: which peers can be dialled, which pairs can punch, and where peers seem to be."""

from gossip.ids import Address
from sim.scenario.conditions import NatSpec
from sim.seeds import derive_int

PORT = 7700  # Of every address; the hosts differ.


class Nat:
    """The routers of a swarm's peers, each of which has one of its own.

    Peers are known by their names, which are their numbers: dialable ones come first, then punchable ones.
    """

    def __init__(self, spec: NatSpec, peers: int, seed: int) -> None:
        self.spec, self.seed = spec, seed
        self.dialable, self.reachable = spec.dialable(peers), spec.reachable(peers)

    def is_dialable(self, name: str) -> bool:
        return int(name) < self.dialable

    def punches(self, name: str, other: str) -> bool:
        """Return True if these two can open a connection to each other by doing so at the same time."""
        low, high = sorted((int(name), int(other)))
        if high >= self.reachable:
            return False
        return derive_int(self.seed, f"{low} and {high}", "punch") < self.spec.punch_success * 2**64

    def inside(self, name: str) -> Address:
        """Return the address at which a peer listens: a private one behind a router."""
        number = int(name)
        private = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        return Address(f"peer-{name}" if self.is_dialable(name) else private, PORT)

    def outside(self, name: str) -> Address:
        """Return the address at which others see a peer: that of its router, if it has one.

        No decision depends on the port, so that it is the same for all destinations even with a hard router.
        """
        return Address(f"peer-{name}" if self.is_dialable(name) else f"router-{name}", PORT)
