"""Sightings: the addresses at which the two ends of a link see each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from gossip.ids import Address, PeerId

__all__ = ["Sighting", "host_outside"]


class Sighting(NamedTuple):
    """The addresses of both ends of a link, each as the other end sees it; None if unknown."""

    theirs: Address | None = None
    ours: Address | None = None  # As the other side says.


def host_outside(sightings: Mapping[PeerId, Sighting], inside: Address | None) -> str | None:
    """Return the host at which most members outside our network see us, that of our router; None without a majority.

    So a single member that lies cannot make us state another's address, unless we know no other.

    Args:
        sightings: The addresses of both ends of each link.
        inside: Our address in our own network.
    """
    mine = None if inside is None else inside.host
    hosts = Counter(one.ours.host for one in sightings.values() if one.ours is not None and one.ours.host != mine)
    if not hosts:
        return None
    host, count = hosts.most_common(1)[0]
    return host if 2 * count > hosts.total() else None
