"""A bound on failed dials to each host that others name, so that no member turns its swarm on a third party."""

from __future__ import annotations

import contextlib
import ipaddress
from collections import OrderedDict

from gossip.ids import Address
from node.links.lobby import neighbourhood
from node.transport.tcp import is_loopback

__all__ = ["DialBudget", "site_of"]

BURST = 16.0  # dials without a handshake: as many as are under way at once, so that a living host never lacks one
REFILL_S = 120.0  # for one more
SITES = 4_096  # remembered, the longest unused are forgotten
PROVEN = 4_096  # addresses likewise


def site_of(host: str) -> str:
    """Return what shares one budget: an IPv4 address, an IPv6 /64, or the last two labels of a name.

    One wildcard record in DNS makes any number of names lead to one host.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return neighbourhood(host)
    return ".".join(host.lower().rstrip(".").split(".")[-2:])


class DialBudget:
    """A token bucket for each host: a dial takes a token, and a finished handshake gives it back.

    An address at which a member once proved to be is free from then on. So are addresses of loopback, from which
    nothing leaves this machine.
    """

    def __init__(self) -> None:
        self.sites: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when they were counted
        self.proven: OrderedDict[Address, None] = OrderedDict()

    def take(self, address: Address, now: float) -> bool:
        """Return whether ``address`` may be dialled; if so the dial is charged to its host."""
        if is_loopback(address.host):
            return True
        if address in self.proven:
            self.proven.move_to_end(address)
            return True
        site = site_of(address.host)
        tokens, counted_s = self.sites.pop(site, (BURST, now))
        tokens = min(BURST, tokens + (now - counted_s) / REFILL_S)
        granted = tokens >= 1
        self.sites[site] = tokens - granted, now
        if len(self.sites) > SITES:
            self.sites.popitem(last=False)
        return granted

    def prove(self, address: Address) -> None:
        """A member proved to be at ``address``, where this node dialled it."""
        site = site_of(address.host)
        if address not in self.proven and site in self.sites:
            tokens, counted_s = self.sites[site]
            self.sites[site] = min(BURST, tokens + 1), counted_s
        self.proven[address] = None
        self.proven.move_to_end(address)
        if len(self.proven) > PROVEN:
            self.proven.popitem(last=False)
