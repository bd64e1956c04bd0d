"""The interface of selection rules, and the uniform one."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from gossip.ids import Address, PeerId
from gossip.selection.graphs import Graph

MAX_DRAWS = 16  # Draws before a scan: if half of the members fit, all fail in one of 65,536 cases.
Member = TypeVar("Member")


def uniform(
    members: Sequence[Member], rng: random.Random, fits: Callable[[Member], bool], excluded: Container[Member] = ()
) -> Member | None:
    """Return a uniformly random member that fits, or None.

    Nearly all members fit in nearly every swarm, so random draws come first. A scan of 10,000 members for each mix
    would be most of a mix's cost. It runs only if no draw found a member.
    """
    if not members:
        return None
    for _ in range(MAX_DRAWS):
        peer = members[int(rng.random() * len(members))]
        if peer not in excluded and fits(peer):
            return peer
    fitting = [peer for peer in members if peer not in excluded and fits(peer)]
    return rng.choice(fitting) if fitting else None


class Candidates(Protocol):
    """The view of the swarm that a peer gives its selector."""

    @property
    def me(self) -> PeerId: ...
    @property
    def round(self) -> int:
        """Return the mixing rounds behind our weights."""

    @property
    def changes(self) -> int:
        """Return a number that grows whenever the members or an address may have changed.

        Selectors cache sorted members until then.
        """

    def alive(self) -> Sequence[PeerId]:
        """Return the living members in no order, perhaps including ourselves. Cheap."""

    def fits(self, peer: PeerId) -> bool:
        """Return True if a mix could begin now: same run, ready, reachable, not in back-off, not ourselves."""

    def address(self, peer: PeerId) -> Address | None: ...


@dataclass(frozen=True, slots=True)
class Options:
    """Options for selectors; each rule takes what it needs."""

    at_once: bool = False  # A mix is with all neighbours together.
    group_size: int = 4  # Maximum number of members of a group of a grid.
    shortcut: float = 0.1  # Probability of a uniform choice in the rule "nearest".
    graph: Graph | None = None


class Selector(ABC):
    """A rule that chooses partners. One instance serves one peer.

    An instance that is not ``is_personal`` may serve all peers with one table of members, as in a simulator. The table
    is then sorted once. With ``at_once`` a mix is with all neighbours together, and a pair's weight leaves room for
    others.
    """

    name: ClassVar[str]
    is_personal: ClassVar[bool] = False  # It keeps one peer's measurements.

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once

    @classmethod
    def from_options(cls, options: Options) -> Selector:
        """Create a selector. Raises :class:`~gossip.errors.ConfigError` for options that cannot work."""
        return cls(options.at_once)

    @abstractmethod
    def choose(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        """Return a partner for the next mix that fits and is not in ``asked``; None means to try again later."""

    @abstractmethod
    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        """Return all fitting partners of this round, each once, without ourselves."""

    def weight(self, swarm: Candidates, partner: PeerId) -> float:
        """Return the largest weight of a pair's difference: 1/2, or less with ``at_once``.

        With ``at_once`` every node must keep a share of itself. The weight must follow from facts that both sides share
        (the method, the graph's file, an id) and not from which members are alive. Otherwise two views would give two
        weights, and the swarm's mean would move.
        """
        return 0.5

    def note_rate(self, partner: PeerId, rate_mb_s: float) -> None:  # noqa: B027 (most rules need none)
        """Learn the rate of an exchange with this partner, in MB/s of float32."""


class Uniform(Selector):
    """A rule that picks any member with equal probability."""

    name = "uniform"

    def choose(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        return uniform(swarm.alive(), rng, swarm.fits, asked)

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        fits = swarm.fits
        return [peer for peer in swarm.alive() if fits(peer)]
