"""Sightings: the addresses at which the two ends of a link see each other."""

from __future__ import annotations

from typing import NamedTuple

from gossip.ids import Address

__all__ = ["Sighting"]


class Sighting(NamedTuple):
    """The addresses of both ends of a link, each as the other end sees it; None if unknown."""

    theirs: Address | None = None
    ours: Address | None = None  # As the other side says.
