"""Sightings: the addresses at which the two ends of a link see each other."""

import ipaddress
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from gossip.ids import Address, PeerId


class Sighting(NamedTuple):
    """The addresses of both ends of a link, each as the other end sees it; None if unknown."""

    theirs: Address | None = None
    ours: Address | None = None  # As the other side says.


def host_outside(sightings: Mapping[PeerId, Sighting], inside: Address | None, like: Address | None) -> str | None:
    """Return the host at which most members outside our network see us, as that of our router.

    So a single member that lies cannot make us state another's address, unless we know no other.

    Args:
        sightings: The addresses of both ends of each link.
        inside: Our address in our own network. A public one means the same outside.
        like: An address of the version of IP that is meant, since a router may map one of the two alone.

    Returns:
        The host; None without a majority, and without members outside.
    """
    housemates_see = inside.host if inside is not None and is_private(inside.host) else None
    seen = [one.ours.host for one in sightings.values() if one.ours is not None]
    is_v6 = like is not None and ":" in like.host
    hosts = Counter(host for host in seen if host != housemates_see and (":" in host) == is_v6)
    if not hosts:
        return None
    host, count = hosts.most_common(1)[0]
    return host if 2 * count > hosts.total() else None


def is_private(host: str) -> bool:
    """Return True if a host is a number that means nothing outside its own network."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_private
    except ValueError:
        return False
