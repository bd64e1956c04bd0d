"""Selection by rank: along a ring, a torus, the exponential graph or a grid, or on a graph from a file.

A rank is a place among the sorted ids of the living members as one peer sees them. Two who see different members derive
different ranks, and then a mix is along another link than the graph's: a pair mean is as good along any. Whoever cannot
be mixed with now keeps its rank and is passed over, so that the graph closes over it and nobody waits for it.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from math import isqrt, prod

from gossip.errors import ConfigError
from gossip.ids import PeerId
from gossip.selection.graphs import Graph
from gossip.selection.rule import Candidates, Options, Selector

__all__ = ["Exponential", "Grid", "OnGraph", "Ranked", "Ring", "Torus"]

GOLDEN = (5**0.5 - 1) / 2  # of the ranks further on at each cycle: multiples of it fall evenly, whatever n is
MAX_GROUP = 16  # members of a grid's group: each streams slices with every other at once


class Ranked(Selector):
    """What all rules by rank share: the sorted members, and a random one of the neighbours as the choice."""

    def __init__(self, at_once: bool = False) -> None:
        super().__init__(at_once)
        self._seen = (-1, -1)
        self._order: list[PeerId] = []

    def order(self, swarm: Candidates) -> tuple[list[PeerId], int]:
        """The sorted ids of the living members and me, and my rank among them. O(log n) until a change."""
        alive, me = swarm.alive(), swarm.me
        seen = (swarm.changes, len(alive))
        if seen == self._seen:
            rank = bisect_left(self._order, me)
            if rank < len(self._order) and self._order[rank] == me:
                return self._order, rank
        self._seen, self._order = seen, sorted({*alive, me})
        return self._order, bisect_left(self._order, me)

    def choose(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        rest = [peer for peer in self.neighbours(swarm) if peer not in asked]
        return rest[int(rng.random() * len(rest))] if rest else None


class Ring(Ranked):
    """The one before me and the one behind me."""

    name = "ring"

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        order, rank = self.order(swarm)
        return beside(order, rank, swarm.fits)

    def weight(self, swarm: Candidates, partner: PeerId) -> float:
        return 1 / 3 if self.at_once else 0.5  # Metropolis: both have two neighbours


class Torus(Ranked):
    """Left, right, up and down of me in rows of ``ceil(sqrt n)``, closed at their ends.

    With n no square the last row is short: it closes over what it has, and the columns that it does not reach close
    one row earlier. Whoever has nobody left in row and column takes the ring's neighbours.
    """

    # Not the two factors of n nearest to its root: a prime number of members would be a ring, and 32 members mix better
    # in rows of 6 with a short last one (gap 0.163) than as 4 by 8 (0.117).

    name = "torus"

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        order, rank = self.order(swarm)
        length = isqrt(len(order) - 1) + 1  # ceil(sqrt n)
        row, column = divmod(rank, length)
        in_row = order[row * length : (row + 1) * length]
        in_column = order[column::length]
        found = [*beside(in_row, column, swarm.fits), *beside(in_column, row, swarm.fits)]
        return list(dict.fromkeys(found)) or beside(order, rank, swarm.fits)

    def weight(self, swarm: Candidates, partner: PeerId) -> float:
        return 0.2 if self.at_once else 0.5  # Metropolis: four neighbours, or fewer


class Exponential(Ranked):
    """One peer a round: the one ``2^(round mod ceil(log2 n))`` further on (Assran et al. 2019; Ying et al. 2021).

    Directed: I send there, and take from the one as far behind me. When it does not fit, or was asked already, the next
    power takes its place; when no power fits, the next member that does.
    """

    name = "exponential"

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        found = next(self.ahead(swarm), None)
        return [] if found is None else [found]

    def choose(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        return next((peer for peer in self.ahead(swarm) if peer not in asked), None)

    def ahead(self, swarm: Candidates) -> Iterator[PeerId]:
        """Those that fit, the one of this round first."""
        order, rank = self.order(swarm)
        n = len(order)
        powers = (n - 1).bit_length()
        nobody = True
        for power in range(powers):
            peer = order[(rank + (1 << (swarm.round + power) % powers)) % n]
            if swarm.fits(peer):
                nobody = False
                yield peer
        if nobody:
            yield from beside(order, rank, swarm.fits)[:1]

    def weight(self, swarm: Candidates, partner: PeerId) -> float:
        return 1 / 3 if self.at_once else 0.5  # of me, the one ahead and the one behind


class Grid(Ranked):
    """Members on a virtual grid of d dimensions, its sides at most ``group_size``. A round's group are those who share
    all coordinates but that round's (Moshpit: Ryabinin et al. 2021, "Moshpit SGD").

    With n = group_size^d members, d rounds of group means give everybody the exact mean. With any other n the sides
    are the shortest that hold n, the last layer is not full, and who is in it changes every d rounds. A round of group
    means then leaves 0.07 to 0.5 of V (measured, 3 to 1,025 members; without that change 0.76 of 33 in groups of 2).
    """

    name = "grid"

    def __init__(self, at_once: bool = False, group_size: int = 4) -> None:
        if not 2 <= group_size <= MAX_GROUP:
            raise ConfigError(f"group_size = {group_size!r} cannot work: a group has from 2 to {MAX_GROUP} members.")
        super().__init__(at_once)
        self.group_size = group_size

    @classmethod
    def of(cls, options: Options) -> Grid:
        return cls(options.at_once, options.group_size)

    def group(self, swarm: Candidates, size: int) -> list[PeerId]:
        """This round's group in groups of at most ``size``: I and those of it that fit, sorted; perhaps I alone."""
        order, rank = self.order(swarm)
        me, fits = swarm.me, swarm.fits
        return [peer for peer in cell_mates(order, rank, size, swarm.round) if peer == me or fits(peer)]

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        """The others of this round's group; of the next dimension's, where it is empty; of the ring, where all are."""
        order, rank = self.order(swarm)
        n, fits = len(order), swarm.fits
        for turn in range(len(sides(n, self.group_size))):
            mates = cell_mates(order, rank, self.group_size, swarm.round + turn)
            found = [peer for peer in mates if fits(peer)]
            if found:
                return found
        return beside(order, rank, fits)

    def weight(self, swarm: Candidates, partner: PeerId) -> float:
        return 1 / self.group_size if self.at_once else 0.5


