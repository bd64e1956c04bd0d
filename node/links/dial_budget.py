"""The dial budget: a limit on failed dials per host, so that no member can turn its swarm on a third party."""

from gossip.ids import Address
from gossip.membership.entry import TokenBucket
from gossip.recent import Recent
from node.links.handshake_pool import neighbourhood
from node.transport.tcp import is_loopback, is_name

BURST = 16.0  # The most tokens of a host: as many as dials run at once, so that a living host never lacks one.
REFILL_S = 120.0  # The time after which a host gets one more token.
MAX_SITES = 4_096  # Hosts that are remembered; the least recently used is forgotten first.
MAX_PROVEN = 4_096  # Proven addresses that are remembered; the least recently used is forgotten first.


def site_of(host: str) -> str:
    """Return the key of a host's budget: an IPv4 address, an IPv6 /64, or the last two labels of a name.

    Names share a budget, because one wildcard record in DNS makes any number of them lead to one host.
    """
    return ".".join(host.lower().rstrip(".").split(".")[-2:]) if is_name(host) else neighbourhood(host)


class DialBudget:
    """A token bucket for each host. A dial takes a token, and a finished handshake gives it back.

    Hosts are numeric addresses as they are about to be dialled, whatever spelling or name led to them. The lookup of a
    name takes a token of its domain. Dials to an address cost no token once a member has proved to be there. Nor do
    dials to loopback addresses, because nothing leaves this machine.
    """

    def __init__(self) -> None:
        self.buckets, self.proven = Recent[str, TokenBucket](MAX_SITES), Recent[Address, None](MAX_PROVEN)

    def charge(self, address: Address, now: float) -> bool:
        """Return True if ``address`` may be dialled, and charge the dial to its host."""
        if is_loopback(address.host):
            return True
        if address in self.proven:
            self.proven[address] = None  # This makes it the newest one.
            return True
        site = site_of(address.host)
        bucket = self.buckets[site] = self.buckets.get(site) or TokenBucket(1 / REFILL_S, BURST, now)
        return bucket.take(now)

    def mark_proven(self, address: Address) -> None:
        """Give the token of a dial back, after a member has proved to be at ``address``."""
        bucket = self.buckets.get(site_of(address.host))
        if address not in self.proven and bucket is not None:
            bucket.give_back()
        self.proven[address] = None
