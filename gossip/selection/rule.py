"""What a rule for whom to average with next is, and the uniform one."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from gossip.ids import Address, PeerId
from gossip.selection.graphs import Graph

__all__ = ["Candidates", "Options", "Selector", "Uniform", "uniform"]

One = TypeVar("One")


def uniform(
    members: Sequence[One], rng: random.Random, fits: Callable[[One], bool], excluded: Container[One] = ()
) -> One | None:
    """A uniformly random member that fits, or None.

    Rejection first, since nearly all fit in nearly every swarm and a scan of 10,000 members for each mix would be most
    of a mix's cost; a full scan only when 16 draws found nobody.
    """
    if not members:
        return None
    for _ in range(16):
        peer = members[int(rng.random() * len(members))]
        if peer not in excluded and fits(peer):
            return peer
    rest = [peer for peer in members if peer not in excluded and fits(peer)]
    return rng.choice(rest) if rest else None


class Candidates(Protocol):
    """What a selector asks of the peer it chooses for."""

    @property
    def me(self) -> PeerId: ...
    @property
    def round(self) -> int:
        """Mixing rounds behind my weights."""

    @property
    def changes(self) -> int:
        """Grows whenever the members, or an address of one, may have changed: until then what is sorted is kept."""

    def alive(self) -> Sequence[PeerId]:
        """Living members in no order, perhaps with me among them. Costs nothing."""

    def fits(self, peer: PeerId) -> bool:
        """Whether a mix with it could begin now: of my run, ready, within reach, not benched; never I myself."""

    def address(self, peer: PeerId) -> Address | None: ...


@dataclass(frozen=True, slots=True)
class Options:
    """What rules are made of: each takes what it needs."""

    at_once: bool = False  # a mix is with all neighbours together
    group_size: int = 4
    vector_mb: float = 0.0  # that cross the wire each way in an exchange
    shortcut: float = 0.1
    graph: Graph | None = None


class Selector(ABC):
    """A rule for whom to mix with. One instance serves one peer; unless it is ``personal`` it may serve every peer that
    shares one table of members, as a simulator's do, and then sorts it once for all.

    ``at_once``: a mix is with all neighbours together, not with one, and a pair's weight leaves room for the others'.
    """

    name: ClassVar[str]
    personal: ClassVar[bool] = False  # it keeps what one peer has measured

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once

    @classmethod
    def of(cls, options: Options) -> Selector:
        """One by these options. Raises :class:`~gossip.errors.ConfigError` for what cannot work."""
        return cls(options.at_once)

    @abstractmethod
    def choose(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        """One partner for the next mix that fits and is not in ``asked``; None: nobody, try again later."""

    @abstractmethod
    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        """All that fit with whom this round may be mixed, each once, never I myself."""

    def weight(self, swarm: Candidates, partner: PeerId) -> float:
        """The most that a pair's difference may weigh: 1/2, or with ``at_once`` what leaves every node a share of
        itself.

        From what both sides hold alike (the method, the graph's file, an id) and never from who is alive: two views
        would give two weights, and the swarm's mean would move.
        """
        return 0.5

    def heard(self, partner: PeerId, round_trip_s: float | None, rate_mb_s: float | None) -> None:  # noqa: B027 (most need none)
        """A measurement of this partner: seconds there and back, MB/s of its stream; None where there is none."""


class Uniform(Selector):
    """Everybody, alike."""

    name = "uniform"

    def choose(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        return uniform(swarm.alive(), rng, swarm.fits, asked)

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        fits = swarm.fits
        return [peer for peer in swarm.alive() if fits(peer)]