class OnGraph(Ranked):
    """The neighbours on a static graph from a file, and nobody else: a link that is not there may be one that must not
    be. Members that play no node mix with nobody."""

    name = "graph"

    def __init__(self, graph: Graph, at_once: bool = False) -> None:
        super().__init__(at_once)
        self.graph = graph
        self._played: tuple[list[PeerId], dict[PeerId, int], dict[int, PeerId]] = ([], {}, {})

    @classmethod
    def of(cls, options: Options) -> OnGraph:
        if options.graph is None:
            raise ConfigError("selection = 'graph' needs a graph: name its file, with one link a line, as in 0 1.")
        return cls(options.graph, options.at_once)

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        played, players = self.played(swarm)
        mine = played.get(swarm.me)
        if mine is None:
            return []
        found = (players.get(node) for node in self.graph.links[mine])
        return [peer for peer in found if peer is not None and swarm.fits(peer)]

    def played(self, swarm: Candidates) -> tuple[dict[PeerId, int], dict[int, PeerId]]:
        """Which node each member plays, and who plays each node."""
        order, _ = self.order(swarm)
        if self._played[0] is not order:
            played = self.graph.players([(peer, swarm.address(peer)) for peer in order])
            self._played = order, played, {node: peer for peer, node in played.items()}
        return self._played[1], self._played[2]

    def weight(self, swarm: Candidates, partner: PeerId) -> float:
        """With ``at_once`` Metropolis' 1 / (1 + max of both degrees) where ids name the nodes. Which node a rank or an
        address is depends on one's view: there every link weighs what the graph's busiest node's do."""
        if not self.at_once:
            return 0.5
        graph = self.graph
        if graph.kind != "id":
            return 1 / (1 + graph.max_degree)
        played = graph.players([(swarm.me, None), (partner, None)])
        return 1 / (1 + max((len(graph.links[node]) for node in played.values()), default=graph.max_degree))


def beside(order: Sequence[PeerId], rank: int, fits: Callable[[PeerId], bool]) -> list[PeerId]:
    """The next and the previous of this circle that fit; one of them where they are one."""
    n = len(order)
    after = next((rank + step for step in range(1, n) if fits(order[(rank + step) % n])), None)
    if after is None:
        return []
    before = next(rank - step for step in range(1, n) if fits(order[rank - step]))
    return [order[after % n]] if (after - before) % n == 0 else [order[after % n], order[before]]


def cell_mates(order: list[PeerId], rank: int, size: int, round: int) -> list[PeerId]:
    """Sorted, those who share all coordinates with this rank but the round's one, and itself."""
    n = len(order)
    shape = sides(n, size)
    if not shape:
        return order
    dimension = round % len(shape)
    stride = prod(shape[:dimension])
    # Cells are filled from the first on: lowering a coordinate leads to a filled one, so that everybody has a path to
    # cell 0. (Empty ones spread evenly part 67 members in groups of 2.) What a last layer has too few of, each cycle
    # through the dimensions has others of.
    shift = round // len(shape) * int(GOLDEN * n) if n < prod(shape) else 0
    cell = (rank + shift) % n
    first = cell - cell // stride % shape[dimension] * stride
    cells = range(first, min(first + shape[dimension] * stride, n), stride)
    return [order[mate] for mate in sorted((cell - shift) % n for cell in cells)]


@lru_cache(64)
def sides(n: int, size: int) -> tuple[int, ...]:
    """The sides of the smallest grid that holds n with as few dimensions as sides of at most ``size`` allow, and these
    as equal as can be; none for n = 1."""
    dimensions = 0
    while size**dimensions < n:
        dimensions += 1
    shape = [1] * dimensions
    at = 0
    while prod(shape) < n:
        shape[at % dimensions] += 1
        at += 1
    return tuple(shape)
